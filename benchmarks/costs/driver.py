"""A driver that does nothing, under Triton's real launcher: everything above `cuLaunchKernelEx` runs as on a GPU.

Nothing is compiled either: a launcher looks at the signature of a kernel, and never at its code.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.machine import ROOT

SOURCE = Path(__file__).with_name("nothing.c")
BUILT = ROOT / "build" / "host"


class NoCompiler(RuntimeError):
    """There is no C compiler to build the driver with."""


def library(folder: Path = BUILT) -> Path:
    """Build the libcuda that does nothing, unless it is there, and give its path."""
    target = folder / "libcuda.so.1"
    if target.exists() and target.stat().st_mtime >= SOURCE.stat().st_mtime:
        return target
    compiler = next(
        (found for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and (found := shutil.which(name))), None
    )
    if compiler is None:
        raise NoCompiler(
            "benchmarks.costs.host: expected a C compiler (cc, gcc, clang, or the one that CC names), with which it "
            "and Triton build a driver and a launcher; found none"
        )
    folder.mkdir(parents=True, exist_ok=True)
    made = target.with_suffix(f".{os.getpid()}")
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", "-Wl,-soname,libcuda.so.1", str(SOURCE), "-o", str(made)]
    subprocess.run(command, check=True)
    made.replace(target)
    return target


def install(folder: Path = BUILT) -> None:
    """Make Triton launch on the driver that does nothing; CPU tensors stand for those of a GPU from here on.

    For a process of its own: Triton and this package keep what they have found out about a driver.
    """
    found = library(folder)
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ["TRITON_LIBCUDA_PATH"] = str(found.parent)
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    # By its name it is found again when Triton's own modules ask for a libcuda.so.1.
    ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)

    import triton
    import triton.compiler

    triton.runtime.driver.set_active(_driver())
    mock.patch.object(triton.compiler, "compile", _uncompiled).start()
    _pass_cpu_tensors_for_those_of_a_gpu()


def _driver() -> Any:
    from triton.backends.nvidia import driver as nvidia

    class Driver(nvidia.CudaDriver):
        def __init__(self) -> None:
            self.utils = nvidia.CudaUtils()
            self.launcher_cls = nvidia.CudaLauncher
            self.get_device_capability = lambda device=0: (9, 0)
            self.get_current_stream = lambda device: 0
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None

        def get_current_target(self) -> Any:
            return nvidia.GPUTarget("cuda", 90, 32)

    return Driver()


def _uncompiled(src: Any, target: Any = None, options: Any = None, _env_vars: Any = None) -> Any:
    """Give a kernel without code, as Triton's `compile` gives one with it."""
    from triton.compiler import CompiledKernel, make_backend

    backend = make_backend(target)
    told = {
        **vars(backend.parse_options(dict(options))),
        "name": src.name,
        "hash": "0" * 64,
        "target": target,
        "shared": 0,
        "tmem_size": 0,
        "cluster_dims": (1, 1, 1),
        "tensordesc_meta": None,
        "global_scratch_size": 0,
        "global_scratch_align": 1,
        "profile_scratch_size": 0,
        "profile_scratch_align": 1,
    }
    kernel = CompiledKernel.__new__(CompiledKernel)
    kernel.__dict__ |= {
        "metadata": SimpleNamespace(**told),
        "src": src,
        "hash": told["hash"],
        "name": src.name,
        "asm": {},
        "metadata_group": {},
        "kernel": b"\0",
        "module": None,
        "_module_pid": None,
        "function": None,
        "_run": None,
    }
    kernel.packed_metadata = backend.pack_metadata(kernel.metadata)
    return kernel


def _pass_cpu_tensors_for_those_of_a_gpu() -> None:
    from rollout_corr.backends import batch, operators

    def offsets_of_a_device(offsets: Any, tokens: int) -> Any:
        """Give offsets as they are: those on a device are never read."""
        return offsets

    def nothing_against(device: Any) -> None:
        """Say that kernels can run on every device."""

    mock.patch.object(operators, "why_not", nothing_against).start()
    mock.patch.object(batch, "checked_offsets", offsets_of_a_device).start()
