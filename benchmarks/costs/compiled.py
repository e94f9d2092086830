"""Kernels and bytes of what torch.compile makes for an H100, counted without one.

inductor lowers, fuses and schedules a graph and then writes Triton. It is followed up to the schedule, which asks a
device only for its properties. Our definition is traced on tensors without memory; what others write is compiled for
tensors of the CPU, and its graphs, of the forward and of the backward pass, are scheduled as if for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import NopKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._triton import has_triton

import rollout_corr as rc
from benchmarks.cases.batches import Batch
from benchmarks.cases.operations import STEP_SURROGATE, SURROGATE, TOKEN_SPEC
from benchmarks.costs.counting import Cost, cost_of
from benchmarks.peers import by_hand

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
    """Count what inductor schedules for a call on tensors without memory."""
    traced = make_fx(torch.func.functionalize(call), decomposition_table=select_decomp_table())(*tensors)
    return schedule(traced, tensors)


def schedule(traced: GraphModule, tensors: Iterable[Tensor]) -> Cost:
    """Count what inductor schedules for a graph: of a kernel every buffer that it reads or writes once."""
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
        # It keeps what it was told before, and what it is told here.
        has_triton.cache_clear()
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


# --- by hand, and of frameworks ---


class Backend:
    """A backend of torch.compile that keeps the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []
        self.compile = aot_autograd(
            fw_compiler=self._keep, bw_compiler=self._keep, inference_compiler=self._keep,
            partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table(),
        )  # fmt: skip

    def __call__(self, graph: GraphModule, inputs: list[Tensor]) -> Any:
        """Compile the graph of the forward pass, and the graph of the backward pass when it is needed."""
        return self.compile(graph, inputs)

    def _keep(self, graph: GraphModule, _: object) -> Any:
        self.graphs.append(graph)
        return make_boxed_func(graph.forward)

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function whole, for each size anew."""
        torch._dynamo.reset()
        return torch.compile(function, backend=self, fullgraph=True, dynamic=False)

    def cost(self) -> Cost:
        """Count what inductor schedules for all graphs, and forget them."""
        cost = Cost()
        for graph in self.graphs:
            places = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
            one = schedule(graph, places)
            cost.launches += one.launches
            cost.read += one.read
            cost.written += one.written
        self.graphs.clear()
        return cost


def corrections_by_hand(given: Batch) -> dict[str, Cost]:
    """Count corrections written by hand, by the metrics that they have; these are copied to the host once."""
    tensors = given.old, given.rollout, None if given.mask is None else given.mask.bool(), given.cu_seqlens, TOKEN_SPEC
    calls = {"our metrics": by_hand.correct, "ten metrics": by_hand.correct_in_short}
    return {name: _by_hand(call, *tensors) for name, call in calls.items()}


def losses_by_hand(given: Batch) -> dict[str, Cost]:
    """Count PPO losses written by hand, with their backward."""
    assert given.new is not None and given.mask is not None and given.advantages is not None
    clip = SURROGATE.low, SURROGATE.high, SURROGATE.dual
    tensors = given.new, given.old, given.advantages, given.mask.bool(), torch.ones_like(given.old), clip
    calls = {"our metrics": by_hand.policy_loss, "three metrics": by_hand.policy_loss_in_short}
    return {name: _by_hand(call, *tensors) for name, call in calls.items()}


def step_by_hand(given: Batch) -> Cost:
    """Count a step written by hand, forward and backward, of advantages [S] that were given to tokens before."""
    assert given.new is not None and given.advantages is not None
    if given.cu_seqlens is None:
        advantages = given.advantages[:, None]
    else:
        advantages = given.advantages.repeat_interleave(given.lengths)
    bounds = STEP_SURROGATE.low, STEP_SURROGATE.high, 2.0
    return _by_hand(by_hand.step_in_short, given.new, given.old, given.rollout, advantages, given.mask, bounds)


def _by_hand(function: Callable[..., Any], *arguments: Any) -> Cost:
    def computed(*arguments: Any) -> Any:
        *results, metrics = function(*arguments)
        return *results, by_hand.together(metrics)

    backend = Backend()
    first = backend.of(computed)(*arguments)[0]
    if first.requires_grad:
        first.backward()
    cost = backend.cost()
    cost.waits = cost_of(lambda: by_hand.on_host(function(*arguments)[-1]), Path(by_hand.__file__).parent).waits
    return cost
