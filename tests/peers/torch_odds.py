"""Has torch, accelerate and transformers save checkpoints of forms that are easy to get wrong.

    python -m peers.torch_odds FOLDER     # FOLDER/NAME; FOLDER/NAME.truth.pt where it is readable

The truth is {slot.name: tensor} of the live model and optimizer, names without wrappers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict

from peers.dcp_variants import network, trained

Make = Callable[[Any], torch.optim.Optimizer]


def truth(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write the live state."""
    weights, moments = get_state_dict(model, optimizer)
    out = {f"param.{n}": v.clone() for n, v in weights.items()}
    for name, state in moments["state"].items():
        out |= {f"{k}.{name}": v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
    torch.save(out, path)


def make_stores(folder: Path) -> None:
    """DCP: numbered optimizers without state, Adam's cousins, objects, two models."""
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    numbered = {"model": model.state_dict(), "optimizer": plain.state_dict()}
    dcp.save(numbered, checkpoint_id=folder / "stateless")
    cousins: dict[str, Make] = {
        "nadam": torch.optim.NAdam, "radam": torch.optim.RAdam, "adamax": torch.optim.Adamax,
    }  # fmt: skip
    for name, made in cousins.items():
        model = network()
        optimizer = trained(model, made)
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder / name)
    whole = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder / "whole", planner=whole)
    pair = {"gen": weights, "disc": weights, "optim_gen": moments, "optim_disc": moments}
    dcp.save(pair, checkpoint_id=folder / "pair")
    odd = {"odd": torch.randn(3, 4, dtype=torch.complex64).conj(), "w": torch.ones(2)}
    dcp.save({"model": odd}, checkpoint_id=folder / "conjugated-store")
    apart = [torch.optim.Adam([p], lr=0.1).state_dict() for p in model.parameters()]
    dcp.save({"model": weights, "one": apart[0], "two": apart[1]}, checkpoint_id=folder / "two")
    rest = {"epoch": 3, "rng": torch.get_rng_state(), "words": ["a", "b"]}
    dcp.save({"model": weights, **rest}, checkpoint_id=folder / "untrained")


def make_files(folder: Path) -> None:
    """torch.save: tensors that are no plain ones, modules, one tensor, a file for each part."""
    numbers = torch.randn(3, 4)
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    kinds = {
        "sparse": numbers.to_sparse(),
        "csr": numbers.to_sparse_csr(),
        "jagged": nested,
        "meta": torch.empty(3, 4, device="meta"),
        "conjugated": numbers.to(torch.complex64).conj(),
    }
    for name, value in kinds.items():
        torch.save({"model": {"odd": value, "w": numbers}}, folder / f"{name}.pt")
    model = network()
    optimizer = trained(model, torch.optim.AdamW)
    torch.save(model, folder / "module.pt")
    torch.save(numbers, folder / "tensor.pt")
    parts = folder / "parts"
    parts.mkdir()
    torch.save(model.state_dict(), parts / "model.pt")
    torch.save(optimizer.state_dict(), parts / "optimizer.pt")
    truth(model, optimizer, folder / "parts.truth.pt")
    run = folder / "lightning-run"
    run.mkdir()
    for step in (10, 9):
        state = {"model": model.state_dict(), "global_step": step}
        torch.save(state, run / f"epoch=0-step={step}.ckpt")


def make_wrapped(folder: Path) -> None:
    """accelerate's save_state of one process, and Trainer with Adafactor and a tied head."""
    from accelerate import Accelerator
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        logging,
    )

    logging.set_verbosity_error()
    config = LlamaConfig(
        vocab_size=67, hidden_size=24, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        use_cache=False, attn_implementation="eager", tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(7)
    tokens = torch.randint(0, 67, (8, 12))
    for name, safe in (("accelerate", True), ("accelerate-bin", False)):
        accelerator = Accelerator(cpu=True)
        made = LlamaForCausalLM(config)
        groups = [
            {"params": [p for p in made.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in made.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        model, optimizer = accelerator.prepare(made, torch.optim.AdamW(groups, lr=0.01))
        for _ in range(2):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(str(folder / name), safe_serialization=safe)
        truth(model, optimizer.optimizer, folder / f"{name}.truth.pt")
    config.save_pretrained(folder / "config")
    made.save_pretrained(folder / "tied")

    class Watch(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            truth(trainer.model, trainer.optimizer.optimizer, folder / "adafactor.truth.pt")

    args = TrainingArguments(
        output_dir=str(folder / "run"), use_cpu=True, max_steps=2, save_steps=2, report_to=[],
        optim="adafactor", disable_tqdm=True, dataloader_pin_memory=False, learning_rate=0.01,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=rows, callbacks=[Watch()])
    trainer.train()
    (folder / "run/checkpoint-2").rename(folder / "adafactor")
    for number in (3, 12):
        made.save_pretrained(folder / f"exports/checkpoint-{number}")


def check_tied(folder: Path) -> None:
    """Load the made DCP and file of a tied model with torch: every key that the model asks for."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kept = AutoModelForCausalLM.from_pretrained(folder / "tied").state_dict()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "tied"))
    state = {"model": model.state_dict()}
    for value in state["model"].values():
        value.zero_()
    dcp.load(state, checkpoint_id=folder / "tied-dcp")
    assert all(torch.equal(kept[k], v) for k, v in state["model"].items())
    model.load_state_dict(torch.load(folder / "tied-torch/checkpoint.pt")["model"])


if __name__ == "__main__":
    where = Path(sys.argv[-1])
    if sys.argv[1] == "check":
        check_tied(where)
    else:
        make_stores(where)
        make_files(where)
        make_wrapped(where)
