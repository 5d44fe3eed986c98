"""What lies beside the weights: config.json, tokenizer and the rest, copied as they are."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from reshard.checkpoint import Checkpoint, Json
from reshard.errors import CorruptError, UsageError
from reshard.format import Fate, Loss, WriteOptions
from reshard.layout import Draft
from reshard.tensor import LogicalTensor, TensorId

CONFIG = "config.json"
#: Weights in any form, their indexes, and what belongs to the folder's own history.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack",
            "*.onnx", "*.onnx_data", "*.index.json", "*.distcp", "*.npz")  # fmt: skip
_OWN = (".*", "reshard*.json*")
#: What a tokenizer folder gives. Source: save_pretrained of tokenizers and processors, 5.24.0.
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
              "*.model", "*.tiktoken", "chat_template*", "preprocessor_config.json",
              "processor_config.json", "*.py")  # fmt: skip
#: Pickles that are no weights; copied they would carry code along.
OPAQUE = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth")
_LARGEST = 256 << 20  # bytes of a file that is copied


@dataclass(frozen=True)
class Beside:
    """The files beside the weights, and what became of those that were there."""

    drafts: tuple[Draft, ...]
    copied: tuple[str, ...]
    losses: tuple[Loss, ...]
    notes: tuple[str, ...]
    fates: tuple[Fate, ...]


def beside(
    source: Checkpoint, tensors: Mapping[TensorId, LogicalTensor], options: WriteOptions
) -> Beside:
    """Every file but the weights: from --config, else the source's own folder; --tokenizer first.

    config.json is copied byte for byte where it fits the weights, patched in the keys that do not,
    and made from what the source says where there is none.
    """
    reference = _reference(source, options)
    losses: list[Loss] = []
    found = dict(_copied(reference, ("*",), losses)) if reference else {}
    if options.tokenizer is not None:
        found = {n: b for n, b in found.items() if not _matches(n, _TOKENIZER)}
        mine = dict(_copied(Path(options.tokenizer), _TOKENIZER, losses))
        if not mine:
            raise UsageError(f"--tokenizer {options.tokenizer}: no tokenizer files there")
        found |= mine
    notes: list[str] = []
    raw = found.pop(CONFIG, None)
    config = _config(raw, source, tensors, notes)
    copied = sorted(found)
    if config is not None:
        found[CONFIG] = config
        copied = sorted([*copied, CONFIG] if config is raw else copied)
    if not _matches_any(found, ("tokenizer*", "vocab.*", "*.model")):
        notes.append("no tokenizer files: give their folder with --tokenizer DIR")
    fates = tuple(Fate(n, "keep", "copied") for n in copied)
    drafts = tuple(Draft(n, len(b), [(0, b)]) for n, b in sorted(found.items()))
    return Beside(drafts, tuple(copied), tuple(losses), tuple(notes), fates)


def _reference(source: Checkpoint, options: WriteOptions) -> Path | None:
    if options.config is not None:
        path = Path(options.config)
        return path.parent if path.is_file() else path
    if options.like is not None and options.like.format == "hf":
        return options.like.path
    return source.path if source.format == "hf" else None


def _copied(
    folder: Path, wanted: tuple[str, ...], losses: list[Loss]
) -> Iterator[tuple[str, bytes]]:
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder")
    for path in sorted(folder.iterdir()):
        name = path.name
        if not path.is_file() or _matches(name, _OWN) or not _matches(name, wanted):
            continue
        if _matches(name, (*OPAQUE, *_WEIGHTS)):
            continue
        if path.stat().st_size > _LARGEST:
            losses.append(
                Loss("file-left", name, f"{path.stat().st_size} bytes, too large to copy")
            )
            continue
        yield name, path.read_bytes()


def opaque_in(folder: Path, read: tuple[str, ...]) -> tuple[str, ...]:
    """The pickles of a trainer's own that lie in a folder, but for the files that are read."""
    found = (p.name for p in folder.iterdir() if p.is_file() and _matches(p.name, OPAQUE))
    return tuple(sorted(name for name in found if name not in read))


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, g) for g in globs)


def _matches_any(names: Mapping[str, bytes], globs: tuple[str, ...]) -> bool:
    return any(_matches(n, globs) for n in names)


# --- config.json ---------------------------------------------------------------------------------


def _config(
    raw: bytes | None,
    source: Checkpoint,
    tensors: Mapping[TensorId, LogicalTensor],
    notes: list[str],
) -> bytes | None:
    """config.json for these weights: the reference's bytes wherever they are true of them."""
    if raw is None:
        made = source.extras.get("config")
        if not isinstance(made, Mapping):
            notes.append("no config.json: give a reference folder with --config DIR")
            return None
        notes.append(
            "config.json is made from what the source says, in the keys of transformers 4 and 5; "
            "check it, or give the model's own with --config DIR"
        )
        kind = _dtype(tensors)
        return _text({**made, "dtype": kind, "torch_dtype": kind})
    try:
        config = json.loads(raw)
    except ValueError as error:
        raise CorruptError(f"the reference's config.json is not JSON: {error}") from error
    changed = _patched(config, tensors, notes)
    return raw if changed is None else _text(changed)


def _text(config: Mapping[str, Json]) -> bytes:
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def _patched(
    config: dict[str, Json], tensors: Mapping[TensorId, LogicalTensor], notes: list[str]
) -> dict[str, Json] | None:
    """The config with what is not true of the weights set right; None if all of it is."""
    out = dict(config)
    names = {t.name for t in tensors}
    plain = not any(n.endswith(("_scale_inv", "_blocks")) for n in names)
    if "quantization_config" in out and plain:
        del out["quantization_config"]
        notes.append("config.json: quantization_config is taken out, the weights are plain")
    kind = _dtype(tensors)
    for key in ("dtype", "torch_dtype"):
        if isinstance(out.get(key), str) and out[key] != kind and plain:
            notes.append(f"config.json: {key} is {kind} now, was {out[key]}")
            out[key] = kind
    return None if out == config else out


def _dtype(tensors: Mapping[TensorId, LogicalTensor]) -> str:
    """The dtype of most of the weights."""
    sizes: dict[str, int] = {}
    for logical in tensors.values():
        sizes[logical.dtype.name] = sizes.get(logical.dtype.name, 0) + logical.nbytes
    return max(sizes, key=lambda k: sizes[k])
