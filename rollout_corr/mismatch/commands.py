"""The commands that look at a dump: their arguments, their exit codes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollout_corr.mismatch.fields import ALIASES
from rollout_corr.mismatch.measuring import measure
from rollout_corr.mismatch.problems import DumpError
from rollout_corr.mismatch.reading import SUFFIXES, Dump

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
    from rollout_corr.mismatch.problems import extra

    bars = extra("rich.progress", "report", "the progress bar")
    with bars.Progress(transient=True, console=_console(stderr=True)) as progress:
        task = progress.add_task(f"reading {dump.path.name}", total=1.0)
        yield lambda: progress.update(task, completed=dump.progress)


def _console(stderr: bool = False):  # type: ignore[no-untyped-def]  # rich is optional
    from rollout_corr.mismatch.summary import console

    return console(stderr)


def report(arguments: list[str]) -> int:
    """`rollout-corr report`."""
    from rollout_corr.mismatch import summary

    parser = argparse.ArgumentParser(prog="rollout-corr report", description="What two sets of log-probs differ in.")
    _reading_arguments(parser)
    parser.add_argument("--by", action="append", default=[], metavar="NAME", help="also show |D| by this field")
    chosen = parser.parse_args(arguments)
    dump = _dump(chosen)
    out = None if chosen.json else summary.console()
    with _progress(dump, chosen.json) as each:
        measured = measure(dump, each)
    if out is None:
        json.dump(summary.as_data(dump, measured), sys.stdout, indent=1)
        sys.stdout.write("\n")
        return GOOD
    summary.print_report(out, dump, measured)
    return GOOD


# What fails a gate when nothing else is asked for.
FAIL_IF = "verdicts > 0"


def doctor(arguments: list[str]) -> int:
    """`rollout-corr doctor`."""
    from rollout_corr.mismatch import summary
    from rollout_corr.mismatch.conditions import Condition
    from rollout_corr.mismatch.doctor import diagnose, with_verdicts

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
        found = summary.verdict_data(dump, measured, verdicts) | {"failed": true}
        json.dump(found, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        summary.print_verdicts(out, dump, measured, verdicts)
        for text in true:
            out.print(f"failed: {text}", markup=False, style="bold red")
    return FOUND if true else GOOD


COMMANDS = {"report": report, "doctor": doctor}


def run(command: str, arguments: list[str]) -> int:
    """Run one of `COMMANDS`; what is wrong with a dump goes to stderr in one line."""
    try:
        return COMMANDS[command](arguments)
    except DumpError as error:
        sys.stderr.write(f"rollout-corr {command}: {error}\n")
        return UNUSABLE
