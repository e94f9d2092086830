"""The command that writes one file that stands alone: eject."""

from __future__ import annotations

from pathlib import Path

from rollout_corr.cli.main import FOUND, GOOD, parser_of
from rollout_corr.cli.streams import print_line, print_source
from rollout_corr.diagnose.read.problems import DumpError
from rollout_corr.eject import BACKENDS, FRAMEWORKS, check, eject
from rollout_corr.eject.plain import DOORS
from rollout_corr.whole_files import write_whole


def run(arguments: list[str]) -> int:
    """Run `rollout-corr eject`."""
    parser = parser_of(
        "eject",
        "Print one file that does what a spec says, with torch alone, to be copied into a project.",
        f"exit codes: {GOOD} done, {FOUND} --check found that a file was edited or is out of date, 2 it cannot be done",
    )
    parser.add_argument("name", nargs="?", help="the name of a spec or a recipe: see `rollout-corr specs`")
    parser.add_argument("--loss", action="store_true",
                        help="write the policy loss of a recipe, with its correction")  # fmt: skip
    parser.add_argument("--for", dest="framework", choices=FRAMEWORKS,
                        help="whose function the file defines; default: plain, correct(...) of tensors")  # fmt: skip
    parser.add_argument("--layout", choices=tuple(DOORS),
                        help="of plain: [N] with cu_seqlens, the default, or [B, T]")  # fmt: skip
    parser.add_argument("--metrics", choices=("dashboard", "all", "none"),
                        help="of plain: which metrics it computes; default: dashboard")  # fmt: skip
    parser.add_argument("--backend", choices=BACKENDS,
                        help="plain torch, the default; Triton kernels; or both: a call chooses")  # fmt: skip
    parser.add_argument("--test", metavar="FILE", type=Path,
                        help="write its test to FILE, test_NAME.py, which imports NAME")  # fmt: skip
    parser.add_argument("--check", metavar="FILE", type=Path,
                        help="say which version wrote FILE, whether it was edited, and what has changed")  # fmt: skip
    chosen = parser.parse_args(arguments)
    if (chosen.name is None) == (chosen.check is None):
        parser.error("expected a spec's name, or --check FILE")
    given = [flag for flag in ("loss", "framework", "layout", "metrics", "backend", "test") if getattr(chosen, flag)]
    if chosen.check is not None:
        if given:
            flag = given[0].replace("framework", "for")
            parser.error(f"--{flag}: expected none with --check FILE, whose head has the command that wrote it")
        return _checked(chosen.check)
    framework = chosen.framework or "plain"
    for flag in ("layout", "metrics"):
        if framework != "plain" and flag in given:
            parser.error(f"--{flag}: expected none with --for {framework}, which has its own")
    module = "" if chosen.test is None else chosen.test.stem.removeprefix("test_")
    if chosen.test is not None and (chosen.test.name != f"test_{module}.py" or not module.isidentifier()):
        parser.error(f"--test: expected a file test_NAME.py with the name of a module, got {str(chosen.test)!r}")
    layout, metrics = chosen.layout or "packed", chosen.metrics or "dashboard"
    try:
        written = eject(chosen.name, framework, layout, metrics, chosen.loss, chosen.backend or "torch")
        if chosen.test is not None:
            write_whole(chosen.test, written.test(module))
    except ValueError as error:
        raise DumpError(str(error)) from error
    print_source(written.source)
    return GOOD


def _checked(path: Path) -> int:
    try:
        same, said = check(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DumpError(f"{path}: {error}") from error
    for line in said:
        print_line(line)
    return GOOD if same else FOUND
