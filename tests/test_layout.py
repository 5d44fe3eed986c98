"""What the laws cannot see, as both sides of a conversion would agree on it: exact numbers.

Each test here kills a mutant that the laws leave alive (python -m benchmarks.mutate).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.box import Box, flat_boxes, row_major, uncovered
from reshard.checkpoint import Checkpoint
from reshard.dtypes import named
from reshard.errors import CoverageError, LossError
from reshard.fingerprints import Sum, complete, lanes, slot_digests
from reshard.format import Declaration
from reshard.join import Plan, Shelf, cover, loss_lines, plan
from reshard.layout import Layout, Made, Piece, StoredArray, place, place_flat, refactor, whole
from reshard.tensor import LogicalTensor, TensorId
from reshard.topology import Topology

F32, BF16, I64 = named("float32"), named("bfloat16"), named("int64")


# --- boxes ---------------------------------------------------------------------------------------


def test_a_box_is_where_it_is_said_to_be() -> None:
    assert Box.at((1, 2), (3, 4)) == Box((1, 2), (4, 6))
    assert Box((1, 2), (4, 6)).shift((10, 20)) == Box((11, 22), (14, 26))
    assert Box((1, 2), (4, 6)).shape == (3, 4)
    assert Box((1, 2), (4, 6)).numel == 12
    assert Box((), ()).numel == 1
    assert str(Box((1, 2), (4, 6))) == "[1:4, 2:6]"


@pytest.mark.parametrize(
    ("inner", "inside"),
    [
        (Box((1, 1), (3, 3)), True),
        (Box((0, 0), (4, 4)), True),
        (Box((0, 0), (5, 4)), False),
        (Box((0, 0), (4, 5)), False),
        (Box((4, 4), (5, 5)), False),
    ],
)
def test_inside(inner: Box, inside: bool) -> None:
    assert (inner in Box((0, 0), (4, 4))) is inside
    assert (Box((0, 0), (4, 4)) in Box((1, 0), (9, 9))) is False


def test_flat_runs_have_no_empty_box() -> None:
    shape = (3, 4, 5)
    for start in range(prod(shape) + 1):
        for stop in range(start, prod(shape) + 1):
            found = flat_boxes(shape, start, stop)
            assert all(b.numel for b in found)
            assert sum(b.numel for b in found) == stop - start
            assert len(found) <= 5
    with pytest.raises(ValueError, match=r"run \[2, 1\)"):
        flat_boxes(shape, 2, 1)
    with pytest.raises(ValueError, match="leaves"):
        flat_boxes(shape, -1, 1)


def test_nothing_is_uncovered_of_nothing() -> None:
    assert uncovered(Box((0, 0), (0, 3)), []) == []
    assert uncovered(Box((0,), (3,)), []) == [Box((0,), (3,))]
    assert uncovered(Box((0,), (9,)), [Box((4,), (6,)), Box((0,), (4,))]) == [Box((6,), (9,))]
    assert row_major((2, 3, 4)) == (12, 4, 1)


# --- layouts -------------------------------------------------------------------------------------


def array(*shape: int, file: str = "f", offset: int = 0, dtype: Any = F32) -> StoredArray:
    return StoredArray(file, offset, shape, dtype, "k")


def test_a_stored_array_counts_its_bytes() -> None:
    assert array(3, 4).numel == 12
    assert array(3, 4).nbytes == 48
    assert (array(3).packed, array(3).inner) == (0, 0)


def test_a_box_lies_where_it_is_placed() -> None:
    piece = place(Box((2, 3), (4, 5)), array(5, 10, 10), (1, 6, 7))
    assert (piece.base, piece.strides) == (100 + 60 + 7, (10, 1))
    assert piece.base_of(Box((3, 4), (4, 5))) == 167 + 10 + 1
    assert place(Box((2, 3), (4, 5)), array(2, 2)).base == 0
    assert whole(array(5, 10)) == place(Box((0, 0), (5, 10)), array(5, 10), (0, 0))


def test_a_flat_run_lies_where_it_is_placed() -> None:
    pieces = place_flat((3, 4), 2, 9, array(20), 5)
    assert [(str(p.box), p.base) for p in pieces] == [
        ("[0:1, 2:4]", 5), ("[1:2, 0:4]", 7), ("[2:3, 0:1]", 11),
    ]  # fmt: skip
    assert all(p.strides == (4, 1) for p in pieces)


def test_factors_that_are_none_are_refused() -> None:
    piece = place(Box((0, 0), (6, 5)), array(6, 5))
    assert [p.box.shape for p in refactor(piece, (6, 5), (2, 3, 5))] == [(2, 3, 5)]
    for factors in ((2, 2, 5), (6, 5, 2), (4, 2, 5)):
        with pytest.raises(ValueError, match="finer"):
            refactor(piece, (6, 5), factors)


def layout(tensors: Sequence[LogicalTensor], pieces: dict[str, list[Piece]]) -> Layout:
    def of(t: TensorId) -> list[Piece]:
        return pieces[str(t)]

    return Layout({t.id: t for t in tensors}, of, "x")


def test_a_layout_that_leaves_a_gap_or_its_bounds() -> None:
    t = LogicalTensor(TensorId("t"), (4, 3), F32)
    low = place(Box((0, 0), (2, 3)), array(2, 3, file="b"))
    high = place(Box((2, 0), (4, 3)), array(2, 3, file="a"))
    layout([t], {"t": [low, high]}).check(t.id)
    with pytest.raises(CoverageError, match=r"no stored array holds \[2:4, 0:3\]"):
        layout([t], {"t": [low]}).check(t.id)
    with pytest.raises(CoverageError, match=r"no stored array holds \[0:2, 0:3\]"):
        layout([t], {"t": [low, high]}).check(t.id, [high])
    others = [place(Box((0, 0), (1, 3)), array(1, 3, file=f)) for f in "hgfedca"]
    with pytest.raises(CoverageError, match=r"the rest is in a, b, c, d\)"):
        layout([t], {"t": [low, *others]}).check(t.id)
    for box in (Box((0, 0), (5, 3)), Box((0,), (4,)), Box((0, 0, 0), (4, 3, 1))):
        with pytest.raises(CoverageError, match="outside the tensor's shape"):
            layout([t], {"t": [place(box, array(*box.shape))]}).check(t.id)


def test_what_is_made_anew_is_a_sequence() -> None:
    made = Made(lambda: iter("abc"))
    assert (len(made), bool(made), made[1], made[1:], list(made)) == (
        3, True, "b", ["b", "c"], ["a", "b", "c"],
    )  # fmt: skip
    assert not Made(lambda: iter(""))
    assert Made(lambda: iter((0,)))


# --- fingerprints --------------------------------------------------------------------------------

MASK = (1 << 64) - 1
COLUMN = (0x1D8E4E27C47D124F, 0xA0761D6478BD642F)
ROW = (0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3)


def odd(index: int, seed: int) -> int:
    """The finaliser of splitmix64, made odd. Source: design of the fingerprint, fingerprints.py."""
    z = (index * 0x9E3779B97F4A7C15 + seed) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def written_out(values: np.ndarray[Any, Any], columns: int) -> tuple[int, int]:
    """The two lanes, element by element: a digest on disk must never change its meaning."""
    a = b = 0
    raw = values.reshape(-1).view(np.uint8).reshape(-1, values.itemsize)
    for i, element in enumerate(raw):
        row, column = divmod(i, columns)
        word, byte = divmod(column * values.itemsize, 8)
        bits = int.from_bytes(element.tobytes(), "little") << 8 * byte
        a += bits * odd(word, COLUMN[0]) * odd(row, ROW[0])
        b += (bits >> 32) * odd(word, COLUMN[1]) * odd(row, ROW[1])
    return (a & MASK, b & MASK)


@pytest.mark.parametrize("kind", [np.uint8, np.float16, np.float32, np.int64])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 5), (11,), (1,), (3, 8)])
def test_the_fingerprint_is_what_it_says(kind: Any, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(0, 256, (*shape, np.dtype(kind).itemsize), np.uint8).view(kind)[..., 0]
    assert lanes(shape, Box.whole(shape), values) == written_out(values, shape[-1])
    if len(shape) == 3:
        wide = shape[1] * shape[2]
        assert lanes(shape, Box.whole(shape), values, wide) == written_out(values, wide)
        part = Box((0, 1, 2), (2, 3, 4))
        rest = values.copy()
        rest[0:2, 1:3, 2:4] = 0
        want = [
            x - y for x, y in zip(written_out(values, wide), written_out(rest, wide), strict=True)
        ]
        got = lanes(shape, part, values[0:2, 1:3, 2:4], wide)
        assert got == tuple(n & MASK for n in want)


def test_scalars_and_nothing() -> None:
    assert lanes((), Box((), ()), np.float32(2).reshape(())) == written_out(np.ones(1, "f4") * 2, 1)
    assert lanes((0, 3), Box((0, 0), (0, 3)), np.empty((0, 3), "f4")) == (0, 0)
    with pytest.raises(ValueError, match="rows of 7 elements"):
        lanes((2, 3), Box((0, 0), (2, 3)), np.zeros((2, 3), "f4"), 7)
    with pytest.raises(ValueError, match="rows of 18 elements"):
        lanes((2, 3), Box((0, 0), (2, 3)), np.zeros((2, 3), "f4"), 18)  # more than all axes hold


def test_weights_beyond_those_that_are_kept() -> None:
    """65,536 words of a row have their weights kept: the ones behind must be the same function."""
    n = (1 << 16) + 3
    values = np.zeros((1, n), np.int64)
    values[0, -4:] = (5, 6, 7, 8)
    for start in (0, n - 4, n - 3, n - 2):  # before, across and behind the last that is kept
        want = sum(
            int(values[0, i]) * odd(i, COLUMN[0]) for i in range(max(start, n - 4), n)
        ) * odd(0, ROW[0])
        got = lanes((1, n), Box((0, start), (1, n)), values[:, start:])
        assert got[0] == want & MASK


def test_sums_are_merged_and_shown() -> None:
    t = LogicalTensor(TensorId("t"), (3, 2), F32, padded=(4, 2))
    whole, parts = Sum(), Sum()
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    whole.add(t, Box((0, 0), (4, 2)), values)
    for at in range(4):  # the last row is padding
        one = Sum()
        one.add(t, Box((at, 0), (at + 1, 2)), values[at : at + 1])
        parts.merge(one)
    assert (whole.a, whole.b, whole.elements) == (parts.a, parts.b, parts.elements)
    assert whole.elements == 6
    assert complete(t, whole)
    assert not complete(t, Sum(0, 0, 8))
    assert (whole.a, whole.b) == written_out(values[:3], 2)
    assert whole.hex == f"{whole.a:016x}{whole.b:016x}"


def test_a_slots_digest_is_what_it_says() -> None:
    ids = [TensorId("b"), TensorId("a"), TensorId("a", "exp_avg")]
    tensors = [LogicalTensor(i, (2, 3), F32) for i in ids]
    sums = dict(zip(ids, ("11", "22", "33"), strict=True))
    text = "a\tfloat32\t2x3\t22\nb\tfloat32\t2x3\t11\n"
    found = slot_digests(tensors, sums)
    assert list(found) == ["exp_avg", "param"]
    assert found["param"] == hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# --- plans ---------------------------------------------------------------------------------------


def joined(
    source: dict[LogicalTensor, list[Piece]],
    target: dict[LogicalTensor, list[Piece]],
    naming: str = "x",
    *,
    narrow: bool = False,
) -> Plan:
    """The plan between two layouts."""
    held = Layout({t.id: t for t in source}, {t.id: p for t, p in source.items()}.__getitem__, "x")
    made = Layout(
        {t.id: t for t in target}, {t.id: p for t, p in target.items()}.__getitem__, naming
    )
    checkpoint = Checkpoint(Path(), "x", "", Topology(), held, ())
    declared = Declaration("x", Topology(), "", made, [])
    return plan(checkpoint, declared, narrow=True) if narrow else plan(checkpoint, declared)


def tensor(name: str, shape: tuple[int, ...], dtype: Any = F32, **more: Any) -> LogicalTensor:
    slot = more.pop("slot", "param")
    return LogicalTensor(TensorId(name, slot), shape, dtype, **more)


def filled(t: LogicalTensor) -> list[Piece]:
    return [place(Box.whole(t.space), array(*t.space, dtype=t.dtype))]


def rows(t: LogicalTensor, *cuts: int) -> list[Piece]:
    edges = [0, *cuts, t.space[0]]
    tail = t.space[1:]
    return [
        place(Box((a, *(0 for _ in tail)), (b, *tail)), array(b - a, *tail, dtype=t.dtype))
        for a, b in pairwise(edges)
    ]


def test_a_plan_counts_what_it_does() -> None:
    t = tensor("t", (6, 2))
    found = joined({t: rows(t, 2)}, {t: rows(t, 3)})
    assert (found.copies, found.fills, found.replicas) == (3, 0, 0)
    assert (found.bytes_read, found.bytes_written) == (48, 48)
    assert found.losses == ()
    assert found.notes == ()
    assert found.names == {"t": [t.id]}
    again = joined({t: [*rows(t, 2), *rows(t, 4)]}, {t: filled(t)})
    assert again.replicas == 12
    assert again.bytes_read == 48


def test_a_plan_says_what_becomes_of_padding() -> None:
    true = tensor("t", (6, 2))
    more = tensor("t", (6, 2), padded=(8, 2))
    grown = joined({true: filled(true)}, {more: rows(more, 4)})
    assert (grown.fills, grown.bytes_read, grown.bytes_written) == (1, 48, 64)
    assert "2 zero rows added" in grown.notes[0]
    cut = joined({more: filled(more)}, {true: filled(true)})
    assert (cut.fills, cut.bytes_read) == (0, 48)
    assert "2 padding rows dropped" in cut.notes[0]
    assert joined({more: filled(more)}, {more: filled(more)}).notes == ()
    one = tensor("t", (6, 2), padded=(7, 2))
    assert "1 zero rows added" in joined({true: filled(true)}, {one: filled(one)}).notes[0]
    gap = joined({true: filled(true)}, {more: filled(more)}).join(true.id)
    assert [f.box for f in gap.fills()] == [Box((6, 0), (8, 2))]
    short = joined({true: filled(true)}, {more: filled(more)}).join(true.id, rows(true, 4)[:1])
    with pytest.raises(CoverageError, match=r"no stored array of the source holds \[4:8, 0:2\]"):
        list(short.fills())


def test_a_plan_refuses_what_cannot_be_filled() -> None:
    t, wide, other = tensor("t", (6, 2)), tensor("t", (6, 3)), tensor("u", (6, 2))
    with pytest.raises(CoverageError, match="named as 'x'"):
        joined({t: filled(t)}, {t: filled(t)}, "y")
    with pytest.raises(CoverageError, match="u: the target needs it"):
        joined({t: filled(t)}, {t: filled(t), other: filled(other)})
    with pytest.raises(
        CoverageError, match=r"shape \[6, 3\] in the target, \[6, 2\] in the source"
    ):
        joined({t: filled(t)}, {wide: filled(wide)})
    with pytest.raises(CoverageError, match="u: the source holds it"):
        joined({t: filled(t), other: filled(other)}, {t: filled(t)})
    with pytest.raises(CoverageError, match="no stored array holds"):
        joined({t: rows(t, 2)[:1]}, {t: filled(t)})


def test_a_plan_declares_what_is_lost() -> None:
    t, narrow = tensor("t", (6, 2)), tensor("t", (6, 2), BF16)
    moment = tensor("t", (6, 2), slot="exp_avg")
    master = tensor("t", (6, 2), slot="master")
    with pytest.raises(LossError, match="bits would be lost"):
        joined({t: filled(t)}, {narrow: filled(narrow)})
    found = joined({t: filled(t)}, {narrow: filled(narrow)}, narrow=True)
    assert [(x.code, x.what) for x in found.losses] == [("narrowed", "t")]
    assert joined({narrow: filled(narrow)}, {t: filled(t)}).losses == ()
    half = tensor("t", (6, 2), named("float16"))
    for a, b in ((half, narrow), (narrow, half)):  # as wide: range against precision
        with pytest.raises(LossError, match="bits would be lost"):
            joined({a: filled(a)}, {b: filled(b)})
        assert joined({a: filled(a)}, {b: filled(b)}, narrow=True).losses[0].code == "narrowed"
    found = joined({t: filled(t), moment: filled(moment)}, {t: filled(t)})
    assert [(x.code, x.what, x.detail) for x in found.losses] == [
        ("slot-dropped", "exp_avg", "1 tensors of slot exp_avg have no place in the target")
    ]
    found = joined({master: filled(master)}, {narrow: filled(narrow)})
    assert [(x.code, x.what) for x in found.losses] == [("derived", "param")]
    assert found.losses[0].detail == "1 tensors made from master: the source has no param"
    assert found.feeds == {narrow.id: master.id}
    found = joined({t: filled(t)}, {t: filled(t), master: filled(master)})
    assert found.feeds[master.id] == t.id
    number = tensor("t", (6, 2), I64)
    with pytest.raises(LossError):
        joined({t: filled(t)}, {number: filled(number)})


def test_the_master_is_the_weight_that_counts() -> None:
    """A weight wider than the stored one comes from the master; as narrow, from itself."""
    weight, master = tensor("t", (6, 2), BF16), tensor("t", (6, 2), slot="master")
    held = {weight: filled(weight), master: filled(master)}
    wide = tensor("t", (6, 2))
    taken = joined(held, {wide: filled(wide)})
    assert taken.feeds == {wide.id: master.id}
    assert taken.losses == ()
    assert joined(held, {weight: filled(weight)}).feeds == {weight.id: weight.id}


def test_a_weight_that_is_not_taken_is_a_witness_of_its_master() -> None:
    weight, master = tensor("t", (6, 2), BF16), tensor("t", (6, 2), slot="master")
    held = {weight: filled(weight), master: filled(master)}
    wide = tensor("t", (6, 2))
    found = joined(held, {wide: filled(wide)}).witness([wide.id])
    assert found is not None
    assert found.source.id == weight.id
    assert found.wanted.items == []
    assert joined(held, {weight: filled(weight)}).witness([weight.id]) is None
    assert joined(held, held).witness([weight.id, master.id]) is None
    assert joined({master: filled(master)}, {master: filled(master)}).witness([master.id]) is None


def test_a_plan_counts_in_the_finer_of_two_shapes() -> None:
    coarse, fine = tensor("t", (6, 2)), tensor("t", (6, 2), factors=(3, 2, 2))
    other = tensor("t", (6, 2), factors=(2, 3, 2))
    for source, target in ((coarse, fine), (fine, coarse), (fine, fine)):
        join = joined({source: filled(source)}, {target: filled(target)}).join(TensorId("t"))
        assert join.source.space == join.target.space == (3, 2, 2)
        assert sum(c.box.numel for c in join.copies()) == 12
    with pytest.raises(CoverageError, match="neither is the finer one"):
        joined({fine: filled(fine)}, {other: filled(other)})


def test_a_shelf_gives_no_more_than_it_must() -> None:
    """The index of the join: with it a grid of n boxes joins in n log n."""
    t = tensor("t", (100, 2))
    shelf = Shelf((p.box, p) for p in rows(t, *range(1, 100)))
    assert shelf.axis == 0
    near = [b for b, _ in shelf.near(Box((40, 0), (43, 2)))]
    assert near == [Box((i, 0), (i + 1, 2)) for i in (40, 41, 42)]
    assert list(Shelf([]).near(Box((0,), (1,)))) == []
    pieces = rows(t, *range(1, 100))
    found = cover([*pieces, *pieces[10:20]])
    assert len(found.parts.items) == 100
    assert [b.start[0] for b, _ in found.replicas] == list(range(10, 20))


def test_nothing_covers_nothing() -> None:
    assert cover([]).parts.items == []
    assert cover([]).replicas == []
    scalar = place(Box((), ()), array())
    assert cover([scalar, scalar]).replicas == [(Box((), ()), scalar)]


def test_losses_are_told_in_order() -> None:
    t, z, y = (tensor("t", (6, 2), slot=s) for s in ("param", "z", "y"))
    found = joined({t: filled(t), z: filled(z), y: filled(y)}, {t: filled(t)})
    assert [x.what for x in found.losses] == ["y", "z"]
    a, b = tensor("a", (6, 2), padded=(8, 2)), tensor("b", (6, 2), padded=(8, 2))
    small = {x: filled(x) for x in (tensor("b", (6, 2)), tensor("a", (6, 2)))}
    notes = joined(small, {b: filled(b), a: filled(a)}).notes
    assert [n.split(":")[1] for n in notes] == [" a", " b"]


def test_losses_are_folded() -> None:
    t = [tensor(f"t{i}", (6, 2)) for i in range(5)]
    small = [tensor(f"t{i}", (6, 2), BF16) for i in range(5)]
    found = joined({x: filled(x) for x in t}, {x: filled(x) for x in small}, narrow=True)
    assert loss_lines(found.losses) == [
        "narrowed: t0, t1, t2 and 2 more: float32 rounded to bfloat16"
    ]
    assert loss_lines(found.losses[:4]) == [
        "narrowed: t0, t1, t2 and 1 more: float32 rounded to bfloat16"
    ]
    assert loss_lines(found.losses[:3]) == ["narrowed: t0, t1, t2: float32 rounded to bfloat16"]
