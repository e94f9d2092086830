"""A step captured in a CUDA graph: correction, loss and gradient replay without any work on the host.

    pip install /path/to/rollout-corr
    python cuda_graph.py

A replay repeats the same launches on the same memory. So the step reads from tensors that stay where they are, and a
new batch is copied into them; shapes, Spec and loss are those of the capture, and `cu_seqlens` lies on the device.
Where there is no GPU the step runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import rollout_corr as rc

SPEC = rc.Spec(weight=rc.Weight.token(upper=2.0), criteria=(rc.Criterion("abs", upper=4.0),))


class Inputs(NamedTuple):
    new_logp: Tensor  # [N], and so are the others
    old_logp: Tensor
    rollout_logp: Tensor
    advantages: Tensor
    cu_seqlens: Tensor  # [S + 1], on the device: tokens may be divided otherwise in every batch


class Outputs(NamedTuple):
    loss: Tensor
    gradient: Tensor  # of new_logp
    statistics: rc.Statistics  # on the device, until `metrics()` reads them


def step(held: Inputs) -> Outputs:
    """Correct, and compute the loss and its gradient; nothing waits for the device."""
    batch = rc.Batch(cu_seqlens=held.cu_seqlens)
    found = rc.correct(held.old_logp, held.rollout_logp, batch, spec=SPEC)
    new_logp = held.new_logp.detach().requires_grad_()
    out = rc.policy_loss(new_logp, held.advantages, batch, old_logp=held.old_logp, correction=found)
    (gradient,) = torch.autograd.grad(out.value, new_logp)
    return Outputs(out.value.detach(), gradient, found.statistics.join(out.statistics))


def captured(held: Inputs) -> Callable[[], Outputs]:
    """Capture a step, and give its replay; inputs and outputs stay where they are."""
    warmup = torch.cuda.Stream()
    warmup.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup):
        step(held)  # compiles the kernels, and brings the thresholds to the device: neither can be captured
    torch.cuda.current_stream().wait_stream(warmup)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(held)

    def replay() -> Outputs:
        graph.replay()
        return outputs

    return replay


def random_batch(seed: int, device: str, tokens: int = 20_000, sequences: int = 40) -> Inputs:
    """Make a batch; every seed divides the tokens otherwise."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(tokens, generator=generator)
    old, new = (rollout + scale * torch.randn(tokens, generator=generator) for scale in (0.05, 0.06))
    cuts = torch.randint(0, tokens, (sequences - 1,), generator=generator).sort().values
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.tensor([tokens])]).int()
    advantages = torch.randn(tokens, generator=generator)
    return Inputs(*(x.to(device) for x in (new, old, rollout, advantages, offsets)))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    held = random_batch(0, device)
    if device == "cuda":
        run = captured(held)
    else:
        run = partial(step, held)
        print("no GPU: each step runs as it is")
    for seed in (1, 2, 3):
        for place, x in zip(held, random_batch(seed, device), strict=True):
            place.copy_(x)
        outputs = run()
        metrics = outputs.statistics.metrics()
        norm = float(outputs.gradient.norm())
        kl = metrics["kl_rollout_train_k3"]
        print(f"batch {seed}: loss {float(outputs.loss):.4f}, gradient {norm:.5f}, kl_rollout_train_k3 {kl:.5f}")


if __name__ == "__main__":
    main()
