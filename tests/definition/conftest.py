"""The ways in which plain torch runs a loss whose surrogate looks beyond a token."""

from __future__ import annotations

from unittest import mock

import pytest

from rollout_corr.api.policy_loss import LOSSES
from rollout_corr.backends import blocks, loss_blocks, sees_batch


@pytest.fixture(params=["blocks", "small blocks", "whole"])
def way(request):
    """Run in blocks, in blocks of few tokens, or in one piece: values may be read on the CPU, and nowhere else."""
    if request.param == "blocks":
        yield
    elif request.param == "small blocks":
        with mock.patch.object(blocks, "BLOCK", 16):
            yield
    else:
        with (
            mock.patch.dict(LOSSES, blocks=loss_blocks.run_whole),
            mock.patch.object(sees_batch, "in_blocks", return_value=False),
        ):
            yield
