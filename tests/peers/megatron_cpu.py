"""The patches that let pip megatron-core 0.16.1 train on a CPU over gloo.

Each replaces an assumption about CUDA or Transformer Engine. None touches arithmetic, layouts or
Megatron's checkpoint code; loading a checkpoint needs none of them. Apply them after the fork.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CudaIsCpu(TorchFunctionMode):
    """device="cuda" in a tensor factory means cpu, `t.cuda()` is t, `t.type()` says torch.cuda.*.

    optimizer.py, clip_grads.py, schedules.py, p2p_communication.py and rope_utils.py ask for
    "cuda"; the optimizers sort parameters by the text 'torch.cuda.BFloat16Tensor'.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return out.replace("torch.", "torch.cuda.", 1)
        return out


class FusedAdamLike(torch.optim.Optimizer):
    """AdamW in the state layout of FusedAdam: an int `step` in each group, none per parameter."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: object,
    ) -> None:
        assert adam_w_mode, "plain L2 Adam is not written here"
        defaults = {
            "lr": lr,
            "bias_correction": True,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # returns no loss
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group)

    def update(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        """One AdamW update of one parameter, in place."""
        beta1, beta2 = group["betas"]
        correction1, correction2 = (1 - beta ** group["step"] for beta in (beta1, beta2))
        state = self.state[param]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(param.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        denominator = (state["exp_avg_sq"].sqrt() / correction2**0.5).add_(group["eps"])
        param.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / correction1)


def patch(*, fused_adam: bool) -> None:
    """Install the patches in this process; `fused_adam`: train with FusedAdamLike.

    Megatron must run the optimizer whose state layout the checkpoint holds.
    """
    CudaIsCpu().__enter__()
    # used as device= of p2p buffers, DDP buffers and masks
    torch.cuda.current_device = lambda: torch.device("cpu")
    # called after p2p and around saving
    torch.cuda.synchronize = lambda *_, **__: None
    # dropout is 0, so nothing draws from the CUDA RNG tracker, which needs a CUDA generator
    from megatron.core.tensor_parallel import random as parallel_random

    parallel_random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    if fused_adam:
        use_fused_adam()
    # the router tests this name for None, and it is missing without Transformer Engine
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # without Transformer Engine its names are mocks here, and isinstance() with a mock raises
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def use_fused_adam() -> None:
    """Where Megatron would import FusedAdam.

    The distributed optimizer reads `step` from per-parameter state that torch AdamW does not have
    before its first step, so with torch AdamW it can load no checkpoint.
    """
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = FusedAdamLike, False
    distrib_optimizer.Adam = FusedAdamLike
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
