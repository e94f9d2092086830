"""Plant faults in a copy of the checkout, one after the other, and tell which of them no test notices.

    PYTHONPATH=tests python -m faults [TEXT ...] [--jobs 2]

A fault is red if a test that its row names fails. Exit codes: 0 all are red, 1 one is not, or the tests fail without
any fault.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from .plant import GREEN, RED, copied, planted, run
from .table import FAULTS, Fault

HERE = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    """Plant every fault, or those whose row contains one of the texts."""
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("texts", nargs="*", help="part of a file, a line or a test; default: all faults")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the checkout that work at a time; default: 1")
    given = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if not given.texts or any(text in repr(fault) for text in given.texts)]
    copies: SimpleQueue[Path] = SimpleQueue()
    survivors = 0

    def tried(fault: Fault | None, tests: tuple[str, ...]) -> tuple[int, str]:
        copy, begun = copies.get(), time.monotonic()
        try:
            with contextlib.nullcontext() if fault is None else planted(fault, copy):
                code, said = run(tests, copy)
        except ValueError as error:
            code, said = -1, str(error)
        finally:
            copies.put(copy)
        return code, f"{said.strip()} ({time.monotonic() - begun:.0f} s)"

    every = tuple(sorted({test for fault in chosen for test in fault.tests}))
    with copied(HERE) as first, ThreadPoolExecutor(given.jobs) as pool:
        for number in range(given.jobs):
            copies.put(shutil.copytree(first, first.parent / str(number), symlinks=True))
        # The longest run begins first, and faults are planted in the other copies meanwhile.
        without = pool.submit(tried, None, every)
        runs = [pool.submit(tried, fault, fault.tests) for fault in chosen]
        code, said = without.result()
        if code != GREEN:
            pool.shutdown(cancel_futures=True)
            print(f"without a fault: {said}")
            return 1
        for fault, one in zip(chosen, runs, strict=True):
            code, said = one.result()
            survivors += code not in RED
            print(f"{'red  ' if code in RED else 'GREEN'} {fault}: {said}", flush=True)
    print(f"{len(chosen)} faults, {survivors} that no test notices")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
