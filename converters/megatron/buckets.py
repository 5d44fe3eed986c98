"""Where each parameter's elements lie in the flat buffers of Megatron's distributed optimizer.

One buffer per (model chunk, parameter dtype, gradient dtype); experts cut by EP > 1 have buffers of
their own, in a second optimizer. Nothing in the files names the parameters: the layout follows from
their order and sizes alone. `buffer` lays them out as Megatron does; `solve` finds the bucket
boundaries that recorded lengths imply.

Two files hold such buffers, one 1-D fp32 array each for param (the fp32 master), exp_avg and
exp_avg_sq:

- torch_dist of type dp_reshardable, per bucket and without the bucket's end padding:
  `[chained_{k}.]optimizer.distributed.dp_group_idx_{g}.gbuf_idx_{i}.dtype_(torch.bfloat16,
  torch.float32).bucket_idx_{b}.{param,exp_avg,exp_avg_sq}`, `Slot.start` elements into it. The
  ShardedObjects `….dp_group_idx_{g}.per_bucket_numel[_unpadded]` hold the lengths, as a list over
  i of {dtypes: [length of bucket b]}, and `….optimizer` the param groups.
  `chained_{k}.` is there only if there are two optimizers: k=0 dense, k=1 experts.
- legacy distrib_optim.pt: the buckets of a buffer joined, each without its end padding:
  `Slot.flat` elements into it. With two optimizers the file is a list of two, either None where
  its writer is not the first rank of that optimizer's data-parallel group: look in all files.

i counts the (chunk, dtypes) buffers of that optimizer that exist: a chunk without experts has none
in the expert optimizer. g is the model-parallel rank: `dense_group` and `expert_group`.
The 64-element gaps between parameters are in both files and hold rubbish.
Source: megatron/core/optimizer/{__init__,distrib_optimizer,optimizer}.py,
distributed/{param_and_grad_buffer,distributed_data_parallel}.py, parallel_state.py @ core_v0.16.1;
fixtures b-tp2pp2dp2[-dpr], f-dp3-buckets, h-llama-tp2pp1dp2-dpr, made-moe-pp2ep{1,2}-dpr,
made-gpt-tied-pp2dp2-dpr, made-gpt-tied-pp2-buckets-dpr, made-llama-pp2vpp2-dpr.
(Two optimizers in distrib_optim.pt: read in optimizer.py ChainedOptimizer, no fixture.)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from reshard.errors import FormatError

ALIGN = 64  # elements: every parameter starts at a multiple of this
BUCKET_ALIGN = 128  # elements: every bucket ends at a multiple of lcm(dp, this)
NCCL_ALIGN = 2**16  # elements, with --ddp-pad-buckets-for-high-nccl-busbw


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies. All counts are elements."""

    name: str
    numel: int
    bucket: int
    start: int  # from the start of its bucket
    flat: int  # from the start of the buffer, buckets joined without their end padding
    padded: int  # from the start of the buffer in memory, end padding included


@dataclass(frozen=True, slots=True)
class Buffer:
    """The layout of one buffer; slots in buffer order, which is reverse module order."""

    slots: tuple[Slot, ...]
    numels_unpadded: tuple[int, ...]  # per bucket, without the end padding
    numels: tuple[int, ...]  # per bucket, as in memory

    @property
    def numel_unpadded(self) -> int:
        """Length of the buffer in distrib_optim.pt."""
        return sum(self.numels_unpadded)

    def slot(self, name: str) -> Slot:
        """The place of the parameter `name`. Raises KeyError."""
        for slot in self.slots:
            if slot.name == name:
                return slot
        raise KeyError(name)


