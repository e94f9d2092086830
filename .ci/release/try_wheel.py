"""Fresh environments with the wheel, for every Python that is there and the oldest and newest torch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SETUP = Path("setup.py").read_text(encoding="utf-8")
PYTHONS = [f"python{version}" for version in re.findall(r"Python :: (3\.\d+)", SETUP)]
# The oldest that setup.py allows, and whatever is newest.
TORCHES = ["oldest", "newest"]
OLDEST = f"{re.findall(r'torch>=([0-9.]+)', SETUP)[0]}.0"
SMOKE = Path(".ci", "release", "smoke.py").resolve()
# As in setup.py: Triton 3.6 fails in the interpreter with NumPy 2.4.
ALSO = ["numpy<2.4"]


def everywhere(wheel: Path, pythons: list[str], torches: list[str]) -> bool:
    """Try the wheel, print a row of docs/versions.md for each environment, and say whether all of them passed."""
    commit = subprocess.run(["git", "log", "-1", "--format=%h"], check=True, capture_output=True, text=True).stdout
    passed = True
    for python in pythons:
        if shutil.which(python) is None or not said(python, "-c", "print(1)"):
            print(f"{python}: not here, so not tried")
            continue
        for torch in torches:
            with tempfile.TemporaryDirectory() as scratch:
                row = tried(wheel, python, torch, Path(scratch))
            if isinstance(row, str):
                # For a new Python the index has no old torch.
                passed = passed and "No matching distribution found for torch" in row
                print(f"{python}, torch {torch}: {row}")
            else:
                passed = passed and not row["failed"]
                cells = [python.removeprefix("python"), *(row[name] for name in ("torch", "triton", "numpy"))]
                print(f"| {' | '.join([*cells, 'installed', commit.strip(), *row['checks'].values()])} |", flush=True)
    return passed


def tried(wheel: Path, python: str, torch: str, scratch: Path) -> dict | str:
    """Run the smoke test in an environment of its own, from an empty folder; what kept it from running, as text."""
    venv, empty = scratch / "venv", scratch / "empty"
    subprocess.run([python, "-m", "venv", venv], check=True)
    empty.mkdir()
    inside = venv / "bin" / "python"
    version = {"newest": "", "oldest": f"=={OLDEST}"}.get(torch, f"=={torch}")
    wanted = [str(wheel), f"torch{version}", *ALSO]
    install = [inside, "-m", "pip", "install", "--quiet", "--no-cache-dir", *wanted]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip()[-400:]
    done = subprocess.run([inside, "-I", SMOKE], cwd=empty, capture_output=True, text=True, check=False)
    print(done.stderr, end="", file=sys.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def said(*command: str) -> str:
    """Give what a program prints, nothing if it fails: a name that a version manager only forwards is no Python."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
