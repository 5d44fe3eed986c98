"""Compares an open checkpoint with the truth that its run left beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

import reshard
from reshard.box import Box
from reshard.containers.safetensors import read_header
from reshard.files import Files
from reshard.layout import place

Truth = dict[tuple[str, str], npt.NDArray[np.generic]]
SLOTS = {"model": "param", "fp32": "param"}


def read_truth(folder: Path) -> Truth:
    """(name, slot) to values: `model.NAME` in fixtures/dcp, `NAME/fp32` in fixtures/wrappers."""
    out: Truth = {}
    with Files(folder) as files:
        for key, array in read_header(folder, "truth.safetensors").arrays.items():
            if "/" in key:
                name, _, slot = key.rpartition("/")
            else:
                slot, _, name = key.partition(".")
            box = Box.whole(array.shape)
            out[name, SLOTS.get(slot, slot)] = files.read(place(box, array), box)
    return out


def differences(opened: reshard.api.Opened, truth: Truth) -> list[str]:
    """What is not equal to the truth, bit for bit."""
    out: list[str] = []
    for (name, slot), expected in truth.items():
        if slot == "step":
            if opened.steps.get(name) != float(expected):
                out.append(f"step of {name}: {opened.steps.get(name)}, not {expected}")
            continue
        try:
            found = opened[name, slot][...]
        except KeyError:
            out.append(f"{name} ({slot}) is missing")
            continue
        if found.dtype != expected.dtype or found.shape != expected.shape:
            out.append(f"{name} ({slot}): {found.dtype} {found.shape}")
        elif found.tobytes() != expected.tobytes():
            out.append(f"{name} ({slot}) differs")
    return out
