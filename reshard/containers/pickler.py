"""Writes pickles that torch loads, from inert values: a small protocol 2 pickler.

The opcodes are those torch.save's pickler emits (torch 2.13 serialization.py, protocol 2), so a
plain state dict comes out byte for byte as torch writes it. A name that neither torch's loader
needs nor the caller allows is never written.
"""

from __future__ import annotations

import struct
from collections.abc import Container

from reshard import dtypes
from reshard.containers.inert import Global, Ordered, Record, StorageRef, TensorRef
from reshard.errors import CorruptError, UnsafeError

_KINDS = {"Tensor": Global("torch", "Tensor")}
_ORDERED = Global("collections", "OrderedDict")
_REBUILD_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_PARAMETER_STATE = Global("torch._utils", "_rebuild_parameter_with_state")
_FROM_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_UNTYPED = Global("torch.storage", "UntypedStorage")
_ENCODE = Global("_codecs", "encode")
_PARAMETER_TYPE = Global("torch.nn.parameter", "Parameter")

#: What tensors and plain values need. torch.load(weights_only=True) takes all but frozenset.
TORCH = frozenset(
    {g.path for g in (_ORDERED, _REBUILD_V2, _REBUILD_V3, _PARAMETER, _PARAMETER_STATE)}
    | {g.path for g in (_FROM_TYPE, _UNTYPED, _ENCODE, _PARAMETER_TYPE, *_KINDS.values())}
    | {f"torch.{t.name}" for t in dtypes.TABLE}
    | {f"torch.{t.storage}" for t in dtypes.TABLE if t.storage}
    | {f"__builtin__.{name}" for name in ("set", "frozenset", "bytes", "bytearray", "complex")}
    | {f"builtins.{name}" for name in ("set", "frozenset", "bytes", "bytearray", "complex")}
    | {"torch.Size", "torch.device", "torch.serialization._get_layout"}
)

#: Of these, what a record may call: every other call comes out of a value we know.
_CALLED = frozenset({"torch.device", "torch.serialization._get_layout"})


def dumps(obj: object, allow: Container[str], storages: dict[str, int]) -> bytes:
    """The protocol 2 pickle of a tree of plain and inert values.

    `allow` holds further "module.name" globals that may be written. `storages` receives the
    bytes of every storage the tree's tensors refer to, in order of first use.
    Raises UnsafeError naming the place in the tree and the global that is not allowed.
    """
    writer = Writer(allow, storages)
    writer.put(b"\x80\x02")
    try:
        writer.save(obj, "")
    except RecursionError:
        raise CorruptError("the values to write are nested too deeply") from None
    writer.put(b".")
    return bytes(writer.out)


