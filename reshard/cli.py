"""The command line: arguments in, a report or one JSON object out, exit codes as promised."""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import click

from reshard.errors import FormatError, ReshardError, UsageError
from reshard.values import Json
from reshard.version import VERSION
from reshard.workers import keep_freed_memory, usual

_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int:
    """`1GiB`, `256MiB`, `64m` or bytes, as bytes."""
    m = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    if m is None or float(m.group(1)) <= 0:
        raise UsageError(f"{text!r} is not a size; write 256MiB or 1GiB")
    return int(float(m.group(1)) * _SIZES[m.group(2)])


class _Size(click.ParamType):  # type: ignore[type-arg]  # generic only in click >= 8.2's stubs
    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


SIZE = _Size()


class _Decimal(click.ParamType):  # type: ignore[type-arg]  # generic only in click >= 8.2's stubs
    """A size in which 5GB is 5e9 bytes, as the hub's tools count; 5GiB is 5 * 2^30."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        m = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt])b", value.strip().lower())
        if m is None:
            return parse_size(value)
        return int(float(m[1]) * 1000 ** (" kmgt".index(m[2])))


DECIMAL = _Decimal()


class Bars:
    """tqdm bars in bytes with ETA, one per phase, on stderr; none when it is no terminal."""

    def __init__(self, *, shown: bool) -> None:
        self.shown = shown
        self.bar: Any = None
        self.phase = ""

    def __call__(self, phase: str, done: int, total: int) -> None:
        """`done` of `total` bytes of a phase."""
        if not self.shown:
            return
        if phase != self.phase:
            self.close()
            from tqdm import tqdm

            self.phase = phase
            self.bar = tqdm(
                total=total, desc=phase, unit="B", unit_scale=True, unit_divisor=1024, leave=True
            )
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        """Finish the bar that is shown."""
        if self.bar is not None:
            self.bar.close()


def _json_option(f: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(f)


def _source_options(f: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in (
        click.option("--from", "given", metavar="TARGET", help="Format or topology of SRC."),
        click.option("--iteration", type=int, help="Which checkpoint of a run folder."),
        click.option("--vocab-size", type=int, help="True vocabulary, without padding rows."),
    ):
        f = decorate(f)
    return f


def _family_options(f: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in (
        click.option("--schema", metavar="NAME|FILE", help="Model family; none: keep the names."),
        click.option("--config", metavar="DIR", help="Folder whose config.json is the model's."),
    ):
        f = decorate(f)
    return f


def _memory_options(f: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in (
        click.option("--memory", type=SIZE, default="1GiB", show_default=True, metavar="SIZE"),
        click.option("--block", type=SIZE, default="1MiB", show_default=True, metavar="SIZE"),
    ):
        f = decorate(f)
    return f


def _convert_options(f: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in (
        click.option("--to", "to", metavar="TARGET", help="tp2pp4, megatron-legacy:tp2, dcp, …"),
        click.option("--like", metavar="DIR", help="Write as this checkpoint is laid out."),
        click.option("--weights-only", is_flag=True, help="Leave the optimizer behind."),
        click.option("--dtype", help="Store weights in this dtype (bf16, fp32)."),
        click.option("--tokenizer", metavar="DIR", help="Folder whose tokenizer goes along."),
        click.option("--max-shard-size", type=DECIMAL, metavar="SIZE", help="Of hf files; 5GB."),
        click.option("--compress", metavar="zstd[:LEVEL]", help="Of universal stores."),
        click.option("--data-cursor", metavar="reset|keep-rank0", help="Opaque loader states."),
        click.option("--migrate", metavar="FILE", help="Renames, drops, resets, resizing (TOML)."),
        click.option("--include", multiple=True, metavar="GLOB"),
        click.option("--exclude", multiple=True, metavar="GLOB"),
        click.option("--keep-opaque", is_flag=True, help="Copy training_args.bin and its like."),
        click.option("--strict", is_flag=True, help="Refuse any loss."),
        click.option("--replicas", type=click.Choice(["check", "first"]), default="check"),
    ):
        f = decorate(f)
    return f


def _stop(number: int, _: object) -> None:
    """SIGTERM stops as Ctrl-C does: tidily, and so that the same command resumes."""
    raise KeyboardInterrupt(signal.Signals(number))


def _guarded(f: Callable[..., int]) -> Callable[..., None]:
    """Turn a command's outcome into output and exit code; never a traceback for bad input."""

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGTERM, _stop)
        try:
            code = f(*args, **kwargs)
        except ReshardError as error:
            if kwargs.get("as_json"):
                kind = type(error).__name__
                print(json.dumps({"status": "refused", "error": kind, "message": str(error)}))
            print(f"reshard: {type(error).__name__}: {_printable(str(error))}", file=sys.stderr)
            sys.exit(error.exit_code)
        except BrokenPipeError:  # the reader of our output has left, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)
        except OSError as error:
            if kwargs.get("as_json"):
                print(json.dumps({"status": "failed", "error": "OSError", "message": str(error)}))
            print(f"reshard: {_printable(str(error))}", file=sys.stderr)
            sys.exit(1)
        except KeyboardInterrupt as stop:
            print("reshard: interrupted; the same command resumes", file=sys.stderr)
            sys.exit(143 if stop.args == (signal.SIGTERM,) else 130)
        except Exception as error:  # a bug of ours: said as one, without a traceback
            where = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
            if kwargs.get("as_json"):
                print(json.dumps({"status": "failed", "error": "bug", "message": message}))
            print(
                f"reshard: a bug in reshard, please report it: {_printable(message)}",
                file=sys.stderr,
            )
            sys.exit(1)
        sys.exit(code)

    return run


