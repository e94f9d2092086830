"""Benchmark in the form of `kernels benchmark`: one call of `correct` and the same call in plain torch."""

import torch
from kernels.benchmark import Benchmark


class CorrectBenchmark(Benchmark):
    """Weights of tokens, truncated at 2, and a criterion of sequences; packed, in bfloat16."""

    seed = 0

    def _setup(self, sequences: int, length: int) -> None:
        tokens = sequences * length
        self.rollout = -torch.rand(tokens, device=self.device).bfloat16()
        self.train = self.rollout + 0.05 * torch.randn(tokens, device=self.device).bfloat16()
        self.offsets = torch.arange(0, tokens + 1, length, device=self.device)
        criterion = self.kernel.Criterion("k1", over="sequence", reduce="mean", upper=1.0)
        self.spec = self.kernel.Spec(self.kernel.Weight.token(upper=2.0), (criterion,))

    def setup_short(self) -> None:
        """512 sequences of 256 tokens."""
        self._setup(512, 256)

    def setup_long(self) -> None:
        """32 sequences of 8,192 tokens."""
        self._setup(32, 8192)

    def _benchmark(self) -> None:
        out = self.kernel.correct(self.train, self.rollout, cu_seqlens=self.offsets, spec=self.spec)
        self.out = out.weights

    benchmark_short = benchmark_long = _benchmark

    def _verify(self) -> torch.Tensor:
        return self.kernel.correct(
            self.train, self.rollout, cu_seqlens=self.offsets, spec=self.spec, backend="torch"
        ).weights

    verify_short = verify_long = _verify
