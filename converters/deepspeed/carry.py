"""What of a source that is not a tensor a target of DeepSpeed carries, and what becomes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from reshard.checkpoint import TIES, Checkpoint, Json, consumed_samples
from reshard.format import Fate, Loss
from reshard.options import in_torch
from reshard.scaler import loss_scale

from .clients import client_for, is_random
from .goal import Goal
from .native import Native
from .recut import affine_map, whole_axis
from .sheet import Sheet, dynamic_scaler, static_scaler
from .values import plain, strange_names


def settings_entries(sheet: Sheet, aim: Goal) -> dict[object, object]:
    """loss_scaler, dynamic_loss_scale, overflow and clip_grad of an optimizer file.

    ZeRO 3 needs all but the last. ZeRO 0's wrappers keep a scaler's counters instead of one.
    """
    found = dict(sheet.entries(aim.settings))
    fp16 = any(aim.kind(n) == "float16" for g in aim.groups for n in g.members)
    dynamic = found.get("dynamic_loss_scale", fp16)
    scale = found.get("cur_scale", 1.0)
    out: dict[object, object] = {
        "loss_scaler": found.get("loss_scaler"),
        "dynamic_loss_scale": bool(dynamic),
        "overflow": bool(found.get("overflow", False)),
    }
    if out["loss_scaler"] is None:
        counters = {str(k): v for k, v in found.items()}
        fixed = static_scaler(float(scale) if isinstance(scale, (int, float)) else 1.0)
        out["loss_scaler"] = dynamic_scaler(counters) if dynamic else fixed
    clip = found.get("clip_grad", aim.config.get("gradient_clipping"))
    if aim.stage != 3 and isinstance(clip, (int, float)):
        out["clip_grad"] = clip
    return out


def config_of(aim: Goal) -> Mapping[object, object]:
    """ds_config as recorded, with the target's stage."""
    if strange_names(dict(aim.config)):
        return {"zero_optimization": {"stage": aim.stage}}
    zero = aim.config.get("zero_optimization")
    changed: dict[object, object] = dict(zero) if isinstance(zero, Mapping) else {}
    changed["stage"] = aim.stage
    if aim.stage == 3:
        changed["sub_group_size"] = aim.sub_group_size
        for key in ("round_robin_gradients", "parameter_alignment", "elastic_checkpoint"):
            changed.pop(key, None)
    changed.pop("elastic_checkpoint", None)
    return {**aim.config, "zero_optimization": changed}


def carried_entries(
    sheet: Sheet, source: Checkpoint, aim: Goal, mp: int, dp: int
) -> dict[object, object]:
    """Everything of a model-states file beside the module and its shapes."""
    own = dict(sheet.entries(aim.top))
    out: dict[object, object] = {
        "lr_scheduler": own.pop("lr_scheduler", _schedule(source)),
        "data_sampler": own.pop("data_sampler", None),
        "random_ltd": own.pop("random_ltd", None),
        "skipped_steps": own.pop("skipped_steps", 0),
        "global_steps": own.pop("global_steps", aim.iteration),
        "global_samples": own.pop("global_samples", _samples(source, aim)),
        "dp_world_size": aim.dp,
        "mp_world_size": aim.mp,
        "checkpoint_parallel_dimensions": {
            "pp_degree": aim.topology.pp,
            "tp_degree": aim.topology.tp,
        },
        "ds_config": dict(config_of(aim)),
        "ds_version": own.pop("ds_version", None) or "0.19.8",
        **own,
    }
    if aim.affine:
        out["universal_checkpoint_info"] = tp_info(aim)
    for key, value in sheet.entries(client_for(source, aim, mp, dp)).items():
        if key not in out:
            out[key] = value
    return out


def _schedule(source: Checkpoint) -> object:
    """The state of DeepSpeed's own schedulers at a step, for a source of another framework."""
    foreign = not isinstance(source.native, Native)
    return {"last_batch_iteration": source.iteration - 1} if foreign and source.iteration else None


