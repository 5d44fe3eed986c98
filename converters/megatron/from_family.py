"""The Megatron run that a translated model would be of: args, param groups, schedule."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

from reshard.checkpoint import Checkpoint, Json, consumed_samples
from reshard.containers.carried import Carried
from reshard.dtypes import DType, named
from reshard.errors import FormatError, LossError, UsageError
from reshard.format import Fate, Loss, WriteOptions
from reshard.scaler import LossScale, loss_scale
from reshard.tensor import EXP_AVG, EXP_AVG_SQ, MASTER, PARAM, STEP, TensorId
from reshard.topology import Target, Topology

from . import names, optim_groups
from .carry import tensor_of
from .run import Optimizer, Options, Run, common_step
from .sizes import sizes

_ARGS = "args."
#: What Megatron's Adam keeps of a parameter.
_SLOTS = frozenset({PARAM, MASTER, EXP_AVG, EXP_AVG_SQ, STEP})
#: Options of Adam that one Megatron job has but once. Source: OptimizerConfig @ core_v0.16.1.
_COMMON = ("lr", "betas", "eps")
#: Options that change the update, and that Megatron's Adam does not have.
_STRANGE = ("amsgrad", "maximize")
#: How many samples a run has consumed: an item of a TARGET, for sources that do not say.
SAMPLES = "samples"


def run_of(source: Checkpoint, target: Target, options: WriteOptions) -> Run:
    """The run that would have saved these tensors, by the args that the translation gives.

    Raises FormatError for a source that no family has translated, LossError for an optimizer that
    no Megatron job would have.
    """
    args = {k.removeprefix(_ARGS): v for k, v in source.extras.items() if k.startswith(_ARGS)}
    if source.layout.naming != "megatron" or not args:
        raise FormatError(
            f"{source.format} to megatron needs a model family to name its tensors: give the "
            "model's config with --config DIR, or a family with --schema NAME."
        )
    plain: dict[str, object] = {k: v for k, v in args.items() if v is not None}
    common: dict[str, object] = {"checkpoint_version": 3.0, "iteration": 0}
    optimizer = None
    if any(t.slot != PARAM for t in source.layout.tensors):
        precision = precision_of(source, options)
        optimizer = optimizer_of(source)
        scale = loss_scale(source.extras) if precision.name == "float16" else None
        optimizer = replace(optimizer, scaler=_scaler(scale))
        samples = _samples(source, target)
        plain |= _training_args(source, optimizer, samples, precision)
        if scale is not None:
            plain |= {"loss_scale_window": scale.window, "hysteresis": scale.full}
        common |= {
            "iteration": source.iteration or 0,
            "opt_param_scheduler": _schedule(optimizer, samples),
        }
    model = sizes(plain)
    return Run(
        args=plain,
        model=model,
        topology=Topology(),
        pipeline=None,
        common=common,
        optimizer=optimizer,
        spec=model.spec,
    )


# --- the optimizer -------------------------------------------------------------------------------


def optimizer_of(source: Checkpoint) -> Optimizer:
    """The optimizer that a Megatron job would have for these groups: decayed, and not decayed.

    Megatron decays by a rule of its own, so a group of the source must agree with it, tensor by
    tensor. Raises LossError naming the first tensor that does not.
    """
    _check_slots(source)
    options_of = {name: g.options for g in source.groups or () for name in g.members}
    shapes = {t.name: v for t, v in source.layout.tensors.items() if t.slot == EXP_AVG}
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for name, logical in shapes.items():
        if name not in options_of:
            raise LossError(
                f"{name}: the source has moments for it and no param group, so its options are "
                "not known. Convert with --weights-only."
            )
        kinds[optim_groups.decays(name, len(logical.shape))].append(name)
    decay = _decay(kinds, options_of)
    first = next(iter(shapes))
    for name in shapes:
        _check_equal(first, options_of[first], name, options_of[name])
    step = common_step(source.steps.get(name) for name in shapes)
    if step is None:
        raise LossError(f"{source.path}: says no step counter. Convert with --weights-only.")
    groups = tuple(
        Options(_options(options_of[members[0]], decays, decay))
        for decays, members in kinds.items()
        if members
    )
    return Optimizer(groups, step, step_in_groups=True, distributed=True)


def _scaler(scale: LossScale | None) -> Carried | None:
    """DynamicGradScaler's state. Source: grad_scaler.py state_dict @ core_v0.16.1."""
    if scale is None:
        return None
    made = tensor_of(struct.pack("<f", scale.scale), "float32", "scaler/scale")
    return Carried({"scale": made.obj, **scale.for_megatron()}, made.values)


