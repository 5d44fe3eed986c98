"""The loss scale of a fp16 run: Megatron's, DeepSpeed's and torch's states of it, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.values import Json

#: Where a checkpoint's extras have one: Megatron's DynamicGradScaler, DeepSpeed's
#: DynamicLossScaler (or ZeRO 0's counters, in the optimizer itself).
MEGATRON, DEEPSPEED = "optimizer.grad_scaler", "optimizer.loss_scaler"
_ZERO0 = "optimizer"
#: Keys of torch.amp.GradScaler.state_dict @ 2.13.
_TORCH = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
#: What the frameworks take where nobody says. Source: arguments.py @ core_v0.16.1; deepspeed 0.19.8
#: runtime/fp16/loss_scaler.py; torch 2.13 amp/grad_scaler.py.
_WINDOW = {"megatron": 1000, "deepspeed": 1000, "torch": 2000}


@dataclass(frozen=True, slots=True)
class LossScale:
    """A dynamic loss scale, with how near it is to growing and to shrinking.

    `clean` counts steps without an overflow as Megatron and torch do: at `window` the scale grows
    and the count is 0. `hysteresis` is how many overflows in a row shrink the scale, `full` how
    many at first. `fields` are the paths of the extras it was read from.
    """

    scale: float
    clean: int
    window: int
    factor: float = 2.0
    hysteresis: int = 1
    full: int = 1
    fields: tuple[str, ...] = ()

    def for_megatron(self) -> dict[str, Json]:
        """`growth_tracker` and `hysteresis_tracker`; the scale is a tensor there."""
        return {"growth_tracker": self.clean, "hysteresis_tracker": self.hysteresis}

    def for_deepspeed(self, step: int) -> dict[str, Json]:
        """DynamicLossScaler's counters at a step.

        It grows before the update at which `cur_iter - last_overflow_iter - 1` is a whole number of
        windows, and not at 0.
        """
        return {
            "dynamic_loss_scale": True,
            "cur_scale": self.scale,
            "cur_iter": step,
            "last_overflow_iter": step - self.clean - 2,
            "scale_factor": self.factor,
            "scale_window": self.window,
            "delayed_shift": self.full,
            "cur_hysteresis": self.hysteresis,
        }

    def for_torch(self) -> dict[str, Json]:
        """torch.amp.GradScaler's state."""
        values = (self.scale, self.factor, 1 / self.factor, self.window, self.clean)
        return dict(zip(_TORCH, values, strict=True))


def loss_scale(extras: Mapping[str, Json]) -> LossScale | None:
    """The dynamic loss scale that a checkpoint's extras hold, in any of three forms; None if none.

    Where several are held (ranks of one file each), the first counts.
    """
    for read in (_of_megatron, _of_deepspeed, _of_torch):
        found = read(extras)
        if found is not None:
            return found
    return None


def _of_megatron(extras: Mapping[str, Json]) -> LossScale | None:
    held = _inside(extras, MEGATRON)
    scale, clean = _number(held, "scale"), _number(held, "growth_tracker")
    if scale is None or clean is None:
        return None
    window = extras.get("args.loss_scale_window")
    full = extras.get("args.hysteresis")
    left = _number(held, "hysteresis_tracker")
    return LossScale(
        scale,
        int(clean),
        _count(window, _WINDOW["megatron"]),
        hysteresis=int(left) if left is not None else 2,
        full=_count(full, 2),
        fields=_paths(extras, MEGATRON),
    )


def _of_deepspeed(extras: Mapping[str, Json]) -> LossScale | None:
    lead = DEEPSPEED if _inside(extras, DEEPSPEED) else _ZERO0
    held = _inside(extras, lead)
    scale, now, last = (_number(held, k) for k in ("cur_scale", "cur_iter", "last_overflow_iter"))
    if scale is None or now is None or last is None:
        return None
    if held.get("dynamic", extras.get("optimizer.dynamic_loss_scale")) is False:
        return None
    window = _count(held.get("scale_window"), _WINDOW["deepspeed"])
    since = int(now - last) - 1
    # it grows at the next update if `since` is a whole number of windows and not 0
    clean = window - 1 - (-since % window) if since > 0 else -1
    full = _count(held.get("delayed_shift"), 1)
    return LossScale(
        scale,
        clean,
        window,
        _number(held, "scale_factor") or 2.0,
        _count(held.get("cur_hysteresis"), full),
        full,
        tuple(
            p
            for p in extras
            if p.startswith(f"{_ZERO0}.") and p.rpartition(".")[2] not in ("clip_grad", "overflow")
        ),
    )


def _of_torch(extras: Mapping[str, Json]) -> LossScale | None:
    for path in extras:
        lead, _, last = path.rpartition(".")
        if last != _TORCH[-1]:
            continue
        held = _inside(extras, lead)
        scale, factor, _, window, clean = (_number(held, k) for k in _TORCH)
        if scale is not None and factor and window is not None and clean is not None:
            return LossScale(scale, int(clean), int(window), factor, fields=_paths(extras, lead))
    return None


def _inside(extras: Mapping[str, Json], lead: str) -> Mapping[str, Json]:
    """The values at a path, given as one mapping or one by one."""
    found = extras.get(lead)
    if isinstance(found, Mapping):
        return found
    return {p[len(lead) + 1 :]: v for p, v in extras.items() if p.startswith(f"{lead}.")}


def _paths(extras: Mapping[str, Json], lead: str) -> tuple[str, ...]:
    return tuple(p for p in extras if p == lead or p.startswith(f"{lead}."))


def _number(held: Mapping[str, Json], name: str) -> float | None:
    found = held.get(name)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


def _count(value: Json, usual: int) -> int:
    whole = isinstance(value, int | float) and not isinstance(value, bool) and value >= 1
    return int(value) if whole and isinstance(value, int | float) else usual