#: The last part of another framework's fields that mean the same here, and where they go.
_MEANT = {
    "iteration": "global_steps",
    "step": "global_steps",
    "last_epoch": "lr_scheduler.last_batch_iteration",
    "num_steps": "lr_scheduler.last_batch_iteration",
    "consumed_train_samples": "global_samples",
    TIES: "shared_params",
    "global_samples": "global_samples",
}
_MEANT_IN = ("", "train_state", "lr_scheduler", "opt_param_scheduler", "args")


def _place_of(path: str) -> str | None:
    """Where a field of another framework's checkpoint goes."""
    lead, _, last = path.rpartition(".")
    return _MEANT.get(last) if lead in _MEANT_IN else None


def _scaled(source: Checkpoint, aim: Goal) -> frozenset[str]:
    """Fields of another framework's loss scale, where the target trains in fp16."""
    fp16 = any(aim.kind(n) == "float16" for g in aim.groups for n in g.members)
    scale = loss_scale(source.extras) if fp16 else None
    return frozenset(scale.fields if scale is not None else ())


def _samples(source: Checkpoint, aim: Goal) -> int:
    found = consumed_samples(source)
    if found is not None:
        return found
    batch = aim.config.get("train_batch_size")
    return aim.iteration * (batch if isinstance(batch, int) else 0)


def tp_info(aim: Goal) -> dict[str, object]:
    """universal_checkpoint_info of AutoTP: patterns and the affine map.

    Source: module_inject/layers.py, universal_checkpoint_info of fixtures tp2_* @ 0.19.8.
    """

    def pattern(name: str) -> str:
        return f"^{re.escape(name)}$"

    axes = {n: whole_axis(n, c) for n, c in aim.affine.items()}
    vocab = [n for n in axes if n in aim.vocabulary and axes[n] == 0]
    info: dict[str, object] = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_row_parallelism_patterns": [pattern(n) for n in axes if axes[n] == 1],
        "tp_replicated_parameter_patterns": [pattern(n) for n in axes if axes[n] is None],
        "vocabulary_parameter_patterns": [pattern(n) for n in vocab],
        "parameter_with_sub_params": [],
        "autotp_unsupported_parameter_patterns": {},
    }
    if vocab:
        info["original_vocab_size"] = aim.affine[vocab[0]].shape[0]
    info["affine_map"] = affine_map(aim.affine)
    return info


# --- what becomes of each field ------------------------------------------------------------------


def fates_of(source: Checkpoint, aim: Goal) -> tuple[Fate, ...]:
    """The fate of every field of the source that is not a tensor."""
    own = source.native if isinstance(source.native, Native) else None
    out: list[Fate] = []
    if own is None:
        scaled = _scaled(source, aim)
        for path in source.extras:
            to = "loss_scaler" if path in scaled else _place_of(path)
            why = to or "another framework's field: DeepSpeed's files have no place"
            out.append(Fate(path, "drop" if to is None else "remap", why))
    else:
        out += _own_fates(own, aim)
    changed = {
        "dp_world_size": aim.dp, "mp_world_size": aim.mp, "param_shapes": "in the target's order",
        "group_paddings": "computed anew", "partition_count": aim.dp,
    }  # fmt: skip
    out += [Fate(k, "derive", str(v)) for k, v in changed.items()]
    if aim.groups:
        out.append(Fate("param_groups", "keep" if not aim.elastic else "drop", "options of each"))
        out.append(Fate("optimizer.step", "keep", "one counter a group"))
    return tuple(out)


def _own_fates(own: Native, aim: Goal) -> list[Fate]:
    out = [Fate("ds_config", "remap", "with the target's stage"), Fate("ties", "keep")]
    top, client = own.top.obj, own.client.obj
    for key, value in top.items() if isinstance(top, dict) else ():
        if value is not None:
            out.append(Fate(str(key), "keep"))
    for key in client if isinstance(client, dict) else ():
        kind, detail = "keep", ""
        if is_random(str(key)) and aim.stage == 3 and (own.stage != 3 or own.dp < aim.dp):
            kind, detail = "derive", "kept for ranks that the source has, made for the others"
        out.append(Fate(f"client.{key}", kind, detail))
    out += [Fate(f"client.{key}", "drop", "names code that is not written") for key in own.refused]
    out += [Fate(f"optimizer.{key}", "drop", "not DeepSpeed's own") for key in own.unread]
    settings = own.settings.obj
    for key in settings if isinstance(settings, dict) else ():
        out.append(Fate(f"optimizer.{key}", "keep"))
    return out


