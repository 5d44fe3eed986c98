"""accelerate's own loop and transformers' Trainer with FSDP2: train, save, resume.

    python -m peers.fsdp_wrapper_judge CASES.json RESULTS.jsonl

Both run as users have them but for one switch: without a GPU accelerate turns FSDP into DDP, and
is told here that it is FSDP. What saves and loads is theirs, unmodified.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from peers.fork_ranks import fork_job

os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error",
)  # fmt: skip

Case = dict[str, Any]
_SAMPLES, _LENGTH, _BATCH, _STEPS = 48, 12, 8, 20


def build(case: Case) -> Any:
    """The case's llama, with random weights of its seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(case["seed"])
    return LlamaForCausalLM(
        LlamaConfig(**case["config"], use_cache=False, attn_implementation="eager")
    )


def samples(case: Case) -> list[dict[str, Any]]:
    """The same tokens for every run."""
    import torch

    made = torch.Generator().manual_seed(31)
    size = (_SAMPLES, _LENGTH)
    tokens = torch.randint(0, case["config"]["vocab_size"], size, generator=made)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def as_fsdp() -> None:
    """Let accelerate keep FSDP where there is no GPU."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    own = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def live(model: Any, optimizer: Any) -> dict[str, Any]:
    """slot.name -> whole tensor."""
    from torch.distributed.tensor import DTensor

    inner = getattr(optimizer, "optimizer", optimizer)
    out = {}
    for name, parameter in model.named_parameters():
        held = {"param": parameter, **inner.state.get(parameter, {})}
        for slot, value in held.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            out[f"{slot}.{name}"] = whole.detach().clone().contiguous()
    return out


def spoil(case: Case, optimizer: Any) -> None:
    """Change one thing of the loaded state."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        if case["spoil"] == "moment":
            state["exp_avg"].neg_()
        elif case["spoil"] == "step":
            state["step"] += 3


# --- accelerate ----------------------------------------------------------------------------------


def accelerate_run(case: Case) -> tuple[list[float], dict[str, Any]]:
    """A loop of one's own around Accelerator: save_state and load_state."""
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    world, at = case["world"], case["at"]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = build(case)
    wide = [p for p in model.parameters() if p.dim() > 1]
    flat = [p for p in model.parameters() if p.dim() < 2]
    decay = 0.3 if case["load"] else 0.1
    optimizer = torch.optim.AdamW(
        [{"params": wide, "weight_decay": decay}, {"params": flat, "weight_decay": 0.0}], lr=0.01
    )
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s / world + 1) / 4) * 0.97 ** (s / world)
    )
    model, optimizer, rates = accelerator.prepare(model, optimizer, rates)
    if case["load"]:
        accelerator.load_state(case["load"])
    state = live(model, optimizer) if case["load"] else {}
    spoil(case, optimizer)
    rows, share = samples(case), _BATCH // world
    losses: list[float] = []
    for step in range(at if case["load"] else 0, at + case["steps"]):
        if case["save"] and step == at:
            accelerator.save_state(case["save"])
            state = live(model, optimizer)
        first = (step * _BATCH) % _SAMPLES + accelerator.process_index * share
        batch = {k: torch.stack([r[k] for r in rows[first : first + share]]) for k in rows[0]}
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses[-case["steps"] :], state


# --- Trainer -------------------------------------------------------------------------------------


def trainer_run(case: Case) -> tuple[list[float], dict[str, Any]]:
    """Trainer(fsdp=...): saves checkpoint-N, resumes from one."""
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    transformers.logging.set_verbosity_error()
    end = case["at"] + case["steps"]
    args = TrainingArguments(
        output_dir=str(Path(case["save"] or case["work"])), use_cpu=True, ddp_backend="gloo",
        per_device_train_batch_size=_BATCH // case["world"], max_steps=_STEPS, learning_rate=0.01,
        weight_decay=0.1, adam_beta2=0.95, warmup_steps=3, logging_steps=1, save_strategy="steps",
        save_steps=case["at"] if case["save"] else 1000, report_to=[], seed=5, data_seed=5,
        disable_tqdm=True, dataloader_pin_memory=False, fsdp=True,
        fsdp_config={
            "version": 2, "state_dict_type": "SHARDED_STATE_DICT",
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        },
    )  # fmt: skip
    found: dict[str, Any] = {}

    class Watch(TrainerCallback):
        """Looks at the state when it is saved, or before the first step after loading."""

        def on_save(self, *_: Any, **__: Any) -> None:
            found.update(live(trainer.model, trainer.optimizer))

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if case["load"] and not found:
                found.update(live(trainer.model, trainer.optimizer))
                spoil(case, trainer.optimizer)

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            if state.global_step >= end:
                control.should_training_stop, control.should_save = True, False

    trainer = Trainer(model=build(case), args=args, train_dataset=samples(case))
    trainer.add_callback(Watch())
    trainer.train(resume_from_checkpoint=case["load"])
    by_step = {x["step"]: x["loss"] for x in trainer.state.log_history if "loss" in x}
    return [by_step[s] for s in range(case["at"] + 1, end + 1)], found


RUNS = {"accelerate": accelerate_run, "trainer": trainer_run}


def run_rank(case: Case, rank: int, out: Path) -> None:
    """One rank of a case; rank 0 writes the result."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    as_fsdp()
    losses, state = RUNS[case["wrapper"]]({**case, "seed": 99 if case["load"] else 7})
    if rank == 0:
        save_file(state, case["state"])
        out.write_text(json.dumps({"name": case["name"], "error": None, "losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Judge every case of a file."""
    import accelerate
    import transformers.models.llama.modeling_llama  # noqa: F401  # imported for the forks
    from transformers import Trainer

    assert Trainer
    assert accelerate.__version__
    wanted, found = Path(sys.argv[1]), Path(sys.argv[2])
    with found.open("w") as lines:
        for i, case in enumerate(json.loads(wanted.read_text())):
            logs = found.parent / f"case-{i}"
            logs.mkdir(parents=True)
            case["work"] = str(logs / "work")
            out = logs / "result.json"
            error = fork_job(
                lambda rank, c=case, o=out: run_rank(c, rank, o),
                case["world"], logs / "ranks", case["seconds"],
            )  # fmt: skip
            if error is not None:
                out.write_text(json.dumps({"name": case["name"], "error": error}))
            lines.write(out.read_text() + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
