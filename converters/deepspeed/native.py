"""What a DeepSpeed checkpoint holds beside tensors: what only DeepSpeed's own writers use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.containers.carried import Carried

from .cuts import Affine

Options = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Group:
    """One param group in the order the model declares it; options as recorded (None: not).

    `expert` is the number of experts' ranks that the group is cut over (1: a dense group).
    `states` are the optimizer's tensors by name; `whole` those kept as whole matrices (Muon).
    `numbers` are its other states; `step_tensor` whether the step is a tensor.
    """

    options: Options | None
    members: tuple[str, ...]
    states: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()
    numbers: Mapping[str, float] = field(default_factory=dict)
    step_tensor: bool | None = None
    expert: int = 1


@dataclass(frozen=True)
class Model:
    """The model's tensors beside the optimizer's: order, buffers, frozen ones, aliases.

    `order` is the module's state dict, aliases and buffers included. `kinds` gives each tensor's
    dtype in the module. `prefix` is what the files put before every name.
    """

    order: tuple[str, ...]
    buffers: tuple[str, ...]
    frozen: tuple[str, ...]
    aliases: Mapping[str, str]
    kinds: Mapping[str, str]
    prefix: str = ""


@dataclass(frozen=True)
class Pipeline:
    """A PipelineModule: which tensors each layer's file holds (key -> name), in layer order."""

    layers: Mapping[int, Mapping[str, str]]
    stages: tuple[frozenset[str], ...]  # the optimizer's names by stage


@dataclass(frozen=True)
class Experts:
    """DeepSpeed-MoE: experts of each MoE layer (by its module path), in the order of layers."""

    counts: Mapping[str, int]  # module path -> experts
    ep: int


@dataclass(frozen=True)
class Wrapper:
    """What a trainer keeps beside a tag folder. Names are relative to its folder.

    `kind` is "trainer" (transformers) or "accelerate". `copies` are small text files, `weights`
    what the safetensors files hold (name, shape, dtype), `opaque` pickles of the trainer's own
    classes, which are left behind.
    """

    kind: str
    tag: str
    scheduler: tuple[str, Carried] | None = None
    rng: Mapping[int, Carried] = field(default_factory=dict)
    copies: Mapping[str, bytes] = field(default_factory=dict)
    weights: Mapping[str, tuple[tuple[str, tuple[int, ...], str], ...]] = field(
        default_factory=dict
    )
    opaque: tuple[str, ...] = ()


@dataclass(frozen=True)
class Native:
    """Everything of a native checkpoint that is not an element of a tensor."""

    stage: int
    form: str  # zero | bf16 (BF16_Optimizer) | plain | unfused | fused (ZeRO 0)
    groups: tuple[Group, ...]
    model: Model
    settings: Carried  # loss scaler, overflow, clip_grad
    top: Carried  # DeepSpeed's own other entries of the first model file
    client: Carried  # the client's entries of the first model file
    config: Mapping[object, object]
    version: str
    dp: int
    round_robin: bool = False
    aligned: bool = False
    elastic: bool = False
    pipeline: Pipeline | None = None
    experts: Experts | None = None
    affine: Mapping[str, Affine] = field(default_factory=dict)
    vocabulary: frozenset[str] = frozenset()  # cut along the vocabulary by AutoTP
    sub_group_size: int | None = None
    tag: str = ""  # its folder's name
    #: The client's entries of other model files, by (mp, dp), where the files themselves are away.
    clients: Mapping[tuple[int, int], Carried] = field(default_factory=dict)
    refused: tuple[str, ...] = ()  # client entries that may not be written again
    unread: tuple[str, ...] = ()  # entries of optimizer files that DeepSpeed does not write
    wrapper: Wrapper | None = None
