"""Inert values: what a pickle holds when nothing it names is imported or called.

Every global becomes a `Global`, which is a type only so that the pickle machine's REDUCE, NEWOBJ,
OBJ and INST opcodes may "instantiate" it: the result is a `Record` of its arguments. Builtins and
torch's tensor constructors become plain values and `TensorRef`s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from reshard import dtypes
from reshard.box import row_major
from reshard.dtypes import DType
from reshard.errors import CorruptError


class Global(type):
    """A name a pickle mentions, `module` and `name`; equal by both. It stands for nothing real.

    It is itself a type because NEWOBJ accepts no less; calling it gives a `Record` or a value of
    the table below. Attributes cannot be set, so BUILD cannot change it.
    """

    module: str
    name: str
    path: str  # module and name with a dot between

    def __new__(mcs, module: str, name: str) -> Global:
        """The global of this module and name."""
        space = {
            "__slots__": (),
            "__new__": _newobj,
            "__module__": __name__,
            "module": str(module),
            "name": str(name),
            "path": f"{module}.{name}",
        }
        return super().__new__(mcs, "Inert", (), space)

    def __init__(cls, module: str, name: str) -> None:
        type.__init__(cls, "Inert", (), {})

    def __call__(cls, *args: object, **kwargs: object) -> object:
        build = _BUILDERS.get(cls.path)
        if build is not None and not kwargs:
            made = build(cls, args)
            if made is not None:
                return made
        return Record(cls, args, kwargs, "reduce")

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"{cls.path}: a name in a pickle cannot be changed")

    def __delattr__(cls, name: str) -> None:
        raise AttributeError(f"{cls.path}: a name in a pickle cannot be changed")

    def __eq__(cls, other: object) -> bool:
        if cls is other:
            return True
        return isinstance(other, Global) and cls.module == other.module and cls.name == other.name

    def __hash__(cls) -> int:
        return hash((cls.module, cls.name))

    def __repr__(cls) -> str:
        return f"Global({cls.module!r}, {cls.name!r})"


def _newobj(cls: Global, *args: object, **kwargs: object) -> object:
    """What NEWOBJ, OBJ and INST give: a `Record`, or the value where the type has one."""
    if not kwargs and cls.path in _PLAIN:
        return cls(*args)
    return Record(cls, args, kwargs, "newobj")


interned = lru_cache(maxsize=4096)(Global)


class Record:
    """An object of an unknown type, as its pickle described it: never a live instance.

    `made` is "reduce" or "newobj". `items` and `pairs` are what the pickle appended or set on it.
    Equality is identity.
    """

    __slots__ = ("args", "items", "kwargs", "made", "pairs", "state", "type")

    def __init__(
        self,
        type: Global,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
        made: str = "newobj",
        state: object = None,
    ) -> None:
        self.type = type
        self.args = args
        self.kwargs = kwargs or None
        self.made = made
        self.state = state
        self.items: list[object] | None = None
        self.pairs: list[tuple[object, object]] | None = None

    def __setstate__(self, state: object) -> None:
        if self.state is not None:
            raise CorruptError(f"the state of a {self.type.path} is set twice")
        self.state = state

    def append(self, item: object) -> None:
        """Takes the pickle's APPEND."""
        self.extend([item])

    def extend(self, items: list[object]) -> None:
        """Takes the pickle's APPENDS."""
        if self.items is None:
            self.items = []
        self.items += items

    def __setitem__(self, key: object, value: object) -> None:
        if self.pairs is None:
            self.pairs = []
        self.pairs.append((key, value))

    @property
    def fields(self) -> dict[str, object]:
        """The attributes its state would set; empty when the state is of another form."""
        state = self.state
        if isinstance(state, dict):
            return state
        if isinstance(state, tuple) and len(state) == 2:
            dicts = [part for part in state if isinstance(part, dict)]
            if len(dicts) + state.count(None) == 2:
                return {k: v for part in dicts for k, v in part.items()}
        return {}

    def get(self, name: str, default: object = None) -> object:
        """The attribute `name` its state would set."""
        return self.fields.get(name, default)

    def __repr__(self) -> str:
        return f"Record({self.type.path}, args={len(self.args)})"


