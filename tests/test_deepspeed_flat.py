"""ZeRO's flat partitions, and the naming of optimizers that record no names."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

import pytest

from reshard.converters.deepspeed import flat
from reshard.converters.deepspeed.solve import Entry, Weight, solve
from reshard.dtypes import FLOAT32
from reshard.errors import FormatError
from reshard.layout import StoredArray


def shapes_of(seed: int) -> dict[str, tuple[int, ...]]:
    rng = random.Random(seed)
    return {
        f"p{i}": tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3)))
        for i in range(rng.randint(1, 12))
    }


def arrays(sizes: Sequence[int]) -> list[StoredArray]:
    return [StoredArray(f"{k}", 0, (n,), FLOAT32, "") for k, n in enumerate(sizes)]


@pytest.mark.parametrize("seed", range(40))
def test_every_element_lies_in_one_place(seed: int):
    """In ZeRO 1 and 2 the places are also those of the concatenation, in order."""
    shapes, count = shapes_of(seed), random.Random(seed).randint(1, 9)
    aligned = bool(seed % 2)
    pads = flat.paddings(list(shapes.values()), 2, aligned)
    group = flat.flat_group(shapes, count, pads)
    assert group.size % flat.ALIGNMENT == 0
    held = arrays([group.size] * count)
    for name, shape in shapes.items():
        runs = list(group.runs(name, held))
        assert sorted(i for r in runs for i in range(r.start, r.stop)) == list(range(prod(shape)))
        for r in runs:
            at = int(r.array.file) * group.size + r.base
            assert at == group.members[name].offset + r.start
            assert not aligned or group.members[name].offset % 8 == 0
    space = flat.sub_group(shapes, count)
    for name, shape in shapes.items():
        runs = list(space.runs(name, arrays([space.size] * count)))
        assert sorted(i for r in runs for i in range(r.start, r.stop)) == list(range(prod(shape)))


@pytest.mark.parametrize("seed", range(20))
def test_sub_groups_are_the_group_in_order(seed: int):
    shapes, rng = shapes_of(seed), random.Random(seed)
    count, limit = rng.randint(1, 5), rng.randint(1, 60)
    parts = flat.sub_groups(shapes, count, limit)
    assert [n for p in parts for n in p] == list(shapes)
    sizes = [flat.sub_group(p, count).size for p in parts]
    assert all(n >= limit for n in sizes[:-1])


@pytest.mark.parametrize("count", range(1, 9))
def test_round_robin_is_undone(count: int):
    names = [f"p{i}" for i in range(7)]
    order = flat.round_robin(names, count)
    assert sorted(order) == names
    assert flat.declared(order, count) == names


# --- names ---------------------------------------------------------------------------------------


def weights(*shapes: tuple[int, ...]) -> list[Weight]:
    return [
        Weight(f"w{i}", s, StoredArray("", 0, s, FLOAT32, f"w{i}")) for i, s in enumerate(shapes)
    ]


def entries(*shapes: tuple[int, ...]) -> list[Entry]:
    return [Entry(s, None) for s in shapes]


def anything(weight: Weight, entry: StoredArray | None, base: int) -> bool:
    return True


def named(found: Sequence[Sequence[Weight]]) -> list[list[str]]:
    return [[w.name for w in g] for g in found]


def test_groups_by_rank_are_named():
    held = weights((4, 3), (4,), (4, 3), (4,))
    groups = [entries((4, 3), (4, 3)), entries((4,), (4,))]
    assert named(solve(held, groups, anything, "here")) == [["w0", "w2"], ["w1", "w3"]]


def test_two_groups_of_one_shape_are_refused():
    """w0 and w1 may be either group's."""
    with pytest.raises(FormatError, match="more than one naming"):
        solve(weights((4, 3), (4, 3)), [entries((4, 3)), entries((4, 3))], anything, "here")


def test_a_frozen_weight_among_equals_is_refused():
    with pytest.raises(FormatError, match="more than one naming"):
        solve(weights((4, 3), (4, 3)), [entries((4, 3))], anything, "here")


def test_a_frozen_weight_of_its_own_shape_is_left_out():
    found = solve(weights((4, 3), (5, 3), (4,)), [entries((4, 3), (4,))], anything, "here")
    assert named(found) == [["w0", "w2"]]


def test_masters_tell_equals_apart():
    held = weights((4, 3), (4, 3))
    masters = [Entry((4, 3), held[1].array), Entry((4, 3), held[0].array)]

    def alike(weight: Weight, entry: StoredArray | None, base: int) -> bool:
        return entry == weight.array

    assert named(solve(held, [[masters[0]], [masters[1]]], alike, "here")) == [["w1"], ["w0"]]
    assert named(solve(held, [masters], alike, "here")) == [["w1", "w0"]]


def test_more_parameters_than_weights_are_refused():
    with pytest.raises(FormatError, match="cannot be named"):
        solve(weights((4, 3)), [entries((4, 3), (4, 3))], anything, "here")
