"""Makes a fixture with an old megatron-core: megatron_make_old FORM BACKEND FOLDER --preset moe …

FORM is how the DistributedOptimizer is saved: fully_sharded_model_space, dp_zero_gather_scatter.
BACKEND is torch_dist, or zarr, which core 0.12 has and which needs zarr 2.18 before the installed
one. The rest is megatron_make's. Put the old release before the installed one:
`pip install --no-deps --target OLD megatron-core==0.14.0`, then PYTHONPATH=OLD:tests. Ran with
0.12.3 and 0.14.0 under torch 2.13.0. What is replaced is what the peers ask of today's core and an
old one does not have, and what torch has dropped since; no arithmetic, no layout.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

if not hasattr(np, "product"):  # core 0.12.3
    np.product = np.prod

import megatron.core
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer import distrib_optimizer, optimizer
from megatron.core.transformer import multi_latent_attention

from peers import megatron_make, megatron_model, megatron_state


def lenient(call: Callable[..., Any], signature: Callable[..., Any]) -> Callable[..., Any]:
    """The call, without the keyword arguments that an old core does not know."""
    known = inspect.signature(signature).parameters

    def called(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **{k: v for k, v in kwargs.items() if k in known})

    return called


def lenient_config(kind: type) -> type:
    """A config class that leaves out the fields an old core does not have."""
    known = {field.name for field in dataclasses.fields(kind) if field.init}

    class Config(kind):  # type: ignore[misc]  # a class that is only known when it runs
        def __init__(self, **fields: Any) -> None:
            super().__init__(**{k: v for k, v in fields.items() if k in known})

    return Config


def adapt(form: str) -> None:
    """Make the peers' modules run with the core that is imported."""
    for module in (megatron_make, megatron_state):
        module.request_metadata = lambda *_: {"distrib_optim_sharding_type": form}
    for name in ("TransformerConfig", "MLATransformerConfig"):
        setattr(megatron_model, name, lenient_config(getattr(megatron_model, name)))
    for name in ("get_gpt_decoder_block_spec", "get_gpt_layer_local_spec"):
        call = getattr(megatron_model, name)
        setattr(megatron_model, name, lenient(call, call))
    model = megatron_model.GPTModel
    megatron_model.GPTModel = lenient(model, model.__init__)
    for name in ("is_pipeline_first_stage", "is_pipeline_last_stage"):
        call = getattr(parallel_state, name)
        if "vp_stage" not in inspect.signature(call).parameters:
            setattr(parallel_state, name, without_stage(call))
    save = megatron_make.dist_checkpointing.save
    megatron_make.dist_checkpointing.save = lenient(save, save)
    pass_form(distrib_optimizer.DistributedOptimizer, form)
    half = optimizer.Float16OptimizerWithFloat16Params
    half.sharded_state_dict = lenient(half.sharded_state_dict, half.sharded_state_dict)
    if not hasattr(multi_latent_attention, "TELinear"):
        multi_latent_attention.TELinear = object
    if hasattr(distrib_optimizer, "quantize_param_shard"):  # asks for Transformer Engine
        distrib_optimizer.quantize_param_shard = lambda *_: None
    parameters = inspect.signature(filesystem_async._write_item).parameters
    if "transforms" in parameters or "serialization_format" in parameters:
        write_item(filesystem_async)


def without_stage(call: Callable[[bool], bool]) -> Callable[..., bool]:
    """core 0.12 keeps the virtual stage in a global that the peers set."""
    return lambda ignore_virtual=False, vp_stage=None: call(ignore_virtual)


def pass_form(kind: Any, form: str) -> None:
    """core 0.12 takes `sharding_type` where today's takes metadata."""
    call = kind.sharded_state_dict
    parameters = inspect.signature(call).parameters
    if "sharding_type" in parameters and "metadata" not in parameters:

        def called(self: Any, state: Any, is_loading: bool = False, **_: Any) -> Any:
            return call(self, state, is_loading, sharding_type=form)

        kind.sharded_state_dict = called


def write_item(module: Any) -> None:
    """torch has added arguments to _write_item that core 0.12.3 does not give."""
    call = module._write_item
    parameters = list(inspect.signature(call).parameters)

    def called(*args: Any) -> Any:
        if len(args) == len(parameters) or parameters[0] != "transforms":
            return call(*args)
        from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms

        rest = {}
        if "serialization_format" in parameters:
            from torch.distributed.checkpoint.filesystem import SerializationFormat

            rest["serialization_format"] = SerializationFormat.TORCH_SAVE
        if len(args) and isinstance(args[0], _StorageWriterTransforms):
            return call(*args, **rest)
        return call(_StorageWriterTransforms(), *args, **rest)

    module._write_item = called


def use_zarr() -> None:
    """Save with the zarr backend, each rank its own shards."""
    import tensorstore  # noqa: F401  # teaches numpy bfloat16, as core's own reader wants it

    strategy = megatron_make.get_default_save_sharded_strategy
    megatron_make.get_default_save_sharded_strategy = lambda _: strategy("zarr", 1)
    megatron_make.FullyParallelSaveStrategyWrapper = lambda found, _: found


if __name__ == "__main__":
    form, backend = sys.argv.pop(1), sys.argv.pop(1)
    adapt(form)
    if backend == "zarr":
        use_zarr()
    print(f"megatron-core {megatron.core.__version__}, {form}")
    megatron_make.main()