class Ordered(OrderedDict[object, object]):
    """An OrderedDict, with the attributes a state_dict carries (`_metadata`) in `state`."""

    __slots__ = ("state",)

    def __init__(self, items: object = (), state: object = None) -> None:
        super().__init__(items)  # type: ignore[call-overload]  # checked by the caller
        self.state = state

    def __setstate__(self, state: object) -> None:
        self.state = state


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A run of bytes kept outside the pickle. `dtype` is None where it is untyped."""

    key: str
    dtype: DType | None
    nbytes: int
    location: str = "cpu"

    def __setstate__(self, state: object) -> None:
        raise CorruptError("a pickle sets the state of a storage")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor whose elements lie in storage `key`. Offset and strides count elements.

    `kind` is "Tensor", "Parameter", or the dotted name of a subclass; `attributes` the state
    that `_rebuild_from_type_v2` or `_rebuild_parameter_with_state` sets.
    """

    key: str
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_nbytes: int
    requires_grad: bool = False
    kind: str = "Tensor"
    attributes: object = field(default=None, hash=False)

    def __setstate__(self, state: object) -> None:
        raise CorruptError("a pickle sets the state of a tensor")

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie row-major without gaps (axes of size 1 have any stride)."""
        return prod(self.shape) == 0 or all(
            n == 1 or s == want
            for n, s, want in zip(self.shape, self.stride, row_major(self.shape), strict=True)
        )


def new_tensor(
    shape: tuple[int, ...],
    dtype: DType,
    key: str,
    *,
    kind: str = "Tensor",
    requires_grad: bool = False,
) -> TensorRef:
    """A contiguous tensor that is all of the storage `key`."""
    nbytes = prod(shape) * dtype.itemsize
    # torch's strides treat an empty axis as size 1
    stride = row_major([max(n, 1) for n in shape])
    return TensorRef(key, dtype, 0, tuple(shape), stride, nbytes, requires_grad, kind)


# ------------------------------------------------------- what a few globals build; the rest: None


def _size(cls: Global, args: tuple[object, ...]) -> object:
    if not args:
        return ()
    only = args[0]
    return tuple(only) if len(args) == 1 and isinstance(only, tuple | list) else None


def _ordered(cls: Global, args: tuple[object, ...]) -> object:
    if not args:
        return Ordered()
    return Ordered(args[0]) if len(args) == 1 and isinstance(args[0], list | dict) else None


def _of_list(make: Callable[[list[object]], object]) -> _Builder:
    def build(cls: Global, args: tuple[object, ...]) -> object:
        if not args:
            return make([])
        only = args[0]
        return make(list(only)) if len(args) == 1 and isinstance(only, list | tuple) else None

    return build


def _bytes(make: Callable[[bytes], object]) -> _Builder:
    def build(cls: Global, args: tuple[object, ...]) -> object:
        match args:
            case ():
                return make(b"")
            case (bytes() as raw,):
                return make(raw)
            case (str() as text, "latin-1" | "latin1"):
                return make(text.encode("latin1"))
        return None

    return build


def _encode(cls: Global, args: tuple[object, ...]) -> object:
    match args:
        case (str() as text, "latin1" | "latin-1"):
            return text.encode("latin1")
    return None


def _complex(cls: Global, args: tuple[object, ...]) -> object:
    match args:
        case (float() as re, float() as im):
            return complex(re, im)
    return None


def _getattr(cls: Global, args: tuple[object, ...]) -> object:
    """A nested class or an enum's member, by its dotted name (protocols before 4 spell it so)."""
    match args:
        case (Global() as outer, str() as name) if name.isidentifier():
            return interned(outer.module, f"{outer.name}.{name}")
    return None


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CorruptError(f"{value!r:.60} where a tensor's size or stride belongs")
    return value


def _tensor(args: tuple[object, ...], dtype: DType | None = None) -> TensorRef:
    storage, offset, size, stride, grad = args
    if not isinstance(storage, StorageRef):
        raise CorruptError(f"a tensor is built from {storage!r:.60}, which is no storage")
    if not isinstance(size, tuple) or not isinstance(stride, tuple) or len(size) != len(stride):
        raise CorruptError(f"a tensor has size {size!r:.60} and stride {stride!r:.60}")
    element = dtype or storage.dtype
    if element is None:
        raise CorruptError(f"a tensor over storage {storage.key} has no dtype")
    shape, strides = tuple(map(_whole, size)), tuple(map(_whole, stride))
    first = _whole(offset)
    if 0 not in shape:
        last = first + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if (last + 1) * element.itemsize > storage.nbytes:
            raise CorruptError(
                f"a tensor of shape {list(shape)} {element} at element {first} does not fit in "
                f"storage {storage.key} of {storage.nbytes} bytes"
            )
    return TensorRef(storage.key, element, first, shape, strides, storage.nbytes, grad is True)


