"""Kernels and bytes of torch.compile of the definition for an H100, counted without one.

inductor lowers, fuses and schedules a graph and then writes Triton. It is followed up to the schedule, which asks a
device only for its properties. The graph is traced on tensors without memory, since this torch may know no CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import NopKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._triton import has_triton

import rollout_corr as rc
from benchmarks.cases.batches import Batch
from benchmarks.cases.operations import TOKEN_SPEC
from benchmarks.costs.counting import Cost

CUDA = torch.device("cuda:0")
H100 = SimpleNamespace(
    name="H100", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, shared_memory_per_block_optin=232448,
)  # fmt: skip


def correction(given: Batch) -> Cost:
    """Count the kernels of a correction and the bytes that they read and write."""
    mask = torch.ones_like(given.old, dtype=torch.bool) if given.mask is None else given.mask.bool()
    tensors = [x.to("meta") for x in (given.old, given.rollout, mask, given.cu_seqlens) if x is not None]

    def call(old: Tensor, rollout: Tensor, valid: Tensor, *offsets: Tensor) -> Any:
        batch = rc.Batch(mask=valid, cu_seqlens=offsets[0] if offsets else None)
        out = rc.correct(old, rollout, batch, spec=TOKEN_SPEC, backend="torch")
        return out.weights, out.mask, out.keep, out.statistics.vector

    return scheduled(call, tensors)


def scheduled(call: Callable[..., Any], tensors: list[Tensor]) -> Cost:
    """Count what inductor schedules for a call: of a kernel every buffer that it reads or writes once."""
    traced = make_fx(torch.func.functionalize(call), decomposition_table=select_decomp_table())(*tensors)
    for node in traced.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": CUDA}
    fake = FakeTensorMode()
    with ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "get_device_properties", H100),
            (torch.cuda, "current_device", 0),
            (CudaInterface, "get_device_properties", H100),
            (CudaInterface.Worker, "get_device_properties", H100),
            (CudaInterface, "get_compute_capability", 90),
            (CudaInterface, "is_available", True),
        ):
            stack.enter_context(mock.patch.object(target, name, lambda *_, value=value: value))
        # It keeps what it is told here.
        stack.callback(has_triton.cache_clear)
        stack.enter_context(fake)
        there = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA) for x in tensors]
        fake_tensor_prop(traced, there)
        stack.enter_context(V.set_fake_mode(fake))
        _recursive_post_grad_passes(traced, False)
        graph = GraphLowering(traced)
        for handler in (V.set_graph_handler(graph), V.set_real_inputs(there), V.set_debug_handler(mock.MagicMock())):
            stack.enter_context(handler)
        graph.run(*there)
        nodes = [node for node in Scheduler(graph.operations).nodes if not isinstance(node, NopKernelSchedulerNode)]
        moved = sum(node.get_read_write_buffers_sizes() for node in nodes)
        written = sum(node.get_write_buffer_sizes() for node in nodes)
    # What takes a result out of several launches nothing, and has its bytes.
    kernels = [node for node in nodes if not isinstance(node.node, MultiOutput)]
    return Cost(len(kernels), [], moved - written, written)
