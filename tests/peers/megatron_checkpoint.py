"""Loads a checkpoint into a live Megatron job, as megatron.training.load_checkpoint does."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

from peers import MegatronCase
from peers.megatron_model import Args, Job, bare
from peers.megatron_state import Tensors, model_state, request_metadata, slot_key

LEGACY_FILE = "model_optim_rng.pt"


class UnloadableError(Exception):
    """The checkpoint lacks what the job asks for, or holds what the job does not ask for."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint's iteration folder and what every rank reads first."""

    folder: Path
    legacy: bool
    state: Mapping[str, Any]  # common.pt, or the file of one rank
    args: Args

    @property
    def content(self) -> Mapping[str, Any]:
        return self.state.get("content_metadata") or {}

    @property
    def distributed(self) -> str:
        """How the optimizer is sharded, by the file's own word."""
        if self.legacy:
            return "legacy" if (self.folder / "distrib_optim.pt").exists() else "none"
        return self.content.get("distrib_optim_sharding_type", "none")

    @property
    def fused_adam(self) -> bool:
        """Whether the file holds FusedAdam's layout: no step count per parameter."""
        optimizer = self.state.get("optimizer") or {}
        if isinstance(optimizer, dict):
            alone = optimizer.keys() & {"optimizer", "param_groups"}
            # a dp_reshardable one keeps nothing here but the name of its form
            members = [one for one in optimizer.values() if isinstance(one, dict)]
            optimizer = [optimizer] if alone else members
        # FP32Optimizer's state is that of Adam itself
        inner = (one if "param_groups" in one else one.get("optimizer", {}) for one in optimizer)
        states = [one.get("state") or {} for one in inner]
        per_param = any("common_step" in state for state in states) or any(
            "step" in slots
            for state in states
            for slots in state.values()
            if isinstance(slots, dict)
        )
        return self.distributed != "none" or not per_param


def iteration_folder(path: Path) -> Path:
    """The folder that the tracker of a run folder names; an iteration folder is itself."""
    tracker = path / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return path
    text = tracker.read_text().strip()
    return path / (text if text == "release" else f"iter_{int(text):07d}")


def open_checkpoint(path: Path, rank_folder: str | None = None) -> Opened:
    """Headers of a checkpoint; `rank_folder`: which mp_rank_… to take, any one when None."""
    folder = iteration_folder(path)
    ranks = sorted(folder.glob("mp_rank_*"))
    if ranks:
        chosen = folder / (rank_folder or ranks[0].name)
        # the fixtures' and our own files: megatron.training loads these with weights_only=False
        state = torch.load(chosen / LEGACY_FILE, map_location="cpu", weights_only=False)
        return Opened(chosen, True, state, state["args"])
    state = dist_checkpointing.load_common_state_dict(str(folder))
    return Opened(folder, False, state, state["args"])


def home(path: Path) -> dict[str, Any]:
    """The topology a checkpoint was written at, as fields of a MegatronCase."""
    args = open_checkpoint(path).args
    return {
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "vpp": args.virtual_pipeline_model_parallel_size or 1,
        "ep": args.expert_model_parallel_size,
        "etp": args.expert_tensor_parallel_size,
        "dp": args.data_parallel_size,
        "first_stage": args.decoder_first_pipeline_num_layers,
        "last_stage": args.decoder_last_pipeline_num_layers,
    }


def load(job: Job, opened: Opened, case: MegatronCase) -> str:
    """Fill the job from the checkpoint, nothing missing, nothing left over. Collective.

    Gives what became of the RNG states: "restored", "of another topology" or "absent".
    """
    return load_legacy(job, case) if opened.legacy else load_sharded(job, opened, case)


