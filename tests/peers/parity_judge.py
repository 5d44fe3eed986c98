"""One tiny llama under FSDP2, DeepSpeed and Megatron: trained, saved, resumed, its state shown.

    python -m peers.parity_judge CASES.json RESULTS.jsonl

One process imports the frameworks and forks the ranks of each case. Model, batches, rates and
options of the optimizer are the case's, so that all frameworks do the same work.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

from peers.fork_ranks import fork_job
from peers.parity import WINDOW

os.environ.update(
    DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_VERBOSITY="error",
)  # fmt: skip

Case = dict[str, Any]


def build(case: Case) -> Any:
    """The model with random weights of the case's seed, or those of `weights`; fp32."""
    import torch
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(case["seed"])
    config = LlamaConfig(**case["config"], use_cache=False, attn_implementation="eager")
    model = LlamaForCausalLM(config).float()
    if case["weights"]:
        model.load_state_dict({k: v.float() for k, v in load_file(case["weights"]).items()})
    return model


def groups_of(model: Any, case: Case) -> list[dict[str, Any]]:
    """Matrices with decay, vectors without."""
    wide = [p for p in model.parameters() if p.dim() > 1]
    flat = [p for p in model.parameters() if p.dim() < 2]
    decay = case["weight_decay"]
    return [{"params": wide, "weight_decay": decay}, {"params": flat, "weight_decay": 0.0}]


def tokens_of(case: Case, step: int) -> Any:
    """[batch, length + 1] tokens of a step; three batches in turn, as in megatron_training."""
    import torch

    generator = torch.Generator().manual_seed(9000 + step % 3)
    vocabulary = case["config"]["vocab_size"]
    return torch.randint(0, vocabulary, (case["batch"], case["length"] + 1), generator=generator)


def loss_of(logits: Any, tokens: Any) -> Any:
    """Mean over every token."""
    import torch

    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), tokens[:, 1:].reshape(-1)
    )


def mean_over_ranks(loss: Any) -> float:
    """The loss of the global batch."""
    import torch
    import torch.distributed as dist

    mean = torch.tensor([float(loss.detach().float())], dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean / dist.get_world_size())


def mine(tokens: Any, case: Case) -> Any:
    """This rank's share of a batch."""
    import torch.distributed as dist

    share = case["batch"] // case["world"]
    return tokens[dist.get_rank() * share : (dist.get_rank() + 1) * share]


class Torch:
    """A job whose optimizer is torch's."""

    case: Case
    schedule: Any

    def inner(self) -> Any:
        """The optimizer that holds the state."""
        raise NotImplementedError

    def numbers(self) -> dict[str, Any]:
        """The step counters that occur, and the options of each group."""
        inner = self.inner()
        return {
            "steps": sorted({float(s["step"]) for s in inner.state.values()}),
            "options": [[g["weight_decay"], *g["betas"], g["eps"]] for g in inner.param_groups],
        }

    def spoil(self, what: str) -> None:
        """Change one thing of the loaded state, to see that the next steps notice."""
        inner = self.inner()
        if what == "schedule":
            self.schedule.step()
        for group in inner.param_groups:
            if what == "decay":
                group["weight_decay"] /= 2
            elif what == "beta":
                group["betas"] = (group["betas"][0] * 0.99, group["betas"][1])
        for state in inner.state.values():
            if what == "step":
                state["step"] += 1
            elif what == "moment":
                state["exp_avg"].neg_()


# --- FSDP2 ---------------------------------------------------------------------------------------


