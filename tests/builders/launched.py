"""Triton's dispatch without a GPU and without a compiler: kernels as JIT functions, over a driver made of Python."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import triton
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from rollout_corr.kernels.correct import launch as correct
from rollout_corr.kernels.policy_loss import launch as policy_loss

TARGETS = {"cuda": GPUTarget("cuda", 90, 32), "hip": GPUTarget("hip", "gfx942", 64)}
KERNELS = {
    correct: ("read_kernel", "gather_kernel", "decide_kernel", "apply_kernel"),
    policy_loss: ("gradient_kernel", "sequences_kernel", "scale_kernel"),
}


class Driver:
    """A driver whose launches are recorded."""

    def __init__(self, backend="cuda"):
        self.target, self.stream, self.device = TARGETS[backend], 7, 0
        self.compiled, self.launched = [], []

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        assert device == self.device
        return self.stream

    def compile(self, src, target=None, options=None, **others):
        """Give a kernel that records its launches, where Triton's compiler would give one with code."""
        kernel = triton.compiler.CompiledKernel.__new__(triton.compiler.CompiledKernel)
        kernel.__dict__ |= {"src": src, "_module_pid": None, "name": src.name}
        kernel.__dict__ |= {"packed_metadata": ("packed", len(self.compiled))}
        kernel.__dict__ |= {"metadata": SimpleNamespace(**options), "hash": "", "metadata_group": {}}
        return self.load(kernel, options)

    def load(self, kernel, options):
        """Make a compiled kernel one whose launches are recorded."""

        def run(programs, one, other, stream, function, metadata, about, enter, leave, *arguments, **others):
            assert (one, other, function, metadata) == (1, 1, kernel.function, kernel.packed_metadata)
            for hook in (enter, leave):
                if hook is not None:
                    hook(about)
            self.launched.append((kernel, programs, stream, arguments))

        # A module is what `CompiledKernel` looks for to see whether it was loaded.
        kernel.__dict__ |= {"module": self, "function": len(self.compiled), "_run": run}
        src = kernel.src
        self.compiled.append((src.name, repr(src.signature), repr(src.constants), repr(src.attrs), repr(options)))
        return kernel


def forget():
    """Drop all operations, whose sites hold kernels."""
    correct.operation_for.cache_clear()
    policy_loss.operation_for.cache_clear()
    policy_loss._scaling_for.cache_clear()


@contextlib.contextmanager
def dispatched(backend="cuda", driver=None):
    """Launch kernels through Triton's dispatch over a driver that records, and give the driver."""
    driver = Driver(backend) if driver is None else driver
    before = triton.runtime.driver.active if triton.runtime.driver._active is not None else None
    with contextlib.ExitStack() as stack:
        for module, names in KERNELS.items():
            for name in names:
                kernel = getattr(module, name)
                settings = getattr(kernel, "kwargs", {})  # of a function of the interpreter
                jit = JITFunction(kernel.fn, **settings)
                jit.hash = name  # Triton would make it from the functions that it calls, which are interpreted ones
                stack.enter_context(mock.patch.object(module, name, jit))
        stack.enter_context(mock.patch.object(triton.compiler, "compile", driver.compile))
        triton.runtime.driver.set_active(driver)
        forget()
        try:
            yield driver
        finally:
            triton.runtime.driver.set_active(before)
            forget()