def load_sharded(job: Job, opened: Opened, case: MegatronCase) -> str:
    """From torch_dist."""
    metadata = request_metadata(job.distributed, opened.content)
    request = model_state(job, metadata)
    if not case.weights_only:
        request["optimizer"] = job.optimizer.sharded_state_dict(
            request, is_loading=True, metadata=metadata
        )
    rng, asked = rng_request(opened.folder, case)
    request |= asked
    # "unexpected" is what we ask and the file lacks, "missing" what the file has and we do not ask
    state, unasked, absent = dist_checkpointing.load(
        request, str(opened.folder), strict="return_all"
    )
    ignored = ("rng_state", "rerun_state") + (
        ("optimizer", "chained_") if case.weights_only else ()
    )
    left = [key for key in sorted(map(str, unasked)) if not key.startswith(ignored)]
    if absent or left:
        raise UnloadableError(
            f"absent from the checkpoint: {sorted(map(str, absent))[:8]}; "
            f"in it, but not in the model: {left[:8]}"
        )
    fill(job, state, case)
    if asked:
        set_rng(state["rng_state"])
    return rng


def load_legacy(job: Job, case: MegatronCase) -> str:
    """From this rank's mp_rank_… file, and distrib_optim.pt beside it."""
    opened = open_checkpoint(case.checkpoint, legacy_name(case))
    fill(job, opened.state, case)
    if opened.distributed == "legacy" and not case.weights_only:
        job.optimizer.load_parameter_state(str(opened.folder / "distrib_optim.pt"))
    if "rng_state" not in opened.state:
        return "absent"
    args = opened.args
    if (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) != (case.tp, case.pp):
        return "of another topology"  # megatron.training then leaves them alone, too
    set_rng(opened.state["rng_state"])
    return "restored"


def legacy_name(case: MegatronCase) -> str:
    """get_checkpoint_name of megatron/training/checkpointing.py @ core_v0.16.1, for this rank."""
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if case.pp > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if case.ep > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return name


def fill(job: Job, state: Mapping[str, Any], case: MegatronCase) -> None:
    """Weights, optimizer and schedule from a loaded state."""
    for number, chunk in enumerate(job.chunks):
        key = "model" if len(job.chunks) == 1 else f"model{number}"
        bare(chunk).load_state_dict(state[key], strict=True)
    if case.weights_only:
        job.optimizer.reload_model_params()
        return
    job.optimizer.load_state_dict(state["optimizer"])
    job.schedule.load_state_dict(state["opt_param_scheduler"])


def rng_request(folder: Path, case: MegatronCase) -> tuple[str, dict[str, Any]]:
    """What to ask for of the RNG states: those of exactly this topology, if the file has them.

    Shape (pp, tp), with experts (pp, tp, dp): megatron/training/checkpointing.py @ core_v0.16.1.
    """
    shapes = {
        item.global_shape
        for item in load_sharded_metadata(str(folder)).values()
        if isinstance(item, ShardedObject) and item.key == "rng_state"
    }
    dp_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    offset = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    plain, expert = (case.pp, case.tp), (case.pp, case.tp, case.data_parallel)
    if plain in shapes:
        wanted = ShardedObject("rng_state", [], plain, offset, replica_id=dp_rank)
    elif expert in shapes:
        wanted = ShardedObject("rng_state", [], expert, (*offset, dp_rank), replica_id=0)
    else:
        return ("of another topology" if shapes else "absent"), {}
    return "restored", {"rng_state": wanted}


def set_rng(states: list[dict[str, Any]]) -> None:
    """Hand the states to Python, numpy and torch, each of which checks its own."""
    state = states[0]
    random.setstate(state["random_rng_state"])
    np.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    if "model-parallel-rng" not in state["rng_tracker_states"]:
        raise UnloadableError(f"RNG tracker states: only {sorted(state['rng_tracker_states'])}")


def true_state(path: Path) -> tuple[Tensors, dict[str, Any]]:
    """({slot key: whole tensor}, truth.json or {}) of a fixture's truth, or of a checkpoint.

    Bucket-space optimizer tensors have no names and are left out. On every rank: collective.
    """
    if (path / "truth.safetensors").exists():
        from safetensors.torch import load_file

        facts = json.loads((path / "truth.json").read_text())
        tensors = load_file(path / "truth.safetensors")
        return tensors, facts | {"step": int(tensors.pop("step"))}
    plain = dist_checkpointing.load_plain_tensors(str(iteration_folder(path)))
    tensors = {
        slot_key(key): value
        for key, value in plain.items()
        if isinstance(value, torch.Tensor) and ".distributed.dp_group_idx" not in key
    }
    return tensors, {}
