"""Which optimizer and param group a parameter of Megatron goes into, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

#: What --decoupled-lr is the rate of; position embeddings are not.
#: Source: language_module.py, is_embedding_or_output_parameter @ core_v0.16.1.
EDGES = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})


@dataclass(frozen=True, slots=True)
class Group:
    """One param group: names in pid order."""

    expert: bool  # is_expert_parallel
    wd_mult: float  # 1.0, or 0.0 for biases and 1-D tensors
    names: tuple[str, ...]


def is_expert_parallel(canonical: str, ep: int) -> bool:
    """Whether a parameter belongs to the expert optimizer: experts do, but only if EP > 1.

    Source: layers.py, experts.py (`allreduce` false needs expert_model_parallel_size > 1)
    @ core_v0.16.1; fixture made-moe-pp2ep1-dpr has one optimizer.
    """
    return ep > 1 and ".mlp.experts." in canonical


def decays(name: str, ndim: int) -> bool:
    """Whether weight decay applies: not to biases nor to any 1-D tensor.

    Source: optimizer/__init__.py get_standard_config_overrides @ core_v0.16.1, _get_param_groups
    @ core_v0.12.3. A run with --apply-wd-to-qk-layernorm decays q/k norms: read its own groups.
    """
    return ndim != 1 and not name.endswith(".bias")


def param_groups(
    params: Sequence[tuple[str, int, bool]],
    everywhere: Collection[tuple[bool, float]] | None = None,
) -> list[list[Group]]:
    """The optimizers of a rank, each a list of groups: dense first, then experts if any.

    `params`: (legacy name, ndim, is_expert_parallel) in named_parameters() order, chunk 0 first.
    `everywhere`: the (expert, wd_mult) pairs that occur on any rank; a rank without such parameters
    has the group empty. A pid counts over an optimizer's groups in order (group-major).
    Source: optimizer/__init__.py _get_param_groups, get_megatron_optimizer @ core_v0.16.1: decayed
    group first; fixtures a-tp4pp2, c-pp2ep2, d-tied-tp4pp2. core_v0.12.3 orders groups by first
    appearance: read the recorded order instead. Not for --decoupled-lr, nor
    --overlap-param-gather-with-optimizer-step (an optimizer of its own for the first chunk).
    """
    held: dict[tuple[bool, float], list[str]] = {key: [] for key in everywhere or ()}
    for name, ndim, expert in params:
        held.setdefault((expert, 1.0 if decays(name, ndim) else 0.0), []).append(name)
    optimizers: list[list[Group]] = []
    for expert in (False, True):
        keys = sorted((k for k in held if k[0] is expert), key=lambda k: -k[1])
        if keys or not expert:
            optimizers.append([Group(expert, wd, tuple(held[expert, wd])) for _, wd in keys])
    return optimizers
