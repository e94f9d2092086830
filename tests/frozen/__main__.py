"""Record what the package computes, or compare two records; run with PYTHONPATH=tests."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

SEEDS = {"blocks": 50, "whole": 50, "interpreter": 2}


def main(words: list[str]) -> int:
    """Run a command, and give the exit status."""
    made = argparse.ArgumentParser(prog="python -m frozen", description=__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record")
    one.add_argument("file", type=Path)
    one.add_argument("--seeds", type=int, help="seeds a case; 50, and 2 in the interpreter")
    one.add_argument("--large", type=int, default=3, help="batches of thousands of tokens a case")
    one.add_argument("--paths", default="blocks", help="of blocks, whole, interpreter")
    one.add_argument("--only", default="", help="a part of the names of the cases")
    two = commands.add_parser("compare")
    two.add_argument("files", nargs=2, type=Path)
    two.add_argument("--allow", action="append", default=[], help="PATTERN[:REL]: a key or a name that may move so far")
    arguments = made.parse_args(words)
    if arguments.command == "record":
        record(arguments)
        return 0
    from frozen import comparison

    return comparison.main(*arguments.files, arguments.allow)


def record(arguments: argparse.Namespace) -> None:
    """Write a file."""
    paths = arguments.paths.split(",")
    if "interpreter" in paths:
        # Triton decides when a kernel is defined whether it will be interpreted.
        os.environ["TRITON_INTERPRET"] = "1"
    from frozen import records

    with open(arguments.file, "w", encoding="utf-8") as file:
        for path in paths:
            start = time.perf_counter()
            large = 0 if path == "interpreter" else arguments.large
            count = records.record(file, path, arguments.seeds or SEEDS[path], large, arguments.only)
            print(f"{path}: {count} calls in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
