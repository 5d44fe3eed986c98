"""Laws of the join, over layouts that hypothesis makes: A to B to C is A to C, byte for byte.

A layout is files of stored arrays over one set of tensors: grids of cuts along any axes, flat runs,
transposed arrays, replicas that overlap, padding rows, stacks. Sources and targets are both such.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reshard.box import Box, flat_boxes, row_major, uncovered
from reshard.checkpoint import Checkpoint
from reshard.dtypes import DType, named
from reshard.engine import Checksums, Mover, move_all
from reshard.errors import CoverageError, ReplicaError
from reshard.files import Files, blocks
from reshard.format import Declaration
from reshard.join import Plan, cover, plan
from reshard.layout import Draft, Layout, Piece, StoredArray, place, place_flat, refactor
from reshard.readback import fingerprints
from reshard.tensor import LogicalTensor, TensorId
from reshard.topology import Topology

QUICK = settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
DTYPES = ("float32", "bfloat16", "int64", "uint8")


# --- layouts, made -------------------------------------------------------------------------------


def cuts(draw: Any, n: int) -> list[int]:
    """0 and n, with some numbers between."""
    inner = draw(st.lists(st.integers(1, n - 1), max_size=3, unique=True)) if n > 1 else []
    return [0, *sorted(inner), n]


def grid(draw: Any, shape: Sequence[int]) -> list[Box]:
    """A shape cut along its axes."""
    boxes = [Box((), ())]
    for n in shape:
        at = cuts(draw, n)
        boxes = [Box((*b.start, i), (*b.stop, j)) for b in boxes for i, j in pairwise(at)]
    return boxes


def transposed(box: Box, file: str, dtype: DType, order: Sequence[int], at: int) -> Piece:
    """A box stored with its axes in another order."""
    array = StoredArray(file, at, tuple(box.shape[i] for i in order), dtype, "k")
    steps = row_major(array.shape)
    strides = tuple(steps[list(order).index(i)] for i in range(len(order)))
    return Piece(box, array, 0, strides)


@dataclass
class Made:
    """Pieces of every tensor, and the bytes that each file has."""

    pieces: dict[TensorId, list[Piece]]
    sizes: dict[str, int]

    def place(self, draw: Any, dtype: DType, nbytes: int) -> tuple[str, int]:
        """A file, and an offset in it with some bytes of nothing before."""
        file = f"f{draw(st.integers(0, 2))}"
        at = self.sizes.get(file, 0) + draw(st.integers(0, 2)) * 8
        at += -at % dtype.itemsize
        self.sizes[file] = at + nbytes
        return file, at


def lay(draw: Any, made: Made, tensor: LogicalTensor, *, replicas: bool) -> None:
    """Place one tensor, in one of the forms."""
    shape, dtype, pieces = tensor.space, tensor.dtype, made.pieces.setdefault(tensor.id, [])
    form = draw(st.sampled_from(["grid", "grid", "transposed", "flat", "stack"]))
    if form == "flat":
        edges = cuts(draw, prod(shape))
        for a, b in pairwise(edges):
            lead = draw(st.integers(0, 3))
            file, at = made.place(draw, dtype, (b - a + lead) * dtype.itemsize)
            array = StoredArray(file, at, (b - a + lead,), dtype, "flat")
            pieces += place_flat(shape, a, b, array, lead)
    elif form == "stack":
        n = draw(st.integers(1, 3))
        file, at = made.place(draw, dtype, n * prod(shape) * dtype.itemsize)
        array = StoredArray(file, at, (n, *shape), dtype, "stack")
        index = draw(st.integers(0, n - 1))
        pieces.append(place(Box.whole(shape), array, (index, *(0 for _ in shape))))
    else:
        for box in grid(draw, shape):
            file, at = made.place(draw, dtype, box.numel * dtype.itemsize)
            order = list(range(len(shape)))
            if form == "transposed":
                order = draw(st.permutations(order))
            pieces.append(transposed(box, file, dtype, order, at))
    if replicas and draw(st.booleans()):
        start = [draw(st.integers(0, n - 1)) for n in shape]
        stop = [draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True)]
        box = Box(tuple(start), tuple(stop))
        file, at = made.place(draw, dtype, box.numel * dtype.itemsize)
        pieces.append(place(box, StoredArray(file, at, box.shape, dtype, "copy")))


@st.composite
def tensors(draw: Any) -> list[LogicalTensor]:
    """A few tensors of odd shapes."""
    out = []
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
        dtype = named(draw(st.sampled_from(DTYPES)))
        out.append(LogicalTensor(TensorId(f"t{i}"), shape, dtype))
    return out


@st.composite
def layouts(draw: Any, held: list[LogicalTensor], *, padded: bool = True) -> tuple[Layout, Made]:
    """A layout of these tensors, some with padding rows of its own."""
    made = Made({}, {})
    logical = {}
    for tensor in held:
        more = draw(st.integers(0, 3)) if padded and tensor.shape else 0
        extent = (tensor.shape[0] + more, *tensor.shape[1:]) if more else None
        mine = LogicalTensor(tensor.id, tensor.shape, tensor.dtype, extent)
        logical[tensor.id] = mine
        lay(draw, made, mine, replicas=True)
    return Layout(logical, lambda t: made.pieces[t], "laws"), made


def checkpoint(folder: Path, layout: Layout, made: Made) -> Checkpoint:
    return Checkpoint(folder, "laws", "1", Topology(), layout, tuple(sorted(made.sizes)))


def declared(layout: Layout, made: Made) -> Declaration:
    drafts = [Draft(name, size, ()) for name, size in sorted(made.sizes.items())]
    return Declaration("laws", Topology(), "", layout, drafts)


def fill(folder: Path, layout: Layout, made: Made, values: dict[TensorId, Any]) -> Checkpoint:
    """A checkpoint with these values; padding holds them too, and the rest is noise."""
    folder.mkdir()
    noise = np.random.default_rng(5)
    for name, size in made.sizes.items():
        (folder / name).write_bytes(noise.bytes(size))
    with Files(folder, writable=True) as files:
        for tensor in layout.tensors:
            for piece in layout.pieces(tensor):
                files.write(piece, piece.box, values[tensor][slices(piece.box)])
    return checkpoint(folder, layout, made)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def values_of(layout: Layout, seed: int) -> dict[TensorId, Any]:
    """Random bits for every element, padding rows zero."""
    rng = np.random.default_rng(seed)
    out = {}
    for tensor, logical in layout.tensors.items():
        raw = rng.bytes(prod(logical.space) * logical.dtype.itemsize)
        array = np.frombuffer(raw, logical.dtype.numpy).reshape(logical.space).copy()
        if logical.shape:
            array[logical.shape[0] :] = 0
        out[tensor] = array
    return out


def moved(planned: Plan, folder: Path, elements: int, workers: int) -> Checkpoint:
    """Run a plan into a folder of empty files."""
    folder.mkdir()
    target = planned.target
    for draft in target.drafts:
        with open(folder / draft.name, "wb") as file:
            file.truncate(draft.size)
    with Files(planned.source.path) as source, Files(folder, writable=True) as out:
        mover = Mover(planned, source, out, elements, Checksums(target.drafts, fresh=True))
        pool = ThreadPoolExecutor(workers) if workers > 1 else None
        try:
            move_all(mover, planned.names, pool, lambda *_: None)
        finally:
            if pool is not None:
                pool.shutdown()
    return Checkpoint(
        folder, "laws", "1", Topology(), target.layout, tuple(d.name for d in target.drafts)
    )


def everything(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {name: (checkpoint.path / name).read_bytes() for name in checkpoint.files}


def true_values(checkpoint: Checkpoint) -> dict[TensorId, bytes]:
    """Every true element, piece by piece, and all copies alike."""
    out = {}
    with Files(checkpoint.path) as files:
        for tensor, logical in checkpoint.layout.tensors.items():
            checkpoint.layout.check(tensor)
            whole = np.zeros(logical.space, logical.dtype.numpy)
            for piece in checkpoint.layout.pieces(tensor):
                whole[slices(piece.box)] = files.read(piece, piece.box)
            for piece in checkpoint.layout.pieces(tensor):
                again = files.read(piece, piece.box)
                assert again.tobytes() == np.ascontiguousarray(whole[slices(piece.box)]).tobytes()
            out[tensor] = np.ascontiguousarray(whole[slices(logical.true)]).tobytes()
    return out


# --- the laws ------------------------------------------------------------------------------------


@QUICK
@given(st.data())
def test_a_to_b_to_c_is_a_to_c(data: st.DataObject) -> None:
    """Also block by block, with workers; fingerprints agree on all three; zero is what is left."""
    held = data.draw(tensors())
    a, b, c = (data.draw(layouts(held)) for _ in "abc")
    elements = data.draw(st.sampled_from([1, 3, 16, 1 << 20]))
    workers = data.draw(st.sampled_from([1, 1, 3]))
    with tempfile.TemporaryDirectory() as place_:
        root = Path(place_)
        values = values_of(a[0], data.draw(st.integers(0, 9)))
        first = fill(root / "a", *a, values)
        second = moved(plan(first, declared(*b)), root / "b", elements, workers)
        third = moved(plan(second, declared(*c)), root / "c", elements, workers)
        direct = moved(plan(first, declared(*c)), root / "d", 1 << 20, 1)
        wanted = true_values(first)
        assert true_values(second) == wanted
        assert true_values(third) == wanted
        sums = [fingerprints(x, elements=elements) for x in (first, second, third)]
        for tensor in wanted:
            assert len({s[tensor].hex for s in sums}) == 1
        assert everything(third) == everything(direct)


@QUICK
@given(st.data())
def test_every_element_is_written_once(data: st.DataObject) -> None:
    """Copies and fills of a join partition each target piece, and no copy leaves its source."""
    held = data.draw(tensors())
    a, b = (data.draw(layouts(held)) for _ in "ab")
    planned = plan(checkpoint(Path(), *a), declared(*b))
    for tensor in b[0].tensors:
        join = planned.join(tensor)
        for piece in join.pieces:
            parts = [x.box for x in join.copies() if x.target is piece]
            parts += [x.box for x in join.fills() if x.target is piece]
            assert sum(p.numel for p in parts) == piece.box.numel
            assert uncovered(piece.box, parts) == []
        for copy in join.copies():
            assert copy.box in copy.source.box
            assert copy.box in copy.target.box


@QUICK
@given(st.data())
def test_a_hole_is_refused_and_a_differing_copy_too(data: st.DataObject) -> None:
    held = data.draw(tensors())
    a, b = (data.draw(layouts(held, padded=False)) for _ in "ab")
    tensor = data.draw(st.sampled_from(sorted(a[0].tensors)))
    pieces = a[1].pieces[tensor]
    gone = data.draw(st.integers(0, len(pieces) - 1))
    rest = [p for i, p in enumerate(pieces) if i != gone]
    hole = uncovered(Box.whole(a[0].tensors[tensor].space), [p.box for p in rest])
    with tempfile.TemporaryDirectory() as place_:
        first = fill(Path(place_) / "a", *a, values_of(a[0], 3))
        if hole:
            a[1].pieces[tensor] = rest
            with pytest.raises(CoverageError):
                plan(first, declared(*b))
            return
        # another holder has all of it: change this one's bits
        piece = pieces[gone]
        with Files(first.path, writable=True) as files:
            values = files.read(piece, piece.box).copy()
            raw = values.reshape(-1).view(np.uint8)
            raw[data.draw(st.integers(0, raw.size - 1))] ^= 1
            files.write(piece, piece.box, values)
        with pytest.raises(ReplicaError):
            moved(plan(first, declared(*b)), Path(place_) / "b", 16, 1)


@QUICK
@given(st.data())
def test_cover_subtracts_and_never_drops(data: st.DataObject) -> None:
    """Pieces that overlap anyhow: each element of their union has one holder, the first."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    pieces = []
    for i in range(data.draw(st.integers(1, 12))):
        start = [data.draw(st.integers(0, n - 1)) for n in shape]
        stop = [data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True)]
        box = Box(tuple(start), tuple(stop))
        pieces.append(place(box, StoredArray(f"{i}", 0, box.shape, named("uint8"), "k")))
    first = np.full(shape, -1)
    for i in reversed(range(len(pieces))):
        first[slices(pieces[i].box)] = i
    found = np.full(shape, -1)
    whole = cover(pieces)
    for box, piece in whole.parts.items:
        assert (found[slices(box)] == -1).all()
        found[slices(box)] = int(piece.array.file)
    assert (found == first).all()
    held = sum(p.box.numel for p in pieces)
    assert sum(b.numel for b, _ in whole.replicas) == held - int((first >= 0).sum())


