"""Values that JSON can print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: What extras are shown as, and what manifests and stores keep.
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
