"""Record what the package computes, or compare two records; run with PYTHONPATH=tests."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEEDS = {"blocks": 50, "whole": 50, "interpreter": 2}


def main(words: list[str]) -> int:
    """Run a command, and give the exit status."""
    arguments = parser().parse_args(words)
    return record(arguments) if arguments.command == "record" else compare(arguments)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m frozen", description=__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    for name in ("record", "compare"):
        one = commands.add_parser(name)
        one.add_argument("files", nargs=1 if name == "record" else "*", type=Path)
        one.add_argument("--seeds", type=int, help="seeds a case; 50, and 2 in the interpreter")
        one.add_argument("--large", type=int, default=3, help="batches of thousands of tokens a case")
        one.add_argument("--paths", default="blocks", help="of blocks, whole, interpreter")
        one.add_argument("--only", default="", help="a part of the names of the cases")
        one.add_argument("--shard", default="0/1", help="I/N: every N-th case from the I-th, from 0")
    one.add_argument("--checkout", action="append", default=[], type=Path, help="record this checkout; twice")
    one.add_argument("--allow", action="append", default=[], help="PATTERN[:REL]: a key or a name that may move so far")
    return made


def record(arguments: argparse.Namespace) -> int:
    """Write a file."""
    paths = tuple(arguments.paths.split(","))
    if "interpreter" in paths:
        # Triton decides when a kernel is defined whether it will be interpreted.
        os.environ["TRITON_INTERPRET"] = "1"
    from frozen import records

    first, of = map(int, arguments.shard.split("/"))
    with open(arguments.files[0], "w", encoding="utf-8") as file:
        for path in paths:
            start = time.perf_counter()
            large = 0 if path == "interpreter" else arguments.large
            count = records.record(file, path, arguments.seeds or SEEDS[path], large, arguments.only, (first, of))
            print(f"{path}: {count} calls in {time.perf_counter() - start:.0f} s")
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Compare two files, or record two checkouts first."""
    from frozen import comparison

    if not arguments.checkout:
        return comparison.main(*arguments.files, arguments.allow)
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for number, checkout in enumerate(arguments.checkout):
            files.append(Path(folder) / f"{number}.jsonl")
            # Its own adapter, where it has one.
            tests = checkout / "tests" if (checkout / "tests/frozen").is_dir() else Path(__file__).parents[1]
            around = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (checkout.resolve(), tests.resolve())))}
            options = [f"--{name}={getattr(arguments, name)}" for name in ("large", "paths", "only", "shard")]
            options += [f"--seeds={arguments.seeds}"] if arguments.seeds else []
            called = [sys.executable, "-m", "frozen", "record", str(files[-1]), *options]
            subprocess.run(called, check=True, env=around, cwd=folder)
        return comparison.main(*files, arguments.allow)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
