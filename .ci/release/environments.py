"""Fresh environments with the wheel, for every Python that is there and the oldest and newest torch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PYTHONS = [f"python3.{minor}" for minor in range(10, 15)]
# The oldest that setup.py allows, and whatever is newest.
OLDEST = re.findall(r'"torch>=([\d.]+)"', Path("setup.py").read_text(encoding="utf-8"))[0]
TORCHES = [f"{OLDEST}.0", "newest"]
SMOKE = Path(".ci", "release", "smoke.py").resolve()


def try_everywhere(wheel: Path, pythons: list[str], torches: list[str]) -> Iterator[dict[str, object]]:
    """Try the wheel under the first Python with every torch, and under the others with the last one."""
    left = torches
    for python in pythons:
        if not runs(python):
            print(f"{python}: not here, so not tried")
            continue
        for torch in left:
            with tempfile.TemporaryDirectory() as scratch:
                row = try_one(wheel, python, torch, Path(scratch))
            show(row)
            yield row
        left = torches[-1:]


def runs(python: str) -> bool:
    """Tell whether an interpreter is there; a name that a version manager only forwards is not."""
    if shutil.which(python) is None:
        return False
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def try_one(wheel: Path, python: str, torch: str, scratch: Path) -> dict[str, object]:
    """Install the wheel into a fresh environment, and run the smoke test from an empty folder."""
    wanted = "torch" if torch == "newest" else f"torch=={torch}"
    # NumPy as in setup.py: Triton 3.6 and older fail in the interpreter with 2.4. The compiler of old torches imports
    # setuptools and does not ask for it.
    installed = install(scratch / "venv", python, [f"{wheel}[demo]", wanted, "numpy<2.4", "setuptools"])
    row: dict[str, object] = {"python": version_of(python), "torch": torch, "checks": {}, "failed": []}
    if installed is not None:
        print(f"{python}, torch {torch}: cannot be installed")
        return row | {"failed": [installed]}
    (scratch / "empty").mkdir()
    done = subprocess.run(
        [scratch / "venv" / "bin" / "python", "-P" if version_of(python) != "3.10" else "-s", SMOKE],
        cwd=scratch / "empty",
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stderr, end="", file=sys.stderr)
    return row | json.loads(done.stdout.splitlines()[-1])


def install(venv: Path, python: str, requirements: list[str]) -> str | None:
    """Make an environment, by uv where it is there, since it copies nothing; say what kept it from being made."""
    if shutil.which("uv"):
        steps = [
            ["uv", "venv", "--quiet", "--python", python, str(venv)],
            ["uv", "pip", "install", "--quiet", "--python", str(venv / "bin" / "python"), *requirements],
        ]
    else:
        steps = [
            [python, "-m", "venv", str(venv)],
            [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", *requirements],
        ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip()[-400:]
    return None


def version_of(python: str) -> str:
    """Give the version of an interpreter, as in 3.12."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def show(row: dict[str, object]) -> None:
    """Print what ran there."""
    checks = ", ".join(f"{name} {result}" for name, result in dict(row["checks"]).items())
    print(f"Python {row['python']}, torch {row['torch']}: {checks or row['failed']}", flush=True)
