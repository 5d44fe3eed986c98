"""Options of param groups: which say how a weight is updated, which are one framework's own."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from reshard.errors import LossError
from reshard.values import Json

#: What an optimizer without an option does: torch's Adam, AdamW and SGD, FusedAdam, Megatron.
#: Source: torch 2.13 optim/adam.py; apex and deepspeed 0.19.8 FusedAdam; core_v0.16.1 optimizer.
_USUAL: Mapping[str, tuple[Json, ...]] = {
    "amsgrad": (False,),
    "maximize": (False,),
    "foreach": (None, False, True),  # how it is computed
    "fused": (None, False, True),
    "capturable": (False,),
    "differentiable": (False,),
    # AdamW sets it on every load; whose weight decay it is, the class says
    "decoupled_weight_decay": (False, True),
    "bias_correction": (True, 1),
    "lr_mult": (1.0,),
    "is_expert_parallel": (False, True),  # how the run is cut
    "is_decoupled_lr": (False,),
    "default_config": (True, False),
}
#: What a framework's scheduler makes `lr` and `weight_decay` of, which both sides have.
_OF_SCHEDULES = frozenset(
    {
        "initial_lr", "max_lr", "min_lr", "lr_mult", "wd_mult", "start_wd", "end_wd",
        "is_decoupled_lr",
    }
)  # fmt: skip
#: Megatron's own. Source: optimizer.py param_group_identifier_keys @ core_v0.16.1; older ones had
#: `pre_` in front.
_MEGATRONS = (_OF_SCHEDULES - {"initial_lr"}) | {"is_expert_parallel", "default_config"}


_NUMBERS = frozenset(
    {
        "lr", "initial_lr", "weight_decay", "eps", "momentum", "dampening", "base_lr",
        "max_lr", "min_lr", "lr_mult", "wd_mult", "start_wd", "end_wd",
    }
)  # fmt: skip
_TRUTHS = frozenset(n for n, usual in _USUAL.items() if any(isinstance(v, bool) for v in usual))
_NUMBER, _PAIR, _TRUTH = "a finite number", "a list of two numbers from 0 to 1", "true or false"


def misfit(name: str, value: object, held: Json = None) -> str | None:
    """What an option takes, in words, if this value is none such; `held` is what it is now."""
    known = bare(name)
    if known == "betas":
        fits = isinstance(value, list) and len(value) == 2 and all(map(_is_share, value))
        return None if fits else _PAIR
    if known in _TRUTHS or isinstance(held, bool):
        return None if isinstance(value, bool) else _TRUTH
    if known in _NUMBERS or isinstance(held, int | float):
        return None if _is_number(value) else _NUMBER
    for kind, words in ((str, "a text"), (list, "a list"), (dict, "a table")):
        if isinstance(held, kind):
            return None if isinstance(value, kind) else words
    return (
        None if _is_json(value) else "a number, a text, true or false, or a list or table of them"
    )


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return isfinite(value)
    return type(value) is int and abs(value) < 1 << 63


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and _is_number(value) and 0 <= value < 1


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_json, value.values()))
    if isinstance(value, list):
        return all(map(_is_json, value))
    return isinstance(value, bool | str) or _is_number(value)


def bare(name: str) -> str:
    """An option without the `pre_` that Megatron's checkpoints once had in front."""
    return name.removeprefix("pre_")


def means_nothing(name: str, value: Json, *, foreign: bool) -> bool:
    """Whether a group that lacks this option would be updated alike.

    `foreign`: the group that lacks it is another framework's, whose schedule has other inputs.
    """
    if name == "initial_lr" or (foreign and bare(name) in _OF_SCHEDULES):
        return True  # every scheduler of torch makes an `initial_lr` where there is none
    return value in _USUAL.get(bare(name), ())


def in_torch(options: Mapping[str, Json], where: str) -> tuple[dict[str, Json], tuple[str, ...]]:
    """The options as torch's optimizers have them, and the names of those that they lack.

    `lr` and `weight_decay` of a group are what the multipliers of Megatron's schedule made of them.
    Raises LossError for one that torch's optimizers cannot do without harm.
    """
    if options.get("bias_correction", True) in (False, 0):
        raise LossError(
            f"{where}: bias_correction is off, and torch's Adam always corrects. Convert with "
            "--weights-only."
        )
    own = [n for n in options if bare(n) in _MEGATRONS or n in ("bias_correction", "step")]
    kept = {n: v for n, v in options.items() if n not in own}
    if "initial_lr" not in kept and "lr" in kept and "max_lr" in own:
        kept["initial_lr"] = options["max_lr"]
    return kept, tuple(n for n in own if n not in ("bias_correction", "step"))
