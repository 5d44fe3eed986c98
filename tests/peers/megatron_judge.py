"""megatron-core judges checkpoints on a CPU: megatron_judge CASES.json RESULTS.jsonl.

One process imports torch and Megatron once (8 CPU seconds) and forks the ranks of each case.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from peers import MegatronCase, megatron_cpu
from peers.fork_ranks import fork_ranks
from peers.megatron_checkpoint import UnloadableError, home, load, open_checkpoint, true_state
from peers.megatron_model import Job, build, join_ranks, members, padded_vocab, real_vocab
from peers.megatron_state import (
    adam_steps,
    differences,
    distinct,
    gather,
    group_options,
    largest_differences,
    unrounded,
)
from peers.megatron_training import Curve, train

#: How much farther from the reference than the native reload a case may end. The reload of equal
#: bits at an equal topology ends equally far; twice is the law's own margin.
FLOORS = 2.0
#: The same where Megatron cannot reload at the topology, and the floor is a few draws of the noise
#: itself (micro-batches of other sizes at home). On two CPUs, three MoE runs at another EP or with
#: other micro-batches parted 8e-5 to 1.6e-3 in loss, for one run up to 9 times as far as at its
#: least, and 2e-4 to 8e-3 in gradient norm, up to 34 times. What is left to this bound is little:
#: live tensors, steps, group options and the schedule are compared outright.
DRAWS = 12.0


def main(wanted: Path, found: Path) -> None:
    """Judge every case; one JSON line each, in order, written as soon as it is known."""
    torch.set_num_threads(1)  # forks of a process with a thread pool hang in it
    cases = [case_of(fields) for fields in json.loads(wanted.read_text())]
    with tempfile.TemporaryDirectory(dir=wanted.parent) as scratch, found.open("w") as out:
        runs = Runs(Path(scratch))
        for case in cases:
            try:
                result = judge_case(case, runs)
            except Exception:  # what one case trips over must not cost the others their verdict
                result = {"name": case.name, "ok": False, "error": traceback.format_exc()}
            out.write(json.dumps(result) + "\n")
            out.flush()


def case_of(fields: dict[str, Any]) -> MegatronCase:
    """A case from its JSON."""
    for name in ("checkpoint", "truth", "native", "floor_native", "args"):
        fields[name] = fields[name] and Path(fields[name])
    floor_at = tuple((name, n) for name, n in fields["floor_at"])
    fields |= {name: tuple(fields[name]) for name in ("probes", "floor_micro_batches")}
    return MegatronCase(**fields | {"floor_at": floor_at})


class Runs:
    """Finished runs of this batch: cases that share a native reload train it once."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.done: dict[MegatronCase, dict[str, Any]] = {}

    def run(self, case: MegatronCase) -> dict[str, Any]:
        """The report of rank 0, with `error` set when any rank failed."""
        key = replace(case, name="", seconds=0.0)
        if key not in self.done:
            self.done[key] = run_case(case, self.scratch / str(len(self.done)))
        return self.done[key] | {"name": case.name}


def run_case(case: MegatronCase, folder: Path) -> dict[str, Any]:
    """Fork the ranks of one case and read what rank 0 reports."""
    began = time.monotonic()
    folder.mkdir()

    def rank_main(rank: int) -> None:
        judge_rank(case, rank, folder)

    error = fork_ranks(rank_main, case.world, folder / "logs", case.seconds)
    report: dict[str, Any] = {"name": case.name, "error": error, "folder": str(folder)}
    if error is None:
        report |= json.loads((folder / "report.json").read_text())
    return report | {"seconds": round(time.monotonic() - began, 2)}