def _dtype_of(value: object) -> DType:
    if not isinstance(value, Global) or value.module != "torch":
        raise CorruptError(f"{value!r:.60} where a torch dtype belongs")
    return dtypes.named(value.name)


def _tensor_v1(cls: Global, args: tuple[object, ...]) -> object:
    return _tensor((*args, False)) if len(args) == 4 else None


def _tensor_v2(cls: Global, args: tuple[object, ...]) -> object:
    # a seventh argument is conj/neg metadata: bits that mean something else
    if len(args) not in (6, 7) or (len(args) == 7 and args[6]):
        return None
    return _tensor(args[:5])


def _tensor_v3(cls: Global, args: tuple[object, ...]) -> object:
    if len(args) not in (7, 8) or (len(args) == 8 and args[7]):
        return None
    return _tensor(args[:5], _dtype_of(args[6]))


def _parameter(cls: Global, args: tuple[object, ...]) -> object:
    match args:
        case (TensorRef() as data, bool() as grad, _):
            return replace(data, requires_grad=grad, kind="Parameter")
        case (TensorRef() as data, bool() as grad, _, state):
            return replace(data, requires_grad=grad, kind="Parameter", attributes=state)
    return None


_KINDS = {"torch.Tensor": "Tensor", "torch.nn.parameter.Parameter": "Parameter"}


def _from_type(cls: Global, args: tuple[object, ...]) -> object:
    match args:
        case (Global() as func, Global() as kind, tuple() as inner, state) if func != cls:
            made = func(*inner)
            if isinstance(made, TensorRef):
                name = _KINDS.get(kind.path, kind.path)
                return replace(made, kind=name, attributes=state)
    return None


_Builder = Callable[[Global, tuple[object, ...]], object]

_BUILDERS: dict[str, _Builder] = {
    "torch.Size": _size,
    "collections.OrderedDict": _ordered,
    "_codecs.encode": _encode,
    "torch._utils._rebuild_tensor": _tensor_v1,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
}
for _module in ("builtins", "__builtin__"):  # protocols 0 to 2 write Python 2's module name
    _BUILDERS[f"{_module}.set"] = _of_list(set)
    _BUILDERS[f"{_module}.frozenset"] = _of_list(frozenset)
    _BUILDERS[f"{_module}.bytes"] = _bytes(bytes)
    _BUILDERS[f"{_module}.bytearray"] = _bytes(bytearray)
    _BUILDERS[f"{_module}.complex"] = _complex
    _BUILDERS[f"{_module}.getattr"] = _getattr

#: Types whose NEWOBJ is as good as a call.
_PLAIN = {"torch.Size", "collections.OrderedDict"}

#: What rebuilds a tensor of a kind that has more than a storage and strides.
#: Source: torch 2.13 _tensor.py, _reduce_ex_internal.
_REBUILDS = ("torch._utils._rebuild_", "torch._tensor._rebuild_")


def unread_tensor(value: object) -> str | None:
    """What a value is that is a tensor, but of a kind that is not read; None for any other."""
    if not isinstance(value, Record) or not value.type.path.startswith(_REBUILDS):
        return None
    inner = [a.path for a in value.args[:2] if isinstance(a, Global)]
    return (
        f"a tensor of a kind that is not read ({', '.join([value.type.path, *inner])}): sparse, "
        "nested, on meta, conjugated when it is used, or a subclass that holds others (quantised "
        "states). Save a plain one: to_dense(), resolve_conj(), dequantize()."
    )


# ---------------------------------------------------------------------- walking


def walk(obj: object) -> Iterator[object]:
    """Every value in a tree, keys, states and arguments included; shared ones once."""
    seen: set[int] = set()
    todo = [obj]
    while todo:
        item = todo.pop()
        if isinstance(item, str | bytes | int | float | None):
            yield item
            continue
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        match item:
            case dict():
                todo += item.keys()
                todo += item.values()
                if isinstance(item, Ordered):
                    todo.append(item.state)
            case list() | tuple() | set() | frozenset():
                todo += item
            case Record():
                todo += [item.type, item.args, item.state, item.items, item.pairs, item.kwargs]
            case TensorRef():
                todo.append(item.attributes)


def globals_in(obj: object) -> set[Global]:
    """All globals in a tree: types of records, and names kept as values."""
    return {item for item in walk(obj) if isinstance(item, Global)}


def tensors_in(obj: object) -> list[TensorRef]:
    """All tensors in a tree, each object once, in no promised order."""
    return [item for item in walk(obj) if isinstance(item, TensorRef)]
