"""Saves a tiny StarCoder2 with random weights, of which no fixture is kept.

python -m peers.hf_make FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Starcoder2Config, Starcoder2ForCausalLM


def make(folder: Path) -> None:
    """Write the model, and the logits that it computes from some tokens."""
    torch.manual_seed(5)
    config = Starcoder2Config(
        vocab_size=29,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=None,
        tie_word_embeddings=True,
    )
    model = Starcoder2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) * 0.3 + (1.0 if value.ndim == 1 else 0.0))
        tokens = torch.arange(24).reshape(2, 12) * 7 % 29
        logits = model(input_ids=tokens, use_cache=False).logits
    model.save_pretrained(folder)
    save_file({"input_ids": tokens, "logits": logits}, folder / "expected.safetensors")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
