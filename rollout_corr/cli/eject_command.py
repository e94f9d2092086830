"""The command that prints a file to copy: eject."""

from __future__ import annotations

from pathlib import Path

from rollout_corr.cli.main import FOUND, GOOD, parser_of
from rollout_corr.cli.streams import print_line, print_source
from rollout_corr.diagnose.read.problems import DumpError
from rollout_corr.eject import FRAMEWORKS, check, eject


def run(arguments: list[str]) -> int:
    """Run `rollout-corr eject`."""
    parser = parser_of(
        "eject",
        "Print one file to copy into a project: the correction of a spec or the loss of a recipe, in plain torch.",
        f"exit codes: {GOOD} done, {FOUND} --check found that a file was edited or is out of date, 2 it cannot be done",
    )
    parser.add_argument("name", nargs="?", help="the name of a spec or a recipe: see `rollout-corr specs`")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--loss", action="store_true", help="print the policy loss of a recipe instead of its correction")
    kind.add_argument("--kernel", action="store_true", help="print the correction in Triton")
    kind.add_argument("--for", dest="framework", choices=tuple(FRAMEWORKS),
                      help="add the function that this framework calls, and its metrics")  # fmt: skip
    kind.add_argument("--metrics", action="store_true", help="add ten metrics, in one copy to the host")
    kind.add_argument("--check", metavar="FILE", type=Path,
                      help="say which version wrote FILE, whether it was edited, and what has changed")  # fmt: skip
    chosen = parser.parse_args(arguments)
    if (chosen.name is None) == (chosen.check is None):
        parser.error("expected the name of a spec or a recipe, or --check FILE")
    try:
        if chosen.check is not None:
            same, said = check(chosen.check.read_text(encoding="utf-8"))
            for line in said:
                print_line(line)
            return GOOD if same else FOUND
        print_source(eject(chosen.name, loss=chosen.loss, kernel=chosen.kernel, framework=chosen.framework,
                           metrics=chosen.metrics))  # fmt: skip
    except ValueError as error:
        raise DumpError(str(error)) from error
    return GOOD
