"""The rank files of a legacy checkpoint: their names, which must be there, what their args say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import CorruptError, FormatError
from reshard.format import OpenOptions
from reshard.topology import Topology, topology

from .run import Place, places, writers
from .sizes import Sizes

MODEL, DISTRIBUTED = "model_optim_rng.pt", "distrib_optim.pt"

#: degree -> the args that give it; tp was model_parallel_size before checkpoint_version 3.0.
#: Source: megatron/training/checkpointing.py check_checkpoint_args @ core_v0.16.1.
_FIELDS = {
    "tp": ("tensor_model_parallel_size", "model_parallel_size"),
    "pp": ("pipeline_model_parallel_size",),
    "ep": ("expert_model_parallel_size",),
    "etp": ("expert_tensor_parallel_size",),
    "cp": ("context_parallel_size",),
    "dp": ("data_parallel_size",),
}


@dataclass(frozen=True, slots=True)
class RankFile:
    """One mp_rank folder: its pipeline stage, and the rank of that stage that writes it."""

    folder: str
    stage: int
    place: Place

    @property
    def model(self) -> str:
        """The file of weights and state, relative to the checkpoint."""
        return f"{self.folder}/{MODEL}"

    @property
    def distributed(self) -> str:
        """The file of the distributed optimizer's buffers, relative to the checkpoint."""
        return f"{self.folder}/{DISTRIBUTED}"


def rank_files(degrees: Topology) -> list[RankFile]:
    """Every file that a run of this topology writes, in the order of their names.

    mp_rank_TT, then _PPP if pp > 1, then _EEE if ep > 1.
    Source: megatron/training/checkpointing.py get_checkpoint_name @ core_v0.16.1; fixtures
    a-tp1pp1, a-tp2pp4, c-pp1ep4, c-pp2ep2.
    """
    out = []
    for (tp, ep), place in writers(degrees).items():
        for stage in range(degrees.pp):
            name = f"mp_rank_{tp:02d}"
            name += f"_{stage:03d}" if degrees.pp > 1 else ""
            name += f"_{ep:03d}" if degrees.ep > 1 else ""
            out.append(RankFile(name, stage, place))
    return sorted(out, key=lambda f: (f.place.tp, f.stage, f.place.ep))


def found_folders(folder: Path) -> list[str]:
    """The mp_rank folders that are there, sorted."""
    return sorted(p.name for p in folder.glob("mp_rank_*") if p.is_dir())


def checked_files(folder: Path, degrees: Topology) -> list[RankFile]:
    """The files of a checkpoint of this topology. Raises CorruptError for one too few or too many.

    A name alone does not tell a pipeline rank from an expert rank; the topology does.
    """
    wanted = rank_files(degrees)
    for file in wanted:
        if not (folder / file.model).is_file():
            raise CorruptError(
                f"{folder / file.model} is missing: the args say {degrees}, which makes "
                f"{len(wanted)} rank files. Copy the checkpoint again, or save it again."
            )
    extra = sorted(set(found_folders(folder)) - {f.folder for f in wanted})
    if extra:
        raise CorruptError(
            f"{folder / extra[0]}: the args say {degrees}, whose {len(wanted)} rank files do not "
            "include this one. Two checkpoints are mixed in this folder."
        )
    return wanted


def refuse_swapped(folder: Path, degrees: Topology, said: Mapping[RankFile, object]) -> None:
    """Raises CorruptError for files whose args say one another's rank.

    `said`: the args.rank of every file; tools that write all files in one process leave one
    rank's in all, which says nothing.
    Source: megatron/training/checkpointing.py save_checkpoint @ core_v0.16.1; fixtures a to g.
    """
    each = len(places(degrees))
    wanted = {file: file.stage * each + file.place.rank for file in said}
    if sorted(map(str, said.values())) != sorted(map(str, wanted.values())):
        return
    for file, rank in said.items():
        if rank != wanted[file]:
            other = next(f for f in said if wanted[f] == rank)
            raise CorruptError(
                f"{folder / file.model}: its args say rank {rank}, which writes {other.model}; "
                f"this is rank {wanted[file]}'s place. Files have been swapped or renamed: give "
                "them their names back, or copy the checkpoint again."
            )


def said_degrees(args: Mapping[str, object], model: Sizes) -> dict[str, int]:
    """The degrees that the args say; etp only where there are experts."""
    said: dict[str, int] = {}
    for degree, fields in _FIELDS.items():
        value = next((args[f] for f in fields if args.get(f) is not None), None)
        if value is None or (degree == "etp" and model.experts is None):
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise FormatError(f"args.{fields[0]} is {value!r}, not a whole number")
        said[degree] = value
    return said


def degrees_of(args: Mapping[str, object], model: Sizes, options: OpenOptions) -> Topology:
    """The topology that the args say, and --from where they do not; vpp is left at 1.

    Raises FormatError for a degree that neither says, or that --from says otherwise.
    """
    said = said_degrees(args, model)
    given = {k: v for k, v in options.given.degrees.items() if k not in ("zero", "vpp")}
    for degree, fields in _FIELDS.items():
        if degree in said and given.get(degree, said[degree]) != said[degree]:
            raise FormatError(
                f"--from says {degree}={given[degree]}, the checkpoint's args say "
                f"{degree}={said[degree]} ({fields[0]})"
            )
        if degree in ("tp", "pp") and degree not in said and degree not in given:
            raise FormatError(
                f"the checkpoint's args do not say {fields[0]}. Give it, as in --from {degree}N."
            )
    return topology({**said, **given})