class Writer:
    """A pickle in the making; `dumps` is its plain use, containers add runs of opcodes."""

    def __init__(self, allow: Container[str], storages: dict[str, int]) -> None:
        self.out = bytearray()
        self.allow = allow
        self.storages = storages
        self.memo: dict[object, int] = {}  # id of an object, or a global, -> index
        self.kept: list[object] = []  # what the ids belong to
        self.indices = 0

    def put(self, raw: bytes) -> None:
        self.out += raw

    def take(self) -> bytes:
        """What was written since the last time: a long pickle leaves in pieces."""
        taken = bytes(self.out)
        self.out.clear()
        return taken

    def remember(self, key: object) -> None:
        """Emits BINPUT for the value on top of the stack."""
        self.memo[key] = self.indices
        self.skip()

    def skip(self) -> None:
        """Emits BINPUT for a value never asked for again, as torch's pickler does."""
        n = self.indices
        self.indices += 1
        self.put(b"q" + bytes([n]) if n < 256 else b"r" + struct.pack("<I", n))

    def recall(self, key: object) -> bool:
        """Emits BINGET if the value was written before."""
        if key not in self.memo:
            return False
        self.put(self.get(key))
        return True

    def get(self, key: object) -> bytes:
        """The opcode that fetches a value written before."""
        n = self.memo[key]
        return b"h" + bytes([n]) if n < 256 else b"j" + struct.pack("<I", n)

    def save(self, obj: object, at: str) -> None:
        if obj is None:
            self.put(b"N")
        elif obj is True or obj is False:
            self.put(b"\x88" if obj else b"\x89")
        elif type(obj) is int:
            self.put(integer(obj))
        elif type(obj) is float:
            self.put(b"G" + struct.pack(">d", obj))
        elif isinstance(obj, Global):
            self.name(obj, at)
        elif not self.recall(id(obj)):
            self.kept.append(obj)
            self.compound(obj, at)

    def compound(self, obj: object, at: str) -> None:
        match obj:
            case str():
                raw = obj.encode("utf-8", "surrogatepass")
                self.put(b"X" + struct.pack("<I", len(raw)) + raw)
                self.remember(id(obj))
            case tuple():
                self.packed(obj, at)
            case list():
                self.put(b"]")
                self.remember(id(obj))
                self.appends(obj, at)
            case Ordered():
                self.name(_ORDERED, at)
                self.put(b")R")
                self.remember(id(obj))
                self.setitems(list(obj.items()), at)
                if obj.state is not None:
                    self.save(obj.state, f"{at}.state")
                    self.put(b"b")
            case dict():
                self.put(b"}")
                self.remember(id(obj))
                self.setitems(list(obj.items()), at)
            case Record():
                self.record(obj, at)
            case TensorRef():
                self.tensor(obj, at)
            case StorageRef():
                self.storage(obj.key, obj.dtype, obj.nbytes, at)
            case _:
                self.reduced(obj, at)

    def reduced(self, obj: object, at: str) -> None:
        """Plain values that protocol 2 has no opcode for."""
        match obj:
            case bytes() if not obj:
                self.call(_builtin("bytes"), (), at)
            case bytes():
                self.call(_ENCODE, (obj.decode("latin1"), "latin1"), at)
            case bytearray():
                self.call(_builtin("bytearray"), (bytes(obj),) if obj else (), at)
            case set() | frozenset():
                items = sorted(obj, key=lambda item: (type(item).__name__, repr(item)))
                self.call(_builtin(type(obj).__name__), (items,), at)
            case complex():
                self.call(_builtin("complex"), (obj.real, obj.imag), at)
            case _:
                raise UnsafeError(
                    f"{at or 'the value'}: a live {type(obj).__module__}.{type(obj).__qualname__} "
                    "cannot be written"
                )
        self.remember(id(obj))

    def name(self, obj: Global, at: str) -> None:
        if self.recall(obj):
            return
        if obj.path not in TORCH and obj.path not in self.allow:
            raise UnsafeError(
                f"{at or 'the value'}: the name {obj.path} is not on the list of what the "
                "target's loader needs, so it is not written"
            )
        if not all(part.isidentifier() for part in obj.path.split(".")):
            raise UnsafeError(f"{at or 'the value'}: {obj.path!r} is not a name")
        self.allowed(obj)
        self.remember(obj)

    def allowed(self, obj: Global) -> None:
        """A name that `name` has let pass, or the class that such a name lies in."""
        outer, _, inner = obj.name.rpartition(".")
        if outer:  # protocol 2 has no dotted names
            self.put(b"c__builtin__\ngetattr\n")
            self.allowed(Global(obj.module, outer))
            self.word(inner)
            self.put(b"\x86R")
        else:
            self.put(b"c" + obj.module.encode() + b"\n" + obj.name.encode() + b"\n")

    def packed(self, obj: tuple[object, ...], at: str) -> None:
        if not obj:
            self.put(b")")
            return
        short = len(obj) <= 3
        if not short:
            self.put(b"(")
        for i, item in enumerate(obj):
            self.save(item, f"{at}[{i}]")
        if id(obj) in self.memo:  # it holds itself through a list or dict
            self.put(b"0" * len(obj) if short else b"1")
            self.recall(id(obj))
            return
        self.put((b"\x85", b"\x86", b"\x87")[len(obj) - 1] if short else b"t")
        self.remember(id(obj))

    def appends(self, items: list[object], at: str) -> None:
        for start in range(0, len(items), 1000):
            part = items[start : start + 1000]
            if len(part) > 1:
                self.put(b"(")
            for i, item in enumerate(part, start):
                self.save(item, f"{at}[{i}]")
            self.put(b"e" if len(part) > 1 else b"a")

    def setitems(self, pairs: list[tuple[object, object]], at: str) -> None:
        for start in range(0, len(pairs), 1000):
            part = pairs[start : start + 1000]
            if len(part) > 1:
                self.put(b"(")
            for key, value in part:
                self.save(key, f"{at} key")
                self.save(value, f"{at}.{key}" if at else str(key))
            self.put(b"u" if len(part) > 1 else b"s")

    def call(self, name: Global, args: tuple[object, ...], at: str) -> None:
        """Emits name(*args), unremembered."""
        self.name(name, at)
        self.kept.append(args)
        self.save(args, at)
        self.put(b"R")

    def record(self, obj: Record, at: str) -> None:
        if obj.kwargs:
            raise UnsafeError(f"{at}: {obj.type.path} takes keywords, which protocol 2 cannot hold")
        if obj.type.path in TORCH - _CALLED and obj.type.path not in self.allow:
            raise UnsafeError(
                f"{at or 'the value'}: a call of {obj.type.path} with arguments of no known form "
                "is not written"
            )
        self.name(obj.type, at)
        self.save(obj.args, at)
        self.put(b"R" if obj.made == "reduce" else b"\x81")
        if id(obj) in self.memo:  # its own arguments hold it
            raise CorruptError(f"{at}: a {obj.type.path} is an argument of itself")
        self.remember(id(obj))
        if obj.items:
            self.appends(obj.items, at)
        if obj.pairs:
            self.setitems(obj.pairs, at)
        if obj.state is not None:
            self.save(obj.state, f"{at}.state")
            self.put(b"b")

    def storage(self, key: str, dtype: dtypes.DType | None, nbytes: int, at: str) -> None:
        if self.storages.setdefault(key, nbytes) != nbytes:
            raise CorruptError(
                f"{at}: storage {key} has {nbytes} bytes here and {self.storages[key]} elsewhere"
            )
        typed = dtype is not None and dtype.storage is not None
        kind = Global("torch", str(dtype.storage)) if dtype and typed else _UNTYPED
        count = nbytes // dtype.itemsize if dtype and typed else nbytes
        self.put(b"(")
        for part in ("storage", kind, key, "cpu", count):
            self.word(part) if isinstance(part, str) else self.save(part, at)
        self.put(b"t")
        self.skip()
        self.put(b"Q")

    def word(self, text: str) -> None:
        """A string remembered by value, for those we make ourselves."""
        if not self.recall(text):
            raw = text.encode("utf-8", "surrogatepass")  # as pickle does
            self.put(b"X" + struct.pack("<I", len(raw)) + raw)
            self.remember(text)

    def tensor(self, ref: TensorRef, at: str) -> None:
        if ref.kind == "Tensor" and ref.attributes is None:
            self.plain_tensor(ref, at)
        elif ref.kind == "Parameter":
            self.name(_PARAMETER if ref.attributes is None else _PARAMETER_STATE, at)
            if ref.attributes is not None:
                self.put(b"(")
            self.plain_tensor(ref, at, False)
            self.skip()
            self.put(b"\x88" if ref.requires_grad else b"\x89")
            self.hooks(at)
            if ref.attributes is not None:
                self.save(ref.attributes, f"{at}.state")
            self.put(b"t" if ref.attributes is not None else b"\x87")
            self.skip()
            self.put(b"R")
        else:
            module, _, name = ref.kind.rpartition(".")
            self.name(_FROM_TYPE, at)
            self.put(b"(")
            self.name(_rebuild(ref), at)
            self.name(_KINDS.get(ref.kind) or Global(module, name), at)
            self.tensor_args(ref, at, ref.requires_grad)
            self.save(ref.attributes, f"{at}.state")
            self.put(b"t")
            self.skip()
            self.put(b"R")
        self.remember(id(ref))

    def plain_tensor(self, ref: TensorRef, at: str, grad: bool | None = None) -> None:
        self.name(_rebuild(ref), at)
        self.tensor_args(ref, at, ref.requires_grad if grad is None else grad)
        self.put(b"R")

    def tensor_args(self, ref: TensorRef, at: str, grad: bool) -> None:
        self.put(b"(")
        self.storage(ref.key, ref.dtype, ref.storage_nbytes, at)
        self.put(integer(ref.offset))
        self.sizes(ref.shape)
        self.sizes(ref.stride)
        self.put(b"\x88" if grad else b"\x89")
        self.hooks(at)
        if ref.dtype.storage is None:
            self.name(Global("torch", ref.dtype.name), at)
        self.put(b"t")
        self.skip()

    def sizes(self, numbers: tuple[int, ...]) -> None:
        body = b"".join(map(integer, numbers))
        if len(numbers) > 3:
            self.put(b"(" + body + b"t")
        else:
            self.put(body + (b")", b"\x85", b"\x86", b"\x87")[len(numbers)])
        if numbers:
            self.skip()

    def hooks(self, at: str) -> None:
        self.name(_ORDERED, at)
        self.put(b")R")
        self.skip()


def _rebuild(ref: TensorRef) -> Global:
    return _REBUILD_V3 if ref.dtype.storage is None else _REBUILD_V2


def _builtin(name: str) -> Global:
    return Global("__builtin__", name)


def integer(n: int) -> bytes:
    """The opcode of a whole number."""
    if 0 <= n < 256:
        return b"K" + bytes([n])
    if 0 <= n < 65536:
        return b"M" + struct.pack("<H", n)
    if -(1 << 31) <= n < 1 << 31:
        return b"J" + struct.pack("<i", n)
    raw = n.to_bytes((n.bit_length() + 8) // 8, "little", signed=True)
    if n < 0 and len(raw) > 1 and raw[-1] == 0xFF and raw[-2] & 0x80:
        raw = raw[:-1]
    if len(raw) < 256:
        return b"\x8a" + bytes([len(raw)]) + raw
    return b"\x8b" + struct.pack("<I", len(raw)) + raw
