"""What a converter must offer, how formats are found, and how a folder is recognised."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Protocol, runtime_checkable

from reshard.checkpoint import Checkpoint, Json
from reshard.errors import CorruptError, FormatError, UsageError
from reshard.layout import Draft, Layout
from reshard.plugins import registered
from reshard.tensor import TensorId
from reshard.topology import Target, Topology
from reshard.workers import Each


@dataclass(frozen=True, slots=True)
class Loss:
    """Something the target will not have. `code` is stable; `--strict` refuses any."""

    code: str  # "narrowed", "slot-dropped", "derived", "rng-derived", "extra-dropped", …
    what: str
    detail: str


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one field of the source that is not a tensor."""

    path: str
    kind: str  # keep | remap | derive | drop
    detail: str = ""


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """What a user says about a source that its files may not say."""

    given: Target = field(default_factory=lambda: Target(None, None))  # --from
    iteration: int | None = None
    vocab_size: int | None = None
    weights_only: bool = False


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What a user says about the target beside TARGET."""

    weights_only: bool = False
    dtype: str | None = None
    vocab_size: int | None = None
    like: Checkpoint | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    config: str | None = None  # the folder whose config and other files go with the weights
    tokenizer: str | None = None  # the folder whose tokenizer does
    max_shard_size: int | None = None  # bytes
    compress: int | None = None  # the level of zstd, for formats that compress
    #: What becomes of opaque data-loader states of another number of ranks: one of CURSORS.
    data_cursor: str | None = None


#: Options that some formats act on, as `takes` names them, and what else to do.
ACTS_ON_SOME: Mapping[str, tuple[str, str]] = {
    "vocab_size": (
        "--vocab-size",
        "its files say how many rows are true; a step `resize` of --migrate FILE changes them",
    ),
    "max_shard_size": ("--max-shard-size", "only hf files are cut by size"),
    "tokenizer": ("--tokenizer", "only an hf folder has a tokenizer; copy its files yourself"),
    "data_cursor": ("--data-cursor", "only dcp and torch keep opaque states of data loaders"),
}
#: Every rank starts its data anew; every rank has rank 0's state.
CURSORS = ("reset", "keep-rank0")


@dataclass(frozen=True)
class Declaration:
    """A target, declared: every file, every offset, every tensor; nothing is written yet.

    `folder` is where the files go below the run folder ("" for the run folder itself).
    `trackers` are written last, below the run folder. `explained` are source tensors that have no
    place of their own because something else stands for them (a tied copy). `feeds` names, for a
    target tensor that the source has under another name only, the source's (a tied copy again).
    """

    format: str
    topology: Topology
    folder: str
    layout: Layout
    drafts: Sequence[Draft]
    trackers: Mapping[str, bytes] = field(default_factory=dict)
    losses: tuple[Loss, ...] = ()
    notes: tuple[str, ...] = ()
    fates: tuple[Fate, ...] = ()
    recipe: Mapping[str, Json] = field(default_factory=dict)
    explained: frozenset[TensorId] = frozenset()
    feeds: Mapping[TensorId, TensorId] = field(default_factory=dict)
    vocab_size: int | None = None  # true rows of vocabulary tensors, where files do not say
    #: Writes the files that were laid out and filled into another folder, compressed; their sizes.
    compress: Callable[[Path, Path, Each], Sequence[Draft]] | None = None


@runtime_checkable
class Format(Protocol):
    """One way a checkpoint lies on disk.

    `recognise` says why a folder is one ("holds metadata.json with backend torch_dist"), or None.
    `runs` lists the checkpoints of a run folder as (iteration, folder), newest last, and the one
    its tracker names. A format that cannot be written raises FormatError from `declare`.
    A format with a true attribute `generic` (bare files that others hold too) stands back where
    a specific one fits. An attribute `takes` names the fields of OpenOptions and WriteOptions that
    not every format acts on and this one does (`ACTS_ON_SOME`); without it, all of them.
    """

    name: str
    summary: str
    writes: bool

    def recognise(self, folder: Path) -> str | None:
        """Why this folder is a checkpoint of the format, or None."""
        ...

    def checkpoint_folder(self, run: Path, iteration: int | None) -> Path | None:
        """The checkpoint of a run folder that its tracker or `iteration` names, or None."""
        ...

    def open(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Read headers; no tensor bytes."""
        ...

    def declare(self, source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
        """Lay out every file of the target."""
        ...


@dataclass(frozen=True, slots=True)
class Packed:
    """What a converter's writers use of a checkpoint beyond its neutral fields, as JSON."""

    state: Json
    losses: tuple[Loss, ...] = ()  # what of it JSON cannot hold


@runtime_checkable
class Packs(Protocol):
    """A format whose `native` a store of another kind can keep, and give back to its writers.

    `unpack` of what `pack` gave makes a `native` from which the format's writers write the same.
    """

    name: str

    def pack(self, source: Checkpoint) -> Packed | None:
        """The source's native as JSON, or None if another converter made it."""
        ...

    def unpack(self, state: Json, source: Checkpoint) -> object:
        """The native of a checkpoint that has all its neutral fields.

        Raises CorruptError for a state that is not one.
        """
        ...


def kin(form: Format, other: Checkpoint) -> bool:
    """Whether a checkpoint is one of the same converter's, or a store of such a one."""
    if _home(find(other.format)) == _home(form):
        return True
    packed = pack(other)
    return packed is not None and _home(find(packed[0])) == _home(form)


def _home(form: Format) -> str:
    """The module that a format comes from."""
    return type(form).__module__


def pack(source: Checkpoint) -> tuple[str, Packed] | None:
    """The name of the format that knows the source's native, and its native as JSON."""
    if source.native is None:
        return None
    for form in sorted(formats()[0], key=lambda f: f.name != source.format):
        packed = form.pack(source) if isinstance(form, Packs) else None
        if packed is not None:
            return form.name, packed
    return None


def unpack(name: str, state: Json, source: Checkpoint) -> object:
    """The native that `pack` kept under a format's name. Raises FormatError if nobody reads it."""
    form = find(name)
    if not isinstance(form, Packs):
        raise FormatError(f"format {name!r} does not read state that it once kept; update reshard")
    return form.unpack(state, source)


def refuse_idle(option: str, *names: str) -> None:
    """Raises FormatError for an option that none of these formats acts on."""
    if not any(option in getattr(find(n), "takes", ACTS_ON_SOME) for n in names):
        flag, instead = ACTS_ON_SOME[option]
        raise FormatError(
            f"{flag} does nothing for {' into '.join(dict.fromkeys(names))}: {instead}. "
            "Leave it away."
        )


def _built_in() -> Iterator[Format]:
    package = importlib.import_module("reshard.converters")
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
        yield from importlib.import_module(f"reshard.converters.{module}").FORMATS


@cache
def formats() -> tuple[tuple[Format, ...], tuple[str, ...]]:
    """Every format, ours and registered under `reshard.formats`; and why some were skipped."""
    found = list(_built_in())
    broken: list[str] = []
    for entry in registered("reshard.formats"):
        try:
            plug_in = entry.load()
            if not isinstance(plug_in, Format):
                raise TypeError("it is not a reshard.format.Format")
            found.append(plug_in)
        except (
            Exception
        ) as error:  # a stranger's module may raise anything; it is named, not hidden
            broken.append(f"plug-in {entry.name} ({entry.value}) is skipped: {error}")
    return tuple(found), tuple(broken)


def find(name: str) -> Format:
    """The format of this name. Raises FormatError naming those that exist."""
    known, _ = formats()
    for f in known:
        if f.name == name:
            return f
    raise FormatError(
        f"format {name!r} is not known. Known: {', '.join(sorted(f.name for f in known))}."
    )


def _candidates(path: Path, options: OpenOptions) -> list[tuple[Format, Path, str]]:
    found = []
    known, _ = formats()
    for f in known:
        if options.given.format not in (None, f.name):
            continue
        folder = path
        why = f.recognise(path)
        if why is None:
            inner = f.checkpoint_folder(path, options.iteration)
            if inner is None:
                continue
            why = f.recognise(inner)
            if why is None:
                continue
            folder = inner
        found.append((f, folder, why))
    specific = [c for c in found if not getattr(c[0], "generic", False)]
    return specific or found


_SHOWN, _LOOKED_AT = 20, 1000  # folders


def _held(path: Path, options: OpenOptions) -> list[tuple[str, str]]:
    """The checkpoints right below a folder, with their formats, by the numbers in their names."""
    known = [f for f in formats()[0] if options.given.format in (None, f.name)]
    folders = (p for p in path.iterdir() if p.is_dir()) if path.is_dir() else iter(())
    found = []
    for folder in islice(folders, _LOOKED_AT):
        here = [f for f in known if f.recognise(folder) is not None]
        here = [f for f in here if not getattr(f, "generic", False)] or here
        if here:
            found.append((folder.name, " or ".join(f.name for f in here)))
    return sorted(found, key=lambda f: [(len(n), n) for n in re.split(r"(\d+)", f[0])])


def recognise(path: Path, options: OpenOptions) -> tuple[Format, Path]:
    """The format of a checkpoint or run folder, and the checkpoint's own folder.

    Raises FormatError if no format or more than one fits.
    """
    if not path.exists():
        raise FormatError(f"{path} does not exist")
    found = _candidates(path, options)
    if len(found) == 1:
        return found[0][0], found[0][1]
    if found:
        listed = "; ".join(f"{f.name} ({why})" for f, _, why in found)
        raise FormatError(
            f"{path} could be more than one checkpoint: {listed}. Say which with --from FORMAT."
        )
    known, _ = formats()
    if options.given.format is not None:
        find(options.given.format)
    held = _held(path, options)
    if held:
        shown = ", ".join(f"{name} ({form})" for name, form in held[:_SHOWN])
        more = f" and {len(held) - _SHOWN} more" if held[_SHOWN:] else ""
        raise FormatError(
            f"{path} holds checkpoints, and no tracker says which is meant: {shown}{more}. Name "
            f"one, as in {path / held[-1][0]}, or give its number: --iteration N."
        )
    raise FormatError(
        f"{path} is no checkpoint that reshard knows"
        + (f" as {options.given.format}" if options.given.format else "")
        + f" (looked for: {', '.join(sorted(f'{f.name}: {f.summary}' for f in known))})"
    )


def open_checkpoint(path: str | Path, options: OpenOptions | None = None) -> Checkpoint:
    """Open a checkpoint or the one that a run folder's tracker names. Headers only.

    Raises CorruptError also for what the system cannot read, and for values that exhaust it.
    """
    options = options or OpenOptions()
    if options.vocab_size is not None and options.vocab_size < 1:
        raise UsageError(f"a vocabulary of {options.vocab_size} tokens; give at least 1")
    if not str(path):
        raise UsageError("the path of the checkpoint is empty")
    if options.given.variant is not None:
        raise FormatError(
            f"--from {options.given.text}: {options.given.variant!r} is a variant of a target; a "
            "source shows its own. Leave it away."
        )
    try:
        form, folder = recognise(Path(path), options)
        opened = form.open(folder, options)
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read: {error}") from error
    except RecursionError:
        raise CorruptError(f"{path}: its values are nested too deeply. Save it again.") from None
    except MemoryError:
        raise CorruptError(
            f"{path}: its headers ask for more memory than there is: they are damaged, or this "
            "machine is too small"
        ) from None
    if not opened.layout.tensors:
        raise CorruptError(f"{opened.path}: holds no tensor. Save it again.")
    _check_iteration(Path(path), folder, opened, options.iteration)
    return opened


def _check_iteration(path: Path, folder: Path, opened: Checkpoint, wanted: int | None) -> None:
    """Raises FormatError if a checkpoint that was named itself is not of the wanted iteration."""
    if wanted is None or folder != path or opened.iteration == wanted:
        return
    said = "says no iteration" if opened.iteration is None else f"is of {opened.iteration}"
    raise FormatError(
        f"{path} is one checkpoint, and it {said}, not {wanted}. Name the run folder that holds "
        "it, or leave --iteration away."
    )
