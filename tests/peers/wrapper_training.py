"""The runs of fixtures/wrappers that go through DeepSpeed, resumed by the real wrapper.

Taken over from the scripts that wrote the fixtures: every number here is theirs. What a GPU machine
does not need is in `on_cpu`, and touches neither how checkpoints are written nor how they are read.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

SEQUENCE, SAMPLES, BATCH, MAX_STEPS = 12, 40, 8, 20
Recipe = dict[str, Any]
Loaded = Callable[[Any], None]  # called with the DeepSpeed engine once it holds the checkpoint


@dataclass
class Ran:
    """The losses after the save, and the rates of these steps."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def model_of(recipe: Recipe, seed: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 67, "hidden_size": 22, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 6,
        "max_position_embeddings": 32, "attention_bias": True, "tie_word_embeddings": False,
        "use_cache": False, "attn_implementation": "eager",
    }  # fmt: skip
    seed_all(seed)
    return LlamaForCausalLM(LlamaConfig(**sizes, **recipe.get("model", {})))


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Fixed sequences."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4321)
        rows = [torch.randint(0, 67, (SAMPLES,), generator=generator)]
        for _ in range(SEQUENCE - 1):
            noise = torch.randint(0, 3, (SAMPLES,), generator=generator)
            rows.append((5 * rows[-1] + 3 + noise) % 67)
        self.ids = torch.stack(rows, 1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    held = list(model.parameters())
    return [
        {"params": [p for p in held if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in held if p.ndim < 2], "weight_decay": 0.0},
    ]


def config_of(recipe: Recipe, world: int) -> dict[str, Any]:
    """The DeepSpeed config, as each wrapper's user writes it."""
    accumulated = recipe.get("gas", 1)
    sizes: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
    }
    if recipe["wrapper"] != "trainer":
        sizes = {
            "train_micro_batch_size_per_gpu": BATCH // world // accumulated,
            "gradient_accumulation_steps": accumulated,
            "train_batch_size": BATCH,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
        }
    zero = {"stage": recipe["stage"], **recipe.get("zero", {})}
    config = {**sizes, "bf16": {"enabled": True}, "zero_optimization": zero}
    return json.loads(json.dumps({**config, **recipe.get("ds", {})}))  # type: ignore[no-any-return]  # JSON


def on_cpu(wrapper: str) -> None:
    """What it takes to run the real wrappers under DeepSpeed without a GPU."""
    import deepspeed
    import transformers.training_args

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo needs no op build
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    if wrapper == "lightning":
        from lightning.pytorch.strategies import DeepSpeedStrategy

        initialize = deepspeed.initialize

        def initialized(*a: Any, args: Any = None, **k: Any) -> Any:
            args.device_rank = int(os.environ["LOCAL_RANK"])  # a CPU has no index
            return initialize(*a, args=args, **k)

        deepspeed.initialize = initialized

        def set_up(self: Any) -> None:  # its own asks for CUDA
            self.set_world_ranks()
            self._init_deepspeed_distributed()

        DeepSpeedStrategy.setup_environment = set_up
        return
    # without a GPU accelerate finds no backend under DeepSpeed: every rank were rank 0 of 1
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._prepare_backend = lambda self, *a, **k: ("gloo", DistributedType.MULTI_CPU)


def run(recipe: Recipe, world: int, resume: Path | None, steps: int, loaded: Loaded) -> Ran:
    """Train `steps` steps behind the fixture's save: afresh, or from a checkpoint.

    A resumed model has weights of another seed, so that each has to come from the checkpoint.
    """
    on_cpu(recipe["wrapper"])
    seed = recipe.get("seed", 11) + (1000 if resume else 0)
    under = {"trainer": run_trainer, "accelerate": run_accelerate, "lightning": run_lightning}
    return under[recipe["wrapper"]](recipe, world, resume, steps, loaded, seed)


