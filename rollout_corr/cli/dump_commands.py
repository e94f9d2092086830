"""The commands that look at a dump: report, doctor and what-if; their arguments and exit codes."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rollout_corr.cli.main import PROGRAM, parser_of
from rollout_corr.diagnose.doctor.conditions import is_true
from rollout_corr.diagnose.doctor.diagnosis import condition_values, diagnose
from rollout_corr.diagnose.measure.measurement import Measurement, measure
from rollout_corr.diagnose.read.dump import SUFFIXES, Dump
from rollout_corr.diagnose.read.fields import ALIASES
from rollout_corr.diagnose.read.problems import DumpError, extra
from rollout_corr.diagnose.show import page, plain_data, terminal
from rollout_corr.diagnose.show.content import ABOUT_D
from rollout_corr.diagnose.what_if import try_all

# Exit codes: all is well; a condition of --fail-if is true; the dump or the arguments cannot be used.
GOOD, FOUND, UNUSABLE = 0, 1, 2

# The gate of `doctor` unless the user names another one.
FAIL_IF = "verdicts > 0"


def _command(run: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """Let a command answer an unusable dump with one line on stderr and exit code 2."""

    @functools.wraps(run)
    def guarded(arguments: list[str]) -> int:
        try:
            return run(arguments)
        except DumpError as error:
            sys.stderr.write(f"{PROGRAM} {run.__name__.replace('_', '-')}: {error}\n")
            return UNUSABLE

    return guarded


def _parser(command: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Make a parser with the arguments that say what to read."""
    parser = parser_of(command, f"{description} {ABOUT_D}", epilog)
    parser.add_argument("file", help=f"a dump ({', '.join(SUFFIXES)}), or a folder of them")
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help=f"name the field of a role, where the guess is wrong; roles: {', '.join(ALIASES)}",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="read only the first N sequences")
    parser.add_argument("--json", action="store_true", help="print all results as JSON, and nothing else")
    return parser


def _page_arguments(parser: argparse.ArgumentParser, kind: Literal["report", "what-if"]) -> None:
    parser.add_argument(
        "--html", metavar="PATH", help=f"where to write the HTML page; default: the name of the dump + .{kind}.html"
    )
    parser.add_argument("--no-html", action="store_true", help="write no page")


def _dump(chosen: argparse.Namespace, path: str | None = None) -> Dump:
    """Open the dump that the arguments name; `path` replaces its file."""
    fields = {}
    for pair in chosen.field:
        role, equals, name = pair.partition("=")
        if not (role and equals and name):
            raise DumpError(f"--field: expected ROLE=NAME, got {pair!r}")
        fields[role] = name
    if chosen.limit is not None and chosen.limit < 1:
        raise DumpError(f"--limit: expected a number >= 1, got {chosen.limit}")
    return Dump(path or chosen.file, fields, getattr(chosen, "by", ()), chosen.limit)


@contextmanager
def _progress(dump: Dump, quiet: bool) -> Iterator[Callable[[], None]]:
    """Show a progress bar if stderr is a terminal; yields what moves it."""
    if quiet or not sys.stderr.isatty():
        yield lambda: None
        return
    bars = extra("rich.progress", "report", "the progress bar")
    with bars.Progress(transient=True, console=terminal.console(stderr=True)) as progress:
        task = progress.add_task(f"reading {dump.path.name}", total=1.0)
        yield lambda: progress.update(task, completed=dump.progress)


def _measure(dump: Dump, quiet: bool) -> Measurement:
    with _progress(dump, quiet) as each:
        return measure(dump, each)


