"""An option that cannot act is refused by name, not passed over."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard import format as registry
from reshard.errors import FormatError, UsageError

Unpack = Callable[[str], Path]
DCP, MEGATRON = "dcp/tp_only_w2/checkpoint", "megatron/h-llama-tp2pp2/dist"


def folder(unpacked: Unpack, name: str) -> Path:
    first, second, rest = name.split("/")
    return unpacked(f"{first}/{second}") / rest


@pytest.mark.parametrize(
    ("source", "to", "options", "says"),
    [
        (DCP, "dcp:dp3", {"vocab_size": 100}, "--vocab-size does nothing for dcp: .*resize"),
        (DCP, "deepspeed:zero2dp2", {"vocab_size": 100}, "nothing for dcp into deepspeed"),
        (
            DCP,
            "torch",
            {"max_shard_size": 1000},
            "--max-shard-size .* torch: only hf",
        ),
        (MEGATRON, "tp1", {"max_shard_size": 1000}, "--max-shard-size does nothing for megatron"),
        (DCP, "dcp:dp2", {"tokenizer": "."}, "--tokenizer does nothing for dcp"),
        (MEGATRON, "tp1", {"data_cursor": "reset"}, "--data-cursor does nothing for megatron"),
        (DCP, "torch", {"set_latest": True}, "--set-latest does nothing for torch"),
        (DCP, "universal", {"set_latest": True}, "--set-latest does nothing for universal"),
    ],
)
def test_of_a_conversion(
    unpacked: Unpack, source: str, to: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(FormatError, match=says):
        reshard.plan(folder(unpacked, source), to, **options)


@pytest.mark.parametrize(
    ("source", "given", "says"),
    [
        (DCP, "dcp:tp4", "--from says 4 ranks, but files of 2 are there"),
        (DCP, "dcp:dp1", "--from says 1 ranks, but files of 2 are there"),
        (DCP, "dcp.plain", "'plain' is a variant of a target"),
        (DCP, "dcp:color=red", "option 'color' is not known here; known: ties"),
        (MEGATRON, "megatron.te", "'te' is a variant of a target"),
        ("deepspeed/z2_dp2_bf16/ckpt", "deepspeed:color=red", "is not known here; known: none"),
        ("hf/llama3/plain", "hf:color=red", "is not known here; known: none"),
    ],
)
def test_of_what_is_said_of_a_source(unpacked: Unpack, source: str, given: str, says: str) -> None:
    with pytest.raises((FormatError, UsageError), match=says):
        reshard.open(folder(unpacked, source), given)


def test_ranks_that_wrote_nothing(unpacked: Unpack) -> None:
    """The files do not show them: what is said of them counts."""
    opened = reshard.open(folder(unpacked, DCP), "dcp:dp3")
    assert opened.checkpoint.topology.dp == 3


def test_patterns_that_match_nothing_are_noted(unpacked: Unpack) -> None:
    said: Any = reshard.plan(folder(unpacked, DCP), "dcp:dp2", exclude=("*inv_freq", "*norm*"))
    assert "--exclude *inv_freq matches no tensor" in said["notes"]
    assert not [n for n in said["notes"] if "*norm*" in n]


def test_said_twice(unpacked: Unpack) -> None:
    with pytest.raises(UsageError, match="give one"):
        reshard.plan(folder(unpacked, DCP), "hf:max_shard_size=5MB", max_shard_size=1000)


def test_of_a_source(unpacked: Unpack) -> None:
    dcp, megatron = folder(unpacked, DCP), folder(unpacked, MEGATRON)
    for command in (reshard.verify, reshard.fingerprint, reshard.open):
        with pytest.raises(FormatError, match="--vocab-size does nothing for dcp"):
            command(dcp, vocab_size=100)
    with pytest.raises(FormatError, match="--vocab-size does nothing for dcp:"):
        reshard.diff(dcp, dcp, vocab_size=100)
    assert reshard.fingerprint(megatron, vocab_size=100)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["inspect", DCP, "--vocab-size", "9"], "--vocab-size does nothing"),
        (["verify", DCP, "--schema", "llama"], "--schema says something to `verify --against"),
        (["fingerprint", DCP, "--config", "."], "--config says something to `fingerprint --can"),
    ],
)
def test_on_the_command_line(unpacked: Unpack, words: list[str], says: str) -> None:
    words[1] = str(folder(unpacked, words[1]))
    done = subprocess.run(
        [sys.executable, "-m", "reshard", *words], capture_output=True, text=True, check=False
    )
    assert (done.returncode, says in done.stderr) == (1, True), done.stderr


def test_every_format_says_what_it_takes() -> None:
    for form in registry.formats()[0]:
        assert getattr(form, "takes") <= registry.ACTS_ON_SOME.keys()  # noqa: B009  # optional
