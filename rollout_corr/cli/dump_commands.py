"""The commands that look at a dump: report, doctor and what-if; their arguments and exit codes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rollout_corr.cli.main import FOUND, GOOD, UNUSABLE, parser_of
from rollout_corr.cli.streams import print_json
from rollout_corr.diagnose import calls
from rollout_corr.diagnose.doctor.cause import counted
from rollout_corr.diagnose.doctor.conditions import check, is_true
from rollout_corr.diagnose.doctor.diagnosis import condition_values
from rollout_corr.diagnose.read.dump import SUFFIXES, Dump
from rollout_corr.diagnose.read.fields import ROLES
from rollout_corr.diagnose.read.problems import DumpError
from rollout_corr.diagnose.results import Diagnosis
from rollout_corr.diagnose.show import plain_data, terminal
from rollout_corr.diagnose.show.content import ABOUT_D
from rollout_corr.diagnose.show.terminal import BOLD_RED, Terminal, progress_of
from rollout_corr.diagnose.what_if import try_all
from rollout_corr.frameworks.shared.lookup import readable

# The gate of `doctor` unless the user names another one.
FAIL_IF = "findings > 0"


def _parser(command: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Make a parser with the arguments that say what to read."""
    parser = parser_of(command, f"{description} {ABOUT_D}", epilog)
    parser.add_argument("file", nargs="+", help=f"dumps ({', '.join(SUFFIXES)}) or folders; all are read as one")
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="ROLE=NAME",
        help=f"read a role from the field NAME instead of the one found by its name; roles: {', '.join(ROLES)}",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="read only the first N sequences")
    parser.add_argument("--json", action="store_true", help="print all results as JSON, and nothing else")
    return parser


def _fields(chosen: argparse.Namespace) -> dict[str, str]:
    """Read the pairs of --field."""
    fields = {}
    for pair in chosen.field:
        role, equals, name = pair.partition("=")
        if not (role and equals and name):
            raise DumpError(f"--field: expected ROLE=NAME, got {pair!r}")
        fields[role] = name
    return fields


def _progress(chosen: argparse.Namespace) -> bool | None:
    """Return whether to show a progress bar: on a terminal, and never with JSON."""
    return False if chosen.json else None


def report(arguments: list[str]) -> int:
    """Run `rollout-corr report`."""
    parser = _parser("report", "Show where the log-probs of trainer and engine differ.")
    parser.add_argument("--by", action="append", default=[], metavar="NAME", help="also show |D| by this field")
    parser.add_argument("--compare", metavar="OTHER", help="a second dump, shown next to the first")
    parser.add_argument(
        "--page", metavar="PATH", help="where to write the HTML page; default: the name of the dump + .report.html"
    )
    parser.add_argument("--no-page", action="store_true", help="write no page")
    chosen = parser.parse_args(arguments)
    out = None if chosen.json else Terminal()
    page = None if chosen.no_page else chosen.page
    if page is None and not (chosen.no_page or chosen.json):
        page = f"{Path(os.path.abspath(chosen.file[0])).name}.report.html"
    found = calls.report(
        chosen.file,
        page=page,
        compare=chosen.compare,
        by=chosen.by,
        field=_fields(chosen),
        limit=chosen.limit,
        progress=_progress(chosen),
    )
    if out is None:
        print_json(found.to_dict())
        return GOOD
    out.show(terminal.report(found.diagnoses))
    if page is not None:
        out.line(f"page: {page}")
    return GOOD


def what_if(arguments: list[str]) -> int:
    """Run `rollout-corr what-if`."""
    parser = _parser(
        "what-if", "Apply every framework's spec and a grid of thresholds to a dump, and compare the results."
    )
    parser.add_argument("--all", action="store_true", help="print every setting, and not only the best ones")
    parser.add_argument(
        "--framework",
        metavar="NAME",
        choices=readable("write"),
        help="try only what this framework can express, and print the lines to paste into its configuration: "
        f"{', '.join(readable('write'))}",
    )
    parser.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="sequences in a training batch, which average out variance and not bias; default: as many as in the dump",
    )
    chosen = parser.parse_args(arguments)
    if chosen.sequences is not None and chosen.sequences < 1:
        raise DumpError(f"--sequences: expected a number >= 1, got {chosen.sequences}")
    dump = Dump(chosen.file, _fields(chosen), limit=chosen.limit)
    out = None if chosen.json else Terminal()
    with progress_of(f"reading {dump.name}", _progress(chosen)) as each:
        tried = try_all(dump, each, chosen.framework)
    if out is None:
        print_json(plain_data.what_if(dump, tried, chosen.sequences))
        return GOOD
    out.show(terminal.what_if(dump, tried, chosen.all, chosen.sequences))
    return GOOD


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
        help="compare the values of a field of whole numbers from 0, such as environment: which are far worse?",
    )
    parser.add_argument(
        "--on-policy",
        action="store_true",
        help="the dump's new_logp and train_logp come from the same weights, so they must be equal",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="the two log-probs must agree bit for bit: exit with 1 if a token differs, and say where the first one is "
        "and what all of them share (a page of the KV cache, a prefix-cache hit, a turn, a rank by --by, ...)",
    )
    chosen = parser.parse_args(arguments)
    conditions = [*(chosen.fail_if or [FAIL_IF]), *(["not_exact > 0"] if chosen.exact and chosen.fail_if else [])]
    for text in conditions:
        check(text)
    out = None if chosen.json else Terminal()
    found = calls.doctor(
        chosen.file,
        by=chosen.by,
        field=_fields(chosen),
        limit=chosen.limit,
        on_policy=chosen.on_policy,
        exact=chosen.exact,
        progress=_progress(chosen),
    )
    values = condition_values(found.metrics(), found.findings, found.source.problems.count)
    failed = [text for text in conditions if is_true(text, values)]
    if out is None:
        print_json(found.to_dict() | {"failed": failed})
    else:
        out.show(terminal.findings(found))
        if failed:
            out.line(f"exit {FOUND}: {_counted(found)} (--fail-if {', '.join(failed)})", BOLD_RED)
    if not found.tokens:
        # Neither healthy nor ill: a gate must not pass on nothing, and its conditions mean nothing either.
        return UNUSABLE
    return FOUND if failed else GOOD


def _counted(found: Diagnosis) -> str:
    """Count what was found, by severity."""
    said = [counted(count, severity) for severity, count in found.counts.items() if count]
    return ", ".join(said) or "nothing was found"
