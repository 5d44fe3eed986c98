"""Pickles made to run code, to change the reader, or to exhaust it: none does any of these.

Each is built from opcodes or by pickle itself. A canary file would show that something ran.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import random
import resource
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reshard.containers import inert, pickler, pickles, torchfile
from reshard.containers.inert import Global, Ordered, Record, StorageRef, TensorRef
from reshard.errors import CorruptError, ReshardError, UnsafeError


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A path that exists only if a pickle's command ran."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "the pickle ran its command"


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """No pickle may change the reader's own classes, or what Python unpickles later."""
    classes = (Global, Record, Ordered, TensorRef, StorageRef, pickles._Unpickler)
    before = [dict(vars(c)) for c in classes]
    tables = dict(inert._BUILDERS), set(inert._PLAIN), set(pickler.TORCH)
    yield
    assert [dict(vars(c)) for c in classes] == before
    assert (dict(inert._BUILDERS), set(inert._PLAIN), set(pickler.TORCH)) == tables


def read(data: bytes) -> object:
    """The inert value of a pickle, walked whole."""
    value = pickles.loads(data, "hostile.pkl")
    for item in inert.walk(value):
        assert type(item) in INERT or isinstance(item, Global), type(item)
    return value


INERT = {
    bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple,
    type(None), Ordered, Record, StorageRef, TensorRef,
}  # fmt: skip


def refused(data: bytes) -> str:
    """Why a pickle is refused, as a CorruptError that names the file."""
    with pytest.raises(CorruptError, match=r"hostile\.pkl: ") as info:
        pickles.loads(data, "hostile.pkl")
    return str(info.value)


class Runs:
    """Pickles to a call of `function`."""

    def __init__(self, function: Callable[..., Any], *args: object) -> None:
        self.function, self.args = function, args

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self.function, self.args


def commands(canary: Path) -> dict[str, tuple[Callable[..., Any], tuple[object, ...]]]:
    """Calls that would make the canary."""
    code = f"open({str(canary)!r}, 'w')"
    return {
        "os.system": (os.system, (f"touch {canary}",)),
        "eval": (eval, (code,)),
        "exec": (exec, (code,)),
        "open": (open, (str(canary), "w")),
        "__import__": (__import__, ("os",)),
        "subprocess": (subprocess.Popen, (["touch", str(canary)],)),
        "getattr": (getattr, (dict, "fromkeys")),
    }


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", sorted(commands(Path("x"))))
def test_calls_become_records(name: str, protocol: int, canary: Path) -> None:
    function, args = commands(canary)[name]
    plain = read(pickle.dumps(Runs(function, *args), protocol))
    assert isinstance(plain, Record | Global)
    if isinstance(plain, Record):
        assert plain.args == args
    runs = Runs(function, *args)
    nested = {"a": [(runs, {"b": Runs(function, *args)})], "c": OrderedDict(d=runs)}
    value = read(pickle.dumps(nested, protocol))
    assert inert.globals_in(value)
    with pytest.raises(UnsafeError):
        torchfile.dumps(value, (), {})


class WithState:
    """Has a state of every kind that pickle knows."""

    def __init__(self, state: object, items: list[object], pairs: dict[str, object]) -> None:
        self.parts = state, items, pairs

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        state, items, pairs = self.parts
        return WithState, (1, 2), state, iter(items), iter(pairs.items())


@pytest.mark.parametrize("protocol", range(6))
def test_states_items_and_pairs_are_kept_not_set(protocol: int, canary: Path) -> None:
    runs = Runs(os.system, f"touch {canary}")
    state = {"__class__": runs, "__setstate__": runs, "append": runs, "x": runs}
    value = read(pickle.dumps(WithState(state, [runs, 2], {"k": runs}), protocol))
    assert type(value) is Record
    assert value.args == (1, 2)
    assert value.items is not None
    assert value.pairs is not None
    assert len(value.items) == 2
    assert value.pairs[0][0] == "k"
    assert set(value.fields) == set(state)
    assert not callable(value)


def text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


SYSTEM = b"cos\nsystem\n"
MAP = b"c__builtin__\nmap\n("


