"""safetensors files that lie, and those that the library writes."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import safetensors.numpy

from reshard.containers.safetensors import Item, draft, read_header
from reshard.dtypes import named
from reshard.errors import CorruptError, FormatError


def file_of(header, data=b"", length=None):
    """A safetensors file with this header (JSON text or object)."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(start, stop, shape=None, dtype="U8"):
    """An entry of a header."""
    return {"dtype": dtype, "shape": shape or [stop - start], "data_offsets": [start, stop]}


HOSTILE = {
    "a hole": (file_of({"a": entry(0, 2), "b": entry(3, 4)}, bytes(4)), "leaves a hole"),
    "a hole at the start": (file_of({"a": entry(1, 2)}, bytes(2)), "leaves a hole"),
    "an overlap": (file_of({"a": entry(0, 3), "b": entry(2, 4)}, bytes(4)), "overlaps"),
    "two names of the same bytes": (
        file_of({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)),
        "overlaps",
    ),
    "bytes behind": (file_of({"a": entry(0, 2)}, bytes(3)), "behind the last"),
    "cut short": (file_of({"a": entry(0, 9)}, bytes(3)), "cut short"),
    "a name twice": (
        file_of(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        "stands twice",
    ),
    "an absurd header": (file_of({}, length=2**62), "is announced"),
    "a header past the end": (file_of({}, length=500), "cut short"),
    "no header": (b"\x01\x02", "too short"),
    "no JSON": (file_of(b"{nothing"), "not JSON"),
    "a list": (file_of(b"[]"), "not a JSON object"),
    "deep nesting": (file_of(b"[" * 100000), "not JSON"),
    "a wrong size": (file_of({"a": entry(0, 2, [3])}, bytes(2)), "2 bytes for shape"),
    "a negative size": (file_of({"a": entry(0, 2, [-2])}, bytes(2)), "malformed"),
    "a size that is true": (file_of({"a": entry(0, 1, [True])}, bytes(1)), "malformed"),
    "an overflow": (file_of({"a": entry(0, 2, [2**40, 2**40])}, bytes(2)), "2 bytes for shape"),
    "an entry that is none": (file_of({"a": 3}), "not a JSON object"),
    "metadata that is none": (file_of({"__metadata__": {"a": 1}}), "table of strings"),
    "an unknown type": (file_of({"a": entry(0, 2, dtype="Q4")}, bytes(2)), "Q4"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_lies_is_refused(tmp_path, name):
    raw, message = HOSTILE[name]
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises((CorruptError, FormatError), match=message):
        read_header(tmp_path, "x.safetensors")


@pytest.mark.parametrize("header", [b" {}", b"{}   ", b"{}"])
def test_what_the_library_accepts_is_read(tmp_path, header):
    (tmp_path / "x.safetensors").write_bytes(file_of(header))
    assert read_header(tmp_path, "x.safetensors").arrays == {}


def test_a_draft_is_what_the_library_writes_byte_for_byte(tmp_path):
    values = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(4, dtype=np.int64),
        "c": np.array(1.5, np.float16),
        "d": np.zeros((0, 3), np.uint8),
        "a.bias": np.arange(3, dtype=np.float32),
    }
    theirs = safetensors.numpy.save(values, {"format": "pt"})
    items = [Item(n, v.shape, named(v.dtype.name)) for n, v in values.items()]
    made = draft("x.safetensors", items)
    out = bytearray(made.size)
    for offset, data in made.literals:
        out[offset : offset + len(data)] = data
    for array in made.arrays:
        raw = values[array.key].tobytes()
        out[array.offset : array.offset + len(raw)] = raw
    assert bytes(out) == theirs
