"""Packs the Hugging Face fixtures: one archive per family, its variants in the same one.

    python tests/peers/hf_pack.py FOLDER fixtures/hf

FOLDER holds what save_pretrained of transformers 5.24.0 wrote (tiny models, random weights), the
variants derived from it, and megatron/truth.json of NVIDIA Megatron-Bridge 067f987df. Variants of
one model hold the same bytes, which xz finds again only within one archive. `inventory` keeps the
names, shapes and dtypes of every family, also of those whose weights are left out for their size.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path

#: archive -> folders in it, as (name in the archive, folder below the source)
FORMS = {
    "llama3": {
        "plain": "llama3",
        "legacy_bin": "variants/llama3_legacy_bin",
        "single_file": "variants/llama3_single_file",
        "v4_config": "variants/llama3_v4_config",
    },
    "llama3_tied": {
        "plain": "llama3_tied",
        "legacy_bin_alias": "variants/llama3_tied_legacy_bin_alias",
        "with_lm_head": "variants/llama3_tied_with_lm_head",
    },
    "qwen3_moe": {"plain": "qwen3_moe", "v5_fused": "variants/qwen3_moe_v5_fused"},
    "deepseek_v3": {"plain": "deepseek_v3", "fp8_mtp": "variants/deepseek_v3_fp8_mtp"},
    "gpt_oss": {"plain": "gpt_oss", "square_mxfp4": "variants/gpt_oss_square_mxfp4"},
}
PLAIN = (
    "deepseek_v2", "gemma", "gemma2", "gemma3_text", "glm4_moe", "gpt2", "llama2", "minimax_m2",
    "mistral", "mixtral", "nemotron", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen2_tied", "qwen3",
    "qwen3_next",
)  # fmt: skip
LEFT_OUT = ("inventory.json",)


def add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    """Put a file into an archive, with nothing of this machine in its header."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def pack(source: Path, target: Path) -> None:
    """Write every archive."""
    families = {**{name: {"plain": name} for name in PLAIN}, **FORMS}
    for name, forms in families.items():
        with tarfile.open(target / f"{name}.tar.xz", "w:xz", preset=9) as archive:
            for form, folder in forms.items():
                for file in sorted((source / folder).rglob("*")):
                    kept = file.is_file() and file.name not in LEFT_OUT
                    if kept and not file.name.startswith(("tp1_rank", "tp2_rank")):
                        inner = file.relative_to(source / folder)
                        add(archive, f"{name}/{form}/{inner}", file.read_bytes())
    with tarfile.open(target / "inventory.tar.xz", "w:xz", preset=9) as archive:
        for file in sorted(source.glob("*/inventory.json")):
            found = json.loads(file.read_text())
            for tensor in found["tensors"].values():
                del tensor["sha256"], tensor["file"]
            config = (file.parent / "config.json").read_bytes()
            add(archive, f"inventory/{file.parent.name}/config.json", config)
            text = json.dumps(found, indent=1, sort_keys=True).encode()
            add(archive, f"inventory/{file.parent.name}/inventory.json", text)


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
