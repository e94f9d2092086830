"""A pretended GPU whose clock is moved by the calls that it times."""

from __future__ import annotations

import torch

from benchmarks.cases.contender import Contender, Outcome
from benchmarks.cpu.memory import Memory
from benchmarks.gpu import device as devices
from benchmarks.gpu import trace


class Clockwork(devices.Host):
    """A device whose calls take what they say."""

    by, copy_bytes = "events", 4_000_000

    def __init__(self):
        self.now, self.captured, self.log = 0.0, [], []
        self.waiting, self.uncapturable = (), ()

    def facts(self):
        return {"gpu": "clockwork"}

    def copy(self):
        self.now += 0.002

    def synchronize(self):
        self.log.append("synchronize")

    def evict(self):
        self.log.append("evict")

    def wall(self, call):
        before = self.now
        call()
        return self.now - before

    def graph(self, calls):
        if any(call in self.uncapturable for call in calls):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.captured.append(calls)

        def replay():
            for call in calls:
                call()
            self.now -= 0.001 * len(calls)  # what the host took

        return replay

    def waits(self, call):
        call()
        return call in self.waiting

    def memory(self, call):
        return Memory(300, 200)

    def counts(self, call):
        return trace.Counts(kernels=3, syncs=int(self.wall(call) >= 0.010))

    def free(self):
        self.log.append("free")


def somebody(device, name, seconds, value=1.0, **about):
    def on_device():
        device.log.append(name)
        device.now += seconds

    def whole():
        on_device()
        device.now += 0.010
        return Outcome(value=torch.tensor(value), metrics={"tokens_trained": 1.0})

    return Contender(name, on_device, whole, **about)
