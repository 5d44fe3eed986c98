"""Topologies and targets: parse `tp2pp4dp2`, rank order, which stage holds which layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from reshard.errors import LayoutError, UsageError

#: Degrees in the order they are printed.
DEGREES = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")
_DEGREES = re.compile(r"(?:(?:zero|tp|pp|vpp|ep|etp|cp|dp)\d+)+")
_RUN = re.compile(r"(?:(zero|tp|pp|vpp|ep|etp|cp|dp)(\d+))")


#: The largest degree; more ranks than any job has, each of which costs memory.
_MOST = 1_000_000


@dataclass(frozen=True, slots=True)
class Topology:
    """How many ranks cut the model along each parallel axis.

    `etp` None: experts are cut as everything else (etp = tp). `dp` None: not said.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    dp: int | None = None
    zero: int | None = None

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert's matrices."""
        return self.tp if self.etp is None else self.etp

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}"]
        for name in ("vpp", "ep"):
            if getattr(self, name) != 1:
                parts.append(f"{name}{getattr(self, name)}")
        if self.etp is not None and self.etp != self.tp:
            parts.append(f"etp{self.etp}")
        if self.cp != 1:
            parts.append(f"cp{self.cp}")
        if self.dp is not None:
            parts.append(f"dp{self.dp}")
        if self.zero is not None:
            parts.insert(0, f"zero{self.zero}")
        return "".join(parts)


def parse_degrees(text: str) -> dict[str, int]:
    """`tp2pp4` as {"tp": 2, "pp": 4}. Raises UsageError for anything else."""
    found: dict[str, int] = {}
    at = 0
    while at < len(text):
        m = _RUN.match(text, at)
        if m is None:
            raise UsageError(
                f"{text!r} is not a topology. Write degrees as tp2pp4 (of {', '.join(DEGREES)}, "
                "or zero1..3 for DeepSpeed)."
            )
        name, n = m.group(1), int(m.group(2))
        if name in found:
            raise UsageError(f"{text!r} names {name} twice")
        if n < 1 and name != "zero":
            raise UsageError(f"{text!r}: {name} must be at least 1")
        if n > _MOST:
            raise UsageError(f"{text!r}: {name} may be {_MOST} at most")
        found[name] = n
        at = m.end()
    return found


def topology(degrees: Mapping[str, int], base: Topology | None = None) -> Topology:
    """The topology with these degrees; the others from `base`, else 1."""
    return replace(base or Topology(), **degrees)


@dataclass(frozen=True, slots=True)
class Target:
    """`FORMAT[.VARIANT][:item,…]` taken apart: what a user asks for."""

    format: str | None
    variant: str | None
    degrees: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    text: str = ""

    def take(self, *known: str) -> Mapping[str, str]:
        """The options, if all of them are known. Raises UsageError naming the first that is not."""
        for key in self.options:
            if key not in known:
                listed = ", ".join(known) or "none"
                raise UsageError(
                    f"{self.text!r}: option {key!r} is not known here; known: {listed}"
                )
        return self.options


def parse_target(text: str) -> Target:
    """Take a TARGET apart. Items alone (`tp2pp4`) leave the format open.

    A comma belongs to the value before it where neither key=value nor a run of degrees follows
    (`layout=Et*3|(tt|)*29,m|L`). Raises UsageError for what is neither.
    """
    head, colon, tail = text.partition(":")
    if not colon and (_RUN.match(head) is not None or "=" in head):
        head, tail = "", text
    name, _, variant = head.partition(".")
    degrees: dict[str, int] = {}
    options: dict[str, str] = {}
    last = ""
    for item in filter(None, tail.split(",")):
        key, equals, value = item.partition("=")
        if equals:
            if key in options:
                raise UsageError(f"{text!r} names {key} twice")
            options[key], last = value, key
        elif last and _DEGREES.fullmatch(item) is None:
            options[last] += f",{item}"
        else:
            for degree, n in parse_degrees(item).items():
                if degree in degrees:
                    raise UsageError(f"{text!r} names {degree} twice")
                degrees[degree] = n
    return Target(name or None, variant or None, degrees, options, text)


def divide(n: int, by: int, tensor: str, axis: str, degree: str) -> int:
    """n / by, or a LayoutError that names tensor, axis and the degrees that fit."""
    if n % by:
        fits = [d for d in range(1, min(n, 256) + 1) if n % d == 0]
        raise LayoutError(
            f"{tensor}: axis {axis!r} has {n} elements, not divisible by {degree}={by}. "
            f"Use {degree} in {{{', '.join(map(str, fits[:16]))}}}."
        )
    return n // by


#: stages[pp_rank][chunk] = the global layers that this pipeline stage's model chunk holds, in order
Stages = Sequence[Sequence[Sequence[int]]]


def even_stages(layers: int, pp: int, vpp: int = 1) -> Stages:
    """Layers cut evenly: chunk v of stage p holds layers v*(L/vpp) + p*(L/pp/vpp) onward."""
    if layers % (pp * vpp):
        fits = [d for d in range(1, layers + 1) if layers % (d * vpp) == 0]
        raise LayoutError(
            f"{layers} layers do not divide into pp={pp}"
            + (f" x vpp={vpp}" if vpp > 1 else "")
            + f" stages. Use pp in {{{', '.join(map(str, fits))}}}, or give split=."
        )
    each = layers // (pp * vpp)
    return [
        [list(range(v * pp * each + p * each, v * pp * each + (p + 1) * each)) for v in range(vpp)]
        for p in range(pp)
    ]


def split_stages(counts: Sequence[int], layers: int, pp: int, vpp: int = 1) -> Stages:
    """Layers cut by given counts, one per model chunk: all stages of chunk 0 first.

    Raises LayoutError unless there are pp * vpp counts that add up to `layers`.
    """
    if len(counts) != pp * vpp:
        raise LayoutError(
            f"split={'-'.join(map(str, counts))} names {len(counts)} stages; pp={pp}"
            + (f" x vpp={vpp}" if vpp > 1 else "")
            + f" needs {pp * vpp}"
        )
    if sum(counts) != layers:
        raise LayoutError(
            f"split={'-'.join(map(str, counts))} places {sum(counts)} layers, not {layers}"
        )
    stages: list[list[list[int]]] = [[] for _ in range(pp)]
    first = 0
    for i, n in enumerate(counts):
        stages[i % pp].append(list(range(first, first + n)))
        first += n
    return stages


def check_stages(stages: Stages, layers: int) -> None:
    """Raises LayoutError unless every layer is present exactly once."""
    seen: dict[int, tuple[int, int]] = {}
    for p, chunks in enumerate(stages):
        for v, chunk in enumerate(chunks):
            for layer in chunk:
                if layer in seen:
                    raise LayoutError(
                        f"layer {layer} is on pipeline stage {seen[layer]} and on {(p, v)}"
                    )
                if not 0 <= layer < layers:
                    raise LayoutError(f"stage {(p, v)} holds layer {layer}; the model has {layers}")
                seen[layer] = (p, v)
    missing = [n for n in range(layers) if n not in seen]
    if missing:
        raise LayoutError(f"layers {missing[:8]} of {layers} are on no pipeline stage")
