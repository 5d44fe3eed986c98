"""How AutoTP cuts the tensors of Hugging Face's dense models, where no file says so."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from reshard.checkpoint import Checkpoint
from reshard.containers.small import parse_object, read_config
from reshard.errors import LayoutError
from reshard.format import WriteOptions

from .cuts import Affine, same, sliced
from .native import Native

#: Models whose tensor-parallel plan is `_COLUMNS`, `_ROWS` and a gathered head: AutoTP follows it.
#: Source: base_model_tp_plan and _tp_plan @ transformers 5.24, which a test reads again.
DENSE = frozenset(
    {
        "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text",
        "granite", "helium", "llama", "ministral", "ministral3", "mistral", "nemotron", "olmo",
        "qwen2", "qwen3", "seed_oss", "smollm3",
    }
)  # fmt: skip
_COLUMNS = re.compile(
    r"(.*\.)?layers\.\d+\.(self_attn\.[qkv]_proj|mlp\.(gate|up)_proj)\.(weight|bias)"
)
_ROWS = re.compile(r"(.*\.)?layers\.\d+\.(self_attn\.o_proj|mlp\.down_proj)\.weight")
_HEAD = re.compile(r"(.*\.)?lm_head\.(weight|bias)")


def rule_axis(name: str) -> int | None:
    """The axis that AutoTP cuts a dense model's parameter on; None for one that every rank has."""
    if _COLUMNS.fullmatch(name) or _HEAD.fullmatch(name):
        return 0
    return 1 if _ROWS.fullmatch(name) else None


def is_vocabulary(name: str) -> bool:
    """Whether a parameter is a matrix that is cut along the vocabulary."""
    return _HEAD.fullmatch(name) is not None and name.endswith("weight")


def widths(name: str, n: int, tp: int, heads: int | None, before: int = 1) -> list[int]:
    """How many of an axis' n elements each rank has: whole heads in attention, else nearly equal.

    `heads` are key-value heads. Without them attention is cut equally, into no more parts than the
    `before` ranks had that the source was cut over. Raises LayoutError for what cannot be.
    Source: module_inject/tp_shard.py get_shard_size @ 0.19.8, tp_grain_size 1.
    """
    units, what = n, "elements"
    if ".self_attn." in name:
        units, what = heads or tp, "key-value heads"
    if n % units:
        fits = [d for d in range(1, min(n, 64) + 1) if n % d == 0]
        raise LayoutError(
            f"{name}: {n} elements of an axis are not divisible by {units}. Use tp in "
            f"{{{', '.join(map(str, fits[:12]))}}}, or give --like DIR."
        )
    if units == tp and heads is None and before % tp and what != "elements":
        raise LayoutError(
            f"{name}: how many key-value heads it has is not known, and AutoTP cuts between them. "
            "Give the folder of the model's config.json with --config DIR, or --like DIR."
        )
    if units < tp:
        raise LayoutError(f"{name}: has {units} {what}, fewer than tp={tp}. Use a smaller tp.")
    return [(units // tp + (1 if rank < units % tp else 0)) * (n // units) for rank in range(tp)]


def cut(
    name: str, shape: tuple[int, ...], axis: int | None, tp: int, heads: int | None, before: int = 1
) -> Affine:
    """Every rank's shard of a parameter that is cut on an axis (None: not cut)."""
    if axis is None:
        return Affine(shape, {r: same(shape) for r in range(tp)})
    shards, start = {}, 0
    for rank, width in enumerate(widths(name, shape[axis], tp, heads, before)):
        shards[rank] = sliced(shape, axis, start, start + width)
        start += width
    return Affine(shape, shards)


def model_config(source: Checkpoint, options: WriteOptions) -> Mapping[str, object] | None:
    """The model's config.json: --config's, the source's own, or that of the trainer's folder."""
    if options.config is not None:
        return read_config(options.config)
    found = source.extras.get("config")
    if isinstance(found, Mapping):
        return found
    own = source.native
    wrapper = own.wrapper if isinstance(own, Native) else None
    raw = wrapper.copies.get("config.json") if wrapper is not None else None
    return None if raw is None else parse_object(raw, "config.json")


def kv_heads(config: Mapping[str, object] | None) -> int | None:
    """Key-value heads of a model, where its config says."""
    found = (config or {}).get("num_key_value_heads")
    return found if isinstance(found, int) and found > 0 else None


def cuts(
    shapes: Iterable[tuple[str, tuple[int, ...]]], config: Mapping[str, object] | None, tp: int
) -> dict[str, Affine]:
    """Every parameter's cut over `tp` ranks, by AutoTP's rules for the model of a config.

    Raises LayoutError where they are not known: no config, another kind of model, a tied head.
    """
    ask = "Give --like DIR, a checkpoint of the job that will resume (step 0 will do)."
    if config is None:
        raise LayoutError(
            f"tp={tp}: the source does not say how its tensors are cut over tensor-parallel ranks, "
            f"nor which model it is. Give the folder of its config.json with --config DIR. {ask}"
        )
    kind = config.get("model_type")
    if kind not in DENSE:
        raise LayoutError(
            f"tp={tp}: AutoTP's cuts of a model of type {kind!r} are not known. {ask}"
        )
    if config.get("tie_word_embeddings", kind in _TIED):
        raise LayoutError(
            f"tp={tp}: AutoTP cuts a tied head by vocabulary or not at all, as the job's loss "
            f"allows. {ask}"
        )
    heads = kv_heads(config)
    return {name: cut(name, shape, rule_axis(name), tp, heads) for name, shape in shapes}


#: Models whose head is tied where their config does not say. Source: transformers 5.24.
_TIED = frozenset({"cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "smollm3"})