def buffer(
    params: Sequence[tuple[str, int]],
    dp: int = 1,
    bucket_size: int | None = None,
    own_bucket: Collection[str] = (),
    pad_for_nccl: bool = False,
) -> Buffer:
    """The buffer of (name, numel) parameters given in module order.

    `dp`: ranks that share the buffer (DP x CP, of one distributed-optimizer instance; expert-DP for
    experts). It moves only `padded` and `numels`. `bucket_size` None: one bucket. `own_bucket`:
    parameters that get a bucket to themselves (see module_order.shared_embedding).
    Source: param_and_grad_buffer.py _ParamAndGradBuffer.__init__ @ core_v0.16.1.
    """
    order = list(reversed(params))
    closes: list[tuple[int, bool]] = []
    filled = pending = 0  # elements and parameters of the open bucket
    for i, (name, numel) in enumerate(order):
        alone = name in own_bucket
        if alone and pending:
            closes.append((i, True))
            filled = pending = 0
        filled = _up(filled, ALIGN) + numel
        pending += 1
        if alone or (bucket_size is not None and filled >= bucket_size):
            closes.append((i + 1, False))
            filled = pending = 0
    if pending:
        closes.append((len(order), False))
    return _closed(order, closes, _divisor(dp, pad_for_nccl))


def default_bucket_size(dp: int) -> int:
    """The bucket size with --overlap-grad-reduce and no --ddp-bucket-size.

    `dp` is the data-parallel size without context parallelism.
    Source: distributed_data_parallel.py __init__ @ core_v0.16.1.
    """
    return max(40_000_000, 1_000_000 * dp)


def bucket_size_of_args(
    args: Mapping[str, object], pp_rank: int, chunk: int, dp: int, numel: int | None = None
) -> int | None:
    """The bucket size that a run with these args used for one model chunk; None: one bucket.

    Only the first chunk of the first pipeline stage is cut. `numel`: parameters of all chunks of
    the rank, needed for --ddp-num-buckets. Raises FormatError if it is needed and not given.
    Source: training.py get_model, distributed_data_parallel.py __init__ @ core_v0.16.1.
    """
    if not args.get("overlap_grad_reduce") or pp_rank > 0 or chunk > 0:
        return None
    count, size = args.get("ddp_num_buckets"), args.get("ddp_bucket_size")
    if isinstance(count, int) and count > 0:
        if numel is None:
            raise FormatError("--ddp-num-buckets cuts by the parameter count, which is not given")
        return numel // count
    return size if isinstance(size, int) and size > 0 else default_bucket_size(dp)


def cut(
    params: Sequence[tuple[str, int]],
    numels_unpadded: Sequence[int],
    dp: int = 1,
    own_bucket: Collection[str] = (),
    pad_for_nccl: bool = False,
) -> Buffer:
    """The buffer whose buckets have these recorded lengths: the bucket size need not be known.

    Raises FormatError if no bucket boundary gives a recorded length, which means that the order or
    the sizes of the parameters are not those of the run.
    """
    order = list(reversed(params))
    closes: list[tuple[int, bool]] = []
    i = 0
    for b, wanted in enumerate(numels_unpadded):
        first, filled, aligned = i, 0, False
        while filled < wanted and i < len(order) and not aligned:
            filled = _up(filled, ALIGN) + order[i][1]
            i += 1
            before_own = i < len(order) and order[i][0] in own_bucket
            aligned = filled < wanted and before_own and _up(filled, ALIGN) == wanted
        if filled != wanted and not aligned:
            names = " … ".join(dict.fromkeys((order[first][0], order[i - 1][0]))) if i else "none"
            raise FormatError(
                f"bucket {b} holds {wanted} elements; the parameters {names} end at {filled}"
            )
        closes.append((i, aligned))
    if i != len(order):
        raise FormatError(
            f"{len(numels_unpadded)} buckets leave {len(order) - i} parameters over, "
            f"from {order[i][0]} on"
        )
    return _closed(order, closes, _divisor(dp, pad_for_nccl))


