"""Whether two torch files hold the same, where their pickles may share strings differently."""

from __future__ import annotations

from pathlib import Path

from reshard.containers import torchfile
from reshard.containers.inert import Record, TensorRef


def same_files(a: Path, b: Path) -> bool:
    """Whether two files are equal, byte for byte or (torch's) as torch.load would show them."""
    if a.read_bytes() == b.read_bytes():
        return True
    if a.suffix not in (".pt", ".pth", ".pkl", ".bin"):
        return False
    left, right = (torchfile.load(p, p.name) for p in (a, b))
    return _same(left.root, left, right.root, right)


def _same(a: object, fa: torchfile.TorchFile, b: object, fb: torchfile.TorchFile) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, TensorRef) and isinstance(b, TensorRef):
        alike = (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
        return alike and fa.read(a).tobytes() == fb.read(b).tobytes()
    if isinstance(a, Record) and isinstance(b, Record):
        parts = [(x.type, x.args, x.state, x.items, x.pairs) for x in (a, b)]
        return _same(parts[0], fa, parts[1], fb)
    if isinstance(a, dict) and isinstance(b, dict):
        return _same([*a.items()], fa, [*b.items()], fb)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(_same(x, fa, y, fb) for x, y in pairs)
    return a == b
