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


COMMANDS = {"report": report}


def run(command: str, arguments: list[str]) -> int:
    """Run one of `COMMANDS`; what is wrong with a dump goes to stderr in one line."""
    try:
        return COMMANDS[command](arguments)
    except DumpError as error:
        sys.stderr.write(f"rollout-corr {command}: {error}\n")
        return UNUSABLE