def judge_rank(case: MegatronCase, rank: int, folder: Path) -> None:
    """One rank: load, compare, train. Rank 0 writes report.json and after-N.safetensors."""
    opened = open_checkpoint(case.checkpoint)
    join_ranks(case, rank, folder / "rendezvous")
    megatron_cpu.patch(fused_adam=opened.fused_adam)
    torch.manual_seed(99)  # so that a weight that is not loaded differs from the saved one
    args = open_checkpoint(case.args).args if case.args else opened.args
    job = build(args, case, case.distributed or opened.distributed)
    rng = load(job, opened, case)
    report = compare(job, case, opened.legacy) | {"rng": rng}
    if case.spoil:
        SPOILS[case.spoil](job)

    def probe(step: int) -> None:
        if step in case.probes:
            state = gather(job, weights_only=False)
            if rank == 0:
                save_file(state, folder / f"after-{step}.safetensors")

    curve = train(job, opened.state.get("iteration", 0), case.steps, probe, case.micro_batch)
    if rank == 0:
        report |= asdict(curve) | {"world": case.world, "distributed": job.distributed}
        (folder / "report.json").write_text(json.dumps(report | true_curve(case, curve)))
    dist.barrier()
    dist.destroy_process_group()


def compare(job: Job, case: MegatronCase, legacy: bool) -> dict[str, Any]:
    """What was loaded, held against the truth. Collective; the verdict is known to rank 0."""
    if legacy and not case.truth:
        raise UnloadableError("a legacy checkpoint has no global names: give the case a truth")
    truth, facts = true_state(case.truth or case.checkpoint)
    live = gather(job, weights_only=case.weights_only)
    report = {
        "adam_steps": [] if case.weights_only else adam_steps(job),
        "groups": group_options(job),
        "schedule": job.schedule.state_dict(),
    }
    if dist.get_rank():
        return report
    if case.weights_only:
        truth = {key: value for key, value in truth.items() if key.startswith("model.")}
    different = differences(live, truth, real_vocab(job.args))
    if "step" in facts and not case.weights_only and report["adam_steps"] != [facts["step"]]:
        different.append(f"Adam's step: {report['adam_steps']} for {facts['step']}")
    slots = sorted({key.split(".")[0] for key in truth})
    return report | {
        "tensors": len(truth),
        "slots": slots,
        "different": different,
        "unrounded": unrounded(live),
    }


def true_curve(case: MegatronCase, curve: Curve) -> dict[str, Any]:
    """How far losses and gradient norms are from those of the run that wrote the fixture."""
    path = case.truth and case.truth / "truth.json"
    if not path or not path.exists():
        return {}
    facts = json.loads(path.read_text())
    return {
        "loss_difference": farthest(curve.losses, facts["losses"]),
        "grad_norm_difference": farthest(curve.grad_norms, facts["grad_norms"]),
    }


def farthest(a: list[float], b: list[float]) -> float:
    """The largest difference over the steps that both have; infinite if one is not a number."""
    gaps = [abs(x - y) for x, y in zip(a, b, strict=False)]
    return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=math.inf)


def judge_case(case: MegatronCase, runs: Runs) -> dict[str, Any]:
    """The result of a case, with its noise floor where a native checkpoint is given."""
    result = runs.run(case)
    if result["error"] is None and case.native:
        # spoilt state is what the floor must catch, so the floor itself is never spoilt
        reload = replace(
            case,
            checkpoint=case.native,
            truth=case.truth or case.native,
            distributed=None,
            native=None,
            spoil=None,
        )
        # the same rows of padding everywhere: they count in the softmax
        rows = padded_vocab(open_checkpoint(case.native).args, case)
        at_home = home(case.native) | {"padded_vocab": rows}
        origin = runs.run(replace(reload, name=f"{case.name}: native at home", **at_home))
        floor_from, like = origin, None
        if case.floor_native:
            source = replace(reload, checkpoint=case.floor_native, truth=case.floor_native)
            degrees = {"padded_vocab": rows} | home(case.floor_native)
            floor_from = runs.run(replace(source, name=f"{case.name}: floor at home", **degrees))
            degrees |= {"etp": None, "dp": None} | dict(case.floor_at)
            floors = [runs.run(replace(source, name=f"{case.name}: floor", **degrees))]
        elif case.floor_micro_batches:
            floors = [
                runs.run(replace(reload, name=f"{case.name}: by {n}", micro_batch=n, **at_home))
                for n in case.floor_micro_batches
            ]
        else:
            like = runs.run(replace(reload, name=f"{case.name}: native reload"))
            floors = [like]
        broken = [run["error"] for run in (*floors, floor_from, origin) if run["error"]]
        if broken:
            result["error"] = "native reload failed:\n" + "\n".join(broken)
        else:
            found = [distances(run, floor_from, case.probes) for run in floors]
            floor = {name: max(one[name] for one in found) for name in found[0]}
            times = DRAWS if case.floor_micro_batches else FLOORS
            result |= hold_to_floor(result, floor, times, like or origin, origin, case.probes)
    result["ok"] = (
        result["error"] is None
        and not result["different"]
        and not result.get("beyond_floor")
        and all(map(math.isfinite, result["losses"] + result["grad_norms"]))
    )
    result.pop("folder")
    return result


