"""CRC-32 and CRC-32C of bytes, taken in part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import google_crc32c
import numpy as np
from isal import isal_zlib

#: Bytes of one checksum, little-endian wherever it is stored.
NBYTES = 4


def crc32c(data: memoryview | bytes, start: int = 0) -> int:
    """The CRC-32C (Castagnoli) of `data`, going on from `start`.

    Source: RFC 3720 B.4; zarr v3 crc32c codec 1.0.
    """
    if not len(data):
        return start
    view = np.frombuffer(data, np.uint8)
    view.flags.writeable = False  # google-crc32c takes read-only buffers alone
    return int(google_crc32c.extend(start, view))


#: How a checksum of each kind goes on: (bytes, what came before) -> value.
KINDS: Mapping[str, Callable[[memoryview, int], int]] = {"crc32": isal_zlib.crc32, "crc32c": crc32c}
