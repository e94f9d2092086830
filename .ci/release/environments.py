"""Fresh environments with the wheel, for every Python that is there and the oldest and newest torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import without_cuda

# The first one tries every torch.
PYTHONS = [f"python3.{minor}" for minor in (11, 10, 12, 13, 14)]
# The oldest that setup.py allows, and whatever is newest.
OLDEST = re.findall(r'"torch>=([\d.]+)"', Path("setup.py").read_text(encoding="utf-8"))[0]
TORCHES = [f"{OLDEST}.0", "newest"]
SMOKE = Path(".ci", "release", "smoke.py").resolve()


# An index that has a version of torch, but not for this Python: by uv, and by pip.
NO_WHEEL = re.compile(r"no wheels? with a matching|No matching distribution found for torch==")


def rows_of(path: Path, tried: str) -> list[dict[str, object]]:
    """Give the rows of an earlier run that tried the same bytes, without those that failed."""
    if not path.is_file():
        return []
    before = json.loads(path.read_text(encoding="utf-8"))
    return [row for row in before["rows"] if not row["failed"]] if before["tried"] == tried else []


def try_everywhere(
    wheel: Path, pythons: list[str], torches: list[str], before: list[dict[str, object]], cuda: bool = True
) -> Iterator[dict[str, object]]:
    """Try the wheel with the first and last torch under every Python, with those between under the first Python.

    Where the index has no such last torch for a Python, the newest that it has for it takes its place.
    """
    done = {(row["python"], row["asked"]): row for row in before}
    there = [python for python in pythons if runs(python)]
    for torch in torches:
        # Downloads of one torch are of use for its other Pythons alone, and all of them would fill a runner's disk.
        with tempfile.TemporaryDirectory() as cache:
            for python in there if torch in (torches[0], torches[-1]) else there[:1]:
                for asked in dict.fromkeys((torch, "newest")):
                    row = done.get((version_of(python), asked))
                    if row is None:
                        with tempfile.TemporaryDirectory() as scratch:
                            row = try_one(wheel, python, asked, Path(scratch), cache, cuda)
                        show(row)
                        yield row
                    if "absent" not in row or torch != torches[-1]:
                        break


def not_here(pythons: list[str]) -> list[str]:
    """Give the versions of the interpreters that are not there, as in 3.14, and say so."""
    missing = [python for python in pythons if not runs(python)]
    for python in missing:
        print(f"{python}: not here, so not tried")
    return [python.removeprefix("python") for python in missing]


def every_torch() -> list[str]:
    """Name the oldest torch and, of each minor version of the index, the newest, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (available,) = re.findall(r"^Available versions: (.+)$", listed, re.MULTILINE)
    return newest_of_each_minor(re.findall(r"(\d+)\.(\d+)\.(\d+)(?=,|$)", available))


def newest_of_each_minor(versions: list[tuple[str, str, str]]) -> list[str]:
    """Keep the newest of each minor version from the oldest that is supported on, which comes first itself."""
    oldest = tuple(int(x) for x in TORCHES[0].split("."))
    numbers = sorted({tuple(int(x) for x in version) for version in versions})
    newest = {version[:2]: version for version in numbers if version >= oldest}
    return [TORCHES[0], *(".".join(map(str, version)) for version in newest.values() if version != oldest)]


def runs(python: str) -> bool:
    """Tell whether an interpreter is there; a name that a version manager only forwards is not."""
    if shutil.which(python) is None:
        return False
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def try_one(wheel: Path, python: str, torch: str, scratch: Path, cache: str, cuda: bool) -> dict[str, object]:
    """Install the wheel into a fresh environment, and run the smoke test from an empty folder."""
    wanted = "torch" if torch == "newest" else f"torch=={torch}"
    # NumPy as in setup.py: Triton 3.6 and older fail in the interpreter with 2.4. The compiler of old torches imports
    # setuptools and does not ask for it.
    also = ["numpy<2.4", "setuptools"]
    if cuda:
        installed = install(scratch / "venv", python, [[f"{wheel}[demo]", wanted, *also]], cache)
    else:
        installed = install_without_cuda(scratch / "venv", python, [str(wheel), wanted], also, cache)
    row: dict[str, object] = {"python": version_of(python), "asked": torch, "torch": torch, "checks": {}, "failed": []}
    row["cuda"] = "installed" if cuda else "stood in"
    if installed is not None and NO_WHEEL.search(" ".join(installed.split())):
        return row | {"absent": True}
    if installed is not None:
        return row | {"failed": [installed[-400:]]}
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


def install(venv: Path, python: str, steps: list[list[str]], cache: str) -> str | None:
    """Make an environment, by uv where it is there, since it copies nothing; say what kept it from being made."""
    inside = str(venv / "bin" / "python")
    make, add = [python, "-m", "venv", str(venv)], [inside, "-m", "pip", "install", "--quiet"]
    if shutil.which("uv"):
        make = ["uv", "venv", "--quiet", "--python", python, str(venv)]
        add = ["uv", "pip", "install", "--quiet", "--python", inside]
    environment = {**os.environ, "UV_CACHE_DIR": cache, "PIP_CACHE_DIR": cache}
    for step in [*([] if venv.exists() else [make]), *([*add, *step] for step in steps)]:
        done = subprocess.run(step, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            return done.stderr.strip()
    return None


def install_without_cuda(venv: Path, python: str, alone: list[str], also: list[str], cache: str) -> str | None:
    """Make an environment with the wheel and torch, what both need but CUDA, and stand-ins for its libraries."""
    problem = install(venv, python, [["--no-deps", *alone]], cache)
    if problem is None:
        inside = venv / "bin" / "python"
        problem = install(venv, python, [[*without_cuda.requirements(inside), *also]], cache)
        (libraries,) = venv.glob("lib/python3.*/site-packages/torch/lib")
        without_cuda.stand_in(libraries)
    return problem


def version_of(python: str) -> str:
    """Give the version of an interpreter, as in 3.12."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def show(row: dict[str, object]) -> None:
    """Print what ran there."""
    checks = ", ".join(f"{name} {result}" for name, result in dict(row["checks"]).items())
    result = "the index has no such torch for this Python" if "absent" in row else checks or row["failed"]
    print(f"Python {row['python']}, torch {row['torch']}: {result}", flush=True)