def hold_to_floor(
    case: dict[str, Any],
    floor: dict[str, float],
    times: float,
    like: dict[str, Any],
    origin: dict[str, Any],
    probes: tuple[int, ...],
) -> dict[str, Any]:
    """Distances of the case from the native run at its own topology, held to the noise floor.

    Adds to `different` what must be equal to the run `like`: step counts, group options and the
    schedule.
    """
    distance = distances(case, origin, probes)
    if like is origin:  # of another topology: at EP 1 no group is of experts
        case, like = ({**run, "groups": without_experts(run["groups"])} for run in (case, like))
    beyond = [
        f"{name}: {distance[name]:.3g}, and a native reload {floor[name]:.3g}"
        for name in distance
        if distance[name] > times * floor[name]
    ]
    different = case["different"] + [
        f"{name}: {case[name]} for {like[name]}"
        for name in ("adam_steps", "groups", "schedule")
        if case[name] != like[name]
    ]
    return {
        "floor": floor,
        "distance": distance,
        "beyond_floor": beyond,
        "different": different,
    }


def without_experts(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Distinct group options, whether or not a group is of experts."""
    return distinct(
        [{k: v for k, v in group.items() if k != "is_expert_parallel"} for group in groups]
    )


def distances(
    run: dict[str, Any], origin: dict[str, Any], probes: tuple[int, ...]
) -> dict[str, float]:
    """{what: largest difference} of two runs: losses, norms, learning rates, states."""
    found = {name: farthest(run[name], origin[name]) for name in ("losses", "grad_norms")}
    found["lrs"] = farthest(*([lr for step in one["lrs"] for lr in step] for one in (run, origin)))
    for step in probes:
        states = (load_file(f"{one['folder']}/after-{step}.safetensors") for one in (run, origin))
        for slot, gap in largest_differences(*states).items():
            found[f"{slot} after {step}"] = gap
    return found


def spoil_step(job: Job) -> None:
    """One more step than Adam has taken."""
    for one in members(job.optimizer):
        for group in one.optimizer.param_groups:
            if "step" in group:
                group["step"] += 1
        for state in one.optimizer.state.values():
            if "step" in state:
                state["step"] += 1


def spoil_decay(job: Job) -> None:
    """Half the weight decay; Megatron takes it from the schedule at each step."""
    job.schedule.start_wd = job.schedule.end_wd = job.schedule.end_wd / 2
    job.schedule.step(increment=0)


def spoil_beta(job: Job) -> None:
    """Another beta1 in every group."""
    for one in members(job.optimizer):
        for group in one.optimizer.param_groups:
            group["betas"] = (group["betas"][0] * 0.99, group["betas"][1])


def spoil_moment(job: Job) -> None:
    """One parameter's first moment negated, on the ranks that hold it."""
    for one in members(job.optimizer)[:1]:
        for state in list(one.optimizer.state.values())[:1]:
            state["exp_avg"].neg_()


def spoil_lr(job: Job) -> None:
    """The schedule one step ahead."""
    job.schedule.step(increment=job.args.global_batch_size)


SPOILS: dict[str, Callable[[Job], None]] = {
    "step": spoil_step,
    "decay": spoil_decay,
    "beta": spoil_beta,
    "moment": spoil_moment,
    "lr": spoil_lr,
}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
