"""torch.distributed.checkpoint folders, read and drafted; no knowledge of tensor names."""

from __future__ import annotations

from reshard.containers.dcp_read import (
    METADATA,
    Blobs,
    Chunk,
    Metadata,
    Place,
    TensorEntry,
    chunk_array,
    inside,
    load_object,
    read_metadata,
    read_object,
)
from reshard.containers.dcp_write import (
    DistcpFile,
    MetadataDraft,
    ObjectItem,
    TensorItem,
    distcp_file,
)

__all__ = [
    "METADATA",
    "Blobs",
    "Chunk",
    "DistcpFile",
    "Metadata",
    "MetadataDraft",
    "ObjectItem",
    "Place",
    "TensorEntry",
    "TensorItem",
    "chunk_array",
    "distcp_file",
    "inside",
    "load_object",
    "read_metadata",
    "read_object",
]
