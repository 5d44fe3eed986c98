"""Where things lie in the repository."""

from __future__ import annotations

import subprocess
import tarfile
import zlib
from pathlib import Path

from reshard.containers.zips import Window, read_members

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"


def archive_of(name: str) -> Path:
    """The archive that holds a fixture: its own, that of its set, or the one of its folder.

    Checkpoints of one state share an archive, where they cost next to nothing: megatron/a-tp4pp2
    lies in megatron/a.tar.xz, dcp/hsdp_2x2 in dcp/shared.tar.xz.
    """
    stem = name
    while not (found := FIXTURES / f"{stem}.tar.xz").exists():
        stem, dash, _ = stem.rpartition("-")
        if not dash:
            break
    else:
        return found
    shared = FIXTURES / Path(name).parent / "shared.tar.xz"
    if not shared.exists():
        raise FileNotFoundError(f"no archive holds the fixture {name}")
    return shared


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive of the repository. Python before 3.11.4 has no filters."""
    guarded = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as packed:
        packed.extractall(folder, **guarded)  # type: ignore[arg-type]  # one keyword, or none


def flip(file: Path, at: int) -> None:
    """Change one bit of a byte, and neither size nor anything else."""
    file.chmod(0o644)
    with open(file, "r+b") as out:
        out.seek(at)
        (byte,) = out.read(1)
        out.seek(at)
        out.write(bytes([byte ^ 1]))


def mend_checksums(file: Path, start: int = 0, length: int | None = None) -> None:
    """Make the members of an archive have the CRC-32s of their bytes, as a new save would.

    `start`, `length`: of the archive in a file that holds several.
    """
    with Window(file, start, length) as window:
        members = read_members(window)
        raw = bytearray(window.read(0, window.length))
    for m in members.values():
        at = m.offset - start
        crc = zlib.crc32(raw[at : at + m.size]).to_bytes(4, "little")
        name, end = m.name.encode(), len(raw)
        while True:  # its entry of the central directory; other names may begin as it does
            entry = raw.rfind(name, 0, end) - 46
            assert entry >= 0
            if raw[entry : entry + 4] == b"PK\x01\x02" and raw[entry + 28] == len(name):
                break
            end = entry + 46
        raw[entry + 16 : entry + 20] = crc
        if raw[at + m.size : at + m.size + 4] == b"PK\x07\x08":
            raw[at + m.size + 4 : at + m.size + 8] = crc
    file.chmod(0o644)
    with open(file, "r+b") as out:
        out.seek(start)
        out.write(raw)


def repository_files() -> list[Path]:
    """Every file that git tracks or would track, relative to the repository."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    names = listing.stdout.decode().split("\0")
    return [Path(name) for name in names if name and (ROOT / name).exists()]
