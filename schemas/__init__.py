"""Families and dialects as data, and the JSON Schemas of what the tool prints."""

from __future__ import annotations

from importlib.resources import files


def texts(folder: str) -> dict[str, str]:
    """The TOML files of `families` or `dialects`: name without suffix to text, in name order."""
    found = files(__name__).joinpath(folder)
    named = {p.name.removesuffix(".toml"): p for p in found.iterdir() if p.name.endswith(".toml")}
    return {name: named[name].read_text(encoding="utf-8") for name in sorted(named)}