@QUICK
@given(st.data())
def test_flat_runs_blocks_and_factors(data: st.DataObject) -> None:
    """A run is its boxes in order; blocks tile; a finer shape holds the same elements."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=4)))
    n = prod(shape)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    numbers = np.arange(n).reshape(shape)
    boxes = flat_boxes(shape, start, stop)
    flat = [int(v) for b in boxes for v in numbers[slices(b)].reshape(-1)]
    assert flat == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    limit = data.draw(st.integers(1, 40))
    tiles = blocks(shape, limit)
    assert all(b.numel <= limit for b in tiles)
    assert [int(v) for b in tiles for v in numbers[slices(b)].reshape(-1)] == list(range(n))
    factors: list[int] = []
    for size in shape:
        by = data.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        factors += [by, size // by] if size > 1 else [size]
    box = data.draw(st.sampled_from(boxes)) if boxes else Box.whole(shape)
    base = sum(s * a for s, a in zip(row_major(shape), box.start, strict=True))
    piece = Piece(box, StoredArray("", 0, shape, named("int64"), ""), base, row_major(shape))
    finer = numbers.reshape(factors)
    got: list[int] = []
    for part in refactor(piece, shape, factors):
        there = finer[slices(part.box)]
        want = np.lib.stride_tricks.as_strided(
            numbers.reshape(-1)[part.base :], part.box.shape, tuple(8 * s for s in part.strides)
        )
        assert (there == want).all()
        got += [int(v) for v in there.reshape(-1)]
    assert sorted(got) == sorted(int(v) for v in numbers[slices(box)].reshape(-1))