_LONGEST = 2000  # characters of a message


def _printable(text: str) -> str:
    """Text as a terminal may be sent it: what a file says may hold escape sequences."""
    shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text[:_LONGEST])
    return shown + (f"… ({len(text)} characters)" if len(text) > _LONGEST else "")


def _emit(report: Mapping[str, Json], text: list[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
    else:
        print("\n".join(map(_printable, text)))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="reshard")
def main() -> None:
    """Turn any distributed LLM training checkpoint into any other, whole and proven right."""
    # entries and pieces are held by the million, and not in cycles (peak memory is the same without
    # any search): looked for as often as Python does, cycles take half the time of a large header
    gc.set_threshold(100_000, 50, 20)
    # numpy's OpenBLAS starts a thread for each core when it is imported; nothing here multiplies
    # matrices of floats
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@main.command("inspect")
@click.argument("checkpoint")
@_source_options
@_json_option
@_guarded
def inspect_command(checkpoint: str, as_json: bool, **options: Any) -> int:
    """Format, topology, slots, sizes, extras, problems; headers only."""
    from reshard.inspect import inspect, lines

    gc.disable()  # ends soon, and holds to its end what it makes
    seen = inspect(_open(checkpoint, options))
    _emit(seen, lines(seen), as_json)
    return 0


def _open(path: str, options: Mapping[str, Any], *, alone: bool = True) -> Any:
    """The checkpoint; `alone`: no other one is there that --vocab-size may be said of."""
    from reshard.format import refuse_idle
    from reshard.opening import open_as

    rows = options.get("vocab_size")
    opened = open_as(path, options.get("given"), options.get("iteration"), rows)
    if alone and rows is not None:
        refuse_idle("vocab_size", opened.format)
    return opened


def _refuse_family(options: Mapping[str, Any], where: str) -> None:
    """Raises FormatError for a family that is named, and has no names to translate."""
    for name in ("schema", "config"):
        if options.get(name) is not None:
            raise FormatError(f"--{name} says something to `{where}` alone. Leave it away.")


def _options(kwargs: Mapping[str, Any]) -> Any:
    from reshard.planning import Options

    taken = dict(kwargs)
    taken["first_replica"] = taken.pop("replicas") == "first"
    return Options(**taken)


@main.command("plan")
@click.argument("source")
@_convert_options
@_family_options
@_source_options
@_json_option
@_guarded
def plan_command(source: str, as_json: bool, **kwargs: Any) -> int:
    """What convert would do: files, bytes, losses, fates, memory, disk."""
    from reshard.planning import make_plan
    from reshard.report import plan_report

    gc.disable()  # as above
    report = plan_report(make_plan(source, _options(kwargs)))
    _emit(report, _plan_lines(report), as_json)
    return 0


def _plan_lines(report: Mapping[str, Any]) -> list[str]:
    from reshard.format import Loss
    from reshard.inspect import size_text
    from reshard.join import loss_lines

    source, target = report["source"], report["target"]
    out = [
        f"{source['format']} {source['topology']} -> {target['format']} {target['topology']}",
        f"  tensors   {report['tensors']}   copies {report['copies']}   fills {report['fills']}",
        f"  read      {size_text(report['bytes_read'])} ({report['read_amplification']} x needed)",
        f"  write     {size_text(target['bytes'])} in {target['files']} files, "
        f"{size_text(report['free_disk'])} free",
        "  per rank  " + ", ".join(f"{s} {size_text(n)}" for s, n in target["per_rank"].items()),
    ]
    losses = [Loss(x["code"], x["what"], x["detail"]) for x in report["losses"]]
    out += [f"  loss      {line}" for line in loss_lines(losses)]
    out += [f"  note      {note}" for note in report["notes"]]
    kinds: dict[str, list[str]] = {}
    for fate in report["fates"]:
        kinds.setdefault(fate["kind"], []).append(fate["path"])
    out += [f"  {kind:<9} {_few(paths)}" for kind, paths in sorted(kinds.items())]
    out += [f"  resume    {k}: {_shown(v)}" for k, v in report["recipe"].items()]
    return out


def _few(paths: list[str]) -> str:
    more = f" and {len(paths) - 6} more" if len(paths) > 6 else ""
    return ", ".join(paths[:6]) + more


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


@main.command("convert")
@click.argument("source")
@click.argument("target")
@_convert_options
@_family_options
@_source_options
@_memory_options
@click.option(
    "--workers", type=click.IntRange(1, 256), default=usual, show_default="cores, 4 at most"
)
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="cpu|cuda[:N]",
    help="Where values are permuted, cast, scaled and fingerprinted.",
)
@click.option("--dry-run", is_flag=True, help="Stop after the plan.")
@click.option("--no-verify", is_flag=True, help="Skip the comparison after writing.")
@click.option("--digest", type=click.Choice(["xxh3_128", "sha256"]), default="xxh3_128")
@click.option("--set-latest", is_flag=True, help="Move an existing run folder's tracker.")
@click.option("--overwrite", is_flag=True, help="Replace an existing checkpoint.")
@_json_option
@_guarded
def convert_command(
    source: str, target: str, as_json: bool, dry_run: bool, no_verify: bool, **kwargs: Any
) -> int:
    """Convert SRC to DST; verified before it is published, resumed by the same command."""
    from reshard.conversion import convert
    from reshard.planning import make_plan
    from reshard.report import plan_report

    options = _options({**kwargs, "verify": not no_verify})
    if dry_run:
        report: Any = plan_report(make_plan(source, options))
        _emit(report, _plan_lines(report), as_json)
        return 0
    bars = Bars(shown=sys.stderr.isatty())
    keep_freed_memory()
    try:
        report = convert(source, target, options, bars)
    finally:
        bars.close()
    text = _plan_lines(report)
    if report.get("already"):
        text = [f"{report['path']} is finished already, by the same plan"]
    else:
        done = report["verified"]
        text += [f"  {slot:<9} fingerprint {d}" for slot, d in report["fingerprints"].items()]
        text.append(
            f"verified: {done['tensors']} of {done['of']} tensors bit-exact"
            if options.verify
            else "not verified, as asked"
        )
        text.append(f"{report['path']}")
    _emit(report, text, as_json)
    return 0


