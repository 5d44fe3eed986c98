"""DeepSpeed: ZeRO 0 to 3, pipeline, AutoTP and MoE checkpoints, and universal ones."""

from __future__ import annotations

from pathlib import Path

from reshard.checkpoint import Checkpoint, Json
from reshard.format import Declaration, OpenOptions, Packed, WriteOptions
from reshard.topology import Target


class DeepSpeed:
    """Native checkpoints: a tag folder with one file or more a rank."""

    name = "deepspeed"
    summary = "mp_rank_*_model_states.pt, *zero_pp_rank_*_optim_states.pt"
    writes = True
    takes: frozenset[str] = frozenset()
    naming = "torch"  # of every target

    def recognise(self, folder: Path) -> str | None:
        """Why a folder is one."""
        from .recognise import recognise_native, recognise_wrapper

        return recognise_native(folder) or recognise_wrapper(folder)

    def checkpoint_folder(self, run: Path, iteration: int | None) -> Path | None:
        """The tag folder of a run folder, or the newest folder of a trainer's."""
        from .recognise import LATEST, newest, tagged_folder

        return tagged_folder(run, iteration, LATEST) or newest(run, iteration)

    def open(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Read headers."""
        from .recognise import recognise_native

        if recognise_native(folder) is None:
            from .wrapper import open_wrapped

            return open_wrapped(folder, options)
        from .read import open_native

        return open_native(folder, options)

    def declare(self, source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
        """Lay out a target."""
        from .write import declare_native

        return declare_native(source, target, options)

    def pack(self, source: Checkpoint) -> Packed | None:
        """What the writers use, as JSON."""
        from .packed import pack

        return pack(source)

    def unpack(self, state: Json, source: Checkpoint) -> object:
        """What the writers use, from JSON."""
        from .packed import unpack

        return unpack(state, source)


class Universal:
    """Universal checkpoints, which a job of any stage and size loads."""

    name = "deepspeed-universal"
    summary = "zero/NAME/fp32.pt beside model states"
    writes = True
    takes: frozenset[str] = frozenset()
    naming = "torch"  # of every target

    def recognise(self, folder: Path) -> str | None:
        """Why a folder is one."""
        from .recognise import recognise_universal

        return recognise_universal(folder)

    def checkpoint_folder(self, run: Path, iteration: int | None) -> Path | None:
        """The universal folder of a run folder."""
        from .recognise import LATEST_UNIVERSAL, tagged_folder

        return tagged_folder(run, iteration, LATEST_UNIVERSAL)

    def open(self, folder: Path, options: OpenOptions) -> Checkpoint:
        """Read headers."""
        from .universal_read import open_universal

        return open_universal(folder, options)

    def declare(self, source: Checkpoint, target: Target, options: WriteOptions) -> Declaration:
        """Lay out a target."""
        from .universal_write import declare_universal

        return declare_universal(source, target, options)

    def pack(self, source: Checkpoint) -> Packed | None:
        """What the writers use, as JSON."""
        from .packed import pack

        return pack(source)

    def unpack(self, state: Json, source: Checkpoint) -> object:
        """What the writers use, from JSON."""
        from .packed import unpack

        return unpack(state, source)


FORMATS = (DeepSpeed(), Universal())