def _check_slots(source: Checkpoint) -> None:
    """Every weight has Adam's two moments, and nothing has more."""
    held = source.layout.tensors
    for tensor in held:
        if tensor.slot not in _SLOTS:
            raise LossError(
                f"{tensor}: Megatron's Adam has no slot {tensor.slot}. Convert with --weights-only."
            )
    for name in dict.fromkeys(t.name for t in held if t.slot in (PARAM, MASTER)):
        for slot in (EXP_AVG, EXP_AVG_SQ):
            if TensorId(name, slot) not in held and not names.is_buffer(name):
                raise LossError(
                    f"{name}: the source has no {slot} for it (frozen, or never stepped), and "
                    "Megatron's loader asks for that of every weight. Convert with --weights-only."
                )


def _decay(
    kinds: Mapping[bool, Sequence[str]], options_of: Mapping[str, Mapping[str, Json]]
) -> float:
    """The weight decay of the tensors that Megatron decays."""
    found: dict[float, str] = {}
    for decays, members in kinds.items():
        for name in members:
            wd = _number(name, options_of[name], "weight_decay")
            if decays:
                found.setdefault(wd, name)
            elif wd:
                raise LossError(
                    f"{name}: weight decay {wd} in the source, and Megatron decays neither "
                    "biases nor 1-D tensors. Convert with --weights-only."
                )
    if len(found) > 1:
        told = ", ".join(f"{n} {wd}" for wd, n in list(found.items())[:3])
        raise LossError(
            f"Megatron has one weight decay for all but biases and 1-D tensors, and the source "
            f"has several: {told}. Convert with --weights-only."
        )
    return next(iter(found), 0.0)


def _check_equal(one: str, its: Mapping[str, Json], other: str, others: Mapping[str, Json]) -> None:
    for option in _COMMON:
        a, b = its.get(option), others.get(option)
        if a is None:
            raise LossError(f"{one}: its param group says no {option}")
        if _plain(a) != _plain(b):
            raise LossError(
                f"{one} and {other}: {option} {_plain(a)} and {_plain(b)} in the source; a "
                "Megatron job has one. Convert with --weights-only."
            )
    for option in _STRANGE:
        if others.get(option):
            raise LossError(f"{other}: {option} is on in the source, and Megatron has none")
    if others.get("is_decoupled_lr") or others.get("lr_mult", 1.0) != 1.0:
        raise LossError(f"{other}: it has a learning rate of its own (--decoupled-lr)")


def _options(its: Mapping[str, Json], decays: bool, decay: float) -> dict[str, object]:
    """A group as FusedAdam and torch's AdamW both take it.

    `max_lr` and `min_lr` are left to the job: where a group has none, the scheduler's count.
    Source: optimizer_param_scheduler.py get_lr, optimizer.py param_group_identifier_keys
    @ core_v0.16.1; fixtures h-llama-tp2pp2, h-llama-tp2pp1dp2-fr.
    """
    betas = its["betas"]
    return {
        "default_config": True,
        "wd_mult": 1.0 if decays else 0.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "lr": its["lr"],
        "bias_correction": True,
        "betas": tuple(betas) if isinstance(betas, list | tuple) else betas,
        "eps": its["eps"],
        "weight_decay": decay if decays else 0.0,
    }


def _number(name: str, options: Mapping[str, Json], option: str) -> float:
    found = options.get(option)
    if not isinstance(found, int | float):
        raise LossError(f"{name}: its param group says no {option}. Convert with --weights-only.")
    return float(found)


def _plain(value: Json) -> Json:
    return list(value) if isinstance(value, tuple) else value


# --- args and schedule ---------------------------------------------------------------------------


def _samples(source: Checkpoint, target: Target) -> int:
    """What the run has consumed. Raises FormatError where nothing says it."""
    asked = target.options.get(SAMPLES)
    if asked is not None:
        if not asked.isdigit():
            raise UsageError(f"{SAMPLES}={asked}: a number of consumed samples is expected")
        return int(asked)
    found = consumed_samples(source)
    if found is None:
        raise FormatError(
            f"{source.path}: nothing says how many samples it has trained on, and Megatron counts "
            f"its schedule and its data in samples. Give {SAMPLES}=N in --to: iterations "
            f"({source.iteration}) x global batch."
        )
    return found


def _training_args(
    source: Checkpoint, optimizer: Optimizer, samples: int, precision: DType
) -> dict[str, object]:
    options = optimizer.groups[0]
    betas = options.get("betas")
    assert isinstance(betas, tuple)
    return {
        "bf16": precision.name == "bfloat16",
        "fp16": precision.name == "float16",
        "optimizer": "adam",
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
        "adam_eps": options.get("eps"),
        "weight_decay": max(float(str(g.get("weight_decay"))) for g in optimizer.groups),
        "iteration": source.iteration or 0,
        "consumed_train_samples": samples,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
    }


