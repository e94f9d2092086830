"""Seconds that `import torch`, and then `import rollout_corr`, take: `python -m benchmarks.imports`.

The least of some fresh processes, because a busy machine makes an import longer and none shorter. Promised beside
`import torch`: 50 ms. tests/package/test_package.py counts the modules, which decide it on any machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

CHILD = """
import sys, time
begun = time.perf_counter()
import torch
torchs = time.perf_counter()
import rollout_corr
ours = time.perf_counter()
count = sum(name.partition(".")[0] == "rollout_corr" for name in sys.modules)
print(torchs - begun, ours - torchs, count)
"""


def measured(processes: int) -> tuple[float, float, int]:
    """Return the least seconds of torch and of this package, and how many modules this package imports."""
    found = []
    for _ in range(1 + processes):
        done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
        found.append([float(x) for x in done.stdout.split()])
    torchs, ours, counts = zip(*found[1:], strict=True)  # the first writes the bytecode
    return min(torchs), min(ours), int(counts[0])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.imports", description=__doc__)
    parser.add_argument("--processes", type=int, default=5, help="fresh processes, of which the fastest counts")
    torchs, ours, count = measured(parser.parse_args().processes)
    print(f"import torch: {torchs * 1000:.0f} ms\nimport rollout_corr: {ours * 1000:.1f} ms, {count} modules")


if __name__ == "__main__":
    main()
