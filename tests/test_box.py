"""Boxes, flat runs and the join: laws over random seeds that a failure prints."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest

from reshard.box import Box, flat_boxes, row_major, uncovered
from reshard.dtypes import named
from reshard.files import Files, blocks
from reshard.fingerprints import Sum, lanes
from reshard.join import cover
from reshard.layout import Piece, StoredArray, place, place_flat, refactor
from reshard.tensor import LogicalTensor, TensorId


def random_shape(rng: random.Random, rank: int | None = None) -> tuple[int, ...]:
    return tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4) if rank is None else rank))


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    start = [rng.randrange(n) for n in shape]
    return Box(
        tuple(start), tuple(rng.randint(a + 1, n) for a, n in zip(start, shape, strict=True))
    )


def indices(box: Box) -> set[tuple[int, ...]]:
    return {tuple(i) for i in np.argwhere(np.ones(box.shape, bool)) + np.array(box.start, int)} or {
        ()
    }


@pytest.mark.parametrize("seed", range(40))
def test_flat_boxes_cover_the_run_in_order(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    n = prod(shape)
    start = rng.randint(0, n)
    stop = rng.randint(start, n)
    found = flat_boxes(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    strides = row_major(shape)
    flat = [
        sum(s * (a + int(d)) for s, a, d in zip(strides, b.start, i, strict=True))
        for b in found
        for i in np.ndindex(*b.shape)
    ]
    assert flat == list(range(start, stop))


def test_flat_boxes_refuses_a_run_outside_the_tensor() -> None:
    with pytest.raises(ValueError, match="leaves a tensor"):
        flat_boxes((2, 3), 4, 7)


@pytest.mark.parametrize("seed", range(40))
def test_minus_leaves_the_rest_disjoint(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng, rng.randint(1, 4))
    box = random_box(rng, shape)
    hole = random_box(rng, shape) & box
    if hole is None:
        return
    rest = box.minus(hole)
    assert sum(b.numel for b in rest) == box.numel - hole.numel
    assert set().union(*(indices(b) for b in rest), set()) == indices(box) - indices(hole)


@pytest.mark.parametrize("seed", range(40))
def test_cover_gives_every_element_one_holder(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng, rng.randint(1, 3))
    pieces = [
        place(b, StoredArray(f"f{i}", 0, b.shape, named("float32"), "k"))
        for i, b in enumerate(random_box(rng, shape) for _ in range(rng.randint(1, 12)))
    ]
    found = cover(pieces)
    counts = np.zeros(shape, int)
    for box, piece in found.parts.items:
        assert box in piece.box
        counts[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] += 1
    assert counts.max() <= 1
    held = set().union(*(indices(p.box) for p in pieces))
    assert int(counts.sum()) == len(held)
    gap = uncovered(Box.whole(shape), [p.box for p in pieces])
    assert sum(b.numel for b in gap) == prod(shape) - len(held)


@pytest.mark.parametrize("seed", range(30))
def test_fingerprint_is_additive_over_any_cut(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng, rng.randint(0, 3))
    dtype = named(rng.choice(["bfloat16", "float32", "uint8", "float64", "float8_e4m3fn"]))
    raw = np.random.default_rng(seed).integers(0, 256, prod(shape) * dtype.itemsize, np.uint8)
    values = raw.view(dtype.numpy).reshape(shape)
    tensor = LogicalTensor(TensorId("t"), shape, dtype)
    whole = Sum()
    whole.add(tensor, Box.whole(shape), values)
    todo, parts = [Box.whole(shape)], []
    while todo:
        box = todo.pop()
        hole = random_box(rng, shape) & box if shape else None
        if hole is None or hole == box or len(parts) > 20:
            parts.append(box)
        else:
            todo += [*box.minus(hole), hole]
    cut = Sum()
    for box in parts:
        cut.add(
            tensor,
            box,
            values[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))],
        )
    assert (cut.a, cut.b, cut.elements) == (whole.a, whole.b, whole.elements)


def test_fingerprint_sees_sign_flips_and_swaps() -> None:
    """One lane is blind at the top bit: an even number of flips, x and -x swapped."""
    x = np.linspace(0.1, 3.0, 64, dtype=np.float64)
    box = Box.whole(x.shape)
    flipped = x.copy()
    flipped[[3, 9]] *= -1
    swapped = np.where(np.arange(64) == 5, -1.0, np.where(np.arange(64) == 6, 1.0, x))
    back = np.where(np.arange(64) == 5, 1.0, np.where(np.arange(64) == 6, -1.0, x))
    assert lanes(x.shape, box, x) != lanes(x.shape, box, flipped)
    assert lanes(x.shape, box, swapped) != lanes(x.shape, box, back)


@pytest.mark.parametrize("seed", range(30))
def test_files_read_and_write_strided_pieces(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A transpose, a stack, a column cut: any strides read and write the same elements as numpy."""
    rng = random.Random(seed)
    folder = tmp_path_factory.mktemp("files")
    stored = random_shape(rng, 3)
    data = np.arange(prod(stored), dtype=np.int32).reshape(stored)
    (folder / "f").write_bytes(b"head" + data.tobytes())
    array = StoredArray("f", 4, stored, named("int32"), "k")
    axes = rng.sample(range(3), 3)
    view = data.transpose(axes)
    piece = Piece(Box.whole(view.shape), array, 0, tuple(row_major(stored)[a] for a in axes))
    box = random_box(rng, view.shape)
    slices = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
    with Files(folder, writable=True) as files:
        assert np.array_equal(files.read(piece, box), view[slices])
        files.write(piece, box, -files.read(piece, box) - 1)
        after = np.fromfile(folder / "f", np.int32, offset=4).reshape(stored).transpose(axes)
    expected = view.copy()
    expected[slices] = -expected[slices] - 1
    assert np.array_equal(after, expected)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_tile_in_row_major_order(seed: int) -> None:
    rng = random.Random(seed)
    shape = random_shape(rng)
    limit = rng.randint(1, 20)
    order = np.arange(prod(shape)).reshape(shape)
    seen = [
        order[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))].reshape(-1)
        for box in blocks(shape, limit)
    ]
    assert np.array_equal(np.concatenate(seen), np.arange(prod(shape)))
    assert all(len(s) <= limit for s in seen)