def handmade(canary: Path) -> dict[str, bytes]:
    """Streams that no pickler writes, each a run of a command in another way."""
    touch = text(f"touch {canary}")
    plain = f"touch {canary}".encode()
    return {
        "GLOBAL REDUCE": SYSTEM + b"(" + touch + b"tR.",
        "INST": b"(S'" + plain + b"'\nios\nsystem\n.",
        "OBJ": b"(" + SYSTEM + touch + b"o.",
        "NEWOBJ": b"\x80\x02" + SYSTEM + touch + b"\x85\x81.",
        "NEWOBJ_EX": b"\x80\x04" + SYSTEM + touch + b"\x85}\x92.",
        "NEWOBJ_EX keywords": b"\x80\x04" + SYSTEM + b")}" + text("command") + touch + b"s\x92.",
        "STACK_GLOBAL": b"\x80\x04" + text("os") + text("system") + b"\x93" + touch + b"\x85R.",
        "dotted": b"\x80\x04" + text("reshard") + text("containers.pickles.pickle.os.system")
        + b"\x93" + touch + b"\x85R.",
        "module of ours": b"creshard.containers.inert\nReplace\n" + touch + b"\x85R.",
        "apply": b"c__builtin__\napply\n(" + SYSTEM + b"(" + touch + b"ttR.",
        "map": b"c__builtin__\nmap\n(" + SYSTEM + b"]" + touch + b"atR.",
        "list of map": b"c__builtin__\nlist\n(" + MAP + SYSTEM + b"]" + touch + b"atRtR.",
        "set of map": b"c__builtin__\nset\n(]" + MAP + SYSTEM + b"]" + touch + b"atRatR.",
        "reconstructor": b"ccopy_reg\n_reconstructor\n(" + SYSTEM + b"c__builtin__\nobject\nNtR.",
        "partial": b"cfunctools\npartial\n(" + SYSTEM + touch + b"tR.",
        "setstate as state": SYSTEM + b")R}" + text("__setstate__") + SYSTEM + b"sb.",
        "load_from_bytes": b"ctorch.storage\n_load_from_bytes\n(C\x05hello" + b"tR.",
        "rebuild_from_type": b"ctorch._tensor\n_rebuild_from_type_v2\n(" + SYSTEM + SYSTEM + b"("
        + touch + b"t}tR.",
        "OrderedDict of call": b"ccollections\nOrderedDict\n(](" + text("k") + SYSTEM + b"(" + touch
        + b"tRtatR.",
        "getattr chain": b"c__builtin__\ngetattr\n(c__builtin__\n__import__\n" + text("x") + b"tR("
        + touch + b"tR.",
        "encode with a codec": b"c_codecs\nencode\n(" + touch + text("rot13") + b"tR.",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(handmade(Path("x"))))
def test_handmade_calls_become_records(name: str, canary: Path) -> None:
    value = read(handmade(canary)[name])
    with pytest.raises(UnsafeError):
        torchfile.dumps(value, (), {})


def test_the_same_inside_a_torch_file_and_a_metadata_file(canary: Path, tmp_path: Path) -> None:
    for data in handmade(canary).values():
        (tmp_path / ".metadata").write_bytes(data)
        pickles.load_pickle(tmp_path / ".metadata")
        path = tmp_path / "x.pt"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/version", "3\n")
        assert torchfile.load(path).root is not None


def test_calling_what_a_call_gave_is_refused(canary: Path) -> None:
    touch = text(f"touch {canary}")
    assert "not callable" in refused(SYSTEM + b")R(" + touch + b"tR.")
    refused(b"(" + touch + b"d(" + touch + b"tR.")


def test_the_extension_registry_is_out_of_reach(canary: Path) -> None:
    copyreg.add_extension("os", "system", 0x70)
    try:
        for op in (b"\x82\x70", b"\x83\x70\x00", b"\x84\x70\x00\x00\x00"):
            assert "EXT" in refused(b"\x80\x02" + op + b"(" + text(f"touch {canary}") + b"tR.")
    finally:
        copyreg.remove_extension("os", "system", 0x70)


# ---------------------------------------------------------------------- changing the reader


@pytest.mark.parametrize("state", [b"}" + text("module") + text("x") + b"s",
                                   b"N}" + text("module") + text("x") + b"s\x86",
                                   b"N}" + text("__new__") + SYSTEM + b"s\x86",
                                   b"}" + text("__call__") + SYSTEM + b"s"])  # fmt: skip
