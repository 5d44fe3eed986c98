"""Nodes of the store: their names, and the sealed JSON that reshard keeps in their attributes."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reshard.checkpoint import Json
from reshard.containers.small import JSON, read_small
from reshard.containers.zarr3 import DOCUMENT, mapping
from reshard.errors import CorruptError
from reshard.layout import Draft

from .recognise import KEY

#: Groups beside those of the slots.
PACKED, NATIVE = "packed", "native"
_PLAIN = frozenset(string.ascii_letters + string.digits + "_.")
_LONGEST = 200  # characters; file systems take 255 bytes


def node_name(name: str, reserved: Iterable[str] = ()) -> str:
    """The node of a tensor or slot: its name, other characters as "-" and two hex digits.

    Different names have different nodes. The true name is in the node's attributes. Source: zarr
    v3 core specification, "Node names": no "/", not only dots, not "__" in front; a-z A-Z 0-9 - _ .
    are safe everywhere.
    """
    spelled = "".join(c if c in _PLAIN else _escaped(c) for c in name)
    if spelled.startswith((".", "__")) or spelled in {*reserved, DOCUMENT}:
        spelled = _escaped(spelled[0]) + spelled[1:]
    if len(spelled) > _LONGEST:
        digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        spelled = f"{spelled[: _LONGEST - 34]}--{digest}"
    return spelled or "-"


def _escaped(text: str) -> str:
    return "".join(f"-{byte:02x}" for byte in text.encode(errors="surrogatepass"))


def one_node(name: object) -> str:
    """A name that is one node's. Raises CorruptError for a path, which could leave the store."""
    if not isinstance(name, str) or name in ("", ".", "..") or {"/", "\\", "\0"} & set(name):
        raise CorruptError(f"{name!r:.60} is no name of a node in a store")
    return name


def sealed(body: Mapping[str, Json]) -> dict[str, Json]:
    """What `unsealed` takes: the body with a digest over it. Floats in it are finite."""
    return {**body, "digest": _digest(body)}


def unsealed(attributes: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The body of a node's attributes. Raises CorruptError if it is not what was written."""
    found = attributes.get(KEY)
    if not isinstance(found, dict):
        raise CorruptError(f"{where}: has no attribute {KEY!r}; it is no node of this store")
    body = {k: v for k, v in found.items() if k != "digest"}
    if found.get("digest") != _digest(body):
        raise CorruptError(
            f"{where}: the attribute {KEY!r} is not what its digest says: the file is damaged or "
            "was changed by hand. Copy it again."
        )
    return body


def _digest(body: object) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def group(node: str, body: Mapping[str, Json]) -> Draft:
    """The zarr.json of a group; `node` "" is the root."""
    found: dict[str, Json] = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {KEY: sealed(body)},
    }
    raw = json.dumps(found, allow_nan=False).encode()
    return Draft(f"{node}/{DOCUMENT}" if node else DOCUMENT, len(raw), [(0, raw)])


def read_group(folder: Path, node: str) -> dict[str, Any]:
    """What reshard keeps in a group's attributes. Raises CorruptError if the group is not there."""
    where = folder / node / DOCUMENT
    found = mapping(read_bytes(where), where)
    attributes = found.get("attributes")
    if found.get("node_type") != "group" or not isinstance(attributes, dict):
        raise CorruptError(f"{where}: is no zarr group with attributes. Copy it again.")
    return unsealed(attributes, where)


def read_bytes(where: Path) -> bytes:
    """A small file whole. Raises CorruptError if it cannot be read."""
    try:
        return read_small(where, JSON)
    except CorruptError as error:
        raise CorruptError(f"{error}. Copy the store again.") from None