def solve(
    orders: Mapping[str, Sequence[tuple[str, int]]],
    *,
    dp: int = 1,
    own_bucket: Collection[str] = (),
    pad_for_nccl: bool | None = None,
    numels_unpadded: Sequence[int] | None = None,
    numels: Sequence[int] | None = None,
    numel_unpadded: int | None = None,
    bucket_sizes: Iterable[int | None] = (None,),
) -> Buffer:
    """The one layout that agrees with every recorded length.

    `orders`: candidate parameter lists in module order, by a name for messages ("local spec").
    dp_reshardable records `numels_unpadded` and `numels` per bucket: boundaries follow from them.
    distrib_optim.pt records only `numel_unpadded`: `bucket_sizes` (what the args say) are tried,
    then None and the default. `pad_for_nccl` None: not known, both are tried against `numels`.
    Layouts that put every parameter at the same place count as one; the caller still checks that
    masters round to their weights. Raises FormatError, listing what was tried, for none or several.
    """
    tried: list[str] = []
    found: dict[tuple[object, ...], Buffer] = {}

    def attempt(
        label: str, params: Sequence[tuple[str, int]], size: int | None, nccl: bool
    ) -> None:
        if numels_unpadded is None:
            what = f"{label}, bucket size {size}"
            made = buffer(params, dp, size, own_bucket, nccl)
        else:
            what = f"{label}, boundaries at the recorded lengths"
            try:
                made = cut(params, numels_unpadded, dp, own_bucket, nccl)
            except FormatError as e:
                tried.append(f"{what}: {e}")
                return
            if not _one_size(made, own_bucket):
                tried.append(f"{what}: no bucket size closes these buckets")
                return
        if numel_unpadded is not None and made.numel_unpadded != numel_unpadded:
            tried.append(f"{what}: {made.numel_unpadded} elements, not {numel_unpadded}")
        elif numels is not None and tuple(numels) != made.numels:
            tried.append(f"{what}: padded to {made.numels}, not {tuple(numels)} (dp={dp})")
        else:
            joined = numels_unpadded is None
            places = (
                (s.name, 0, s.flat) if joined else (s.name, s.bucket, s.start) for s in made.slots
            )
            found.setdefault(tuple(places), made)
            tried.append(f"{what}: agrees")

    known = tuple(dict.fromkeys(bucket_sizes))
    others = tuple(size for size in (None, default_bucket_size(dp)) if size not in known)
    for sizes in ((None,),) if numels_unpadded is not None else (known, others):
        for label, params in orders.items():
            for nccl in (False, True) if pad_for_nccl is None else (pad_for_nccl,):
                for size in sizes:
                    attempt(label, params, size, nccl)
        if found:
            break
    if len(found) == 1:
        return next(iter(found.values()))
    listed = "; ".join(dict.fromkeys(tried)) or "no parameter order was given"
    held = numel_unpadded if numels_unpadded is None else sum(numels_unpadded)
    hint = ""
    if held is not None and all(held < sum(n for _, n in order) for order in orders.values()):
        hint = (
            ". It holds fewer elements than the model's parameters: if the run froze some, the "
            "checkpoint does not say which. Convert with --weights-only"
        )
    elif numels_unpadded is None:
        hint = ". If the job set --ddp-bucket-size, give it as --from ddp_bucket_size=ELEMENTS"
    raise FormatError(
        ("several layouts agree" if found else "no layout agrees")
        + f" with the recorded lengths of this optimizer buffer. Tried: {listed}"
        + hint
    )


def dense_group(tp_rank: int, pp_rank: int, tp: int) -> int:
    """dp_group_idx of the dense optimizer: tensor rank first, then pipeline stage.

    Source: parallel_state.py get_ranks('tp-pp') @ core_v0.16.1; fixture b-tp2pp2dp2-dpr.
    """
    return pp_rank * tp + tp_rank


def expert_group(etp_rank: int, ep_rank: int, pp_rank: int, etp: int, ep: int) -> int:
    """dp_group_idx of the expert optimizer: expert-tensor rank, then expert rank, then stage.

    Source: parallel_state.py get_ranks('tp-ep-pp') @ core_v0.16.1; fixture made-moe-pp2ep2-dpr.
    """
    return (pp_rank * ep + ep_rank) * etp + etp_rank