def run_trainer(
    recipe: Recipe, world: int, resume: Path | None, steps: int, loaded: Loaded, seed: int
) -> Ran:
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    transformers.logging.set_verbosity_error()
    accumulated, save = recipe.get("gas", 1), recipe["save_step"]
    args = TrainingArguments(
        output_dir="out", max_steps=MAX_STEPS, learning_rate=1e-2, weight_decay=0.1,
        per_device_train_batch_size=BATCH // world // accumulated, adam_beta2=0.95,
        gradient_accumulation_steps=accumulated, max_grad_norm=1.0, warmup_steps=3,
        lr_scheduler_type=recipe.get("lr_scheduler", "linear"), logging_steps=1,
        save_strategy="no", report_to=[], seed=recipe.get("seed", 11), data_seed=5, bf16=True,
        disable_tqdm=True, dataloader_pin_memory=False, optim="adamw_torch",
        deepspeed=config_of(recipe, world),
    )  # fmt: skip

    class Watch(TrainerCallback):
        first = True

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.first and resume is not None:
                loaded(trainer.model_wrapped)
            self.first = False

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= save + steps

    trainer = Trainer(
        model=model_of(recipe, seed), args=args, train_dataset=Tokens(),
        data_collator=default_data_collator, callbacks=[Watch()],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    rows = [row for row in trainer.state.log_history if "loss" in row and row["step"] > save]
    return Ran([row["loss"] for row in rows], [row["learning_rate"] for row in rows])


def run_accelerate(
    recipe: Recipe, world: int, resume: Path | None, steps: int, loaded: Loaded, seed: int
) -> Ran:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from transformers import get_linear_schedule_with_warmup

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config_of(recipe, world)),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    model = model_of(recipe, seed)
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2, betas=(0.9, 0.95))
    schedule = get_linear_schedule_with_warmup(optimizer, 3 * world, MAX_STEPS * world)
    set_seed(5)
    rows = torch.utils.data.DataLoader(Tokens(), batch_size=BATCH // world, shuffle=True)
    engine, optimizer, rows, schedule = accelerator.prepare(model, optimizer, rows, schedule)
    save, done, ran = recipe["save_step"], 0, Ran()
    if resume is not None:
        accelerator.load_state(str(resume))
        done = save
        loaded(engine)
    while done < save + steps:
        epoch, skip = divmod(done, len(rows))
        batches = accelerator.skip_first_batches(rows, skip) if skip else rows
        batches.set_epoch(epoch)
        for batch in batches:
            loss = engine(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
            if done > save:
                ran.losses.append(mean_over_ranks(loss))
                ran.rates.append(schedule.get_last_lr()[0])
            if done == save + steps:
                break
    return ran


def mean_over_ranks(loss: torch.Tensor) -> float:
    mean = loss.detach().double().reshape(1).clone()
    torch.distributed.all_reduce(mean)
    return float(mean / torch.distributed.get_world_size())


class Rows(torch.utils.data.DataLoader[dict[str, torch.Tensor]]):
    """A stateful loader: without one, Lightning starts the epoch's data again on a resume."""

    served = 0

    def __iter__(self) -> Any:
        begin = self.served % (SAMPLES // BATCH)
        self.served = begin
        for i, batch in enumerate(super().__iter__()):
            if i >= begin:
                self.served = i + 1
                yield batch
        self.served = 0

    def state_dict(self) -> dict[str, int]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.served = state["served"]


def run_lightning(
    recipe: Recipe, world: int, resume: Path | None, steps: int, loaded: Loaded, seed: int
) -> Ran:
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DeepSpeedStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    save, ran, rank = recipe["save_step"], Ran(), int(os.environ["RANK"])

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of(recipe, seed)
            self.steps = save if resume else 0

        def training_step(self, batch: Any, i: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.steps += 1
            if self.steps > save:
                ran.losses.append(mean_over_ranks(loss))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(two_groups(self.model), lr=1e-2, betas=(0.9, 0.95))
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 1e-2, total_steps=MAX_STEPS, cycle_momentum=False
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    class Watch(lightning.Callback):
        first = True

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, i: int) -> None:
            if self.first and resume is not None:
                loaded(trainer.strategy.model)
            self.first = False

        def on_train_batch_end(
            self, trainer: Any, module: Any, out: Any, batch: Any, i: int
        ) -> None:
            if module.steps > save:
                ran.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    config = config_of(recipe, world)
    for ours in ("bf16", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping"):
        del config[ours]  # Lightning sets these from its own arguments
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world, max_steps=save + steps, logger=False,
        strategy=DeepSpeedStrategy(config=config, process_group_backend="gloo"),
        precision="bf16-true", enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, gradient_clip_val=1.0,
        plugins=[LightningEnvironment()], callbacks=[Watch()],
    )  # fmt: skip
    each = BATCH // world
    mine = [
        list(range(at + rank * each, at + (rank + 1) * each)) for at in range(0, SAMPLES, BATCH)
    ]
    rows = Rows(Tokens(), batch_sampler=mine)
    trainer.fit(Module(), rows, ckpt_path=str(resume) if resume else None, weights_only=False)
    return ran
