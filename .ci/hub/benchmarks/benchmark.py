"""Workloads of the Hub's `kernels benchmark`: a correction, and a whole step in one pass, of packed sequences."""

from __future__ import annotations

import torch
from kernels.benchmark import Benchmark

SEQUENCES, MEAN = 64, 2048


class RolloutCorr(Benchmark):
    """Token weights, truncated at 2, and PPO."""

    seed = 0

    def setup(self) -> None:
        """Sequences of many lengths whose log-probs differ by 0.02 or so."""
        rc = self.kernel
        lengths = torch.randint(1, 2 * MEAN, (SEQUENCES,))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        self.rollout = -torch.rand(int(offsets[-1]), device=self.device)
        self.old = self.rollout + 0.02 * torch.randn_like(self.rollout)
        self.new = (self.old + 0.01 * torch.randn_like(self.old)).requires_grad_()
        self.advantages = torch.randn(SEQUENCES, device=self.device)
        self.batch = rc.Batch(cu_seqlens=offsets.to(self.device), total=int(offsets[-1]))
        self.spec, self.loss = rc.Spec(rc.Weight.token(upper=2.0)), rc.Loss(rc.PPO(0.2))

    def weights(self) -> torch.Tensor:
        """The weights in plain torch."""
        return (self.old - self.rollout).exp().clamp(max=2.0)

    def benchmark_correct(self) -> None:
        """Weights, mask and statistics."""
        self.out = self.kernel.correct(self.old, self.rollout, self.batch, spec=self.spec).weights

    def verify_correct(self) -> torch.Tensor:
        """The weights."""
        return self.weights()

    def benchmark_step(self) -> None:
        """Correction, loss and gradient."""
        policies = {"old_logp": self.old, "rollout_logp": self.rollout}
        self.new.grad = None
        self.kernel.policy_loss(
            self.new, self.advantages, self.batch, self.loss, spec=self.spec, **policies
        ).value.backward()
        # The gradient of a mean is small compared with the tolerance of the Hub's comparison.
        self.out = self.new.grad * self.new.numel()

    def verify_step(self) -> torch.Tensor:
        """The gradient, as autograd has it."""
        new = self.new.detach().requires_grad_()
        lengths = self.batch.cu_seqlens.diff()
        advantages = self.advantages.repeat_interleave(lengths)
        ratio = (new - self.old).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        (-self.weights() * surrogate).sum().backward()
        return new.grad
