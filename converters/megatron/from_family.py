"""The Megatron run that a translated model would be of: its args, from the family's file."""

from __future__ import annotations

from reshard.checkpoint import Checkpoint
from reshard.errors import FormatError
from reshard.tensor import PARAM
from reshard.topology import Topology

from .run import Run
from .sizes import sizes

_ARGS = "args."


def run_of(source: Checkpoint) -> Run:
    """The run that would have saved these tensors, by the args that the translation gives.

    Raises FormatError for a source that no family has translated, and for one with an optimizer:
    Megatron's param groups say more than another framework's.
    """
    args = {k.removeprefix(_ARGS): v for k, v in source.extras.items() if k.startswith(_ARGS)}
    if source.layout.naming != "megatron" or not args:
        raise FormatError(
            f"{source.format} to megatron needs a model family to name its tensors: give the "
            "model's config with --config DIR, or a family with --schema NAME."
        )
    if any(t.slot != PARAM for t in source.layout.tensors):
        raise FormatError(
            f"{source.path}: an optimizer of {source.format} has no form in Megatron yet: its "
            "param groups lack what Megatron's scheduler multiplies. Convert with --weights-only."
        )
    plain = {k: v for k, v in args.items() if v is not None}
    model = sizes(plain)
    return Run(
        args=plain,
        model=model,
        topology=Topology(),
        pipeline=None,
        common={"checkpoint_version": 3.0, "iteration": 0},
        optimizer=None,
        spec=model.spec,
    )