def test_place_flat_finds_a_run_in_a_buffer() -> None:
    array = StoredArray("f", 0, (100,), named("float32"), "bucket")
    pieces = place_flat((4, 6), 5, 17, array, 40)
    for p in pieces:
        for i in np.ndindex(*p.box.shape):
            at = [a + d for a, d in zip(p.box.start, i, strict=True)]
            element = p.base + sum(s * d for s, d in zip(p.strides, i, strict=True))
            assert element == 40 + at[0] * 6 + at[1] - 5


@pytest.mark.parametrize("seed", range(40))
def test_refactor_counts_the_same_elements_in_a_finer_shape(seed: int) -> None:
    rng = random.Random(seed)
    parts = [random_shape(rng, rng.randint(1, 3)) for _ in range(rng.randint(1, 3))]
    shape = tuple(prod(p) for p in parts)
    factors = tuple(n for p in parts for n in p)
    array = StoredArray("f", 0, shape, named("int32"), "k")
    box = random_box(rng, shape)
    piece = Piece(box, array, 7, tuple(rng.randint(1, 50) for _ in shape))

    def elements(pieces: list[Piece], space: tuple[int, ...]) -> dict[int, int]:
        steps = row_major(space)
        found = {}
        for p in pieces:
            for i in np.ndindex(*p.box.shape):
                at = sum(s * (a + d) for s, a, d in zip(steps, p.box.start, i, strict=True))
                assert at not in found
                found[at] = p.base + sum(s * d for s, d in zip(p.strides, i, strict=True))
        return found

    fine = refactor(piece, shape, factors)
    assert elements(fine, factors) == elements([piece], shape)


@pytest.mark.parametrize("seed", range(20))
def test_fingerprint_does_not_depend_on_factors(seed: int) -> None:
    rng = random.Random(seed)
    parts = [random_shape(rng, rng.randint(1, 3)) for _ in range(rng.randint(1, 3))]
    shape, factors = tuple(prod(p) for p in parts), tuple(n for p in parts for n in p)
    dtype = named(rng.choice(["bfloat16", "float32"]))
    values = np.random.default_rng(seed).normal(size=shape).astype(dtype.numpy)
    plain, fine = Sum(), Sum()
    plain.add(LogicalTensor(TensorId("t"), shape, dtype), Box.whole(shape), values)
    tensor = LogicalTensor(TensorId("t"), shape, dtype, factors=factors)
    for box in blocks(factors, rng.randint(1, 40)):
        cut = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        fine.add(tensor, box, values.reshape(factors)[cut])
    assert (plain.a, plain.b, plain.elements) == (fine.a, fine.b, fine.elements)