@pytest.mark.parametrize("name", [b"os\nsystem", b"torch\nSize", b"collections\nOrderedDict",
                                  b"torch._utils\n_rebuild_tensor_v2",
                                  b"reshard.containers.inert\nRecord"])  # fmt: skip
def test_names_cannot_be_changed(name: bytes, state: bytes) -> None:
    refused(b"\x80\x02c" + name + b"\n" + state + b"b.")
    again = Global(*name.decode().split("\n"))
    assert again.path == name.decode().replace("\n", ".")
    for method in (b"(" + text("x") + text("y") + b"u", text("x") + text("y") + b"s",
                   text("x") + b"a", b"(" + text("x") + text("y") + b"e",
                   b"(" + text("x") + b"\x90"):  # fmt: skip
        refused(b"\x80\x04c" + name + b"\n" + method + b".")
    with pytest.raises(AttributeError):
        again.module = "x"
    with pytest.raises(AttributeError):
        del again.module


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + b"ctorch\nFloatStorage\n"
    + text("0") + text("cpu") + b"K\x06tQK\x00K\x06\x85K\x01\x85\x89Nt"
)  # fmt: skip


def test_tensors_and_storages_cannot_be_changed() -> None:
    assert isinstance(read(b"\x80\x02" + TENSOR + b"R."), TensorRef)
    fields = b"](" + text("k") + b"NK\x00))K\x00\x89" + text("T") + b"Ne"
    for state in (fields, b"}" + text("key") + text("x") + b"s",
                  b"N}" + text("key") + text("x") + b"s\x86"):  # fmt: skip
        refused(b"\x80\x02" + TENSOR + b"R" + state + b"b.")
        begin = TENSOR.index(b"((") + 1
        storage = TENSOR[begin : TENSOR.index(b"tQ") + 2]
        refused(b"\x80\x02" + storage + state + b"b.")


def test_a_state_is_set_once_and_shadows_nothing() -> None:
    once = b"\x80\x02" + SYSTEM + b")\x81}" + text("type") + text("x") + b"sb"
    record = read(once + b".")
    assert isinstance(record, Record)
    assert record.type == Global("os", "system")
    assert "set twice" in refused(once + b"}" + text("y") + b"K\x01sb.")
    shadow = b"\x80\x02ccollections\nOrderedDict\n)R}" + text("items") + SYSTEM + b"sb."
    ordered = read(shadow)
    assert isinstance(ordered, Ordered)
    assert list(ordered.items()) == []
    assert ordered.state == {"items": Global("os", "system")}
    for target in (b"]", b"}", b")", b"K\x01", text("x"), b"\x8f", b"N"):
        refused(b"\x80\x04" + target + b"}" + text("append") + SYSTEM + b"sb.")


# ---------------------------------------------------------------------- exhausting the reader