def lost_entries(own: Native) -> list[Loss]:
    """What of the source's files is not carried, into whatever target."""
    return [
        *(
            Loss("extra-dropped", f"client.{key}", "names types that are not written again")
            for key in own.refused
        ),
        *(Loss("extra-dropped", f"optimizer.{k}", "not DeepSpeed's own") for k in own.unread),
    ]


def losses_of(source: Checkpoint, aim: Goal) -> tuple[Loss, ...]:
    """What the target will not have, beside tensors."""
    own = source.native if isinstance(source.native, Native) else None
    if own is None:
        names = dict.fromkeys(n for g in source.groups or () for n in in_torch(g.options, "")[1])
        return (
            *(
                Loss("extra-dropped", path, "another framework's field")
                for path in source.extras
                if _place_of(path) is None and path not in _scaled(source, aim)
            ),
            *(
                Loss("option-dropped", f"param_groups.{name}", f"of {source.format} alone")
                for name in (names if aim.groups else ())
            ),
        )
    out = lost_entries(own)
    client = own.client.obj
    random = [str(k) for k in client if is_random(str(k))] if isinstance(client, dict) else []
    if own.stage == 3 and own.dp > (aim.dp if aim.stage == 3 else 1):
        detail = "the states of data-parallel ranks beyond the target's files"
        out += [Loss("rng-dropped", f"client.{key}", detail) for key in random]
    if strange_names(dict(aim.config)):
        out.append(Loss("extra-dropped", "ds_config", "names types that are not written again"))
    return tuple(out)


def recipe_of(source: Checkpoint, aim: Goal) -> dict[str, Json]:
    """What the job that resumes needs."""
    world = aim.dp * aim.mp
    batch = aim.config.get("train_batch_size")
    own = source.native if isinstance(source.native, Native) else None
    exact = own is not None and (own.dp, own.stage) == (aim.dp, aim.stage)
    out: dict[str, Json] = {
        "world_size": world,
        "topology": str(aim.topology),
        "config": {
            "zero_optimization": plain(config_of(aim).get("zero_optimization")),
            "train_batch_size": plain(batch),
        },
        "next_step_options": [
            {k: plain((g.options or {}).get(k)) for k in ("lr", "betas", "eps", "weight_decay")}
            for g in aim.groups
        ],
        "lr_scheduler": "in the checkpoint" if _scheduler(source, aim) else "not in the checkpoint",
        "verdict": "exact" if exact else "same sample sequence",
    }
    if own is None and aim.groups:
        kinds = {aim.kind(n) for g in aim.groups for n in g.members}
        out["engine"] = "fp32" if kinds == {"float32"} else "bf16 or fp16, over fp32 masters"
        out["parameters"] = (
            "the job's optimizer must list the same groups, each in the order of the model's "
            "modules; a job that lists them otherwise is named with --like"
        )
    if isinstance(batch, int) and batch % aim.dp == 0:
        out["micro_batch_times_accumulation"] = batch // aim.dp
    if not aim.groups:
        out["verdict"] = "weights only"
    narrow = any(aim.kind(n) == "float16" for g in aim.groups for n in g.members)
    if own is not None and own.form in ("fused", "unfused") and narrow:
        out["verdict"] = "changes trajectory"
        out["note"] = (
            "DeepSpeed 0.19.8 without ZeRO divides fp16 gradients by a loss scale that it did not "
            "multiply the loss with: its moments are of smaller gradients than those under ZeRO"
        )
    if aim.elastic:
        out["verdict"] = "changes trajectory"
        out["note"] = (
            "the source recorded no optimizer options: the job's own are used, and the first step "
            "takes the learning rate its scheduler starts with"
        )
    return out


def _scheduler(source: Checkpoint, aim: Goal) -> bool:
    own = source.native
    if isinstance(own, Native) and own.wrapper is not None and own.wrapper.scheduler is not None:
        return True
    if _schedule(source) is not None:
        return True
    return isinstance(aim.top.obj, dict) and aim.top.obj.get("lr_scheduler") is not None
