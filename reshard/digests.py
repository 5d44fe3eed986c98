"""Digests of whole files, as the manifest records and `xxhsum -c` or `sha256sum -c` check them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import xxhash

from reshard.errors import CorruptError


class Digest(Protocol):
    """A digest under way."""

    def update(self, data: memoryview | bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


USUAL = "xxh3_128"
KINDS: Mapping[str, Callable[[], Digest]] = {USUAL: xxhash.xxh3_128, "sha256": hashlib.sha256}
#: The list of a checkpoint's files, beside the manifest.
LISTS = {USUAL: "reshard-files.xxh128", "sha256": "reshard-files.sha256"}
_BLOCK = 1 << 20


def spelled(kind: str, digest: Digest) -> str:
    """A finished digest as the manifest records it."""
    return f"{kind}:{digest.hexdigest()}"


def of_file(path: Path, recorded: str) -> str:
    """The digest of a file, of the kind that `recorded` is. Raises CorruptError for another."""
    kind = recorded.partition(":")[0]
    if kind not in KINDS:
        raise CorruptError(f"{path}: the manifest's digest {recorded!r:.80} is of no known kind")
    digest = KINDS[kind]()
    with open(path, "rb") as source:
        while chunk := source.read(_BLOCK):
            digest.update(chunk)
    return spelled(kind, digest)


def listing(digests: Mapping[str, str]) -> tuple[str, bytes] | None:
    """The name and content of the list that `xxhsum -c` or `sha256sum -c` takes; None if empty.

    A line per file: digest, two spaces, name from the checkpoint's folder on (GNU form: xxhash
    0.8.1 xxhsum.1, 32 hex digits are XXH128).
    """
    kinds = {recorded.partition(":")[0] for recorded in digests.values()}
    if len(kinds) != 1:
        return None
    lines = [f"{recorded.partition(':')[2]}  {n}\n" for n, recorded in sorted(digests.items())]
    return LISTS[kinds.pop()], "".join(lines).encode()