def test_memo_bombs_are_refused() -> None:
    tail = b"K\x01"
    for put in (b"r\xff\xff\xff\xff", b"r\xff\xff\xff\x7f", b"r\x00\x00\x10\x00", b"p99999999999\n",
                b"p4294967295\n", b"p-1\n", b"p" + b"9" * 30 + b"\n", b"p\n", b"px\n"):  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        refused(b"\x80\x02" + tail + put + b".")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    assert read(b"\x80\x02" + tail + b"r\x01\x00\x00\x00j\x01\x00\x00\x00\x86.") == (1, 1)
    for get in (b"j\xff\xff\xff\xff", b"h\x09", b"g99999999999999999999\n", b"gx\n"):
        refused(b"\x80\x02" + get + b".")


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f" + b"x.",
        b"\x80\x04\x8e\x00\x00\x00\x00\x00\x01\x00\x00x.",
        b"\x80\x05\x96\x00\x00\x00\x00\x00\x01\x00\x00x.",
        b"\x80\x04\x8d" + b"\xff" * 8 + b"x.",
        b"\x80\x04\x95" + b"\xff" * 8 + b"K\x01.",
        b"\x80\x04\x95\x00\x00\x00\x00\x01\x00\x00\x00K\x01.",
        b"\x80\x02\x8b\xff\xff\xff\xff1.",
        b"\x80\x02\x8b\xff\xff\xff\x7f1.",
        b"\x80\x02\x8a\xffx.",
        b"X\xff\xff\xff\xffx.",
        b"T\xff\xff\xff\x7fx.",
        b"B\xff\xff\xff\x7fx.",
        b"\x80\x05\x97.",
        b"\x80\x05\x98.",
        b"\x80\x7fK\x01.",
        b"K\x012.",
        b"I" + b"9" * 10_000 + b"\n.",
        b"L" + b"9" * 10_000 + b"L\n.",
        b"F1e999999x\n.",
        b"S'\\x'\n.",
        b"Sunquoted\n.",
        b"V\\ud800\\u\n.",
        b"X\x01\x00\x00\x00\xff.",
        b"U\x01\xff.",
        b"cno newline",
        b"c\xff\nx\n.",
        b"\x80\x04K\x01K\x02\x93.",
        b"\x80\x04" + text("a") + b"\x93.",
        b".",
        b"",
        b"0.",
        b"t.",
        b"K\x01K\x02",
        b"K\x01.K\x02.",
        b"K\x01.\n",
        b"R.",
        b"K\x01K\x02R.",
        b"K\x01)\x81.",
        b"(K\x01o.",
        b"K\x01)}\x92.",
        b"(K\x01d.",
        b"(]K\x01d.",
        b"}]K\x01s.",
        b"\x80\x04\x8f(]\x90.",
        b"(]\x91.",
        b"\xff.",
        b"\x80\x02c_codecs\nencode\n)R.",
        b"ccollections\nOrderedDict\n]\x85R}K\x01K\x01\x86\x85R.",
        b"ccollections\nOrderedDict\n(]K\x01atR.",
        b"c__builtin__\nset\n(]]atR.",
    ],
)
def test_malformed_streams_are_refused(data: bytes) -> None:
    start = time.monotonic()
    try:
        value = pickles.loads(data, "hostile.pkl")
    except CorruptError:
        pass
    else:
        assert isinstance(value, Record), value
    assert time.monotonic() - start < 1


def test_every_cut_of_a_pickle_is_refused() -> None:
    state = {"a": [1, 2.5, "x" * 300, b"y" * 300], "b": (OrderedDict(a=1), {1, 2}), "c": 2**70}
    for protocol in range(6):
        data = pickle.dumps(state, protocol)
        assert read(data) == state
        for n in range(len(data)):
            refused(data[:n])


def test_damage_gives_a_value_or_a_refusal_never_more() -> None:
    state = {"a": [1, 2.5, "x" * 40, Path("p")], "b": (OrderedDict(a=1), {1, 2}), "c": 2**70}
    for protocol in range(6):
        data = pickle.dumps(state, protocol)
        for seed in range(1500):
            rng = random.Random(seed)
            bad = bytearray(data)
            for _ in range(rng.choice((1, 2, 8))):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            try:
                pickles.loads(bytes(bad), "hostile.pkl")
            except ReshardError:
                continue


def test_random_opcodes_give_a_value_or_a_refusal() -> None:
    ops = b"(0123NRQab]}des)tluo\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94"
    parts = [bytes([op]) for op in ops]
    parts += [SYSTEM, TENSOR, b"K\x01", text("os"), b"h\x00", b"q\x00", b"ctorch\nSize\n"]
    parts += [b"ccollections\nOrderedDict\n", b"c__builtin__\ngetattr\n"]
    for seed in range(3000):
        rng = random.Random(seed)
        data = b"\x80\x04" + b"".join(rng.choices(parts, k=rng.randrange(3, 40))) + b"."
        try:
            pickles.loads(data, "hostile.pkl")
        except ReshardError:
            continue


def test_deep_nesting_neither_crashes_nor_is_walked_into_the_ground() -> None:
    depth = 100_000
    for data in (
        b"]" * depth + b"a" * (depth - 1) + b".",
        b"\x80\x02}" + b")" + b"\x85" * 300_000 + b"K\x01s.",  # hashed as a key
        b"\x80\x02" + b"(" * depth + b"t" * depth + b".",
        b"\x80\x02" + SYSTEM * depth + b")" + b"\x85R" * depth + b".",
        b"\x80\x02" + (SYSTEM + b")\x81") * 20_000 + b"b" * 19_999 + b".",
    ):
        value = pickles.loads(data, "hostile.pkl")
        assert sum(1 for _ in inert.walk(value)) > 10_000
        with pytest.raises(ReshardError):
            torchfile.dumps({"a": [value] * 2, "b": Global("os", "x")}, (), {})
        del value
    assert threading.stack_size() == 0


