"""A training step in plain PyTorch: GRPO in decoupled and bypass mode, padded and packed batches.

    pip install /path/to/rollout-corr
    python plain_torch.py

`decoupled`, `one_pass` and `bypass` are three steps; copy the one you need. What is below them is a toy that they can
train on a CPU in seconds: each token should be the one before it plus one. The engine samples from a bfloat16 copy of
the policy that is up to three updates old, and reports broken log-probs for one sequence of every batch.
"""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn

import rollout_corr as rc

REJECT = rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.5, upper=2.0)  # geometric mean of the ratios
SPEC = rc.Spec(weight=rc.Weight.token(upper=2.0), criteria=(REJECT,))
LOSS = rc.Loss(rc.PPO(0.2, 0.28))


class Rollout(NamedTuple):
    before: Tensor  # [S, T] padded, or [N] packed: the token before each token
    tokens: Tensor  # like before
    logp: Tensor  # like before: what the engine says about the tokens
    batch: rc.Batch  # the mask of what was generated, False at padding; the offsets of packed sequences
    rewards: Tensor  # [S]
    group: Tensor  # [S], which samples share a prompt


def decoupled(policy: nn.Module, optimizer: torch.optim.Optimizer, rollout: Rollout) -> list[rc.PendingMetrics]:
    """The weight repairs old/rollout, PPO's ratio is new/old: one more forward, and any number of updates."""
    with torch.no_grad():
        old_logp = policy(rollout.before, rollout.tokens)
    out = rc.correct(old_logp, rollout.logp, rollout.batch, spec=SPEC)
    advantages = baseline(rollout, out.keep)  # a rejected sample does not move the baseline of its siblings
    pending = [out.metrics_async()]
    for _ in range(2):
        new_logp = policy(rollout.before, rollout.tokens)
        loss = rc.policy_loss(new_logp, advantages, rollout.batch, LOSS, old_logp=old_logp, correction=out)
        update(optimizer, loss)
        pending.append(loss.metrics_async())
    return pending


def one_pass(policy: nn.Module, optimizer: torch.optim.Optimizer, rollout: Rollout) -> list[rc.PendingMetrics]:
    """Train one update whose old_logp is new_logp before it: one forward, and on a GPU one pass over the tokens."""
    new_logp = policy(rollout.before, rollout.tokens)
    old_logp = new_logp.detach()
    advantages = baseline(rollout, torch.ones_like(rollout.rewards, dtype=torch.bool))
    policies = {"old_logp": old_logp, "rollout_logp": rollout.logp}
    loss = rc.policy_loss(new_logp, advantages, rollout.batch, LOSS, **policies, spec=SPEC)
    update(optimizer, loss)
    return [loss.metrics_async()]


def bypass(policy: nn.Module, optimizer: torch.optim.Optimizer, rollout: Rollout) -> list[rc.PendingMetrics]:
    """PPO's ratio is new/rollout and is itself the correction; the Spec rejects. One forward, one update."""
    new_logp = policy(rollout.before, rollout.tokens)
    advantages = baseline(rollout, torch.ones_like(rollout.rewards, dtype=torch.bool))
    spec = rc.Spec(criteria=(REJECT,))
    loss = rc.policy_loss(new_logp, advantages, rollout.batch, LOSS, rollout_logp=rollout.logp, spec=spec)
    update(optimizer, loss)
    return [loss.metrics_async()]


def baseline(rollout: Rollout, keep: Tensor) -> Tensor:
    """Advantages as in GRPO, [S, 1]: one for each sequence, in either layout."""
    groups = rc.filter_groups(rollout.rewards, keep, rollout.group, alone="zero")
    return (groups.centered / (groups.std + 1e-4))[:, None]


def update(optimizer: torch.optim.Optimizer, loss: rc.PolicyLoss) -> None:
    optimizer.zero_grad()
    loss.value.backward()
    optimizer.step()


# --- the toy ---

WORDS, SEQUENCES, GROUP, LONGEST, STEPS = 10, 64, 8, 16, 40


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WORDS)

    def forward(self, before: Tensor, tokens: Tensor) -> Tensor:
        return self.table(before).float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


@torch.no_grad()
def sample(engine: Policy, packed: bool) -> Rollout:
    tokens = torch.randint(WORDS, (SEQUENCES // GROUP, 1)).repeat_interleave(GROUP, 0)
    for _ in range(LONGEST):
        chances = engine.table(tokens[:, -1]).float().softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
    before, tokens = tokens[:, :-1], tokens[:, 1:]
    lengths = torch.randint(LONGEST // 4, LONGEST + 1, (SEQUENCES,))
    mask = torch.arange(LONGEST) < lengths[:, None]
    logp = engine(before, tokens)
    logp[0] -= 3.0  # the broken one
    rewards = ((tokens == (before + 1) % WORDS) & mask).sum(1) / lengths
    batch = rc.Batch(mask=mask)
    if packed:
        batch = rc.Batch(cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
        before, tokens, logp = before[mask], tokens[mask], logp[mask]
    return Rollout(before, tokens, logp, batch, rewards, torch.arange(SEQUENCES) // GROUP)


def train(step, packed: bool) -> None:
    torch.manual_seed(0)
    policy = engine = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    pending: list[rc.PendingMetrics] = []
    logged, rewards = [], []
    for i in range(STEPS):
        if i % 3 == 0:
            engine = deepcopy(policy).bfloat16()
        rollout = sample(engine, packed)
        begun = step(policy, optimizer, rollout)
        # The numbers of the step before. On a GPU they went to the host while this one was launched: nothing waits.
        logged += [{key: x for part in pending for key, x in part.result().items()}] if pending else []
        pending = begun
        rewards.append(float(rollout.rewards.mean()))
    name = f"{step.__name__}, {'packed' if packed else 'padded'}"
    mismatch = sum(metrics["kl_rollout_train_k3"] for metrics in logged) / len(logged)
    trained = [metrics["sequences_trained"] for metrics in logged]
    print(f"{name}: reward {rewards[0]:.3f} -> {rewards[-1]:.3f}, mismatch {mismatch:.4f} nats, ", end="")
    print(f"{min(trained):.0f} to {max(trained):.0f} of {SEQUENCES} sequences train")


if __name__ == "__main__":
    for step in (decoupled, one_pass, bypass):
        for packed in (False, True):
            train(step, packed)
