"""Calls of `rc.dump` whose sequences carry numbers of their own, so that a file tells which of them it holds."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import torch

import rollout_corr as rc
from rollout_corr.diagnose.read.dump import Dump


class Disk:
    """A disk on which files whose path has a name that starts with "hung" cannot be written until it is freed."""

    def __init__(self, monkeypatch):
        self.free, self.begun, self._write = threading.Event(), threading.Event(), os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, file, data):
        if "/hung" in os.readlink(f"/proc/self/fd/{file}"):
            self.begun.set()
            assert self.free.wait(120)
        return self._write(file, data)


def call(path, first=0, count=3, tokens=4, **more):
    """Dump `count` sequences numbered from `first`; their log-probs follow from the number."""
    numbers = torch.arange(first, first + count)
    train = -(numbers.repeat_interleave(tokens) % 97) / 8.0 - 0.125
    offsets = torch.arange(count + 1) * tokens
    return rc.dump(path, train, train - 0.5, cu_seqlens=offsets, sequences=None, which=numbers, **more)


def plain_numbers(path):
    """Read the numbers in a .jsonl file by json, or of all shards of a folder by torch, in order."""
    path = Path(path)
    if path.is_dir():
        shards = [torch.load(file, weights_only=True) for file in sorted(path.glob("*.pt"))]
        for shard in shards:
            assert shard["train_logp"].shape == (int(shard["cu_seqlens"][-1]),)
        return [number for shard in shards for number in shard["which"].tolist()]
    return [json.loads(line)["which"] for line in path.read_bytes().splitlines()]


def read_numbers(path):
    """Read the numbers by the package's own reader, with the problems that it noted."""
    dump = Dump(path, by=("which",))
    found = []
    for chunk in dump.chunks():
        first = chunk.offsets[:-1][chunk.offsets.diff() > 0]
        numbers = chunk.columns["which"][first].long()
        assert torch.equal(chunk.train[first], (-(numbers % 97) / 8.0 - 0.125).to(chunk.train.dtype))
        found += numbers.tolist()
    return found, [str(problem) for problem in dump.problems.shown]


def forked(run):
    """Run a function in a forked process, and return its exit code: 0 if it returned, 99 if it raised."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def failure(future):
    """Wait for the error of a dump that cannot be written, and read it."""
    error = future.exception(timeout=60)
    assert isinstance(error, OSError)
    return str(error)
