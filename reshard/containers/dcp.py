"""torch.distributed.checkpoint folders, read and drafted; no knowledge of tensor names."""

from __future__ import annotations

from reshard.containers.dcp_blobs import Blobs, chunk_array, load_object, read_object, unpacked
from reshard.containers.dcp_chunks import Chunk, Chunks, Kinds, Place, TensorEntry
from reshard.containers.dcp_metadata import (
    METADATA,
    Metadata,
    inside,
    is_metadata,
    rank_metadata,
    read_metadata,
)
from reshard.containers.dcp_write import (
    DistcpFile,
    MetadataDraft,
    ObjectItem,
    TensorItem,
    distcp_file,
    metadata_file,
    tensor_span,
)

__all__ = [
    "METADATA",
    "Blobs",
    "Chunk",
    "Chunks",
    "DistcpFile",
    "Kinds",
    "Metadata",
    "MetadataDraft",
    "ObjectItem",
    "Place",
    "TensorEntry",
    "TensorItem",
    "chunk_array",
    "distcp_file",
    "inside",
    "is_metadata",
    "load_object",
    "metadata_file",
    "rank_metadata",
    "read_metadata",
    "read_object",
    "tensor_span",
    "unpacked",
]
