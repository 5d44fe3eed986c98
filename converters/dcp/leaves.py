"""The leaves of a nested state dict, whichever files they lie in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reshard.containers.carried import Carried
from reshard.dtypes import DType
from reshard.layout import Piece

from .values import Path


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A whole tensor at a place of a state dict; its pieces are located when asked for.

    `first` is where its first elements lie, as files say it (tensors of one storage share it), or
    None.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: DType
    pieces: Callable[[], Sequence[Piece]]
    first: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class ObjectLeaf:
    """A value at a place of a state dict; `file` is the side file it came from, "" for none."""

    path: Path
    value: Carried
    file: str = ""


Leaf = TensorLeaf | ObjectLeaf


def dotted(path: Path) -> str:
    """A path as messages and DCP keys spell it."""
    return ".".join(map(str, path))
