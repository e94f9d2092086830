"""Kernels of ejected files as compiled code, compared with the package's; for a process without the interpreter."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import rollout_corr as rc
from aot.ahead_of_time import TYPES
from builders.ejected import loaded
from ptx.machine import FoundWrong
from ptx.session import Session, as_ptx, compiled, program_of
from rollout_corr.eject import eject


def run_kernel(session: Session, kernel: JITFunction, given: tuple[Any, ...], programs: int) -> None:
    """Run a launch of a file: nothing but pointers and the types of sizes is in its compile key."""
    kinds = {
        parameter.name: f"*{TYPES[x.dtype]}" if isinstance(x, Tensor) else parameter.annotation
        for parameter, x in zip(kernel.params, given, strict=True)
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(given)
               if isinstance(x, Tensor) and x.data_ptr() % 16 == 0}  # fmt: skip
    source = ASTSource(fn=kernel, signature=kinds, constexprs={}, attrs=aligned)
    program = program_of(*as_ptx(source, {"num_warps": 1, "enable_fp_fusion": True}))
    values = [x.data_ptr() if isinstance(x, Tensor) else x & (2**64 - 1) for x in given]
    values += [0] * (len(program.kernel.parameters) - len(values))
    regions = [session.region(parameter.name, x) for parameter, x in zip(kernel.params, given, strict=True)
               if isinstance(x, Tensor) and x.numel()]  # fmt: skip
    number = next(session.launches)
    done = program.run(values, programs, np.arange(programs), regions, number, number, True, (0, 0))
    if done.findings:
        raise FoundWrong(done.findings)


def run_ejected(name: str) -> None:
    """A file of kernels alone and the package's kernels, both compiled: the same bits."""
    made = eject(name, backend="triton")
    random = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 1, 0, 130, 700, 2, *[1, 3] * 20, 300])
    offsets = torch.cat([torch.tensor([0]), lengths.cumsum(0)])
    tokens = int(offsets[-1])
    train = -torch.rand(tokens, generator=random)
    rollout = train + 0.1 * torch.randn(tokens, generator=random)
    mask = torch.rand(tokens, generator=random) > 0.2
    train[7], rollout[200], mask[200] = float("nan"), -float("inf"), True
    with compiled() as session, loaded(made) as file:

        def launch(kernel: JITFunction, *given: Any, grid: tuple[int], warmup: bool, **options: Any) -> None:
            run_kernel(session, kernel, given, grid[0])

        # The file takes tensors of a CPU only from Triton's interpreter.
        with mock.patch.object(JITFunction, "run", launch), mock.patch.object(triton.runtime, "JITFunction", int):
            weights, kept, keep, metrics = file["correct"](train, rollout, mask, offsets)
        out = rc.correct(train, rollout, rc.Batch(mask=mask, cu_seqlens=offsets), spec=rc.spec(name), backend="triton")
        assert session.executed, "the package ran something else than its kernels"
    torch.testing.assert_close(weights, out.weights, rtol=0, atol=0)
    assert torch.equal(kept, out.mask)
    assert torch.equal(keep, out.keep)
    expected = out.metrics("dashboard")
    assert {key: metrics[key] for key in expected} == expected