@dataclass(frozen=True, slots=True)
class BucketKey:
    """A torch_dist key of an optimizer bucket, taken apart."""

    chained: int | None  # which optimizer, None: the only one
    group: int  # dp_group_idx
    gbuf: int | None  # None for the objects of the whole group
    dtypes: str  # "(torch.bfloat16, torch.float32)"
    bucket: int | None
    field: str  # param, exp_avg, exp_avg_sq; optimizer, per_bucket_numel[_unpadded], param_state

    def __str__(self) -> str:
        """The key as Megatron writes it, without the /shard_0_1 of an object."""
        head = "" if self.chained is None else f"chained_{self.chained}."
        head += f"optimizer.distributed.dp_group_idx_{self.group}."
        if self.gbuf is not None:
            head += f"gbuf_idx_{self.gbuf}.dtype_{self.dtypes}.bucket_idx_{self.bucket}."
        return head + self.field


_KEY = re.compile(
    r"(?:chained_(?P<chained>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\."
    r"(?:gbuf_idx_(?P<gbuf>\d+)\.dtype_(?P<dtypes>\([^()]*\))\.bucket_idx_(?P<bucket>\d+)\.)?"
    r"(?P<field>\w+)(?:/shard_0_1)?"
)


def bucket_key(key: str) -> BucketKey | None:
    """The parts of a bucket key, or None for any other key."""
    m = _KEY.fullmatch(key)
    if m is None:
        return None
    n = {k: None if m[k] is None else int(m[k]) for k in ("chained", "gbuf", "bucket")}
    return BucketKey(
        n["chained"], int(m["group"]), n["gbuf"], m["dtypes"] or "", n["bucket"], m["field"]
    )


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _divisor(dp: int, pad_for_nccl: bool) -> int:
    return lcm(dp, BUCKET_ALIGN, NCCL_ALIGN) if pad_for_nccl else lcm(dp, BUCKET_ALIGN)


def _closed(
    order: Sequence[tuple[str, int]], closes: Sequence[tuple[int, bool]], divisor: int
) -> Buffer:
    """The buffer whose bucket b ends before parameter closes[b][0] of `order`.

    closes[b][1]: that parameter closed it by taking a bucket of its own, at its aligned start.
    """
    slots: list[Slot] = []
    unpadded: list[int] = []
    padded: list[int] = []
    first = flat = base = 0
    for b, (close, aligned) in enumerate(closes):
        filled = 0
        for name, numel in order[first:close]:
            start = _up(filled, ALIGN)
            slots.append(Slot(name, numel, b, start, flat + start, base + start))
            filled = start + numel
        unpadded.append(_up(filled, ALIGN) if aligned else filled)
        padded.append(_up(unpadded[-1], divisor))
        flat += unpadded[-1]
        base += padded[-1]
        first = close
    return Buffer(tuple(slots), tuple(unpadded), tuple(padded))


def _one_size(made: Buffer, own_bucket: Collection[str]) -> bool:
    """Whether some bucket size closes exactly these buckets (own buckets and their eve aside)."""
    too_small, enough = 0, None
    last = len(made.numels_unpadded) - 1
    per_bucket: list[list[Slot]] = [[] for _ in made.numels_unpadded]
    for slot in made.slots:
        per_bucket[slot.bucket].append(slot)
    for b, slots in enumerate(per_bucket):
        if any(s.name in own_bucket for s in slots):
            if len(slots) > 1:
                return False
            continue
        ends = [s.start + s.numel for s in slots]
        too_small = max([too_small, *ends[:-1]])
        # the last bucket, and one before an own bucket, may have been closed below the size
        if b != last and per_bucket[b + 1][0].name not in own_bucket:
            enough = ends[-1] if enough is None else min(enough, ends[-1])
    return enough is None or too_small < enough
