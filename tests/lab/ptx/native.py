"""The interface of machine.cpp: its structures and enumerations, read from its text, and its functions.

`g++` compiles machine.cpp when it is first needed; the result lies next to Triton's cache.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import re
import subprocess
from ctypes import c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import triton

# Next to Triton's cache and not in it: what lies there has no machine code.
CACHE = Path(triton.knobs.cache.dir) / "ptx_alone"
SOURCES = tuple(Path(__file__).with_name(name) for name in ("machine.cpp", "opcodes.hpp"))
# No sum and product that the instructions have apart may be joined; integers wrap.
COMPILE = ("g++", "-std=gnu++17", "-O1", "-shared", "-fPIC", "-fwrapv", "-ffp-contract=off")
_TEXT = re.sub(r"//.*", "", SOURCES[0].read_text())


def _structure(name: str) -> Any:
    """Give a structure, all of whose members have 8 bytes."""
    (body,) = re.findall(rf"struct {name} {{([^}}]*)}};", _TEXT)
    members = re.findall(r"(\w+)(?:\[(\d)\])?[,;]", body)
    fields = [(member, c_int64 * int(many) if many else c_int64) for member, many in members]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _enumeration(name: str) -> dict[str, int]:
    """Give the numbers of an enumeration by their names in small letters."""
    (body,) = re.findall(rf"enum {name} {{([^}}]*)}};", _TEXT)
    entries = enumerate(re.findall(r"(\w+)(?: = (\d+))?", body))
    return {entry.lower().replace("_", " "): int(number or i) for i, (entry, number) in entries}


Step, Cell, Region, Finding, Task = map(_structure, ("Step", "Cell", "Region", "Finding", "Task"))
ACTION, SPACE, MODE, KIND, STAMP = map(_enumeration, ("Action", "Space", "Mode", "Kind", "Stamp"))
MANY = 1 << 26  # steps of a program, more than any of ours has


@cache
def library() -> ctypes.CDLL:
    """Compile machine.cpp, unless that was done before, and load it."""
    name = hashlib.sha256(b"".join(x.read_bytes() for x in SOURCES) + repr(COMPILE).encode()).hexdigest()[:16]
    path = CACHE / f"{name}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the tests' processes one compiles, the others wait
        if not path.exists():
            made = path.with_suffix(".made")
            subprocess.run([*COMPILE, str(SOURCES[0]), "-o", str(made)], check=True)
            made.rename(path)
    return functions_of(path)


def functions_of(path: Path) -> ctypes.CDLL:
    """Load a compiled machine.cpp."""
    loaded = ctypes.CDLL(str(path))
    loaded.find.restype, loaded.compute.restype = c_void_p, c_uint64
    loaded.compute.argtypes = [c_void_p, c_uint64, c_uint64, c_uint64]
    return loaded