@main.command("verify")
@click.argument("checkpoint")
@click.option("--against", metavar="OTHER", help="Compare logical content with another.")
@click.option("--deep", is_flag=True, help="Read from the disk, not from the page cache.")
@click.option("--subset", metavar="I/N", help="Content of the I-th of N parts; structure of all.")
@_family_options
@_source_options
@_memory_options
@_json_option
@_guarded
def verify_command(
    checkpoint: str,
    against: str | None,
    deep: bool,
    subset: str | None,
    as_json: bool,
    memory: int,
    block: int,
    **options: Any,
) -> int:
    """Structure, coverage, replicas, masters, recorded digests."""
    from reshard.engine import block_elements
    from reshard.verification import Part, verify

    elements = block_elements(memory, block, 1)
    part = Part.parse(subset) if subset is not None else Part()
    opened = _open(checkpoint, options, alone=against is None)
    if against is None:
        _refuse_family(options, "verify --against OTHER")
    report = verify(opened, elements=elements, deep=deep, part=part)
    findings: Any = report["findings"]
    of = f" of {report['of']}: part {report['subset']}" if part.of > 1 else ""
    text = [f"{report['path']}: {report['tensors']}{of} tensors whole"]
    text += [f"  finding   {f['code']}: {f['what']}: {f['detail']}" for f in findings]
    code = 0
    if against is not None:
        there = _open(against, {"vocab_size": options.get("vocab_size")}, alone=False)
        other, more, code = _diff(opened, there, options, elements, False)
        report |= {"status": other["status"], "against": other}
        text += more
    _emit(report, text, as_json)
    return code


