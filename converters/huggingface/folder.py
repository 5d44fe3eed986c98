"""Which files of a model folder hold its weights, checked against the index; what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from reshard.checkpoint import Json
from reshard.containers.small import read_object
from reshard.errors import CorruptError, FormatError, UnsafeError

from .recognise import ADAPTERS, SAFE, SAFE_INDEX, TORCH, TORCH_INDEX

#: Quantisations whose tensors are passed through or dequantised; any other is refused by name.
READ_QUANTISED = ("fp8", "mxfp4")
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf")
#: What trainers keep beside them, by how its name begins.
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "sampler", "rng_state")
_SHOWN = 8  # files that are named


@dataclass(frozen=True)
class Weights:
    """The files that hold a model's weights, and where the index says each tensor is."""

    files: tuple[str, ...]
    safe: bool  # safetensors, else torch.save
    where: Mapping[str, str] | None  # tensor -> file; None: a single file, which has no index
    problems: tuple[str, ...] = ()


def weights(folder: Path) -> Weights:
    """The weight files of a folder, as transformers would choose them.

    Raises FormatError for a folder of adapters, or with two complete sets; CorruptError for an
    index that names what is not there; UnsafeError for one that leaves the folder.
    """
    there = [n for n in (SAFE, SAFE_INDEX, TORCH, TORCH_INDEX) if (folder / n).is_file()]
    if not there:
        _refuse_without_weights(folder)
    for pair in ((SAFE, SAFE_INDEX), (TORCH, TORCH_INDEX)):
        if all(n in there for n in pair):
            raise FormatError(
                f"{folder} holds both {pair[0]} and {pair[1]}: two models, of which loaders take "
                "the first without a word. Remove the stale one."
            )
    chosen = there[0]
    _refuse_adapter(folder)
    safe = chosen in (SAFE, SAFE_INDEX)
    if chosen in (SAFE, TORCH):
        return Weights((chosen,), safe, None, _unread(folder, (chosen,)))
    where = _index(folder, chosen, "safetensors" if safe else "bin")
    files = tuple(sorted(set(where.values())))
    return Weights(files, safe, where, _unread(folder, files))


def _refuse_without_weights(folder: Path) -> None:
    if any((folder / n).is_file() for n in ADAPTERS):
        raise FormatError(
            f"{folder} holds a LoRA adapter and no model. Merge it into its base model "
            "(peft: merge_and_unload, save_pretrained) and give that folder."
        )
    raise CorruptError(
        f"{folder} holds shards and neither {SAFE_INDEX} nor {TORCH_INDEX}, which names the shard "
        "of every tensor. Copy it again."
    )


def _refuse_adapter(folder: Path) -> None:
    if any((folder / n).is_file() for n in ADAPTERS[1:]):
        raise FormatError(
            f"{folder} holds a model and an adapter; transformers would add the adapter on "
            "loading. Merge it, or move it elsewhere."
        )


def _unread(folder: Path, read: tuple[str, ...]) -> tuple[str, ...]:
    """The files of weights that are not the model's: another form of it, or another save's.

    Folders of the hub hold such (consolidated.safetensors, original/, *.gguf), and loaders pass
    over them as this reader does; so may a shard that the index has forgotten.
    """
    found = sorted(p.relative_to(folder) for p in (*folder.iterdir(), *folder.glob("original/*")))
    left = [
        str(path)
        for path in found
        if path.suffix in _WEIGHTS and not path.name.startswith(_NO_WEIGHTS)
        if str(path) not in read and (folder / path).is_file()
    ]
    if not left:
        return ()
    shown = ", ".join(left[:_SHOWN]) + (f" and {len(left) - _SHOWN} more" if left[_SHOWN:] else "")
    what = "is" if len(left) == 1 else "are"
    return (f"{shown} {what} there too and {what} not read: no part of the model by its index",)


def _index(folder: Path, name: str, suffix: str) -> dict[str, str]:
    table = read_object(folder / name)
    where = table.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CorruptError(f"{folder / name}: no weight_map in it")
    out: dict[str, str] = {}
    for tensor, file in where.items():
        if not isinstance(file, str):
            raise CorruptError(f"{folder / name}: the file of {tensor} is {file!r}, not a name")
        if "/" in file or "\\" in file or file in ("", ".", ".."):
            raise UnsafeError(
                f"{folder / name}: {tensor} is said to lie in {file!r}, outside the folder"
            )
        if not file.endswith(suffix):
            raise CorruptError(f"{folder / name}: {tensor} is said to lie in {file}, no .{suffix}")
        out[tensor] = file
    for file in sorted(set(out.values())):
        if not (folder / file).is_file():
            raise CorruptError(
                f"{folder / name} names {file}, which is not there. A shard is missing: copy it."
            )
    return out


def quantisation(config: Mapping[str, Json]) -> Mapping[str, Json] | None:
    """The config's quantization_config, if any.

    Raises FormatError for a method whose tensors are not understood here.
    """
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    method = found.get("quant_method")
    if method is None and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        method = "bitsandbytes"
    if method not in READ_QUANTISED:
        raise FormatError(
            f"the model is quantised with {method}, which is not read: its packed weights cannot "
            f"be cut, renamed or checked. Read are {', '.join(READ_QUANTISED)} and plain weights; "
            "give the unquantised model."
        )
    return found


_PACKED = (
    (r".*\.(?:qweight|qzeros|g_idx)", "GPTQ or AWQ"),
    (r".*\.weight\.(?:absmax|quant_map|nested_absmax|quant_state.*)|.*\.SCB", "bitsandbytes"),
    (r".*\.weight_(?:packed|shape|zero_point)", "compressed-tensors"),
    (r".*\.lora_[AB]\..*", "LoRA"),
)
_ANY_PACKED = re.compile("|".join(f"({pattern})" for pattern, _ in _PACKED))


def refuse_packed(names: Iterable[str], folder: Path) -> None:
    """Raises FormatError for tensors of a quantisation or adapter, whatever the config says."""
    for name in names:
        if (found := _ANY_PACKED.fullmatch(name)) is not None:
            _, what = _PACKED[(found.lastindex or 1) - 1]
            raise FormatError(
                f"{folder}: {name} is a tensor of {what}, which is not read. Give the plain "
                "model (merged, unquantised)."
            )