def _schedule(optimizer: Optimizer, samples: int) -> dict[str, object]:
    """Megatron's scheduler after `samples`: constant at the rate of the source's next step.

    The shape of the source's schedule is in its job, not in its files; so the job that resumes
    brings its own (--override-opt_param-scheduler) and only `num_steps` counts.
    Source: optimizer_param_scheduler.py state_dict @ core_v0.16.1.
    """
    decay = max(float(str(g.get("weight_decay"))) for g in optimizer.groups)
    return {
        "max_lr": optimizer.groups[0].get("lr"),
        "lr_warmup_steps": 0,
        "num_steps": samples,
        "lr_decay_style": "constant",
        "lr_decay_steps": max(1, samples),
        "min_lr": 0.0,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": max(1, samples),
    }


#: The dtypes that a Megatron run computes in. Source: arguments.py @ core_v0.16.1.
_PRECISIONS = ("bfloat16", "float16", "float32")


def precision_of(source: Checkpoint, options: WriteOptions) -> DType:
    """The dtype that the trained weights are written in, which is what the run computes in.

    Raises LossError where the weights are of several, or of one that no Megatron run has.
    """
    found: dict[str, str] = {}
    for tensor, logical in source.layout.tensors.items():
        trained = TensorId(tensor.name, EXP_AVG) in source.layout.tensors
        if not trained or logical.fixed or tensor.slot not in (PARAM, MASTER):
            continue
        if tensor.slot == MASTER and TensorId(tensor.name) in source.layout.tensors:
            continue
        lone = "bfloat16" if tensor.slot == MASTER else logical.dtype.name
        found.setdefault(named(options.dtype).name if options.dtype else lone, tensor.name)
    told = ", ".join(f"{name} {kind}" for kind, name in found.items())
    if len(found) > 1:
        raise LossError(
            f"trained weights would be written in several dtypes ({told}), and a Megatron run has "
            "one. Say which with --dtype; masters keep every bit of the source."
        )
    kind = next(iter(found), "bfloat16")
    if kind not in _PRECISIONS:
        raise LossError(
            f"{told}: a Megatron run computes in {', '.join(_PRECISIONS)}. Say which with --dtype."
        )
    return named(kind)


def foreign_fates(source: Checkpoint, run: Run) -> tuple[list[Fate], list[Loss]]:
    """What becomes of the fields of another framework's checkpoint."""
    fates: list[Fate] = []
    losses: list[Loss] = []
    trained = any(t.slot != PARAM for t in source.layout.tensors)
    scale = loss_scale(source.extras) if run.optimizer and run.optimizer.scaler else None
    for path in source.extras:
        if path.startswith(_ARGS) or path in ("config", "ties"):
            continue
        if scale is not None and path in scale.fields:
            fates.append(Fate(path, "remap", "grad_scaler; --loss-scale-window, --hysteresis"))
            continue
        last = path.rpartition(".")[2]
        if trained and last in ("consumed_train_samples", "global_samples", "last_epoch"):
            fates.append(Fate(path, "remap", "args.consumed_train_samples, num_steps"))
        elif trained and path in ("train_state.step", "global_steps", "iteration"):
            fates.append(Fate(path, "remap", "iteration"))
        else:
            fates.append(Fate(path, "drop", f"of {source.format}; Megatron has no place for it"))
            losses.append(Loss("extra-dropped", path, "another framework's field"))
    if trained:
        fates.append(
            Fate("opt_param_scheduler", "derive", "num_steps of the source; the job's own shape")
        )
    return fates, losses


def foreign_notes(source: Checkpoint, run: Run) -> tuple[str, ...]:
    """What a person should know who takes another framework's fp32 weights for a bf16 run."""
    trained = run is not source.native and run.optimizer is not None
    if not trained or run.args.get("bf16") or run.args.get("fp16"):
        return ()
    return (
        "the trained weights are fp32, so this is an fp32 run; a job that computes in bf16 needs "
        "--dtype bf16 (masters keep every bit)",
    )


def foreign_recipe(run: Run) -> dict[str, Json]:
    """What a job needs to know of a checkpoint that another framework trained."""
    if run.optimizer is None:
        return {}
    rate = run.optimizer.groups[0].get("lr")
    kind = next((k for k in ("bf16", "fp16") if run.args.get(k)), None)
    return {
        "also": ["--override-opt_param-scheduler", "--no-load-rng"],
        **_scaling(run),
        "precision": f"--{kind}"
        if kind
        else "neither --bf16 nor --fp16; a bf16 job needs --dtype bf16",
        "schedule": (
            f"the job's own at {run.args['consumed_train_samples']} samples; the source's next "
            f"step would have had lr {rate}"
        ),
    }


def _scaling(run: Run) -> dict[str, Json]:
    """The flags of the loss scale, which Megatron keeps in no checkpoint."""
    if run.optimizer is None or run.optimizer.scaler is None:
        return {}
    window, full = run.args.get("loss_scale_window"), run.args.get("hysteresis")
    return {"loss_scale": f"--loss-scale-window {window} --hysteresis {full}"}
