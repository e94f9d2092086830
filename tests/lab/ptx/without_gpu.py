"""A GPU that is not there: `pytest -m gpu --without-gpu`, or `python -m lab.ptx.without_gpu MODULE`, run on the CPU.

"cuda" names memory of the CPU that is marked, and tensors know whether theirs is. A launch runs the compiled PTX in the
interpreter of this folder. Streams run at once; a captured graph keeps operations and launches, and runs them again.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lab.ptx.session import Session, compile_ptx
from rollout_corr.kernels import launches
from rollout_corr.kernels.launches import Launch

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

# What cannot mean anything here, by a part of the test's name.
LEFT_OUT = {
    "test_the_search_for_owners": "a kernel of the test itself, which Triton launches",
    "test_large_batches_against_the_reference[4000000-100000]": "minutes in an interpreter",
    "test_large_batches_against_the_reference[16000000-1000]": "minutes in an interpreter",
}

MOVES = ("to", "cuda", "cpu", "copy_")
# What takes tensors of two devices.
ANYWHERE = (*MOVES, "__getitem__", "__setitem__", "__set__", "set_", "backward", "grad")
# What makes the host wait, which the debug mode of synchronization refuses.
WAITS = ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero", "masked_select", "unique", "equal", "tensor")


class Memory:
    """The GPU's memory: bytes that are allocated now, and at most."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0

    def holds(self, x: Tensor) -> bool:
        """Tell whether a tensor lies here. A storage is one object in Python as long as its memory lives."""
        return x.layout is torch.strided and getattr(x.untyped_storage(), "on_gpu", False)

    def take(self, x: Tensor) -> None:
        """Let a tensor's memory be here."""
        storage = x.untyped_storage()
        if x.device.type == "cpu" and not getattr(storage, "on_gpu", False):
            storage.on_gpu = True
            self._add(storage.nbytes())
            weakref.finalize(storage, self._add, -storage.nbytes())

    def _add(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)


class Gpu(TorchFunctionMode):
    """Sees every call of torch in this thread: what it allocates for "cuda", what it mixes, what it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.session = Memory(), Session()
        self.streams, self.refuses_waits, self.backward = [Stream()], False, False
        self.tape: list[tuple[Callable[[], Any], Any]] | None = None

    def begin(self) -> None:
        """Begin another test."""
        self.session = Session()

    def here(self, x: Any) -> bool:
        return isinstance(x, Tensor) and (self.memory.holds(x) or self.backward)

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__get__":
            name = getattr(function.__self__, "__name__", "")
            if self.here(arguments[0]) and name in ("device", "is_cuda", "is_cpu"):
                return {"device": GPU, "is_cuda": True, "is_cpu": False}[name]
            if name not in ("grad", "data", "T", "mT", "real"):
                return function(*arguments)
        if name in ("numpy", "pin_memory", "get_device") and self.here(arguments[0]):
            if name == "get_device":
                return GPU.index
            raise TypeError(f"{name}: expected a tensor on the host")
        return self._call(function, name, arguments, dict(named or {}))

    def _call(self, function: Any, name: str, arguments: Any, named: dict[str, Any]) -> Any:
        given = [x for x in tree_leaves((arguments, named)) if isinstance(x, Tensor)]
        places = [self.here(x) for x in given]
        asked = {"cuda": True, "cpu": False}.get(name)
        if name == "to" and len(given) > 1:
            asked = places[1]

        def on_the_cpu(x: Any) -> Any:
            nonlocal asked
            if isinstance(x, torch.device) or (isinstance(x, str) and x.partition(":")[0] in ("cuda", "cpu")):
                asked = torch.device(x).type == "cuda" if torch.device(x).type != "meta" else None
                return CPU if asked is not None else x
            return x

        arguments, named = tree_map(on_the_cpu, arguments), tree_map(on_the_cpu, named)
        pinned = named.pop("pin_memory", False) or name == "pin_memory"
        result_here = any(places) if asked is None else asked
        self._refuse(name, given, places, result_here, arguments, named)
        if name == "cuda":
            function, arguments = Tensor.to, (arguments[0], CPU)

        def run() -> Any:
            found = arguments[0].clone() if name == "pin_memory" else function(*arguments, **named)
            if name in MOVES[:3] and places and places[0] != result_here and _shares(found, given[:1]):
                # As bytes: a copy between devices leaves a bool of 2 as it is.
                bits = found.dtype == torch.bool
                found = found.view(torch.uint8).clone().view(torch.bool) if bits else found.clone()
            return found

        found = run()
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and result_here and not pinned and not _shares(x, given):
                self.memory.take(x)
        if self.tape is not None and (result_here or any(places)) and name not in ("grad", "backward", "data_ptr"):
            self.tape.append((run, found))
        return found

    def _refuse(
        self, name: str, given: list[Tensor], places: list[bool], result_here: bool, arguments: Any, named: Any
    ) -> None:
        sized = {place for x, place in zip(given, places, strict=True) if x.dim() and x.device.type == "cpu"}
        if len(sized) == 2 and name not in ANYWHERE:
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device, found cuda:0 and cpu")
        if self.refuses_waits:
            moves = name in MOVES and len({*places, result_here}) == 2 and not named.get("non_blocking")
            by_mask = name == "__getitem__" and any(x.dtype == torch.bool for x in given[1:])
            if moves or (result_here and (by_mask or name in WAITS)):
                raise RuntimeError(f"{name}: called a synchronizing CUDA operation")

    def launch(self, launch: Launch) -> None:
        """Run a launch, all of whose tensors have to be here."""
        elsewhere = [x.shape for x in tree_leaves(launch.arguments) if isinstance(x, Tensor) and not self.here(x)]
        assert not elsewhere, f"{launch.kernel.__name__} was given memory of the host: {elsewhere}"
        with torch._C.DisableTorchFunction():
            if launches.only_compiles():
                compile_ptx(launch)
                return
            self.session.run(launch)
        if self.tape is not None:
            self.tape.append((lambda: self.session.run(launch), None))

    def run_backward(self, engine: Callable[..., Any], outputs: Any, *others: Any, **named: Any) -> Any:
        """Run autograd's engine, whose own calls nobody sees, with everything in it on the device of the outputs."""
        before, self.backward = self.backward, any(map(self.memory.holds, outputs))
        try:
            with self:
                found = engine(outputs, *others, **named)
        finally:
            here, self.backward = self.backward, before
        for x in (found or ()) if here else ():
            if x is not None:
                self.memory.take(x)
        return found


