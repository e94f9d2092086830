"""The interface of machine.cpp: its structures, its functions, and the names of its numbers.

`g++` compiles machine.cpp when it is first needed; the result lies beside Triton's cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from ctypes import c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import triton

# Beside Triton's cache and not in it: what lies there has no machine code.
CACHE = Path(triton.knobs.cache.dir) / "ptx_alone"
SOURCES = tuple(Path(__file__).with_name(name) for name in ("machine.cpp", "opcodes.hpp"))
# No sum and product that the instructions have apart may be joined; integers wrap.
COMPILE = ("g++", "-std=gnu++17", "-O1", "-shared", "-fPIC", "-fwrapv", "-ffp-contract=off")
ACTIONS = (
    "compute", "setp", "pack", "unpack", "load", "store", "atomic", "matrix", "store matrix", "shuffle", "ballot",
    "reduce", "barrier", "branch", "indexed", "exit",
)  # fmt: skip
SPACES, MODES = ("global", "shared"), ("bfly", "down", "up", "idx")
KINDS = ("bounds", "alignment", "unwritten", "race in a program", "race of programs", "divergence", "endless")
# Bits of a stamp: thread, epoch, program.
EPOCH, PROGRAM, LAUNCH = 10, 27, 49
LOCAL = 1 << 60  # where local memory begins as a generic address
CELL = 56  # bytes of a record
MANY = 1 << 26  # steps of a program, more than any of ours has


class Step(ctypes.Structure):
    _fields_ = [
        ("compute", c_void_p), ("place", c_int64),
        *((name, c_int32) for name in (
            "action", "guard", "negated", "flush_from", "flush_to", "space", "width", "is_signed", "mode", "target",
            "acquires", "releases", "to_count", "from_count",
        )),
        ("to", c_int32 * 9), ("from_", c_int32 * 9),
    ]  # fmt: skip


class Region(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("data", "base", "size", "item", "fresh", "cells", "axes")),
        ("shape", c_int64 * 4), ("strides", c_int64 * 4),
    ]  # fmt: skip


class Found(ctypes.Structure):
    _fields_ = [
        (name, c_int64) for name in ("kind", "instruction", "program", "thread", "threads", "region", "place", "other")
    ]


class Task(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in (
            "code", "targets", "initial", "executed", "bytes", "programs", "regions", "findings")),
        *((name, c_int64) for name in (
            "instructions", "registers", "program_count", "tensors", "found", "capacity", "threads", "thread",
            "program", "lane", "launch", "seed", "most", "off_by", "off_seed")),
    ]  # fmt: skip


@cache
def library() -> ctypes.CDLL:
    """Compile machine.cpp, unless that was done before, and load it."""
    name = hashlib.sha256(b"".join(x.read_bytes() for x in SOURCES) + repr(COMPILE).encode()).hexdigest()[:16]
    path = CACHE / f"{name}.so"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder) / path.name
            subprocess.run([*COMPILE, str(SOURCES[0]), "-o", str(made)], check=True)
            os.replace(made, path)
    loaded = ctypes.CDLL(str(path))
    loaded.find.restype, loaded.compute.restype = c_void_p, c_uint64
    loaded.compute.argtypes = [c_void_p, c_uint64, c_uint64, c_uint64]
    return loaded
