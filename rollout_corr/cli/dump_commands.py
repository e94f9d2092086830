"""The commands that look at a dump: report, doctor and what-if; their arguments and exit codes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rollout_corr.cli.main import FOUND, GOOD, UNUSABLE, parser_of
from rollout_corr.diagnose.doctor.conditions import check, is_true
from rollout_corr.diagnose.doctor.diagnosis import condition_values, diagnose
from rollout_corr.diagnose.measure.measurement import Measurement, measure
from rollout_corr.diagnose.read.dump import IN_FOLDERS, SUFFIXES, Dump, suffix_of
from rollout_corr.diagnose.read.fields import ALIASES
from rollout_corr.diagnose.read.problems import DumpError
from rollout_corr.diagnose.show import plain_data, report_page, terminal, what_if_page
from rollout_corr.diagnose.show.content import ABOUT_D
from rollout_corr.diagnose.show.terminal import Terminal
from rollout_corr.diagnose.what_if import try_all
from rollout_corr.whole_files import write_whole

# The gate of `doctor` unless the user names another one.
FAIL_IF = "findings > 0"


def _parser(command: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Make a parser with the arguments that say what to read."""
    parser = parser_of(command, f"{description} {ABOUT_D}", epilog)
    parser.add_argument("file", help=f"a dump ({', '.join(SUFFIXES)}), or a folder of them")
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help=f"the field of a role, where the one found by its name is wrong; roles: {', '.join(ALIASES)}",
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
def _progress(dump: Dump, quiet: bool) -> Iterator[Callable[[float, str], None]]:
    """Show a progress bar if stderr is a terminal; yields what moves it."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, doing: None
        return
    with Terminal(stderr=True).progress(f"reading {dump.path.name}") as move:
        yield move


def _measure(dump: Dump, quiet: bool) -> Measurement:
    with _progress(dump, quiet) as move:
        return measure(dump, lambda: move(dump.progress, ""))


def _page_path(chosen: argparse.Namespace, dumps: Sequence[Dump], kind: Literal["report", "what-if"]) -> Path | None:
    """Return where the page goes, None for nowhere; with --json it has to be asked for.

    Raises:
        DumpError: There is a dump that is read.
    """
    if chosen.no_html or (chosen.html is None and chosen.json):
        return None
    path = Path(chosen.html or f"{dumps[0].path.resolve().name}.{kind}.html")
    for dump in dumps:
        for file in dump.files:
            # Not by name: the page may be a symlink or a hard link to the dump.
            if path.exists() and file.exists() and path.samefile(file):
                raise DumpError(f"--html {path}: this is the dump {file}, which the page would overwrite")
        if suffix_of(path) in IN_FOLDERS and dump.path.is_dir() and path.resolve().is_relative_to(dump.path.resolve()):
            raise DumpError(f"--html {path}: in {dump.path} this would be read as a dump; name it .html")
    return path


def _output(
    path: Path | None,
    out: Terminal | None,
    make_page: Callable[[], str],
    data: Callable[[], dict[str, Any]],
    show: Callable[[Terminal], None],
) -> int:
    """Write the page, then print tables, or JSON where there is no terminal to print them on."""
    if path is not None:
        try:
            write_whole(path, make_page())
        except OSError as error:
            raise DumpError(f"--html {path}: cannot be written: {error.strerror or error}") from error
    if out is None:
        _print_json(data())
        return GOOD
    show(out)
    if path is not None:
        out.line(f"page: {path}")
    return GOOD


def _print_json(data: dict[str, Any]) -> None:
    json.dump(data, sys.stdout, indent=1)
    sys.stdout.write("\n")


def report(arguments: list[str]) -> int:
    """Run `rollout-corr report`."""
    parser = _parser("report", "Show where the log-probs of trainer and engine differ.")
    parser.add_argument("--by", action="append", default=[], metavar="NAME", help="also show |D| by this field")
    parser.add_argument("--compare", metavar="OTHER", help="a second dump, shown beside the first")
    _page_arguments(parser, "report")
    chosen = parser.parse_args(arguments)
    dumps = [_dump(chosen)] + ([_dump(chosen, chosen.compare)] if chosen.compare else [])
    path = _page_path(chosen, dumps, "report")
    out = None if chosen.json else Terminal()
    reported = []
    for dump in dumps:
        measured = _measure(dump, chosen.json)
        reported.append((dump, measured, diagnose(measured)))

    def data() -> dict[str, Any]:
        first, *others = (plain_data.report(*one) for one in reported)
        return first | ({"compare": others[0]} if others else {})

    return _output(
        path,
        out,
        lambda: report_page.report_page(reported),
        data,
        lambda out: terminal.print_report(out, reported),
    )


def what_if(arguments: list[str]) -> int:
    """Run `rollout-corr what-if`."""
    parser = _parser(
        "what-if", "Apply every framework's spec and a grid of thresholds to a dump, and compare the results."
    )
    _page_arguments(parser, "what-if")
    parser.add_argument("--all", action="store_true", help="print every setting, and not only the best ones")
    chosen = parser.parse_args(arguments)
    dump = _dump(chosen)
    path = _page_path(chosen, [dump], "what-if")
    out = None if chosen.json else Terminal()
    with _progress(dump, chosen.json) as each:
        tried = try_all(dump, each)
    return _output(
        path,
        out,
        lambda: what_if_page.what_if_page(dump, tried),
        lambda: plain_data.what_if(dump, tried),
        lambda out: terminal.print_what_if(out, dump, tried, chosen.all),
    )


def doctor(arguments: list[str]) -> int:
    """Run `rollout-corr doctor`."""
    parser = _parser(
        "doctor",
        "Name the causes of a mismatch between the log-probs of trainer and engine.",
        f"exit codes: {GOOD} healthy, {FOUND} a condition of --fail-if is true, {UNUSABLE} the dump cannot be read "
        "or has no valid token",
    )
    parser.add_argument(
        "--fail-if",
        action="append",
        metavar="CONDITION",
        help="exit with 1 if this is true: comparisons with numbers, joined by and, or, not; they may name the "
        "metrics of `report --json`, `problems`, `findings` (how many errors and warnings were found) and every cause "
        f"(0 or 1); given several times, one true condition is enough; default: {FAIL_IF!r}",
    )
    parser.add_argument(
        "--by",
        action="append",
        default=[],
        metavar="NAME",
        help="a field of labels, whole numbers from 0 (environment, source): name those that are ill beside the others",
    )
    parser.add_argument(
        "--on-policy",
        action="store_true",
        help="the dump's new_logp and train_logp come from the same weights, so that they have to be equal",
    )
    chosen = parser.parse_args(arguments)
    conditions = chosen.fail_if or [FAIL_IF]
    for text in conditions:
        check(text)
    dump = _dump(chosen)
    out = None if chosen.json else Terminal()
    measured = _measure(dump, chosen.json)
    findings = diagnose(measured, chosen.on_policy)
    values = condition_values(measured.metrics(), findings, dump.problems.count)
    failed = [text for text in conditions if is_true(text, values)]
    if out is None:
        _print_json(plain_data.doctor(dump, measured, findings) | {"failed": failed})
    else:
        terminal.print_findings(out, dump, measured, findings)
        for text in failed:
            out.line(f"failed: {text}", style="bold red")
    if not measured.evidence.tokens:
        # Neither healthy nor ill: a gate must not pass on nothing, and its conditions mean nothing either.
        return UNUSABLE
    return FOUND if failed else GOOD
