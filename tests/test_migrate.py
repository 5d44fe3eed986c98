"""Migration files: each typed step on real checkpoints, what it loses, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reshard
from reshard.errors import FormatError, LossError, ReshardError, UsageError
from reshard.format import open_checkpoint
from reshard.migrate import migrate, read_migration

Unpack = Callable[[str], Path]
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
SLOTS = ("param", "exp_avg", "exp_avg_sq")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """A migration file of this text."""

    def written(text: str) -> str:
        path = tmp_path / "migration.toml"
        path.write_text(text)
        return str(path)

    return written


@pytest.fixture(scope="module")
def fsdp(unpacked: Unpack) -> Path:
    return unpacked("dcp/fsdp2_w2_fp32") / "checkpoint"


def values(path: Path, name: str, slot: str = "param") -> Any:
    return reshard.open(path)[name, slot][...]


def test_a_rename_and_its_inverse_are_the_identity(fsdp: Path, tmp_path: Path, write: Any):
    there = write('[[step]]\nkind = "rename"\nmatch = "model\\\\.(.*)"\nto = "backbone.\\\\1"\n')
    report = reshard.convert(fsdp, tmp_path / "there", "dcp:dp3", migrate=there)
    assert report["losses"] == [
        x for x in report["losses"] if isinstance(x, dict) and x["code"] != "migrated"
    ]
    names = {t.name for t in open_checkpoint(tmp_path / "there").layout.tensors}
    assert HEAD in names
    assert not any(n.startswith("model.") for n in names)
    back = write('[[step]]\nkind = "rename"\nmatch = "backbone\\\\.(.*)"\nto = "model.\\\\1"\n')
    reshard.convert(tmp_path / "there", tmp_path / "back", "dcp:dp2", migrate=back)
    assert reshard.diff(fsdp, tmp_path / "back")["differences"] == []
    groups = open_checkpoint(tmp_path / "back").groups
    assert [g.members for g in groups or ()] == [
        g.members for g in open_checkpoint(fsdp).groups or ()
    ]


@pytest.mark.parametrize("rows", [300, 201])
def test_a_vocabulary_grows_with_zeros_in_every_slot_and_shrinks_by_its_last_rows(
    unpacked: Unpack, fsdp: Path, tmp_path: Path, write: Any, rows: int
):
    file = write(f'[[step]]\nkind = "resize"\nnames = ["{HEAD}", "{EMBED}"]\nrows = {rows}\n')
    made = tmp_path / "made"
    report = reshard.convert(fsdp, made, "deepspeed:zero3dp2", migrate=file)
    assert (rows < 256) == any(x["code"] == "migrated" for x in report["losses"])
    for slot in SLOTS:
        old, new = values(fsdp, EMBED, slot), values(made, EMBED, slot)
        kept = min(rows, 256)
        assert new.shape == (rows, 32)
        assert new[:kept].tobytes() == old[:kept].tobytes()
        assert np.count_nonzero(new[kept:]) == 0
    told = json.loads((made / "global_step4/reshard.json").read_text())["options"]["migrate"]
    assert told == [{"kind": "resize", "names": [HEAD, EMBED], "rows": rows}]


def test_slots_are_reset_dropped_and_made_by_name(fsdp: Path, tmp_path: Path, write: Any):
    norms = "model.layers.0.input_layernorm.weight"
    file = write(
        f"""
        [[step]]
        kind = "drop"
        names = ["{HEAD}"]
        slots = ["exp_avg", "exp_avg_sq"]
        [[step]]
        kind = "default"
        names = ["{HEAD}"]
        slots = ["exp_avg", "exp_avg_sq"]
        group_of = "{EMBED}"
        [[step]]
        kind = "reset"
        names = ["model.layers.*"]
        slots = ["exp_avg", "step"]
        [[step]]
        kind = "options"
        names = ["{norms}"]
        set = {{ weight_decay = 0.5 }}
        """
    )
    report = reshard.convert(fsdp, tmp_path / "made", "dcp:dp2", migrate=file)
    assert report["status"] == "ok"
    made = open_checkpoint(tmp_path / "made")
    assert np.count_nonzero(values(tmp_path / "made", HEAD, "exp_avg")) == 0
    assert np.count_nonzero(values(tmp_path / "made", norms, "exp_avg")) == 0
    for name, slot in ((norms, "exp_avg_sq"), (EMBED, "exp_avg"), (HEAD, "param")):
        assert values(tmp_path / "made", name, slot).tobytes() == values(fsdp, name, slot).tobytes()
    assert {made.steps[HEAD], made.steps[norms], made.steps[EMBED]} == {0.0, 4.0}
    decay = {m: g.options["weight_decay"] for g in made.groups or () for m in g.members}
    assert (decay[norms], decay["model.norm.weight"], decay[HEAD]) == (0.5, 0.0, 0.1)
    codes = [x["what"] for x in report["losses"] if x["code"] == "migrated"]
    assert f"{HEAD} (exp_avg)" in codes
    assert "param_groups.weight_decay" in codes
    with pytest.raises(LossError, match="--strict"):
        reshard.convert(fsdp, tmp_path / "strict", "dcp:dp2", migrate=file, strict=True)


def test_another_migration_is_another_conversion(fsdp: Path, tmp_path: Path, write: Any):
    """A reset changes no header, yet it is not what was done before."""
    plain = reshard.convert(fsdp, tmp_path / "made", "dcp:dp2")
    file = write('[[step]]\nkind = "reset"\nnames = ["*"]\nslots = ["exp_avg"]\n')
    with pytest.raises(ReshardError, match="exists"):
        reshard.convert(fsdp, tmp_path / "made", "dcp:dp2", migrate=file)
    other = reshard.convert(fsdp, tmp_path / "other", "dcp:dp2", migrate=file)
    assert plain["plan"] != other["plan"]
    report = reshard.plan(fsdp, "dcp:dp2", migrate=file)
    assert report["migration"] == [{"kind": "reset", "names": ["*"], "slots": ["exp_avg"]}]


def test_a_megatron_vocabulary_is_resized_with_its_args(
    unpacked: Unpack, tmp_path: Path, write: Any
):
    source = unpacked("megatron/h-llama-tp2pp2") / "dist"
    names = '["embedding.word_embeddings.weight", "output_layer.weight"]'
    file = write(f'[[step]]\nkind = "resize"\nnames = {names}\nrows = 131\n')
    reshard.convert(source, tmp_path / "made", "dcp:dp2,names=hf", migrate=file)
    made = values(tmp_path / "made", EMBED)
    old = values(source, "embedding.word_embeddings.weight", "master")
    assert made.shape == (131, 40)
    assert made[:109].tobytes() == old[:109].tobytes()
    assert np.count_nonzero(made[109:]) == 0


DEFAULT = '[[step]]\nkind = "default"\nnames = ["a"]\nslots = ["exp_avg"]\n'
SET = '[[step]]\nkind = "options"\nnames = ["a"]\nset = '


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", FormatError, r"holds \[\[step\]\] tables and nothing else"),
        ("step = 3", FormatError, r"holds \[\[step\]\] tables"),
        ("[[step]", FormatError, "not TOML"),
        ('[[step]]\nkind = "sort"', FormatError, "step 1: kind 'sort': choose one of rename, dr"),
        ('[[step]]\nkind = "drop"\nname = ["a"]', FormatError, r"step 1 \(drop\): .*'name'"),
        ('[[step]]\nkind = "drop"', FormatError, r"step 1 \(drop\): .*'names'"),
        ('[[step]]\nkind = "drop"\nnames = "a"', FormatError, "names = 'a' is not what names"),
        ('[[step]]\nkind = "resize"\nnames = ["a"]\nrows = -1', FormatError, "rows = -1 is not"),
        (DEFAULT + "step = true", FormatError, "step = True is .*: a number from 0"),
        (DEFAULT + "step = inf", FormatError, "step = inf is .*: a number from 0"),
        (SET + "{}", FormatError, r"set = \{\} is .*: a table, as in"),
        (SET + '{ lr = "high" }', FormatError, "step 1: set.lr = 'high': give a finite number"),
        (SET + "{ weight_decay = nan }", FormatError, "set.weight_decay = nan: give a finite numb"),
        (SET + "{ pre_lr_mult = true }", FormatError, "set.pre_lr_mult = True: give a finite numb"),
        (SET + "{ betas = 0.9 }", FormatError, "set.betas = 0.9: give a list of two numbers"),
        (SET + "{ betas = [0.9, 1.5] }", FormatError, r"set.betas = \[0.9, 1.5\]: give a list of"),
        (SET + "{ amsgrad = 1 }", FormatError, "set.amsgrad = 1: give true or false"),
        (SET + "{ since = 1979-05-27 }", FormatError, "set.since = .*: give a number, a text"),
    ],
)
def test_a_file_that_is_not_understood_is_refused(
    write: Any, text: str, error: type[ReshardError], message: str
):
    with pytest.raises(error, match=message):
        read_migration(write(text))


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        ('kind = "drop"\nnames = ["nothing.*"]', UsageError, r"names 'nothing\.\*', and .* no su"),
        ('kind = "drop"\nnames = ["*"]\nslots = ["momentum"]', UsageError, "has slots momentum"),
        ('kind = "rename"\nmatch = "x"\nto = "y"', UsageError, "no such tensor"),
        ('kind = "rename"\nmatch = "("\nto = "y"', FormatError, "unterminated"),
        ('kind = "rename"\nmatch = ".*norm.*"\nto = "y"', LossError, "would both be y"),
        ('kind = "reset"\nnames = ["*"]\nslots = ["param"]', LossError, "weights are not reset"),
        (
            'kind = "options"\nnames = ["*"]\nset = { maximize = 0.5 }',
            FormatError,
            "set.maximize = 0.5: give true or false",
        ),
        ('kind = "default"\nnames = ["*"]\nslots = ["exp_avg"]', LossError, "it is there: reset"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(
    fsdp: Path, write: Any, step: str, error: type[ReshardError], message: str
):
    with pytest.raises(error, match=message):
        migrate(open_checkpoint(fsdp), read_migration(write(f"[[step]]\n{step}\n")))


def test_a_file_that_is_not_there_is_a_usage_error(fsdp: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="--migrate"):
        reshard.plan(fsdp, "dcp:dp2", migrate=str(tmp_path / "none.toml"))
