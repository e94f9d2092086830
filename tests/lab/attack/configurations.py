"""Attack `rollout-corr check`: values, names, blocks and sizes that nobody expects in a configuration.

Each is checked with exit code 0 or 1 and lines that act in no terminal, or refused with exit code 2 and one line that
names the file: within 10 seconds of a core and 500 MB of memory; imports take half.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from pathlib import Path

from lab.attack.campaign import Area, Outcome
from lab.attack.crafted_configs import KNOWN, crafted
from lab.attack.files import run
from rollout_corr.frameworks.shared import lookup

GROWTH = 250_000_000
LONGEST = 10.0


def attempt(seed):
    """Check one configuration: those that are written out first, then crafted ones."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        if seed < len(KNOWN):
            name, suffix, make = KNOWN[seed]
            path, framework = Path(folder) / f"run{suffix}", rng.choice((None, *lookup.readable()))
            make(path)
        else:
            suffix, text, framework = crafted(rng)
            name, path = f"crafted {suffix}", Path(folder) / f"run{suffix}"
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
        outcome = judge(path, framework)
    return Outcome(outcome.verdict, f"{name}, --framework {framework}: {outcome.detail}")


def judge(path, framework=None):
    """Check one file, and judge what the command says and takes."""
    before, begun = forget_peak(), time.process_time()
    code, out, err = run(["check", str(path), *(() if framework is None else ("--framework", framework))])
    if (growth := memory("VmHWM") - before) > GROWTH:
        return Outcome("wrong", f"{growth / 1e6:.0f} MB of memory")
    if (taken := time.process_time() - begun) > LONGEST:
        return Outcome("wrong", f"{taken:.0f} s")
    said = [*out.splitlines(), *err.splitlines()]
    if not all(line.isprintable() for line in said):
        return Outcome("wrong", f"lines that act in a terminal: {said!r}")
    if code == 2:
        # The file may be one that its defaults name.
        one_line = not out and err.count("\n") == 1 and err.endswith("\n") and str(path.parent) in err
        bad = not one_line or re.search("Traceback|this is a mistake|out of memory", err)
        return Outcome("wrong" if bad else "refused", f"{err[:2000]!r} {out[:200]!r}" if bad else err.strip()[:200])
    if code not in (0, 1) or err or str(path) not in out:
        return Outcome("wrong", f"exit code {code} with {err[:2000]!r} and {out[:200]!r}")
    return Outcome("right")


def forget_peak():
    """Begin to measure the largest memory of this process anew, and return what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(kind):
    """Return the resident memory of this process in bytes: VmRSS now, VmHWM at most."""
    found = re.search(rf"{kind}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found[1])


AREA = Area(name="configurations", unit="files", attempt=attempt, count=len(KNOWN) + 5000, few=6)
