"""Freeze what a checkout computes, and compare two checkouts on one machine; README.md says how.

    PYTHONPATH=tests python -m frozen write FILE [--quick] [--part PART ...] [--checkout FOLDER]
    PYTHONPATH=tests python -m frozen compare OLD NEW [--most 20]
    PYTHONPATH=tests python -m frozen digests

Exit codes: 0 nothing differs, 1 something does, 2 the arguments cannot be used.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import record

HERE = Path(__file__).resolve().parents[2]
PARTS = ("blocks", "whole", "interpreter", "registers", "counts")
# Masks, decisions and counts of one case in so many, which the tests recompute.
DIGESTS = Path(__file__).with_name("digests.txt")
THIN = {"blocks": 8, "whole": 32, "interpreter": 120}
# One case in so many, as the interpreter takes a second for each; then with --quick.
EACH = {"blocks": (1, 4), "whole": (1, 8), "interpreter": (3, 60)}


def main(arguments: list[str]) -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(
        prog="python -m frozen", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="record a checkout")
    writing.add_argument("file", type=Path, help="a name that ends in .gz is compressed")
    writing.add_argument("--quick", action="store_true", help="some of the cases: about a minute")
    writing.add_argument("--only", metavar="TEXT", default="", help="cases whose key contains it, such as loss/GMPO")
    writing.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="default: all, each in a process")
    writing.add_argument("--checkout", type=Path, default=HERE, help="whose package and kernels; default: this one")
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--most", type=int, default=20, help="differences to show one by one; default: 20")
    commands.add_parser("digests", help=f"write {DIGESTS.name} anew")
    given = parser.parse_args(arguments)
    if given.command == "digests":
        os.environ["TRITON_INTERPRET"] = "1"
        DIGESTS.write_text("".join(f"{line}\n" for part in THIN for line in digests(part)))
        return 0
    if given.command == "compare":
        return compare(given.old, given.new, given.most)
    checkout = given.checkout.resolve()
    if not (checkout / "rollout_corr").is_dir():
        parser.error(f"--checkout: expected a folder with rollout_corr in it, got {checkout}")
    parts = tuple(given.part)
    if len(parts) == 1:
        write_part(given.file, parts[0], given.quick, given.only, checkout)
    else:
        write_parts(given.file, parts, given.quick, given.only, checkout)
    return 0


def write_parts(path: Path, parts: tuple[str, ...], quick: bool, only: str, checkout: Path) -> None:
    """Record each part in a process of its own: Triton decides at its import whether kernels are interpreted."""
    head: dict[str, Any] = {}
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            own = Path(folder) / part
            options = [*["--quick"] * quick, f"--only={only}"]
            command = [sys.executable, "-m", "frozen", "write", str(own), "--part", part, "--checkout", str(checkout)]
            subprocess.run([*command, *options], check=True)
            of_part, more = record.read(own)
            head = of_part | {"parts": [*head.get("parts", ()), *of_part["parts"]]}
            cases |= more
    record.write(path, head, cases.items())


def write_part(path: Path, part: str, quick: bool, only: str, checkout: Path) -> None:
    """Record one part in this process."""
    os.environ["TRITON_INTERPRET"] = "1" if part == "interpreter" else "0"
    sys.path[:0] = [str(checkout), str(checkout / "tests")]
    import rollout_corr

    if not Path(rollout_corr.__file__).is_relative_to(checkout):
        raise SystemExit(f"rollout_corr: expected the one of {checkout}, got {rollout_corr.__file__}")
    begun = time.process_time()
    head = head_of(checkout) | {"parts": [part], "complete": not quick and not only}
    number = record.write(path, head, recorded(part, quick, only))
    sys.stderr.write(f"{part}: {number} cases, {time.process_time() - begun:.0f} s of CPU\n")


def head_of(checkout: Path) -> dict[str, Any]:
    """The commit and the machine: floats of others differ."""
    import torch
    import triton

    asked = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    made_on = f"{_processor()}, torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    return {"commit": commit, "machine": f"{made_on}, Triton {triton.__version__}"}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def recorded(part: str, quick: bool, only: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a part: of all its cases, of some, or of those whose key contains a text."""
    if part in ("registers", "counts"):
        from . import compiled

        for name, found in getattr(compiled, part)(quick, only):
            yield f"{part}/{name}", found
    else:
        yield from calls_of(part, EACH[part][quick], only)


def calls_of(part: str, each: int, only: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Draw one case in so many, and make its call in the way of a part."""
    from . import cases, runners
    from .calls import answer, digest_of, exact

    ways = {"blocks": runners.in_blocks, "whole": runners.as_whole, "interpreter": runners.in_tiles}
    backend = "triton" if part == "interpreter" else "torch"
    some = list(cases.every())
    some += [] if part == "interpreter" else cases.large()
    # Parts of sequences run in one way, whatever the backend's.
    some += [] if part == "whole" else cases.on_ranks()
    warnings.simplefilter("ignore")
    with runners.one_thread(), runners.quick_interpreter(part == "interpreter"):
        for key, draw in some:
            # By the key, so that a new preset does not move the choice.
            if runners.number_of(key) % each or only not in key:
                continue
            call = draw()
            given = call.digest()
            with ways[part](key):
                found = answer(call, backend)
            digest = digest_of([repr(sorted(exact(found).items(), key=str))])
            yield f"{part}/{key}", {"call": given, "exact": digest, **found}


def digests(part: str) -> list[str]:
    """The lines of `DIGESTS` for a part; the kernels have to be interpreted in this process."""
    return [f"{key} {found['exact']}" for key, found in calls_of(part, THIN[part])]


def compare(old: Path, new: Path, most: int) -> int:
    """Print what differs between two records."""
    (head, before), (other, after) = record.read(old), record.read(new)
    only_exact = head["machine"] != other["machine"]
    if only_exact:
        print(f"made on other machines, so only exact results compare:\n  {head['machine']}\n  {other['machine']}")
    common = [key for key in before if key in after]
    found = []
    for key in common:
        one, two = before[key], after[key]
        if only_exact:
            one, two = ({name: x for name, x in each.items() if name in ("call", "exact")} for each in (one, two))
        found += record.differences(key, one, two)
    shared = set(head["parts"]) & set(other["parts"]) if head["complete"] and other["complete"] else set()
    apart = [key for key in {**before, **after} if (key in before) != (key in after)]
    missing = [key for key in apart if key.partition("/")[0] in shared]
    for line in record.report(found, most):
        print(line)
    for key in missing[:most]:
        print(f"{key}: only in the {'old' if key in before else 'new'} record")
    cases = len({difference.case for difference in found})
    commits = f"{head['commit']} -> {other['commit']}"
    print(f"{commits}: {len(common)} cases, {cases} differ, {len(missing)} in one record alone")
    return 1 if found or missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