class Generator(torch.Generator):
    """A generator of random numbers of either device."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")


def _shares(x: Tensor, others: list[Tensor]) -> bool:
    return any(x is y or x.untyped_storage() is y.untyped_storage() for y in others)


class Stream:
    """A stream, or an event: all that was asked of it is done."""

    made = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        Stream.made += 1
        self.cuda_stream, self.device, self.at = Stream.made, GPU, 0.0

    def done(self, *_: Any) -> bool:
        return True

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Stream) -> float:
        return 1e3 * (end.at - self.at)

    synchronize = wait_stream = wait_event = wait = record_event = query = done


class Graph:
    """Operations and launches, in order, with what the operations gave."""

    def __init__(self) -> None:
        self.tape: list[tuple[Callable[[], Any], Any]] = []

    @torch.no_grad()
    def replay(self) -> None:
        with torch._C.DisableTorchFunction():
            for run, kept in self.tape:
                for old, new in zip(tree_leaves(kept), tree_leaves(run()), strict=False):
                    if isinstance(old, Tensor) and not _shares(old, [new]):
                        old.detach().copy_(new)


def names_of_cuda(gpu: Gpu) -> dict[str, Any]:
    """Give what stands for functions and classes of `torch.cuda`."""

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        gpu.streams.append(stream)
        try:
            yield
        finally:
            gpu.streams.pop()

    @contextlib.contextmanager
    def captured(graph: Graph, **_: Any) -> Iterator[None]:
        gpu.tape = graph.tape
        try:
            with on(Stream()):
                yield
        finally:
            gpu.tape = None

    def nothing(*_: Any) -> None:
        pass

    about = {"name": "none", "warp_size": 32, "major": 9, "minor": 0, "multi_processor_count": 132}
    about |= {"total_memory": 80 << 30, "L2_cache_size": 50 << 20}
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: GPU.index,
        "get_device_properties": lambda device=None: SimpleNamespace(**about),
        "Stream": Stream,
        "Event": Stream,
        "stream": on,
        "current_stream": lambda device=None: gpu.streams[-1],
        "CUDAGraph": Graph,
        "graph": captured,
        "is_current_stream_capturing": lambda: gpu.tape is not None,
        "synchronize": nothing,
        "_sleep": nothing,
        "set_stream": nothing,
        "mem_get_info": lambda: (1 << 36, 1 << 36),
        "empty_cache": nothing,
        "set_sync_debug_mode": lambda mode: setattr(gpu, "refuses_waits", mode == "error"),
        "get_sync_debug_mode": lambda: 2 * gpu.refuses_waits,
        "memory_allocated": lambda device=None: gpu.memory.allocated,
        "max_memory_allocated": lambda device=None: gpu.memory.peak,
        "reset_peak_memory_stats": lambda device=None: setattr(gpu.memory, "peak", gpu.memory.allocated),
    }


@contextlib.contextmanager
def standing_in() -> Iterator[Gpu]:
    """Put a GPU in place that is none."""
    gpu, empty, engine = Gpu(), torch.empty, torch.autograd._engine_run_backward
    run_thread = threading.Thread.run

    def allocate(*size: Any, **named: Any) -> Tensor:
        return gpu.session.allocate(empty(*size, **named))

    def run_on_gpu(thread: threading.Thread) -> None:
        with gpu:
            run_thread(thread)

    with (
        mock.patch.multiple(torch.cuda, **names_of_cuda(gpu)),
        mock.patch.object(threading.Thread, "run", run_on_gpu),
        mock.patch.object(torch, "empty", allocate),
        mock.patch.object(torch, "Generator", Generator),
        mock.patch.object(Tensor, "record_stream", return_value=None),
        mock.patch.object(torch.autograd, "_engine_run_backward", lambda *a, **b: gpu.run_backward(engine, *a, **b)),
        mock.patch.object(Launch, "run", lambda launch: gpu.launch(launch)),
        gpu,
    ):
        yield gpu


if __name__ == "__main__":
    del sys.argv[0]
    with standing_in():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
