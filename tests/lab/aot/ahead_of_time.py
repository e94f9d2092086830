"""Compile a launch for a GPU that this machine does not have.

Whatever of Triton's compiler may change from one version to the next is used in this file alone. It works with Triton
3.5 to 3.9, without a driver.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rollout_corr.kernels.launches import SMALL_STORAGE, Launch
from rollout_corr.kernels.tiles import Tiling

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Binary(NamedTuple):
    """The result of a compilation.

    Attributes:
        text: The machine code in words, with what the compiler says of registers: the disassembly of NVIDIA's
            `cuobjdump`, or AMD's assembly.
        shared: Bytes of shared memory that a program asks for.
        tokens: How many tokens a thread has at a time, of a kernel with a tiling.
    """

    text: str
    shared: int
    tokens: int


def interpreted(launch: Launch) -> bool:
    """Tell whether the kernel is a function of Triton's interpreter, which cannot be compiled."""
    return not isinstance(launch.kernel, triton.JITFunction)


def compile_launch(launch: Launch, target: str) -> Binary:
    """Compile one launch as the launcher would, had the device been there.

    Args:
        launch: From `correct.prepare`, on tensors of any device, "meta" too.
        target: A name in `TARGETS`.

    Raises:
        RuntimeError: The kernels are interpreted.
    """
    if interpreted(launch):
        raise RuntimeError("TRITON_INTERPRET=1 makes the kernels interpreted functions, which cannot be compiled")
    device = TARGETS[target]
    options = launch.options(device.warp_size, device.backend == "cuda")
    compiled = triton.compile(source_of(launch, device), target=device, options=options)
    text = compiled.asm["amdgcn"] if device.backend == "hip" else disassembly(compiled.asm["cubin"])
    return Binary(text, compiled.metadata.shared, tokens_of_thread(launch, device))


def tokens_of_thread(launch: Launch, device: GPUTarget) -> int:
    """Count the tokens that a thread has at a time; 0 without a tiling."""
    tiling = launch.arguments.get("TILING")
    if not isinstance(tiling, Tiling):
        return 0
    return tiling.for_warps_of(device.warp_size).step // device.warp_size


def source_of(launch: Launch, device: GPUTarget) -> ASTSource:
    """The kernel with the types, the constants and the promises of its arguments."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    promises: dict[tuple[int, ...], list[list[Any]]] = {}

    def type_of(x: Any, path: tuple[int, ...]) -> Any:
        if isinstance(x, tuple):
            return tuple(type_of(item, (*path, i)) for i, item in enumerate(x))
        if x is None:
            constants[path] = None
            return "constexpr"
        promises[path] = promises_of(x, device)
        return "*" + TYPES[x.dtype]

    for i, parameter in enumerate(launch.kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            x = launch.arguments[parameter.name]
            constants[(i,)] = x.for_warps_of(device.warp_size) if isinstance(x, Tiling) else x
        elif parameter.annotation_type:
            signature[parameter.name] = parameter.annotation_type
        else:
            signature[parameter.name] = type_of(launch.arguments[parameter.name], (i,))
    return ASTSource(launch.kernel, signature, constants, promises)


def promises_of(x: Tensor, device: GPUTarget) -> list[list[Any]]:
    """List what the launcher tells the compiler about a pointer. A meta tensor's address is its offset."""
    promises: list[list[Any]] = []
    if x.data_ptr() % 16 == 0:
        promises.append(["tt.divisibility", 16])
    if device.backend == "hip" and x.untyped_storage().nbytes() <= SMALL_STORAGE:
        promises.append(["tt.pointer_range", 32])
    return promises


def disassembly(cubin: bytes) -> str:
    """Resource usage and SASS, by the `cuobjdump` that comes with Triton."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