def test_shared_values_are_walked_once() -> None:
    doubled = b"\x80\x02)" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(200)) + b"."
    value = pickles.loads(doubled, "hostile.pkl")
    assert sum(1 for _ in inert.walk(value)) < 300
    assert len(torchfile.dumps(value, (), {})) < 2000


# ---------------------------------------------------------------------- storages

FLOATS = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0")
HUGE = b"\x8a\x08" + b"\xff" * 7 + b"\x3f"


@pytest.mark.parametrize(
    "pid",
    [
        b"K\x01",
        b"N",
        b"]",
        text("storage"),
        b"(" + text("storage") + b"t",
        b"(" + text("module") + SYSTEM + text("0") + text("cpu") + b"K\x06t",
        b"(" + text("storage") + SYSTEM + text("0") + text("cpu") + b"K\x06t",
        b"(" + text("storage") + text("FloatStorage") + text("0") + text("cpu") + b"K\x06t",
        b"(" + text("storage") + b"ctorch\nFloatStorage\nK\x00" + text("cpu") + b"K\x06t",
        FLOATS + b"K\x00K\x06t",
        FLOATS + text("cpu") + b"J\xff\xff\xff\xfft",
        FLOATS + text("cpu") + b"G\0\0\0\0\0\0\0\0t",
        FLOATS + text("cpu") + b"K\x06(K\x01tt",
    ],
)
def test_odd_storage_references_are_refused(pid: bytes) -> None:
    refused(b"\x80\x02" + pid + b"Q.")
    refused(b"Psome text\n.")
    with pytest.raises(CorruptError, match="refers to storages"):
        pickles.loads(b"\x80\x02" + pid + b"Q.", "hostile.pkl", None)


def tensor(offset: bytes, size: bytes, stride: bytes) -> bytes:
    """A float tensor over a storage of six elements."""
    return b"\x80\x02" + TENSOR[: TENSOR.index(b"tQ") + 2] + offset + size + stride + b"\x89NtR."


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [
        (b"K\x01", b"K\x06\x85", b"K\x01\x85"),
        (b"K\x00", b"K\x07\x85", b"K\x01\x85"),
        (b"K\x00", b"K\x02K\x02\x86", b"K\x05K\x02\x86"),
        (b"K\x00", b"K\x03\x85", b"K\x03\x85"),
        (b"J\xff\xff\xff\xff", b"K\x06\x85", b"K\x01\x85"),
        (b"K\x00", b"J\xff\xff\xff\xff\x85", b"K\x01\x85"),
        (b"K\x00", b"K\x06\x85", b"J\xff\xff\xff\xff\x85"),
        (b"K\x00", b"K\x06\x85", b"K\x01K\x01\x86"),
        (b"K\x00", b"]K\x06a", b"K\x01\x85"),
        (b"K\x00", b"\x88\x85", b"K\x01\x85"),
        (b"G\0\0\0\0\0\0\0\0", b"K\x06\x85", b"K\x01\x85"),
        (b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"K\x06\x85", b"K\x01\x85"),
        (
            b"K\x00",
            b"\x8a\x08" + b"\xff" * 7 + b"\x3f\x85",
            b"\x8a\x08" + b"\xff" * 7 + b"\x3f\x85",
        ),
    ],
)
def test_tensors_that_leave_their_storage_are_refused(
    offset: bytes, size: bytes, stride: bytes
) -> None:
    assert isinstance(read(tensor(b"K\x00", b"K\x06\x85", b"K\x01\x85")), TensorRef)
    refused(tensor(offset, size, stride))


def test_nothing_was_imported_on_a_pickles_behalf(canary: Path) -> None:
    code = (
        "import sys, pathlib; from reshard.containers import pickles; "
        "pickles.loads(b'cthis\\ns\\n.', 'x'); pickles.loads(b'cantigravity\\nfly\\n)R.', 'x'); "
        "assert not {'this', 'antigravity', 'torch'} & set(sys.modules), 'imported'"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b""