def _diff(
    left: Any, right: Any, options: Mapping[str, Any], elements: int, extras: bool
) -> tuple[dict[str, Json], list[str], int]:
    """The report on two open checkpoints, its lines, and the exit code."""
    from reshard.differences import diff_report, differences
    from reshard.format import refuse_idle
    from reshard.namings import Choice

    if options.get("vocab_size") is not None:
        refuse_idle("vocab_size", left.format, right.format)
    found, compared = differences(
        left,
        right,
        elements=elements,
        extras=extras,
        choice=Choice(options.get("schema"), options.get("config")),
    )
    text = [f"{d.kind}: {d.what}: {d.detail}" for d in found]
    text.append(f"{len(found)} differences" if found else f"equal: {compared} tensors bit for bit")
    return diff_report(found, compared), text, 3 if found else 0


@main.command("diff")
@click.argument("left")
@click.argument("right")
@click.option("--extras", is_flag=True, help="Extras count too.")
@_family_options
@click.option("--from", "given", metavar="TARGET", multiple=True, help="Of A, then of B.")
@click.option("--iteration", type=int, multiple=True, help="Of A, then of B.")
@click.option("--vocab-size", type=int, help="True vocabulary, without padding rows.")
@_memory_options
@_json_option
@_guarded
def diff_command(
    left: str, right: str, extras: bool, as_json: bool, memory: int, block: int, **options: Any
) -> int:
    """Logical difference of A and B across formats and topologies."""
    from reshard.engine import block_elements

    said = {n: options.pop(n) for n in ("given", "iteration")}
    if any(len(values) > 2 for values in said.values()):
        raise UsageError("--from and --iteration are said of A, then of B: twice at most")
    a, b = (
        _open(path, {**options, **{n: v[i] for n, v in said.items() if i < len(v)}}, alone=False)
        for i, path in enumerate((left, right))
    )
    report, text, code = _diff(a, b, options, block_elements(memory, block, 1), extras)
    _emit(report, text, as_json)
    return code


