"""VAGEN's `turn_gspo`, as docs/losses.md has it: by loops over the turns of each row."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from builders.rounding import all_near, near

pytestmark = pytest.mark.usefixtures("one_thread")


def turn_gspo(new, old, advantages, mask, turns):
    """The mean over rows of the sum over turns of the mean over tokens; the ratio is the turn's, without its gradient.

    Also returns the slope by `new`: of a token the ratio of its turn alone, as GSPO-token has it.
    """
    value, slope, rows = 0.0, torch.zeros_like(new), int(mask.any(1).sum())
    for row in range(new.shape[0]):
        for turn in set(turns[row].tolist()):
            places = [t for t in range(new.shape[1]) if mask[row, t] and turns[row, t] == turn]
            if not places:
                continue
            ratio = math.exp(sum((new[row, t] - old[row, t]).item() for t in places) / len(places))
            for t in places:
                a = advantages[row, t].item()
                plain, clipped = -a * ratio, -a * min(max(ratio, 0.8), 1.2)
                value += max(plain, clipped) / len(places) / rows
                slope[row, t] = plain / len(places) / rows if plain >= clipped else 0.0
    return value, slope


def test_turn_gspo_is_gspo_over_turns():
    made = torch.Generator().manual_seed(3)
    old = torch.randn(5, 16, generator=made, dtype=torch.float64) - 2.0
    new = (old + 0.4 * torch.randn(5, 16, generator=made, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(5, 16, generator=made, dtype=torch.float64)
    mask = torch.rand(5, 16, generator=made) < 0.8
    mask[4] = False
    turns = torch.randint(0, 2, (5, 16), generator=made).cumsum(1)
    value, slope = turn_gspo(new.detach(), old, advantages, mask, turns)
    same = turns[:, :, None] == turns[:, None, :]
    lengths = (same & mask[:, None, :]).sum(2).clamp(min=1)
    loss = rc.policy_loss(
        new,
        advantages / lengths,
        rc.Batch(mask=mask, turns=turns),
        rc.Loss(rc.GSPO(0.2, 0.2, through="token", over="turn"), mean=rc.Mean("sequence_sum")),
        old_logp=old,
    )
    loss.value.backward()
    assert loss.value.item() == near(value)
    assert all_near(new.grad, slope)
    assert 0 < int((slope[mask] == 0).sum()) < int(mask.sum())