def _output(
    chosen: argparse.Namespace,
    out: Any,
    dump: Dump,
    kind: Literal["report", "what-if"],
    make_page: Callable[[], str],
    data: Callable[[], dict[str, Any]],
    show: Callable[[Any], None],
) -> int:
    """Write the page unless it is unwanted (with --json it has to be asked for), then print tables or JSON."""
    path = None
    if not chosen.no_html and (chosen.html is not None or not chosen.json):
        path = Path(chosen.html or f"{dump.path.resolve().name}.{kind}.html")
        try:
            path.write_text(make_page(), encoding="utf-8")
        except OSError as error:
            raise DumpError(f"--html {path}: cannot be written: {error.strerror}") from error
    if out is None:
        _print_json(data())
        return GOOD
    show(out)
    if path is not None:
        out.print(f"page: {path}", markup=False)
    return GOOD


def _print_json(data: dict[str, Any]) -> None:
    json.dump(data, sys.stdout, indent=1)
    sys.stdout.write("\n")


@_command
def report(arguments: list[str]) -> int:
    """Run `rollout-corr report`."""
    parser = _parser("report", "Show where the log-probs of trainer and engine differ.")
    parser.add_argument("--by", action="append", default=[], metavar="NAME", help="also show |D| by this field")
    parser.add_argument("--compare", metavar="OTHER", help="a second dump, shown beside the first")
    _page_arguments(parser, "report")
    chosen = parser.parse_args(arguments)
    dumps = [_dump(chosen)] + ([_dump(chosen, chosen.compare)] if chosen.compare else [])
    out = None if chosen.json else terminal.console()
    reported = []
    for dump in dumps:
        measured = _measure(dump, chosen.json)
        reported.append((dump, measured, diagnose(measured)))

    def data() -> dict[str, Any]:
        first, *others = (plain_data.report(*one) for one in reported)
        return first | ({"compare": others[0]} if others else {})

    return _output(
        chosen,
        out,
        dumps[0],
        "report",
        lambda: page.report_page(reported),
        data,
        lambda out: terminal.print_report(out, reported),
    )


@_command
def what_if(arguments: list[str]) -> int:
    """Run `rollout-corr what-if`."""
    parser = _parser("what-if", "Apply every preset and a grid of thresholds to a dump, and compare the results.")
    _page_arguments(parser, "what-if")
    chosen = parser.parse_args(arguments)
    dump = _dump(chosen)
    out = None if chosen.json else terminal.console()
    with _progress(dump, chosen.json) as each:
        tried = try_all(dump, each)
    return _output(
        chosen,
        out,
        dump,
        "what-if",
        lambda: page.what_if_page(dump, tried),
        lambda: plain_data.what_if(dump, tried),
        lambda out: terminal.print_what_if(out, dump, tried),
    )


@_command
def doctor(arguments: list[str]) -> int:
    """Run `rollout-corr doctor`."""
    parser = _parser(
        "doctor",
        "Name the causes of a mismatch between the log-probs of trainer and engine.",
        f"exit codes: {GOOD} healthy, {FOUND} a condition of --fail-if is true, {UNUSABLE} the dump cannot be read",
    )
    parser.add_argument(
        "--fail-if",
        action="append",
        metavar="CONDITION",
        help="exit with 1 if this is true: comparisons with numbers, joined by and, or, not; they may name the "
        "metrics of `report --json`, `problems`, `verdicts` (how many errors and warnings were found) and every cause "
        f"(0 or 1); given several times, one true condition is enough; default: {FAIL_IF!r}",
    )
    parser.add_argument(
        "--on-policy", action="store_true", help="new_logp and train_logp come from the same weights and have to agree"
    )
    chosen = parser.parse_args(arguments)
    dump = _dump(chosen)
    out = None if chosen.json else terminal.console()
    measured = _measure(dump, chosen.json)
    findings = diagnose(measured, chosen.on_policy)
    values = condition_values(measured.metrics(), findings, dump.problems.count)
    failed = [text for text in chosen.fail_if or [FAIL_IF] if is_true(text, values)]
    if out is None:
        _print_json(plain_data.doctor(dump, measured, findings) | {"failed": failed})
    else:
        terminal.print_findings(out, dump, measured, findings)
        for text in failed:
            out.print(f"failed: {text}", markup=False, style="bold red")
    return FOUND if failed else GOOD
