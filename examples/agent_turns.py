"""Turns of an agent: where the mismatch is, and what rejecting one turn instead of its sequence keeps.

    pip install /path/to/rollout-corr
    python agent_turns.py

An agent writes, a tool answers, it writes again. What the tool wrote is in the mask as 0, so the runs of the mask are
the agent's turns. In this batch the engine's log-probs of some last turns are off, as after a weight update in the
middle of an episode: the sequence is lost where it is the unit, and one turn where that is.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

import rollout_corr as rc


def episodes(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train and rollout log-probs, mask and offsets of packed episodes with two to five turns each."""
    rng = torch.Generator().manual_seed(seed)
    rollout, train, mask, lengths = [], [], [], []
    for episode in range(count):
        length = 0
        turns = int(torch.randint(2, 6, (1,), generator=rng))
        for turn in range(turns):
            written, answered = (int(torch.randint(20, 80, (1,), generator=rng)) for _ in range(2))
            logp = -torch.empty(written).exponential_(2.0, generator=rng)
            wrong = 0.08 if episode % 4 == 0 and turn == turns - 1 else 0.0
            rollout.append(torch.cat([logp, torch.zeros(answered)]))
            train.append(torch.cat([logp + 0.02 * torch.randn(written, generator=rng) - wrong, torch.zeros(answered)]))
            mask.append(torch.cat([torch.ones(written), torch.zeros(answered)]))
            length += written + answered
        lengths.append(length)
    return torch.cat(train), torch.cat(rollout), torch.cat(mask).bool(), torch.tensor([0, *lengths]).cumsum(0)


def geometric(over: Literal["turn", "sequence"]) -> rc.Spec:
    """Reject each turn, or each sequence, whose geometric mean ratio is off."""
    return rc.Spec(criteria=(rc.Criterion("ratio", over, "mean", lower=0.98, upper=1.02),))


def main() -> None:
    train_logp, rollout_logp, mask, cu_seqlens = episodes(64)
    batch = rc.Batch(mask=mask, cu_seqlens=cu_seqlens, turns="runs")

    metrics = rc.correct(train_logp, rollout_logp, batch).metrics()
    print(f"turns: {metrics['turns']:.0f} in {metrics['sequences']:.0f} episodes")
    for place in ("first", "middle", "last"):
        print(f"mean D of {place} turns: {-metrics[f'{place}_turn_token_kl_rollout_train_k1']:.4f}")

    by_turn = rc.correct(train_logp, rollout_logp, batch, spec=geometric("turn"))
    by_sequence = rc.correct(train_logp, rollout_logp, batch, spec=geometric("sequence"))
    for name, out in (("turns", by_turn), ("sequences", by_sequence)):
        print(f"tokens kept by {name}: {out.metrics()['tokens_kept_fraction']:.3f}")

    # Token i of the batch is in turn u with turns[u] <= i < turns[u + 1].
    assert by_turn.turns is not None and by_turn.keep_turns is not None
    first = int((~by_turn.keep_turns).nonzero()[0])
    begin, end = by_turn.turns[first : first + 2].tolist()
    print(f"first rejected turn: {first}, tokens {begin} to {end}")

    # A GSPO whose ratio is a turn's, corrected by turns.
    new_logp = rollout_logp.clone().requires_grad_()
    advantages = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)[:, None]
    loss = rc.policy_loss(
        new_logp, advantages, batch, rc.Loss(rc.GSPO(over="turn")), old_logp=train_logp, correction=by_turn
    )
    loss.value.backward()
    assert new_logp.grad is not None
    print(f"loss: {loss.value.item():.4f}, gradient at {int(new_logp.grad.count_nonzero())} tokens")


if __name__ == "__main__":
    main()
