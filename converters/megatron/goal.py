"""What a target asks of Megatron: topology, pipeline, padded vocabulary, spec, optimizer form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from reshard.checkpoint import Checkpoint
from reshard.containers.inert import Global
from reshard.dtypes import named
from reshard.errors import FormatError, LayoutError, UsageError
from reshard.format import WriteOptions
from reshard.tensor import PARAM, LogicalTensor
from reshard.topology import Target, Topology, split_stages, topology

from . import stages
from .run import Run, data_parallel
from .shards import check_degrees
from .sizes import LOCAL, TE, need, padded_vocab
from .stages import Pipeline

#: Options of a Megatron TARGET beside the degrees.
OPTIONS = ("optim", "split", "first", "last", "layout", "vocab_divisor", "spec", "samples")


@dataclass(frozen=True)
class Goal:
    """A target, resolved against the source."""

    topology: Topology  # dp filled in
    pipeline: Pipeline
    flags: Mapping[str, object]  # pipeline options as Megatron's args name them
    precision: Mapping[str, object]  # bf16, fp16, params_dtype; empty: the source's own
    rows: int | None  # padded vocabulary rows
    rows_before: int | None
    spec: str | None
    optim: str | None
    notes: tuple[str, ...]

    def padded(self, logical: LogicalTensor, vocab: bool) -> tuple[int, ...] | None:
        """The padded shape of a tensor of the target, where it differs from the true one."""
        if not vocab or self.rows is None or self.rows == logical.shape[0]:
            return None
        return (self.rows, *logical.shape[1:])


def goal(source: Checkpoint, run: Run, target: Target, options: WriteOptions) -> Goal:
    """Resolve a TARGET or `--like` reference. Raises UsageError, LayoutError or FormatError."""
    like = options.like.native if options.like else None
    if like is not None and not isinstance(like, Run):
        raise FormatError("--like names a checkpoint of another framework; give --to as well")
    if "zero" in target.degrees:
        raise UsageError("zero is a DeepSpeed degree; Megatron has optim=fully_reshardable")
    chosen = target.take(*OPTIONS)
    if "samples" in chosen and source.native is run:
        raise UsageError("samples=N: the source is Megatron's and says how many it has consumed")
    notes: list[str] = []
    base = like.topology if like else Topology(dp=run.topology.dp)
    if not run.model.experts:
        base = replace(base, etp=None)  # Megatron saves one that follows tp
    wanted = topology(target.degrees, base)
    if wanted.dp is None or "dp" not in target.degrees:
        found = replace(wanted, dp=wanted.dp)
        try:
            dp = data_parallel(found)
        except LayoutError:
            dp = data_parallel(replace(wanted, dp=None))
        if dp != run.topology.dp or run.topology.dp is None:
            notes.append(f"dp is not given: {dp} is taken")
        wanted = replace(wanted, dp=dp)
    if wanted.etp is None and run.model.experts:
        wanted = replace(wanted, etp=wanted.tp)
    data_parallel(wanted)
    check_degrees(run.model, wanted)
    pipe, flags = _pipeline(run, like, wanted, chosen)
    vocab = options.vocab_size or _true_rows(source)
    before = _stored_rows(source)
    rows = _rows(run, like, wanted, vocab, before, chosen)
    spec = chosen.get("spec") or (like.spec if like else None) or run.spec
    if spec not in (None, LOCAL, TE):
        raise UsageError(f"spec={spec}: choose {LOCAL} or {TE}")
    optim = chosen.get("optim")
    told = _precision(source, run, options)
    return Goal(wanted, pipe, flags, told, rows, before, spec, optim, tuple(notes))


#: Dtypes that a Megatron run trains in, and the flags that ask for them.
#: Source: megatron/training/arguments.py validate_args @ core_v0.16.1: params_dtype follows them.
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": None}


def _precision(source: Checkpoint, run: Run, options: WriteOptions) -> dict[str, object]:
    """bf16, fp16 and params_dtype, where --dtype or a source of another framework decides them."""
    kind = named(options.dtype).name if options.dtype else None
    if kind is None and run is not source.native:
        sizes: dict[str, int] = {}
        for tensor, logical in source.layout.tensors.items():
            if tensor.slot == PARAM:
                sizes[logical.dtype.name] = sizes.get(logical.dtype.name, 0) + logical.nbytes
        kind = max(sizes, key=lambda k: sizes[k], default=None)
    if kind not in _PRECISIONS:
        return {}
    flag = _PRECISIONS[kind]
    return {
        "bf16": flag == "bf16",
        "fp16": flag == "fp16",
        "params_dtype": Global("torch", kind),
    }


def _pipeline(
    run: Run, like: Run | None, wanted: Topology, chosen: Mapping[str, str]
) -> tuple[Pipeline, Mapping[str, object]]:
    layers = need(run.model.layers, "layers")
    mtp = run.model.mtp_layers
    flags: dict[str, object] = {
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
    named = {"split", "first", "last", "layout"} & chosen.keys()
    if len(named) > 1 and named != {"first", "last"}:
        raise UsageError(f"give one of split, layout or first and last, not {sorted(named)}")
    if not named and like is not None and like.pipeline is not None:
        taken = {k: like.args.get(k) for k in flags}
        return like.pipeline, taken
    if "split" in chosen:
        if not re.fullmatch(r"\d+(-\d+)*", chosen["split"]):
            raise UsageError(f"split={chosen['split']}: write layers per stage as 3-5")
        counts = [int(n) for n in chosen["split"].split("-")]
        pipe = stages.own_stages(split_stages(counts, layers, wanted.pp, wanted.vpp), layers, mtp)
        return pipe, {**flags, **_split_flags(counts, wanted, mtp)}
    first, last = _count(chosen, "first"), _count(chosen, "last")
    layout = chosen.get("layout")
    flags |= {
        "decoder_first_pipeline_num_layers": first,
        "decoder_last_pipeline_num_layers": last,
        "pipeline_model_parallel_layout": layout,
    }
    pipe = stages.pipeline(
        layers, wanted.pp, wanted.vpp, first=first, last=last, layout=layout, mtp_layers=mtp
    )
    return pipe, flags


def _count(chosen: Mapping[str, str], name: str, of: str = "layers") -> int | None:
    if name not in chosen:
        return None
    if not chosen[name].isdecimal() or (of != "layers" and not int(chosen[name])):
        raise UsageError(f"{name}={chosen[name]}: a number of {of} is expected")
    return int(chosen[name])


def _split_flags(counts: list[int], wanted: Topology, mtp: int) -> dict[str, object]:
    """How Megatron is told of a split: first and last counts where the middle is even."""
    if len(set(counts)) == 1:
        return {}
    inner = counts[1:-1]
    # a first or last count of 0 is refused: transformer_config.py __post_init__ @ core_v0.16.1
    if wanted.vpp == 1 and len(set(inner)) <= 1 and len(counts) > 1 and all(counts):
        return {
            "decoder_first_pipeline_num_layers": counts[0],
            "decoder_last_pipeline_num_layers": counts[-1],
        }
    parts = ["t" * n for n in counts]
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "m" * mtp + "L"
    return {"pipeline_model_parallel_layout": "|".join(parts)}


def _vocab_tensors(source: Checkpoint) -> list[LogicalTensor]:
    wanted = ("embedding.word_embeddings.weight", "output_layer.weight")
    return [v for t, v in source.layout.tensors.items() if t.name in wanted]


def _true_rows(source: Checkpoint) -> int | None:
    return next((v.shape[0] for v in _vocab_tensors(source)), None)


def _stored_rows(source: Checkpoint) -> int | None:
    return next((v.extent[0] for v in _vocab_tensors(source)), None)


def _rows(
    run: Run,
    like: Run | None,
    wanted: Topology,
    vocab: int | None,
    before: int | None,
    chosen: Mapping[str, str],
) -> int | None:
    """Padded rows of the target: Megatron's rule, or the source's where no divisor is known."""
    if vocab is None or before is None:
        return before
    if like is not None and like.model.padded_vocab:
        return like.model.padded_vocab
    divisor = _count(chosen, "vocab_divisor", "rows") or run.model.vocab_divisor
    if divisor is None:
        if before % wanted.tp:
            raise LayoutError(
                f"embedding.word_embeddings.weight: {before} stored rows do not divide by "
                f"tp={wanted.tp}, and the args name no divisor. Give vocab_divisor=N."
            )
        return before
    return padded_vocab(vocab, divisor, wanted.tp)