class Fsdp(Torch):
    """fully_shard with AdamW and LambdaLR; bf16 computes in it, and keeps fp32 weights."""

    def __init__(self, case: Case) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.case, self.model = case, build(case)
        mixed = {}
        if case["dtype"] == "bf16":
            mixed["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        mesh = init_device_mesh("cpu", (case["world"],), mesh_dim_names=("fsdp",))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, **mixed)
        fully_shard(self.model, mesh=mesh, **mixed)
        fresh = wrong(case) if case["load"] else case
        self.optimizer = torch.optim.AdamW(
            groups_of(self.model, fresh), lr=1.0, betas=tuple(fresh["betas"]), eps=fresh["eps"],
            foreach=False,
        )  # fmt: skip
        rates = case["rates"]
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: rates[s])

    def _states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        return get_state_dict(self.model, self.optimizer)

    def save(self, folder: str, step: int) -> None:
        """As torchtitan and accelerate users do it: model, optim, lr_scheduler, train_state."""
        import torch.distributed.checkpoint as dcp

        weights, moments = self._states()
        state = {"model": weights, "optim": moments, "lr_scheduler": self.schedule.state_dict()}
        samples = step * self.case["batch"]
        state["train_state"] = {"step": step, "consumed_train_samples": samples}
        dcp.save(state, checkpoint_id=folder)

    def load(self, folder: str) -> int:
        """Everything by torch's own loader; the step that the scheduler says is next."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        weights, moments = self._states()
        train = {"step": -1}
        state = {
            "model": weights, "optim": moments, "lr_scheduler": self.schedule.state_dict(),
            "train_state": train,
        }  # fmt: skip
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments
        )
        # the job's own table of rates: base_lrs are the run's that saved
        self.schedule.load_state_dict(state["lr_scheduler"] | {"base_lrs": [1.0, 1.0]})
        assert state["train_state"]["step"] == self.schedule.last_epoch
        return int(self.schedule.last_epoch)

    def state(self) -> dict[str, Any]:
        """slot.name -> whole tensor, from the live parameters."""
        from torch.distributed.tensor import DTensor

        out = {}
        for name, parameter in self.model.named_parameters():
            held = {"master": parameter, **self.optimizer.state.get(parameter, {})}
            for slot in ("master", "exp_avg", "exp_avg_sq"):
                value = held.get(slot)
                if value is not None:
                    whole = value.full_tensor() if isinstance(value, DTensor) else value
                    out[f"{slot}.{name}"] = whole.detach().clone().contiguous()
        return out

    def step(self, number: int) -> dict[str, float]:
        """One optimizer step on the batch of `number`."""
        import torch
        from torch.distributed.tensor import DTensor

        tokens = mine(tokens_of(self.case, number), self.case)
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.model(input_ids=tokens[:, :-1]).logits, tokens)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.case["clip"], foreach=False
        )
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.schedule.step()
        return {"loss": mean_over_ranks(loss), "norm": float(norm), "lr": rate, "scale": 1.0}

    def inner(self) -> Any:
        """The optimizer that holds the state."""
        return self.optimizer


# --- DeepSpeed -----------------------------------------------------------------------------------


class Rates:
    """A schedule in the form of DeepSpeed's own: `last_batch_iteration` is all its state."""

    def __init__(self, optimizer: Any, rates: list[float]) -> None:
        self.optimizer, self.rates, self.last_batch_iteration = optimizer, rates, -1
        self._apply()

    def _apply(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[self.last_batch_iteration + 1]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """After each optimizer step."""
        self.last_batch_iteration += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """The rates in force."""
        return [g["lr"] for g in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """Source: deepspeed 0.19.8 runtime/lr_schedules.py, WarmupLR.state_dict."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """As WarmupLR's."""
        self.last_batch_iteration = state["last_batch_iteration"]
        self._apply()


class DeepSpeed(Torch):
    """A ZeRO engine over AdamW."""

    def __init__(self, case: Case) -> None:
        import deepspeed
        import torch

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo needs no op build
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        self.case = case
        model = build(case)
        fresh = wrong(case) if case["load"] else case
        optimizer = torch.optim.AdamW(
            groups_of(model, fresh), lr=1.0, betas=tuple(fresh["betas"]), eps=fresh["eps"]
        )
        config: dict[str, Any] = {
            "train_batch_size": case["batch"],
            "train_micro_batch_size_per_gpu": case["batch"] // case["world"],
            "gradient_accumulation_steps": 1,
            "steps_per_print": 10**9,
            "gradient_clipping": case["clip"],
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": case["stage"]},
        }
        if case["dtype"] == "bf16":
            config["bf16"] = {"enabled": True}
        if case["dtype"] == "fp16":
            fp16 = {"initial_scale_power": 9, "loss_scale_window": WINDOW, "hysteresis": 2}
            config["fp16"] = {"enabled": True, **fp16}
            deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # torch can
        self.engine = deepspeed.initialize(
            model=model, config=config, optimizer=optimizer,
            lr_scheduler=Rates(optimizer, case["rates"]),
        )[0]  # fmt: skip
        self.schedule = self.engine.lr_scheduler
        self.schedule.optimizer = self.engine.optimizer

    def save(self, folder: str, step: int) -> None:
        """engine.save_checkpoint."""
        assert self.engine.global_steps == step
        self.engine.save_checkpoint(folder)

    def load(self, folder: str) -> int:
        """engine.load_checkpoint; the next step as the engine counts."""
        path, _ = self.engine.load_checkpoint(folder)
        assert path is not None, "load_checkpoint found nothing"
        assert self.schedule.last_batch_iteration + 1 == self.engine.global_steps
        self.schedule.load_state_dict(self.schedule.state_dict())
        return int(self.engine.global_steps)

    def state(self) -> dict[str, Any]:
        """slot.name -> whole tensor, by DeepSpeed's own accessors."""
        from peers.deepspeed_judge import state_of

        slots = {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
        out = {}
        for key, value in state_of(self.engine, {}).items():
            name, _, slot = key.rpartition("/")
            out[f"{slots[slot]}.{name}"] = value.contiguous()
        return out

    def step(self, number: int) -> dict[str, float]:
        """One optimizer step on the batch of `number`."""
        tokens = mine(tokens_of(self.case, number), self.case)
        loss = loss_of(self.engine(input_ids=tokens[:, :-1]).logits, tokens)
        self.engine.backward(loss)
        rate = self.engine.optimizer.param_groups[0]["lr"]
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        scale = float(getattr(self.engine.optimizer, "cur_scale", 1.0))
        return {"loss": mean_over_ranks(loss), "norm": float(norm), "lr": rate, "scale": scale}

    def inner(self) -> Any:
        """The optimizer that holds the state."""
        return self.engine.optimizer.optimizer


def job_of(case: Case) -> Any:
    """The job of a case's framework, with fresh state."""
    if case["framework"] == "megatron":
        from peers.parity_megatron import Megatron

        return Megatron(case)
    return {"fsdp2": Fsdp, "deepspeed": DeepSpeed}[case["framework"]](case)


# --- cases ---------------------------------------------------------------------------------------


def wrong(case: Case) -> Case:
    """Options that only a load corrects."""
    return {**case, "weight_decay": 0.33, "betas": [0.1, 0.2], "eps": 1e-3}


def run_rank(case: Case, rank: int, out: Path) -> None:
    """One rank of a case; rank 0 writes the result."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=case["seconds"]))
    job = job_of({**case, "seed": 99} if case["load"] else case)
    first = job.load(case["load"]) if case["load"] else 0
    if case["spoil"]:
        job.spoil(case["spoil"])
    before = [job.step(i) for i in range(first, first + case["before"])]
    at = first + case["before"]
    if case["save"]:
        job.save(case["save"], at)
    report = {"name": case["name"], "error": None, "first": at, **job.numbers()}

    def show(after: int) -> None:
        state = job.state()
        if rank == 0 and case["state"]:
            save_file(state, f"{case['state']}-{after}")

    show(0)
    after = []
    for n in range(1, case["steps"] + 1):
        after.append(job.step(at + n - 1))
        if n in case["probes"]:
            show(n)
    if case["back"]:
        job.save(case["back"], at + case["steps"])
    for key, what in (("losses", "loss"), ("norms", "norm"), ("lrs", "lr"), ("scales", "scale")):
        report[key] = [s[what] for s in after]
        report["before"] = {**report.get("before", {}), key: [s[what] for s in before]}
    if rank == 0:
        out.write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def judged(case: Case, logs: Path) -> dict[str, Any]:
    """The result of one case; its failure is part of it."""
    out = logs / "result.json"
    logs.mkdir(parents=True, exist_ok=True)
    error = fork_job(
        lambda rank: run_rank(case, rank, out), case["world"], logs / "ranks", case["seconds"]
    )
    if error is not None or not out.exists():
        return {"name": case["name"], "error": error or "no result"}
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def main() -> None:
    """Judge every case of a file."""
    import deepspeed
    import torch
    import torch.distributed.checkpoint
    import transformers.models.llama.modeling_llama  # noqa: F401  # imported for the forks

    import peers.parity_megatron  # noqa: F401  # as well

    assert deepspeed.__version__
    torch.set_num_threads(1)
    wanted, found = Path(sys.argv[1]), Path(sys.argv[2])
    with found.open("w") as out:
        for i, case in enumerate(json.loads(wanted.read_text())):
            out.write(json.dumps(judged(case, found.parent / f"case-{i}")) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
