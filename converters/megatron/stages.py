"""Which model chunk of which pipeline stage holds which layer, the embedding, the head and MTP."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reshard.errors import FormatError, LayoutError
from reshard.topology import Stages, check_stages

_REPEAT = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
_KINDS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
_MAX_LAYOUT = 1_000_000  # letters: a layout beyond this is not a model


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one model chunk (pipeline stage and virtual stage) holds."""

    layers: tuple[int, ...] = ()  # global decoder layers, in order
    mtp: tuple[int, ...] = ()  # multi-token-prediction layers, in order
    embedding: bool = False  # pre_process: the word (and position) embeddings
    head: bool = False  # post_process: the output layer and the loss
    final_norm: bool = False


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The chunks of every pipeline stage: chunks[pp][virtual stage]."""

    chunks: tuple[tuple[Chunk, ...], ...]

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.chunks)

    @property
    def vpp(self) -> int:
        """Model chunks per pipeline stage."""
        return len(self.chunks[0])

    @property
    def stages(self) -> Stages:
        """The decoder layers alone."""
        return [[list(c.layers) for c in row] for row in self.chunks]

    def where(self, layer: int) -> tuple[int, int]:
        """(pipeline stage, virtual stage) of a decoder layer."""
        for p, row in enumerate(self.chunks):
            for v, chunk in enumerate(row):
                if layer in chunk.layers:
                    return p, v
        raise LayoutError(f"layer {layer} is on no pipeline stage")


def pipeline_of_args(args: Mapping[str, object]) -> Pipeline:
    """The pipeline of the run that saved these args (the fields of its argparse.Namespace).

    Raises FormatError if the args lack the layer count, LayoutError if they misplace a layer.
    Source: arguments.py validate_args (which derives the virtual size) @ core_v0.16.1.
    """
    layers = _int(args, "num_layers", "encoder_num_layers")
    if layers is None:
        raise FormatError(
            "the checkpoint's args do not say layers. Give --from num_layers=… (Megatron's "
            "--num-layers)."
        )
    pp = _int(args, "pipeline_model_parallel_size") or 1
    embedding = bool(args.get("account_for_embedding_in_pipeline_split"))
    loss = bool(args.get("account_for_loss_in_pipeline_split"))
    vpp = _int(args, "virtual_pipeline_model_parallel_size")
    vpp = vpp or _int(args, "num_virtual_stages_per_pipeline_rank")
    each = _int(args, "num_layers_per_virtual_pipeline_stage")
    if vpp is None and each:
        total = layers + embedding + loss
        if total % (pp * each):
            raise LayoutError(
                f"{total} layers (embedding and loss counted as asked) do not divide into pp={pp} "
                f"stages of chunks of {each} (--num-layers-per-virtual-pipeline-stage)"
            )
        vpp = total // pp // each
    layout = args.get("pipeline_model_parallel_layout")
    if isinstance(layout, Mapping):  # PipelineParallelLayerLayout, read as an inert record
        layout = layout.get("input_data")
    if layout is not None and not isinstance(layout, str | list | tuple):
        raise FormatError(
            f"args.pipeline_model_parallel_layout is {layout!r}. "
            'Give the layout as text, like "Et*3|(tt|)*29,m|L".'
        )
    return pipeline(
        layers,
        pp,
        vpp or 1,
        first=_int(args, "decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"),
        last=_int(args, "decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"),
        embedding_counts=embedding,
        loss_counts=loss,
        layout=layout,
        mtp_layers=_int(args, "mtp_num_layers") or 0,
    )


def pipeline(
    layers: int,
    pp: int,
    vpp: int = 1,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding_counts: bool = False,
    loss_counts: bool = False,
    layout: str | Sequence[Sequence[object]] | None = None,
    mtp_layers: int = 0,
) -> Pipeline:
    """The chunks Megatron builds for these options.

    `first`, `last`: layers of the first and last stage (--decoder-first/last-pipeline-num-layers).
    `embedding_counts`, `loss_counts`: they take the place of a layer (--account-for-…).
    Raises LayoutError where Megatron asserts, and for any layer missed or repeated.
    Source: transformer_block.py get_num_layers_to_build, transformer_layer.py
    get_transformer_layer_offset, pipeline_parallel_layer_layout.py @ core_v0.16.1.
    """
    if layers < 1 or pp < 1 or vpp < 1:
        raise LayoutError(f"{layers} layers on pp={pp} x vpp={vpp}: each must be at least 1")
    if vpp > 1 and pp == 1 and layout is None:
        raise LayoutError(f"vpp={vpp} needs pp > 1 (Megatron's interleaved schedule)")
    if layout is not None:
        if first is not None or last is not None or embedding_counts or loss_counts:
            raise LayoutError(
                "--pipeline-model-parallel-layout cannot be combined with other split options"
            )
        return _of_layout(layout, layers, pp, vpp, mtp_layers)
    per_chunk = _counts(layers, pp, vpp, first, last, embedding_counts, loss_counts)
    rows: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
    at = 0
    for v in range(vpp):
        for p in range(pp):
            n = per_chunk[p]
            n -= embedding_counts and (p, v) == (0, 0)
            n -= loss_counts and (p, v) == (pp - 1, vpp - 1)
            if n < 0:
                raise LayoutError(
                    f"{layers} layers on pp={pp} x vpp={vpp}: chunk {(p, v)} is left without room "
                    "for the embedding or the loss that counts as a layer"
                )
            rows[p].append(tuple(range(at, at + n)))
            at += n
    return _assembled(rows, layers, mtp=((pp - 1, vpp - 1), mtp_layers))


def own_stages(stages: Stages, layers: int, mtp_layers: int = 0) -> Pipeline:
    """The pipeline for a decoder map made by hand; embedding first, head and MTP last.

    Raises LayoutError unless every layer is present once and in order along the pipeline.
    """
    rows = [[tuple(chunk) for chunk in row] for row in stages]
    return _assembled(rows, layers, mtp=((len(rows) - 1, len(rows[0]) - 1), mtp_layers))


def parse_layout(text: str) -> list[list[str]]:
    """The stages that a layout string names, chunk-major: "Et|(tt|)*2mL" has 4.

    E embedding, t decoder layer, m MTP layer, L loss; `x*n` and `(…)*n` repeat, `|` ends a stage,
    commas are cosmetic. Raises LayoutError for another letter.
    Source: pipeline_parallel_layer_layout.py parse_str_to_list @ core_v0.16.1.
    """
    spelled = text.replace(",", "")
    for pattern in _REPEAT:
        grown = len(spelled)
        for m in pattern.finditer(spelled):
            grown += len(m.group(1)) * int(m.group(2))
        if grown > _MAX_LAYOUT:
            raise LayoutError(f"pipeline layout {text!r} names more than {_MAX_LAYOUT} layers")
        spelled = pattern.sub(lambda m: m.group(1) * int(m.group(2)), spelled)
    for letter in spelled:
        if letter != "|" and letter not in _KINDS:
            raise LayoutError(
                f"pipeline layout {text!r} holds {letter!r}; it takes E, t, m, L, | , * and ( )"
            )
    return [[_KINDS[letter] for letter in stage] for stage in spelled.split("|")]


def _int(args: Mapping[str, object], *keys: str) -> int | None:
    for key in keys:
        value = args.get(key)
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise FormatError(f"args.{key} is {value!r}, not a whole number")
        if value is not None:
            return value
    return None


def _counts(
    layers: int,
    pp: int,
    vpp: int,
    first: int | None,
    last: int | None,
    embedding_counts: bool,
    loss_counts: bool,
) -> list[int]:
    """Layers per chunk of each stage, before the embedding and the loss take their places."""
    if first is None and last is None:
        total = layers + embedding_counts + loss_counts
        if total % (pp * vpp):
            counted = "" if total == layers else f" ({layers} plus embedding or loss)"
            fits = [n for n in range(1, total + 1) if total % (n * vpp) == 0]
            raise LayoutError(
                f"{total} layers{counted} do not divide into pp={pp} x vpp={vpp} chunks. "
                f"Use pp in {{{', '.join(map(str, fits[:16]))}}}, or an uneven split."
            )
        return [total // pp // vpp] * pp
    if embedding_counts or loss_counts:
        raise LayoutError("--account-for-… cannot be combined with an uneven first or last stage")
    per_stage: list[int | None] = [None] * pp
    if last is not None:
        per_stage[-1] = last
    if first is not None:
        if pp == 1 and last is not None:
            raise LayoutError(
                "one pipeline stage cannot be both an uneven first and an uneven last"
            )
        per_stage[0] = first
    left = layers - (first or 0) - (last or 0)
    middle = per_stage.count(None)
    if left < 0 or (left > 0) != (middle > 0) or (middle and left % middle):
        raise LayoutError(
            f"{layers} layers with first={first}, last={last}: {left} layers are left for {middle} "
            f"middle stages of pp={pp}, which must divide evenly"
        )
    counts = [left // middle if n is None else n for n in per_stage]
    bad = [n for n in counts if n < 1 or n % vpp]
    if bad:
        raise LayoutError(f"stages of {counts} layers do not divide into vpp={vpp} chunks")
    return [n // vpp for n in counts]


def _of_layout(
    layout: str | Sequence[Sequence[object]], layers: int, pp: int, vpp: int, mtp_layers: int
) -> Pipeline:
    listed = parse_layout(layout) if isinstance(layout, str) else _of_list(layout)
    if len(listed) % pp:
        raise LayoutError(
            f"the pipeline layout names {len(listed)} stages, not a multiple of pp={pp}"
        )
    chunks = len(listed) // pp
    if vpp not in (1, chunks):
        raise LayoutError(
            f"the layout's {len(listed)} stages make vpp={chunks} on pp={pp}, not vpp={vpp}"
        )
    flat = [kind for stage in listed for kind in stage]
    count = Counter(flat)
    if not flat or flat[0] != "embedding" or flat[-1] != "loss":
        raise LayoutError("a pipeline layout begins with E and ends with L")
    for kind, wanted in (("embedding", 1), ("loss", 1), ("decoder", layers), ("mtp", mtp_layers)):
        if count[kind] != wanted:
            raise LayoutError(
                f"the pipeline layout names {count[kind]} {kind} layers; the model has {wanted}"
            )
    if mtp_layers and "decoder" in flat[flat.index("mtp") :]:
        raise LayoutError("in a pipeline layout decoder layers come before MTP layers")
    rows: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
    mtp_at = (pp - 1, chunks - 1)
    at = 0
    for i, stage in enumerate(listed):
        n = stage.count("decoder")
        rows[i % pp].append(tuple(range(at, at + n)))
        at += n
        if "mtp" in stage:
            mtp_at = (i % pp, i // pp)
            if stage.count("mtp") != mtp_layers or mtp_at[1] != chunks - 1:
                raise LayoutError(
                    "Megatron keeps all MTP layers in one stage, the last virtual stage of its rank"
                )
    return _assembled(rows, layers, mtp=(mtp_at, mtp_layers))


def _of_list(layout: Sequence[Sequence[object]]) -> list[list[str]]:
    """A layout given as lists of LayerType members or their names."""
    listed: list[list[str]] = []
    for stage in layout:
        if isinstance(stage, str) or not isinstance(stage, Sequence):
            raise LayoutError(f"a pipeline layout is text or a list of lists, not {stage!r}")
        names = [str(getattr(kind, "name", kind)).strip().lower() for kind in stage]
        for name in names:
            if name not in _KINDS.values():
                raise LayoutError(f"a pipeline layout cannot place {name!r}")
        listed.append(names)
    return listed


def _assembled(
    rows: Sequence[Sequence[tuple[int, ...]]],
    layers: int,
    mtp: tuple[tuple[int, int], int],
) -> Pipeline:
    """The chunks, checked: every layer once, in order along the pipeline.

    The final norm lies with the head, or with the last decoder layer if the model has MTP layers
    (transformer_block.py has_final_layernorm_in_this_stage @ core_v0.16.1).
    """
    check_stages(rows, layers)
    pp, vpp = len(rows), len(rows[0])
    along = [layer for v in range(vpp) for p in range(pp) for layer in rows[p][v]]
    if along != list(range(layers)):
        raise LayoutError(f"the pipeline runs through the layers in the order {along[:12]}…")
    (mtp_at, mtp_layers) = mtp
    chunks: list[tuple[Chunk, ...]] = []
    for p, row in enumerate(rows):
        chunks.append(
            tuple(
                Chunk(
                    layers=tuple(held),
                    mtp=tuple(range(mtp_layers)) if (p, v) == mtp_at else (),
                    embedding=(p, v) == (0, 0),
                    head=(p, v) == (pp - 1, vpp - 1),
                    final_norm=(layers - 1 in held) if mtp_layers else (p, v) == (pp - 1, vpp - 1),
                )
                for v, held in enumerate(row)
            )
        )
    return Pipeline(tuple(chunks))
