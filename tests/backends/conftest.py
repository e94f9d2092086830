"""The ways in which plain torch runs a batch, and a process group of one rank."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist

from builders.forked_ranks import starter
from rollout_corr.backends import blocks
from rollout_corr.backends.run import CORRECTIONS
from rollout_corr.backends.whole import run_whole


@pytest.fixture(params=["blocks", "small blocks", "whole"])
def way(request):
    """Run in blocks, in blocks of few tokens, or in one piece."""
    if request.param == "blocks":
        yield
    elif request.param == "small blocks":
        with mock.patch.object(blocks, "BLOCK", 4):
            yield
    else:
        with mock.patch.dict(CORRECTIONS, blocks=run_whole):
            yield


@pytest.fixture(scope="module")
def alone():
    """A process group of this rank alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def on_ranks():
    """Run a function on ranks; see builders/forked_ranks.py."""
    with starter() as run:
        yield run
