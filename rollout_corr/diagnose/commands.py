"""The commands that look at a dump: their arguments, their exit codes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollout_corr.diagnose.measure.measuring import measure
from rollout_corr.diagnose.read.fields import ALIASES
from rollout_corr.diagnose.read.problems import DumpError
from rollout_corr.diagnose.read.reading import SUFFIXES, Dump

# Exit codes: everything is as asked for; something was found; the dump or the arguments cannot be used.
GOOD, FOUND, UNUSABLE = 0, 1, 2


def _reading_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help=f"a dump ({', '.join(SUFFIXES)}), or a folder of them")
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help=f"which field plays a role, where the guess is wrong; roles: {', '.join(ALIASES)}",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="read the first N sequences only")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, and nothing else")


def _dump(chosen: argparse.Namespace, path: str | None = None) -> Dump:
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
    """A bar on a terminal's stderr; nothing elsewhere, and nothing without rich."""
    if quiet or not sys.stderr.isatty():
        yield lambda: None
        return
    from rollout_corr.diagnose.read.problems import extra

    bars = extra("rich.progress", "report", "the progress bar")
    with bars.Progress(transient=True, console=_console(stderr=True)) as progress:
        task = progress.add_task(f"reading {dump.path.name}", total=1.0)
        yield lambda: progress.update(task, completed=dump.progress)


def _console(stderr: bool = False) -> Any:
    from rollout_corr.diagnose.show.summary import console

    return console(stderr)


def _page_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    parser.add_argument(
        "--html", metavar="PATH", help=f"where the page goes; default: the dump's name with .{kind}.html"
    )
    parser.add_argument("--no-html", action="store_true", help="write no page")


def _write_page(chosen: argparse.Namespace, dump: Dump, kind: str, make: Callable[[], str]) -> str | None:
    """Write the page unless it is not wanted: with --json it has to be asked for. Where it is."""
    if chosen.no_html or (chosen.json and chosen.html is None):
        return None
    path = Path(chosen.html or f"{dump.path.resolve().name}.{kind}.html")
    try:
        path.write_text(make(), encoding="utf-8")
    except OSError as error:
        raise DumpError(f"--html {path}: cannot be written: {error.strerror}") from error
    return str(path)


def report(arguments: list[str]) -> int:
    """`rollout-corr report`."""
    from rollout_corr.diagnose.doctor.doctor import diagnose
    from rollout_corr.diagnose.show import summary
    from rollout_corr.diagnose.show.page import report_page

    parser = argparse.ArgumentParser(prog="rollout-corr report", description="What two sets of log-probs differ in.")
    _reading_arguments(parser)
    parser.add_argument("--by", action="append", default=[], metavar="NAME", help="also show |D| by this field")
    parser.add_argument("--compare", metavar="OTHER", help="a second dump, shown beside the first")
    _page_arguments(parser, "report")
    chosen = parser.parse_args(arguments)
    dumps = [_dump(chosen)] + ([_dump(chosen, chosen.compare)] if chosen.compare else [])
    out = None if chosen.json else summary.console()
    found = []
    for dump in dumps:
        with _progress(dump, chosen.json) as each:
            measured = measure(dump, each)
        found.append((dump, measured, diagnose(measured)))
    written = _write_page(chosen, dumps[0], "report", lambda: report_page(found))
    if out is None:
        data = [summary.as_data(*one) for one in found]
        _print_json(data[0] | ({"compare": data[1]} if len(data) == 2 else {}))
        return GOOD
    summary.print_report(out, found)
    if written:
        out.print(f"page: {written}", markup=False)
    return GOOD


def what_if(arguments: list[str]) -> int:
    """`rollout-corr what-if`."""
    from rollout_corr.diagnose.show import summary
    from rollout_corr.diagnose.show.page import what_if_page
    from rollout_corr.diagnose.what_if import try_all

    parser = argparse.ArgumentParser(
        prog="rollout-corr what-if", description="What every preset and a grid of thresholds would make of a dump."
    )
    _reading_arguments(parser)
    _page_arguments(parser, "what-if")
    chosen = parser.parse_args(arguments)
    dump = _dump(chosen)
    out = None if chosen.json else summary.console()
    with _progress(dump, chosen.json) as each:
        tried = try_all(dump, each)
    written = _write_page(chosen, dump, "what-if", lambda: what_if_page(dump, tried))
    if out is None:
        _print_json(summary.what_if_data(dump, tried))
        return GOOD
    summary.print_what_if(out, dump, tried)
    if written:
        out.print(f"page: {written}", markup=False)
    return GOOD


def _print_json(found: dict[str, Any]) -> None:
    json.dump(found, sys.stdout, indent=1)
    sys.stdout.write("\n")


# What fails a gate when nothing else is asked for.
FAIL_IF = "verdicts > 0"


def doctor(arguments: list[str]) -> int:
    """`rollout-corr doctor`."""
    from rollout_corr.diagnose.doctor.conditions import Condition
    from rollout_corr.diagnose.doctor.doctor import diagnose, with_verdicts
    from rollout_corr.diagnose.show import summary

    parser = argparse.ArgumentParser(
        prog="rollout-corr doctor",
        description="Name the causes of a mismatch.",
        epilog=f"exit codes: {GOOD} healthy, {FOUND} --fail-if is true, {UNUSABLE} the dump cannot be read",
    )
    _reading_arguments(parser)
    parser.add_argument(
        "--fail-if",
        action="append",
        metavar="CONDITION",
        help="exit with 1 if this is true; metrics of `report --json`, `problems`, `verdicts` (errors and warnings) or "
        f"the name of one (0 or 1), compared with numbers, joined by and, or, not; several: any; default: {FAIL_IF!r}",
    )
    parser.add_argument(
        "--on-policy", action="store_true", help="new_logp and train_logp are of the same weights, and have to agree"
    )
    chosen = parser.parse_args(arguments)
    dump = _dump(chosen)
    out = None if chosen.json else summary.console()
    with _progress(dump, chosen.json) as each:
        measured = measure(dump, each)
    verdicts = diagnose(measured, chosen.on_policy)
    values = with_verdicts(measured.metrics(), verdicts, dump.problems.count)
    conditions = [Condition(text, values) for text in chosen.fail_if or [FAIL_IF]]
    true = [condition.text for condition in conditions if condition.true]
    if out is None:
        _print_json(summary.verdict_data(dump, measured, verdicts) | {"failed": true})
    else:
        summary.print_verdicts(out, dump, measured, verdicts)
        for text in true:
            out.print(f"failed: {text}", markup=False, style="bold red")
    return FOUND if true else GOOD


COMMANDS = {"report": report, "doctor": doctor, "what-if": what_if}


def run(command: str, arguments: list[str]) -> int:
    """Run one of `COMMANDS`; what is wrong with a dump goes to stderr in one line."""
    try:
        return COMMANDS[command](arguments)
    except DumpError as error:
        sys.stderr.write(f"rollout-corr {command}: {error}\n")
        return UNUSABLE
