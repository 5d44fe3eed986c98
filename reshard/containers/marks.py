"""Names of the files by which the folders of containers are known."""

#: Of torch.distributed.checkpoint: what it stores, and where.
METADATA = ".metadata"
#: Of zarr v3: what a group or an array is.
DOCUMENT = "zarr.json"
