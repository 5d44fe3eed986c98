"""Which parameter an optimizer's number means, where the file keeps numbers instead of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.errors import FormatError

Shape = tuple[int, ...]
#: How scripts split parameters that are not to be decayed from the others, most usual first.
#: Source: transformers 5.24 trainer_pt_utils.get_parameter_names; nanoGPT's `dim() < 2`.
_RULES = ("biases and norms", "one-dimensional")


def names_by_number(
    model: Sequence[tuple[str, Shape]],
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, Shape],
    where: str,
) -> tuple[dict[int, str], str | None]:
    """The name that each number of the optimizer stands for, and what was assumed, if anything.

    torch numbers parameters group by group, each group in the order of the model's parameters
    (torch 2.13 optim/optimizer.py, state_dict). `shapes` are those of the state, by number.
    Raises FormatError if no order of the model's parameters fits the shapes, or several do.
    """
    wanted = [[shapes.get(i) for i in group] for group in groups]
    found, unique = _interleave(model, wanted)
    if found is None:
        raise FormatError(
            f"{where}: its {sum(map(len, groups))} numbered parameters in {len(groups)} groups fit "
            f"no order of the model's {len(model)} parameters: the optimizer is another model's, "
            "or flat (FSDP1 without use_orig_params). Save it with names "
            "(torch.distributed.checkpoint.state_dict.get_state_dict)."
        )
    note = None
    if not unique:
        found, note = _by_rule(model, wanted, where)
    out: dict[int, str] = {}
    position = [0] * len(groups)
    for (name, _), chosen in zip(model, found, strict=True):
        if chosen is not None:
            out[groups[chosen][position[chosen]]] = name
            position[chosen] += 1
    return out, note


Chosen = Sequence[int | None]


def _interleave(
    model: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Shape | None]]
) -> tuple[Chosen | None, bool]:
    """The group of each parameter (None: in none), and whether no other choice fits.

    Every group is an ordered part of the model. Parameters are left out only where the model has
    more than the groups.
    """
    spare = len(model) - sum(map(len, groups))
    start = (0,) * len(groups)
    levels: list[dict[tuple[int, ...], list[tuple[tuple[int, ...], int | None]]]] = []
    counts = {start: 1}
    for k, (_, shape) in enumerate(model):
        back: dict[tuple[int, ...], list[tuple[tuple[int, ...], int | None]]] = {}
        grown: dict[tuple[int, ...], int] = {}
        for at, n in counts.items():
            steps: list[tuple[tuple[int, ...], int | None]] = []
            for g, group in enumerate(groups):
                if at[g] < len(group) and group[at[g]] in (None, shape):
                    steps.append(((*at[:g], at[g] + 1, *at[g + 1 :]), g))
            if k - sum(at) < spare:
                steps.append((at, None))
            for to, picked in steps:
                back.setdefault(to, []).append((at, picked))
                grown[to] = min(2, grown.get(to, 0) + n)
        levels.append(back)
        counts = grown
    end = tuple(map(len, groups))
    if end not in counts:
        return None, False
    chosen: list[int | None] = []
    at = end
    for back in reversed(levels):
        at, group_ = back[at][0]
        chosen.append(group_)
    return chosen[::-1], counts[end] == 1


def _by_rule(
    model: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Shape | None]], where: str
) -> tuple[Chosen, str]:
    """The choice that a usual rule makes, where shapes leave several."""
    fitting: list[tuple[str, tuple[int, ...]]] = []
    for rule in _RULES if len(groups) == 2 else ():
        for plain in (0, 1):
            chosen = tuple(plain ^ _undecayed(rule, name, shape) for name, shape in model)
            parts: list[list[Shape]] = [[], []]
            for (_, shape), g in zip(model, chosen, strict=True):
                parts[g].append(shape)
            if all(
                len(part) == len(group)
                and all(w in (None, s) for s, w in zip(part, group, strict=True))
                for part, group in zip(parts, groups, strict=True)
            ):
                fitting.append((rule, chosen))
    if not fitting or len({chosen for _, chosen in fitting}) > 1:
        raise FormatError(
            f"{where}: the optimizer numbers its parameters, and several orders fit their shapes. "
            "Save it with names (torch.distributed.checkpoint.state_dict.get_state_dict)."
        )
    return fitting[0][1], (
        f"{where}: the optimizer numbers its parameters; several orders fit their shapes, and the "
        f"usual one was taken ({fitting[0][0]} are a group of their own)"
    )


def _undecayed(rule: str, name: str, shape: Shape) -> int:
    if rule == "one-dimensional":
        return int(len(shape) < 2)
    return int(name.endswith("bias") or "norm" in name.lower())
