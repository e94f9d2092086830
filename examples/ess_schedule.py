"""A learning rate that falls with the effective sample size of the correction, on the device: no step waits for it.

    pip install /path/to/rollout-corr
    python ess_schedule.py

Where tokens are stale, a few weights dominate an update. Their effective sample size (ESS) says how many samples it is
worth, and VCPO (arXiv 2602.17616) scales the learning rate of Adam with its root. `statistics.on_device` gives it as a
0-d tensor, and a fused optimizer takes its learning rate as one: nothing is read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

import rollout_corr as rc

LEARNING_RATE = 1e-2
SPEC = rc.Spec(rc.Weight.product(upper=5.0))


def scaled(optimizer: torch.optim.Optimizer, statistics: rc.Statistics) -> Tensor:
    """Set the learning rate from the ESS of the sequences' weights; with ranks, of `statistics.all_reduce(group)`."""
    rate = LEARNING_RATE * statistics.on_device("sequence_weight_ess").sqrt()
    for group in optimizer.param_groups:
        group["lr"].copy_(rate)
    return rate


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = torch.nn.Parameter(torch.zeros(32, device=device))
    optimizer = torch.optim.AdamW([logits], lr=torch.tensor(LEARNING_RATE, device=device), fused=True)

    rates = []
    for lag in (0.0, 0.05, 0.2, 0.8):
        # A batch whose engine was `lag` away: 64 sequences of 16 tokens.
        tokens = torch.randint(32, (64, 16), device=device)
        old = logits.detach().log_softmax(0)[tokens]
        rollout = old - lag * torch.randn_like(old)
        out = rc.correct(old, rollout, spec=SPEC)
        advantages = torch.randn(64, device=device)
        loss = rc.policy_loss(logits.log_softmax(0)[tokens], advantages, old_logp=old, correction=out)
        optimizer.zero_grad()
        loss.value.backward()
        rates.append(scaled(optimizer, out.statistics))
        optimizer.step()

    # Reading them, here at the end, is what waits.
    for lag, rate in zip((0.0, 0.05, 0.2, 0.8), torch.stack(rates).tolist(), strict=True):
        print(f"lag {lag:.2f}: learning rate {rate:.5f}")


if __name__ == "__main__":
    main()
