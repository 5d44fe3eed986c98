"""Where a parameter's elements lie in ZeRO's flat partitions, for source and target alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from reshard.dtypes import DType
from reshard.layout import StoredArray


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, stop) of a flattened tensor, lying from element `base` of an array on."""

    start: int
    stop: int
    array: StoredArray
    base: int


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a flat group: its local shape, and its first element in the flat space."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


# --- ZeRO 1 and 2: one flat space a param group, cut into equal partitions -----------------------

#: Elements that every partition's size is a multiple of.
#: Source: runtime/zero/stage_1_and_2.py nccl_start_alignment_factor @ 0.19.8.
ALIGNMENT = 2


@dataclass(frozen=True)
class FlatGroup:
    """The flat space of one param group (ZeRO 1, 2, BF16_Optimizer): members, then padding.

    `size` is the length of one partition, padding included; `count` the partitions.
    """

    members: Mapping[str, Member]
    numel: int  # up to the end of the last member
    size: int
    count: int

    def valid(self, partition: int) -> int:
        """How many elements of a partition are not the padding at the group's end."""
        return max(0, min(self.size, self.numel - partition * self.size))

    def runs(self, name: str, arrays: Sequence[StoredArray | None]) -> Iterator[Run]:
        """Where a member lies; `arrays` are one state's partitions in order."""
        member = self.members[name]
        first, last = member.offset, member.offset + member.numel
        for k in range(first // self.size if self.size else 0, self.count):
            low, high = max(first, k * self.size), min(last, (k + 1) * self.size)
            if low >= high:
                break
            array = arrays[k]
            if array is not None:
                yield Run(low - first, high - first, array, low - k * self.size)

    def overlapping(self, partition: int) -> list[Member]:
        """The members that a partition holds a part of, in flat order."""
        low, high = partition * self.size, (partition + 1) * self.size
        return [m for m in self.members.values() if m.offset < high and m.offset + m.numel > low]


def paddings(shapes: Sequence[Sequence[int]], itemsize: int, aligned: bool) -> list[int]:
    """Elements of padding after each parameter under `parameter_alignment`; else zeros.

    Each but the last is padded so that the next one begins at 16 bytes of the 16-bit buffer.
    Source: runtime/zero/stage_1_and_2.py round_robin_bit16_padding @ 0.19.8.
    """
    unit = 16 // gcd(16, itemsize) if aligned else 1
    out, offset = [], 0
    for i, shape in enumerate(shapes):
        offset += prod(shape)
        pad = 0 if i == len(shapes) - 1 else -offset % unit
        out.append(pad)
        offset += pad
    return out


def flat_group(
    shapes: Mapping[str, tuple[int, ...]],
    count: int,
    pads: Sequence[int] | None = None,
    alignment: int = ALIGNMENT,
) -> FlatGroup:
    """The flat space of parameters in this order, cut into `count` partitions."""
    members: dict[str, Member] = {}
    offset = 0
    for i, (name, shape) in enumerate(shapes.items()):
        members[name] = Member(name, tuple(shape), offset)
        offset += prod(shape) + (pads[i] if pads else 0)
    unit = alignment * count
    size = -(-offset // unit) * unit // count
    return FlatGroup(members, offset, size, count)


def round_robin(names: Sequence[str], count: int) -> list[str]:
    """The flat order under `round_robin_gradients`: every count-th parameter together.

    Source: runtime/zero/stage_1_and_2.py _round_robin_reorder @ 0.19.8; fixture
    z2_dp2_bf16_roundrobin.
    """
    return [name for k in range(min(count, len(names))) for name in names[k::count]]


def declared(names: Sequence[str], count: int) -> list[str]:
    """The order that `round_robin` of `count` partitions was made from."""
    order = round_robin([str(i) for i in range(len(names))], count)
    at = {int(index): name for index, name in zip(order, names, strict=True)}
    return [at[i] for i in range(len(names))]


# --- ZeRO 3: each parameter is cut alone ---------------------------------------------------------


@dataclass(frozen=True)
class SubGroup:
    """The parameters of one ZeRO-3 sub-group; each rank holds ceil(numel/count) of each.

    Source: runtime/zero/stage3.py _create_fp16_sub_groups, partition_parameters.py @ 0.19.8.
    """

    members: Mapping[str, Member]  # offsets within a rank's flat tensor
    size: int  # elements of one rank's flat tensor
    count: int

    def runs(self, name: str, arrays: Sequence[StoredArray | None]) -> Iterator[Run]:
        """Where a member lies; `arrays` are one state's flat tensors by rank."""
        member = self.members[name]
        each = share(member.numel, self.count)
        for k, array in enumerate(arrays):
            low, high = k * each, min((k + 1) * each, member.numel)
            if low >= high:
                break
            if array is not None:
                yield Run(low, high, array, member.offset)


def share(numel: int, count: int) -> int:
    """Elements of a parameter that each of `count` ranks holds, the last ones padded."""
    return -(-numel // count)


def sub_group(shapes: Mapping[str, tuple[int, ...]], count: int) -> SubGroup:
    """The sub-group of parameters in this order, cut over `count` ranks."""
    members: dict[str, Member] = {}
    offset = 0
    for name, shape in shapes.items():
        members[name] = Member(name, tuple(shape), offset)
        offset += share(prod(shape), count)
    return SubGroup(members, offset, count)


def sub_groups(
    shapes: Mapping[str, tuple[int, ...]], count: int, limit: int
) -> list[dict[str, tuple[int, ...]]]:
    """One param group cut into sub-groups: a sub-group ends once it has `limit` local elements.

    Source: runtime/zero/stage3.py _create_fp16_sub_groups @ 0.19.8; fixture
    z3_dp2_bf16_subgroups.
    """
    sizes = {name: share(prod(shape), count) for name, shape in shapes.items()}
    if limit >= sum(sizes.values()):
        return [dict(shapes)]
    out: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in shapes.items():
        if held >= limit:
            out.append({})
            held = 0
        out[-1][name] = shape
        held += sizes[name]
    return out


def fragment_runs(numel: int, arrays: Sequence[StoredArray | None]) -> Iterator[Run]:
    """Where a frozen parameter's flat fragments lie, one array a rank (ZeRO 3)."""
    each = share(numel, len(arrays))
    for k, array in enumerate(arrays):
        low, high = k * each, min((k + 1) * each, numel)
        if low >= high:
            break
        if array is not None:
            yield Run(low, high, array, 0)


def whole_runs(group: FlatGroup, name: str, arrays: Sequence[StoredArray | None]) -> Iterator[Run]:
    """Where a matrix lies in a state that holds whole matrices, one array a partition.

    Muon's momentum on a rank is every matrix that its partition holds a part of, complete, in
    flat order: a matrix that straddles two partitions is stored twice.
    Source: fixture z2_dp2_bf16_muon.
    """
    for k, array in enumerate(arrays):
        base = 0
        for member in group.overlapping(k):
            if member.name == name and array is not None:
                yield Run(0, member.numel, array, base)
            base += member.numel


def whole_size(group: FlatGroup, partition: int) -> int:
    """Elements of such a state on one rank."""
    return sum(m.numel for m in group.overlapping(partition))


def flat_array(array: StoredArray, dtype: DType | None = None) -> bool:
    """Whether an array is one-dimensional (and of this dtype): a flat partition."""
    return len(array.shape) == 1 and (dtype is None or array.dtype == dtype)
