"""Clocks, memory, graphs and profiles of the current GPU."""

from __future__ import annotations

import gc
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from benchmarks.cpu.memory import Memory

# A millisecond or two: long compared with the two events around it.
TICKS = 2_000_000
# Calls of ours that are put into one graph, and the largest batch that so many are made of.
IN_A_ROW, MOST_IN_A_ROW = 16, 1 << 21

Call = Callable[[], object]
Seconds = Callable[[], float]
# Replays captured calls, and returns what they returned at the capture, with new numbers in it.
Replay = Callable[[], list[object]]


class Gpu:
    """The current GPU. Tiny: with buffers that show only that everything works."""

    def __init__(self, tiny: bool = False) -> None:
        self.tiny, self._about = tiny, torch.cuda.get_device_properties(torch.cuda.current_device())
        size, copied = max(4 * self._about.L2_cache_size, 256 << 20), 1 << 30
        if tiny:
            size = copied = 1 << 12
        self._from = torch.randint(256, (copied,), dtype=torch.uint8, device="cuda")
        self._to = torch.empty(copied, dtype=torch.uint8, device="cuda")
        self._evicting = torch.empty(size, dtype=torch.uint8, device="cuda")

    def facts(self) -> dict[str, Any]:
        """Return facts for the head of a table."""
        about = self._about
        return {
            "gpu": about.name,
            "capability": f"{about.major}.{about.minor}",
            "multiprocessors": about.multi_processor_count,
            "memory_bytes": about.total_memory,
            "l2_bytes": about.L2_cache_size,
            "cuda": torch.version.cuda,
            **driver(),
        }

    def copy(self) -> None:
        """Copy a buffer within the device."""
        self._to.copy_(self._from)

    @property
    def copy_bytes(self) -> int:
        """Bytes read and written by `copy`."""
        return 2 * self._from.numel()

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def evict(self) -> None:
        """Overwrite the caches."""
        self._evicting.zero_()

    def timed(self, call: Call) -> Seconds:
        """Run a call from cold caches; the time on the device can be read after `synchronize`."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # While the device overwrites its cache the host gets ahead, so the call is queued when the device is free.
        self.evict()
        start.record()
        call()
        end.record()
        return lambda: start.elapsed_time(end) / 1e3

    def megahertz(self) -> int | None:
        """Measure the clock of the multiprocessors now, by a kernel that waits for so many ticks; None if tiny."""
        if self.tiny:
            return None
        spent = self.timed(lambda: torch.cuda._sleep(TICKS))
        self.synchronize()
        return round(TICKS / spent() / 1e6)

    def wall(self, call: Call) -> float:
        """Time a call until the device is done; its result is freed after the clock has stopped."""
        self.synchronize()
        start = time.perf_counter()
        result = call()
        self.synchronize()
        taken = time.perf_counter() - start
        del result
        return taken

    def graph(self, calls: Sequence[Call]) -> Replay:
        """Capture calls, to be replayed without the host."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                for call in calls:
                    call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, stream=stream):
                # Kept, so that no call writes into another one's result.
                results = [call() for call in calls]
        except RuntimeError:
            # A failed capture leaves its own stream as the current one.
            torch.cuda.set_stream(before)
            raise

        def replay() -> list[object]:
            graph.replay()
            return results

        return replay

    def waits(self, call: Call) -> bool:
        """Return whether the host waits for the device inside a call."""
        self.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as problem:
            if "synchronizing" not in str(problem):
                raise
            return True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return False

    def memory(self, call: Call) -> Memory:
        """Return peak temporaries and outputs of a call."""
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        self.synchronize()
        outputs = torch.cuda.memory_allocated() - before
        temporaries = torch.cuda.max_memory_allocated() - before - outputs
        del result
        return Memory(temporaries, outputs)

    def kernels(self, call: Call) -> list[tuple[str, int, float]]:
        """Return (name, times, microseconds in all) of what a call runs on the device, none without a profiler."""
        self.synchronize()
        with profile(activities=supported_activities()) as run:
            result = call()
            self.synchronize()
        del result
        found = [one for one in run.key_averages() if one.device_type == DeviceType.CUDA]
        return [(one.key, one.count, one.self_device_time_total) for one in found]

    def free(self) -> None:
        """Free cached memory between cases."""
        gc.collect()
        torch.cuda.empty_cache()


def driver() -> dict[str, str]:
    """Return {"driver": version, "clocks": clocks and power limit} from nvidia-smi, empty where it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    query = ["driver_version", "clocks.sm", "clocks.mem", "power.limit"]
    command = [program, f"--query-gpu={','.join(query)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return {}
    if answer.returncode:
        return {}
    version, *rest = answer.stdout.splitlines()[0].split(", ")
    return {"driver": version, "clocks": ", ".join(rest)}
