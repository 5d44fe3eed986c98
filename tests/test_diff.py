"""The difference of two checkpoints: what counts, and what each of them is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import reshard
from reshard.cli import main
from reshard.differences import differences
from reshard.errors import FormatError, UsageError
from reshard.format import open_checkpoint

Unpack = Callable[[str], Path]


def test_diff_takes_one_iteration_of_each(unpacked: Unpack) -> None:
    a, b = (unpacked(f"megatron/{n}") / "dist" for n in ("a-tp4pp2", "a-tp1pp1"))
    said = ("--iteration", "3", "--iteration", "3", "--from", "tp4pp2", "--from", "tp1")
    done = CliRunner().invoke(main, ["diff", str(a), str(b), *said])
    assert done.exit_code == 0, done.output
    assert reshard.diff(a, b, given=("tp4pp2", "tp1"), iteration=(3, 3))["compared"] == 204
    with pytest.raises(FormatError, match="no iteration 4"):
        reshard.diff(a, b, iteration=(3, 4))
    with pytest.raises(UsageError, match="of A, then of B"):
        reshard.diff(a, b, iteration=(3, 3, 3))


def test_diff_counts_an_option_that_only_one_side_has(unpacked: Unpack) -> None:
    """Not where a group without it is updated alike, nor another framework's multipliers."""
    source = open_checkpoint(unpacked("megatron/h-llama-tp2pp2") / "dist")
    assert source.groups is not None
    first, *rest = source.groups

    def against(form: str = "megatron", **options: Any) -> list[str]:
        made = replace(first, options={**first.options, **options})
        other = replace(source, groups=(made, *rest), format=form)
        pair = (source, other), (other, source)
        one, back = (differences(*p, elements=1 << 18, slots=None)[0] for p in pair)
        assert len(one) == len(back)
        return [d.detail for d in one]

    assert against(weight_decay_of_mine=0.5) == ["only right: 0.5"]
    assert against(nesterov=True, momentum=0.5) == ["only right: 0.5", "only right: True"]
    assert against(bias_correction=True, lr_mult=1.0) == []
    assert against(start_wd=0.1) == ["only right: 0.1"]
    assert against("dcp", start_wd=0.1) == []