@main.command("fingerprint")
@click.argument("checkpoint")
@click.option("--canonical", is_flag=True, help="Under the family's names, in any container.")
@_family_options
@_source_options
@_memory_options
@_json_option
@_guarded
def fingerprint_command(
    checkpoint: str, as_json: bool, memory: int, block: int, canonical: bool, **options: Any
) -> int:
    """One digest per slot, the same for every topology and container."""
    from reshard.engine import block_elements
    from reshard.fingerprints import slot_digests
    from reshard.readback import fingerprints

    opened = _open(checkpoint, options)
    if canonical:
        from reshard.namings import Choice
        from reshard.renaming import canonical as renamed

        choice = Choice(options.get("schema"), options.get("config"))
        opened = renamed(opened, choice)
    else:
        _refuse_family(options, "fingerprint --canonical")
    sums = fingerprints(opened, elements=block_elements(memory, block, 1))
    slots = slot_digests(opened.layout.tensors.values(), {t: s.hex for t, s in sums.items()})
    report: dict[str, Json] = {
        "status": "ok",
        "path": str(opened.path),
        "naming": f"family {opened.family}" if canonical else opened.layout.naming,
        "tensors": len(sums),
        "fingerprints": dict(slots),
    }
    _emit(report, [f"{slot} {digest}" for slot, digest in slots.items()], as_json)
    return 0


@main.command("formats")
@_json_option
@_guarded
def formats_command(as_json: bool) -> int:
    """The formats that are read and written."""
    from reshard.format import formats
    from reshard.tables import root

    known, broken = formats()
    rows: list[Json] = [
        {"name": f.name, "summary": f.summary, "reads": True, "writes": f.writes} for f in known
    ]
    support = json.loads((root() / "support.json").read_text())
    report: dict[str, Json] = {
        "status": "ok",
        "formats": rows,
        "support": support,
        "skipped": list(broken),
    }
    text = [f"{f.name:<18} read{', written' if f.writes else '':<10} {f.summary}" for f in known]
    for row in support:
        text.append(f"{row['from']:<18} -> {row['to']:<18} {row['what']:<15} {row['test']}")
    _emit(report, text + list(broken), as_json)
    return 0


@main.group("schemas", invoke_without_command=True)
@_json_option
@click.pass_context
def schemas_command(context: click.Context, as_json: bool) -> None:
    """Model families and the dialects each has names in."""
    if context.invoked_subcommand is None:
        _list_schemas(as_json=as_json)


@_guarded
def _list_schemas(as_json: bool) -> int:
    from reshard.proof import listing
    from reshard.schema import families

    rows: list[Any] = [listing(f) for f in families().values()]
    text = [
        f"{r['name']:<12} {', '.join(r['dialects']):<28} {', '.join(r['model_types'])}"
        for r in rows
    ]
    text += [f"{r['name']}: {d} refused: {why}" for r in rows for d, why in r["refused"].items()]
    _emit({"status": "ok", "families": list(rows)}, text, as_json)
    return 0


@schemas_command.command("check")
@click.argument("files", nargs=-1, metavar="FILE|NAME")
@_json_option
@_guarded
def schemas_check_command(files: tuple[str, ...], as_json: bool) -> int:
    """Prove family files: every logical tensor once per dialect, every element once."""
    from reshard.families import named
    from reshard.proof import prove
    from reshard.schema import families

    rows: list[Json] = []
    text: list[str] = []
    for name in files or tuple(families()):
        family = named(name)
        found = prove(family)
        rows.append({"family": family.name, "proven": [p.shown() for p in found]})
        text += [
            f"{family.name}: example {p.example}: {p.dialect}: {p.logical} logical tensors in "
            f"{p.stored} stored, each element once"
            for p in found
        ]
    _emit({"status": "ok", "families": rows}, text, as_json)
    return 0


if __name__ == "__main__":
    main()
