"""Load build/hub with the package `kernels`, and compare it with the installed rollout-corr, value by value."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import rollout_corr as ours

# Any name will do: the folder stands in for it.
REPO = "local/rollout-corr"
os.environ["LOCAL_KERNELS"] = f"{REPO}={Path('build', 'hub').resolve()}"


def main() -> None:
    """Compare weights, masks, metrics, losses and gradients, and that nothing is shared."""
    from kernels import get_kernel

    theirs = get_kernel(REPO, version=0)
    assert theirs is not ours and theirs.__name__.startswith("_rollout_corr_"), theirs.__name__
    assert set(theirs.__all__) == set(ours.__all__)
    namespace = getattr(torch.ops, theirs.__name__)
    assert namespace.correct.default is not torch.ops.rollout_corr.correct.default
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(300, generator=generator)
    train = rollout + 0.3 * torch.randn(300, generator=generator)
    offsets = torch.tensor([0, 100, 100, 180, 300])
    found = []
    for package in (ours, theirs):
        criterion = package.Criterion("k3", over="sequence", reduce="mean", upper=0.05)
        spec = package.Spec(package.Weight.token(upper=1.5), (criterion,), report=("native", "verl"))
        batch, loss = package.Batch(cu_seqlens=offsets), package.Loss(package.PPO(0.2))
        out = package.correct(train, rollout, batch, spec=spec)
        traced = torch.compile(
            lambda x, p=package, s=spec: p.correct(x, rollout, cu_seqlens=offsets, spec=s).weights,
            backend="eager",
            fullgraph=True,
        )
        new = train.clone().requires_grad_()
        value = package.policy_loss(new, torch.ones(4), batch, loss, old_logp=train, correction=out).value
        value.backward()
        found.append((out.weights, out.mask, out.keep, traced(train), value.detach(), new.grad, out.metrics()))
    *tensors, metrics = zip(*found, strict=True)
    assert all(torch.equal(one, other) for one, other in tensors)
    assert metrics[0] == metrics[1] and len(metrics[0]) > 20
    print(f"{theirs.__name__}: weights, masks, gradients and {len(metrics[0])} metrics equal those of the package")


if __name__ == "__main__":
    main()
