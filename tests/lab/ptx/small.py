"""Small kernels written by hand, for the tests of the interpreter itself."""

from __future__ import annotations

import numpy as np
import torch

from lab.ptx.machine import Finding, Program, Region, record_of

_TEMPLATE = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry small(
	.param .u64 .ptr .global .align 1 small_param_0,
	.param .u64 .ptr .global .align 1 small_param_1
)
.reqntid {threads}
{{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<99>;
	.reg .b64 	%rd<99>;
	.loc	1 7 3                         // small.py:7:3
	mov.u32 %r1, %tid.x;
	mov.u32 %r2, %ctaid.x;
	ld.param.b64 %rd1, [small_param_0];
	ld.param.b64 %rd2, [small_param_1];
	shl.b32 %r3, %r1, 2;
	cvt.u64.u32 %rd3, %r3;
	add.s64 %rd4, %rd1, %rd3;
	add.s64 %rd5, %rd2, %rd3;
	.loc	1 8 5                         // small.py:8:5 @[ caller.py:3:1 ]
{body}
	ret;
}}
"""


def run_small(
    body: str, one: torch.Tensor, two: torch.Tensor, *, threads: int = 64, programs: int = 2, shared: int = 1024,
    unwritten: tuple[str, ...] = (), launches: int = 1, seed: int = 0, off_by: tuple[int, int] = (0, 0),
) -> list[Finding]:  # fmt: skip
    """Run a body on two tensors and give the findings.

    %r1 is the thread, %r2 the program, %rd1 and %rd2 are the tensors, %rd4 and %rd5 the thread's 4 bytes of them.
    """
    program = Program(_TEMPLATE.format(threads=threads, body=body), shared)
    regions = [
        Region(name, x.data_ptr(), x.itemsize, tuple(x.shape), x.stride(), name in unwritten, record_of(2 * x.numel()))
        for name, x in (("one", one), ("two", two))
    ]
    given, order = [one.data_ptr(), two.data_ptr()], np.arange(programs)
    done = [program.run(given, programs, order, regions, 1 + i, seed, True, off_by) for i in range(launches)]
    return [x for launch in done for x in launch.findings]
