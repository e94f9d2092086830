"""The place and time of a run, in words that do not identify the machine, and its result file."""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks import tables
from rollout_corr.whole_files import write_whole

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# What can change a number of a run.
MEASURED = ("rollout_corr", "kernels", "benchmarks", ":!benchmarks/results")
# With these glibc decides whether a temporary comes from fresh pages.
ALLOCATOR = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "LD_PRELOAD")


def head() -> dict[str, Any]:
    """Return date and commit of a run, and whether a file that is measured differs from the commit."""
    sha, dirty = commit()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": sha,
        "dirty": dirty,
    }


def describe() -> dict[str, object]:
    """Return processor, caches and versions."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "caches": _caches(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "verl": version("verl"),
        "allocator": {name: os.environ[name] for name in ALLOCATOR if name in os.environ},
    }


def write(path: Path, results: dict[str, Any]) -> None:
    """Write results at once, so that a reader finds the old file or the new one, without folders of this machine."""
    write_text(path, tables.to_json(results))


def write_text(path: Path, text: str) -> None:
    """Write a text at once, without folders of this machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, without_places(text))


def without_places(text: str) -> str:
    """Return a text, which may hold tracebacks, without the folders of this machine."""
    places = {str(Path.home()): "~", tempfile.gettempdir(): "<tmp>", sys.prefix: "<python>", str(ROOT): "."}
    # Longest first, because one folder may be inside another.
    for place in sorted(places, key=len, reverse=True):
        if place not in ("/", "/usr"):
            text = text.replace(place, places[place])
    return text


def commit() -> tuple[str, bool]:
    """Return (commit, whether a file that is measured differs from it); ("unknown", True) outside a checkout."""
    try:
        return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--", *MEASURED))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True


def import_seconds(times: int = 7) -> list[float]:
    """Time what `import rollout_corr` adds to `import torch`, each in a fresh process that finds bytecode.

    Without the collector of garbage: a full run over torch's objects takes 80 ms, and falls into this import or into
    the next one by how many objects the environment's other packages have made before.
    """
    code = "import gc, time, torch; gc.disable(); t = time.perf_counter()"
    code += "; import rollout_corr; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    writes = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    taken = [
        float(subprocess.run(command, cwd=ROOT, env=writes, check=True, capture_output=True, text=True).stdout)
        for _ in range(1 + times)
    ]
    return taken[1:]


def keep_pages() -> bool:
    """Make glibc's allocator keep all memory from now on; False where there is no glibc.

    By default it takes fresh pages for everything above 32 MiB, and below that the process's past decides. This is the
    extreme that can be set on purpose.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    never_map, never_trim = (-4, 0), (-1, 2**31 - 1)  # M_MMAP_MAX, M_TRIM_THRESHOLD
    return all(libc.mallopt(*setting) for setting in (never_map, never_trim))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def version(name: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _caches() -> dict[str, str]:
    """Return {"L2": "1024K", ...} of the first core, where the system tells."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text(encoding="utf-8").strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            found[f"L{level}"] = size
    return found
