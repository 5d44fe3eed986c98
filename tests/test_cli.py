"""The command line: output, JSON, exit codes, messages; and what it does not import."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from reshard.cli import main, parse_size
from reshard.errors import UsageError

Unpack = Callable[[str], Path]


def run(*args: object) -> Any:
    return CliRunner().invoke(main, [str(a) for a in args])


def as_json(*args: object, code: int = 0) -> dict[str, Any]:
    """The one JSON object a command prints on stdout."""
    done = run(*args, "--json")
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    kind = "error" if found["status"] in ("refused", "failed") else str(args[0])
    conforms(found, kind)
    return found


def conforms(found: Any, kind: str) -> None:
    """Held against the JSON Schema that the package ships."""
    schema = json.loads((resources.files("reshard.schemas") / f"{kind}.schema.json").read_text())
    jsonschema.validate(found, schema, cls=jsonschema.Draft202012Validator)


def test_convert_shows_what_it_did(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked("megatron/a-tp4pp2") / "dist"
    done = run("convert", source, tmp_path / "out", "--from", "tp4pp2", "--to", "tp2pp4")
    assert done.exit_code == 0
    assert "verified: 204 of 204 tensors bit-exact" in done.stdout
    assert "rng-derived" in done.stdout
    assert "--make-vocab-size-divisible-by 256" in done.stdout
    again = run("convert", source, tmp_path / "out", "--to", "tp2pp4")
    assert again.exit_code == 0
    assert "finished already" in again.stdout


def test_diff_exit_codes(unpacked: Unpack, tmp_path: Path) -> None:
    a, b = (unpacked(f"megatron/{n}") / "dist" for n in ("a-tp4pp2", "a-tp1pp1"))
    equal = as_json("diff", a, b)
    assert equal["status"] == "equal"
    assert equal["compared"] == 204
    other = unpacked("megatron/b-tp1pp1dp1") / "dist"
    different = as_json("diff", a, other, code=3)
    assert different["status"] == "different"
    assert {d["kind"] for d in different["differences"]} >= {"bits"}
    assert as_json("verify", a, "--against", other, code=3)["status"] == "different"
    assert as_json("verify", a, "--against", b)["status"] == "equal"


def test_inspect_plan_fingerprint_formats(unpacked: Unpack) -> None:
    source = unpacked("megatron/c-pp2ep2") / "dist"
    seen = as_json("inspect", source)
    assert seen["topology"] == "tp1pp2ep2dp2"
    assert seen["slots"]["master"]["dtypes"] == {"float32": seen["slots"]["master"]["tensors"]}
    assert seen["iteration"] == 3
    plan = as_json("plan", source, "--to", "ep1pp1")
    assert plan["target"]["topology"] == "tp1pp1dp2"
    assert plan["read_amplification"] <= 1.1
    assert plan["free_disk"] > 0
    assert set(as_json("fingerprint", source)["fingerprints"]) == set(seen["slots"])
    names = {f["name"]: f for f in as_json("formats")["formats"]}
    assert names["megatron"]["writes"]
    assert names["megatron-legacy"]["writes"]


def test_every_field_of_the_source_has_a_fate(unpacked: Unpack) -> None:
    plan = as_json("plan", unpacked("megatron/g-v019-tp2pp2dp2") / "dist", "--to", "tp1pp1")
    seen = as_json("inspect", unpacked("megatron/g-v019-tp2pp2dp2") / "dist")
    fates = {f["path"] for f in plan["fates"]}
    for path in seen["extras"]:
        assert path in fates or path.split(".")[0] in fates, path


def test_the_manifest_conforms(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked("megatron/a-tp1pp1") / "dist"
    conforms(as_json("convert", source, tmp_path / "out", "--to", "tp2"), "convert")
    folder = tmp_path / "out" / "iter_0000003"
    manifest = json.loads((folder / "reshard.json").read_text())
    conforms(manifest, "manifest")
    rows = [
        json.loads(line)
        for name in manifest["tensor_files"]
        for line in (folder / name).read_text().splitlines()
    ]
    assert len(rows) == manifest["tensors"] == 204
    for row in rows:
        conforms(row, "manifest-tensor")


def test_dry_run_writes_nothing(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked("megatron/a-tp1pp1") / "dist"
    done = run("convert", source, tmp_path / "out", "--to", "tp2", "--dry-run")
    assert done.exit_code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("convert", "SRC", "OUT", "--to", "tp3"), 1, "attention heads"),
        (("convert", "SRC", "OUT", "--to", "tq3"), 1, "not known"),
        (("convert", "SRC", "OUT", "--to", "megatron:tq3"), 2, "not a topology"),
        (("convert", "SRC", "OUT", "--to", "tp2tp4"), 2, "twice"),
        (("convert", "SRC", "OUT", "--to", "tp2,color=red"), 2, "color"),
        (("convert", "SRC", "OUT"), 2, "--to TARGET or --like DIR"),
        (("convert", "SRC", "OUT", "--to", "tp1", "--memory", "lots"), 2, "is not a size"),
        (("convert", "SRC", "OUT", "--to", "zero3dp2"), 2, "zero"),
        (("convert", "SRC", "OUT", "--to", "optim=dp_reshardable"), 1, "fully_reshardable"),
        (("inspect", "NOWHERE"), 1, "does not exist"),
        (("inspect", "EMPTY"), 1, "no checkpoint that reshard knows"),
        (("inspect", "SRC", "--iteration", "9"), 1, "no iteration 9"),
        (("inspect", "ONE", "--iteration", "9"), 1, "is one checkpoint, and it is of 3, not 9"),
        (("diff", "SRC", "SRC", "--iteration", "9"), 1, "no iteration 9"),
        (("diff", "SRC", "SRC", *("--iteration", "3") * 3), 2, "twice at most"),
        (("diff", "SRC", "SRC", "--from", "tp1", "--from", "tp2"), 1, "--from says tp=2"),
        (("convert", "SRC", "OUT", "--to", "megatron:tp2", "--like", "HUB"), 2, "HUB is a checkpo"),
        (("convert", "SRC", "LONG", "--to", "tp2"), 1, "the name of DST has 240 bytes"),
        (("convert", "SRC", "OUT", "--to", "vocab_divisor=x"), 2, "a number of rows is expected"),
        (("convert", "SRC", "OUT", "--to", "vocab_divisor=0"), 2, "a number of rows is expected"),
        (("convert", "SRC", "OUT", "--to", "tp1,first=x"), 2, "a number of layers is expected"),
        (("convert", "SRC", "OUT", "--to", "dp99999999999"), 2, "dp may be 1000000 at most"),
        (("convert", "SRC", "OUT", "--to", "tp2", "--dtype", "fp8"), 2, "--dtype: dtype 'fp8' is"),
        (("convert", "SRC", "DEEP", "--to", "tp2"), 1, "at most go through"),
    ],
)
def test_what_is_wrong_is_said(
    unpacked: Unpack, tmp_path: Path, args: tuple[str, ...], code: int, message: str
) -> None:
    places = {
        "SRC": str(unpacked("megatron/a-tp1pp1") / "dist"),
        "OUT": str(tmp_path / "out"),
        "NOWHERE": str(tmp_path / "nowhere"),
        "EMPTY": str(tmp_path),
        "ONE": str(unpacked("megatron/a-tp1pp1") / "dist" / "iter_0000003"),
        "HUB": str(unpacked("hf/llama2") / "plain"),
        "LONG": str(tmp_path / ("n" * 240)),
        "DEEP": str(tmp_path) + "/n" * 2000,
    }
    done = run(*(places.get(a, a) for a in args))
    assert done.exit_code == code, done.output
    assert message.replace("HUB", places["HUB"]) in done.stderr
    assert "Traceback" not in done.output
    assert not (tmp_path / "out").exists()


def test_a_run_folder_without_a_tracker_says_what_it_holds(
    unpacked: Unpack, tmp_path: Path
) -> None:
    """A copied run often lacks its tracker: the tags are listed, by number, and one is chosen."""
    tag = unpacked("deepspeed/z2_dp2_bf16") / "ckpt" / "global_step5"
    for name in ("global_step10", "global_step5", "best"):
        shutil.copytree(tag, tmp_path / "ds" / name)
    done = run("inspect", tmp_path / "ds")
    assert (done.exit_code, done.stdout) == (1, "")
    listed = "best (deepspeed), global_step5 (deepspeed), global_step10 (deepspeed)"
    assert f"no tracker says which is meant: {listed}. Name one, as in" in done.stderr
    assert "--iteration N" in done.stderr
    assert run("inspect", tmp_path / "ds", "--iteration", "5").exit_code == 0
    assert run("inspect", tmp_path / "ds" / "best").exit_code == 0
    saved = unpacked("megatron/a-tp1pp1") / "dist" / "iter_0000003"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "iter_0000003").symlink_to(saved)
    assert "meant: iter_0000003 (megatron). Name" in run("inspect", tmp_path / "run").stderr
    assert run("inspect", tmp_path / "run", "--iteration", "3").exit_code == 0


def test_a_refusal_in_json(tmp_path: Path) -> None:
    found = as_json("inspect", tmp_path / "nowhere", code=1)
    assert found["status"] == "refused"
    assert found["error"] == "FormatError"


def test_sizes() -> None:
    assert parse_size("1GiB") == 1 << 30
    assert parse_size("64m") == 64 << 20
    assert parse_size("4096") == 4096
    with pytest.raises(UsageError):
        parse_size("-1")


@pytest.mark.parametrize("command", ["inspect", "plan", "convert"])
def test_torch_is_never_imported(unpacked: Unpack, tmp_path: Path, command: str) -> None:
    """Importing torch costs seconds and 200 MiB."""
    source = str(unpacked("megatron/a-tp1pp1") / "dist")
    more = {
        "inspect": [],
        "plan": ["--to", "tp2"],
        "convert": [str(tmp_path / "out"), "--to", "tp2"],
    }[command]
    code = (
        "import sys\nfrom reshard.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        "heavy = {'torch', 'megatron', 'deepspeed', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command, source, *more],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_workers_write_the_same_bytes(unpacked: Unpack, tmp_path: Path) -> None:
    source = unpacked("megatron/a-tp4pp2") / "dist"
    for n in (1, 4):
        done = run("convert", source, tmp_path / str(n), "--to", "tp2pp4", "--workers", n)
        assert done.exit_code == 0
    for file in (tmp_path / "1").rglob("*"):
        if file.is_file() and file.name != "reshard.json":
            assert (
                file.read_bytes()
                == (tmp_path / "4" / file.relative_to(tmp_path / "1")).read_bytes()
            )
