"""A checkpoint's neutral fields as the store's JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.checkpoint import Checkpoint, Json, ParamGroup
from reshard.containers.state_json import kept_groups, read_groups, strict
from reshard.dtypes import DType
from reshard.errors import CorruptError, FormatError, UsageError
from reshard.tensor import LogicalTensor, TensorId
from reshard.topology import Topology, parse_degrees, topology

#: The version of what is described in docs/universal.md.
VERSION = 1


def root(source: Checkpoint, tensors: Mapping[TensorId, LogicalTensor]) -> dict[str, Json]:
    """Everything of a checkpoint that is neither tensor nor native, for these of its tensors."""
    names = {t.name for t in tensors}
    stateful = {t.name for t in tensors if t.slot != "param"}
    stateless = all(t.slot == "param" for t in source.layout.tensors)  # plain SGD has groups alone
    groups = source.groups if stateful or stateless else None
    return {
        "store": VERSION,
        "naming": source.layout.naming,
        "source": {"format": source.format, "version": source.version},
        "topology": str(source.topology),
        "iteration": source.iteration,
        "family": source.family,
        "groups": None
        if groups is None
        else kept_groups([(g.options, g.members) for g in groups], names),
        "steps": strict({n: s for n, s in source.steps.items() if n in stateful}),
        "extras": strict(source.extras),
    }


def check_version(found: Mapping[str, Any], where: Path) -> None:
    """Raises FormatError for a store of another version."""
    if found.get("store") != VERSION:
        raise FormatError(
            f"{where}: a universal store of version {found.get('store')!r}; this reshard reads "
            f"version {VERSION}. Update reshard."
        )


def groups_of(found: Mapping[str, Any], where: Path) -> tuple[ParamGroup, ...] | None:
    """The param groups."""
    listed = found["groups"]
    if listed is None:
        return None
    return tuple(ParamGroup(o, members) for o, members in read_groups(listed, where))


def topology_of(found: Mapping[str, Any], where: Path) -> Topology:
    """The topology that the source of the store had."""
    try:
        return topology(parse_degrees(found["topology"]))
    except UsageError as error:
        raise CorruptError(f"{where}: {error}") from None


def row(position: int, logical: LogicalTensor) -> dict[str, Json]:
    """What the store says of a tensor beside its bytes. `position`: its place in the source."""
    out: dict[str, Json] = {
        "name": logical.id.name,
        "slot": logical.id.slot,
        "shape": list(logical.shape),
        "position": position,
    }
    if logical.padded is not None:
        out["padded"] = list(logical.padded)
    if logical.stored_name is not None:
        out["stored_name"] = logical.stored_name
    if logical.fixed:
        out["fixed"] = True
    return out


def logical_of(found: Mapping[str, Any], dtype: DType) -> tuple[int, LogicalTensor]:
    """(position, tensor) of a row."""
    padded = found.get("padded")
    tensor = LogicalTensor(
        TensorId(str(found["name"]), str(found["slot"])),
        _shape(found["shape"]),
        dtype,
        None if padded is None else _shape(padded),
        found.get("stored_name"),
        fixed=bool(found.get("fixed")),
    )
    return int(found["position"]), tensor


def _shape(value: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(n) for n in value)
