"""Megatron-core under the cases of parity_judge: the same model, batches, rates and options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron.core.parallel_state import initialize_model_parallel

from peers import MegatronCase, megatron_cpu
from peers.megatron_checkpoint import load, open_checkpoint
from peers.megatron_judge import SPOILS
from peers.megatron_make import LLAMA, save
from peers.megatron_model import build, members, precision
from peers.megatron_state import adam_steps, gather, group_options
from peers.megatron_training import one_step
from peers.parity import WINDOW

Case = dict[str, Any]


def arguments(case: Case) -> argparse.Namespace:
    """megatron.training's args for the model, the optimizer and the schedule of a case."""
    config = case["config"]
    args = argparse.Namespace(**LLAMA)
    args.num_layers = args.encoder_num_layers = config["num_hidden_layers"]
    args.hidden_size, args.ffn_hidden_size = config["hidden_size"], config["intermediate_size"]
    args.num_attention_heads = config["num_attention_heads"]
    args.num_query_groups, args.kv_channels = config["num_key_value_heads"], config["head_dim"]
    args.vocab_size, args.make_vocab_size_divisible_by = config["vocab_size"], 1
    args.max_position_embeddings = config["max_position_embeddings"]
    args.layernorm_epsilon = config["rms_norm_eps"]
    args.seq_length, args.global_batch_size = case["length"], case["batch"]
    args.bf16, args.fp16 = case["dtype"] == "bf16", case["dtype"] == "fp16"
    args.params_dtype = precision(args)
    args.initial_loss_scale, args.loss_scale_window, args.hysteresis = 512.0, WINDOW, 2
    args.weight_decay, args.clip_grad = case["weight_decay"], case["clip"]
    args.adam_beta1, args.adam_beta2 = case["betas"]
    args.adam_eps, args.seed = case["eps"], case["seed"]
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = case["tp"], case["pp"]
    args.virtual_pipeline_model_parallel_size = None
    args.expert_model_parallel_size, args.expert_tensor_parallel_size = 1, case["tp"]
    args.decoder_first_pipeline_num_layers = case["first_stage"]
    args.decoder_last_pipeline_num_layers = None
    args.world_size = case["world"]
    args.data_parallel_size = case["world"] // (case["tp"] * case["pp"])
    args.use_distributed_optimizer = case["distributed"] != "none"
    args.padded_vocab_size = args.vocab_size
    args.iteration = args.consumed_train_samples = 0
    args.consumed_valid_samples = args.skipped_train_samples = 0
    return args


class Megatron:
    """A Megatron job with FusedAdam's state layout; its schedule is that of megatron_make."""

    def __init__(self, case: Case) -> None:
        initialize_model_parallel(case["tp"], case["pp"], create_gloo_process_groups=True)
        megatron_cpu.patch(fused_adam=True)
        self.case, args = case, arguments(case)
        folder = case["load"] or case["weights"]
        self.asked = MegatronCase(
            name=case["name"], checkpoint=Path(folder), tp=case["tp"], pp=case["pp"],
            dp=args.data_parallel_size, first_stage=case["first_stage"],
            padded_vocab=args.vocab_size, override_schedule=True,
            weights_only=case["load"] is None,
        )  # fmt: skip
        self.job = build(args, self.asked, case["distributed"])
        if case["load"] is None:
            load(self.job, open_checkpoint(Path(folder)), self.asked)
        else:  # options that only a load corrects
            for group in self._groups():
                group["betas"], group["eps"] = (0.1, 0.2), 1e-3

    def _groups(self) -> list[dict[str, Any]]:
        return [g for o in members(self.job.optimizer) for g in o.param_groups if g["params"]]

    def save(self, folder: str, step: int) -> None:
        """As megatron.training does, with what it counts in its args."""
        args = self.job.args
        args.iteration, args.consumed_train_samples = step, step * args.global_batch_size
        save(self.job, MegatronCase(**{**_fields(self.asked), "checkpoint": Path(folder)}), step)

    def load(self, folder: str) -> int:
        """By Megatron's own loader, nothing missing, nothing left over; the next iteration."""
        opened = open_checkpoint(Path(folder))
        load(self.job, opened, self.asked)
        step = int(opened.state["iteration"])
        assert self.job.schedule.num_steps == step * self.job.args.global_batch_size
        return step

    def state(self) -> dict[str, Any]:
        """slot.name -> whole tensor on rank 0; an fp32 weight is its own master."""
        live = gather(self.job, weights_only=False)
        alone = not any(key.startswith("master.") for key in live)
        return {
            f"master.{key.removeprefix('model.')}" if key.startswith("model.") else key: value
            for key, value in live.items()
            if alone or not key.startswith("model.")
        }

    def step(self, number: int) -> dict[str, float]:
        """One optimizer step on the batch of `number`."""
        (rate,) = {g["lr"] for g in self._groups()}
        loss, norm = one_step(self.job, number)
        scale = float(self.job.optimizer.get_loss_scale())
        return {"loss": loss, "norm": norm, "lr": rate, "scale": scale}

    def numbers(self) -> dict[str, Any]:
        """The step counters that occur, and the options of each group."""
        groups = sorted(group_options(self.job), key=lambda g: -g["weight_decay"])
        return {
            "steps": [float(n) for n in adam_steps(self.job)],
            "options": [[g["weight_decay"], *g["betas"], g["eps"]] for g in groups],
        }

    def spoil(self, what: str) -> None:
        """Change one thing of the loaded state on every rank."""
        SPOILS["lr" if what == "schedule" else what](self.job)


def _fields(case: MegatronCase) -> dict[str, Any]:
    return {name: getattr(case, name) for name in MegatronCase.__slots__}
