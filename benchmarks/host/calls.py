"""The calls that are timed, whole and by part, on one packed sequence of a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

import rollout_corr as rc
from rollout_corr.backends import operators
from rollout_corr.backends.batch import OpenBatch
from rollout_corr.backends.read import Given, read_batch
from rollout_corr.kernels.correct import launch

TOKENS = 4096
TOKEN = rc.Weight.token(upper=2.0)
GEOMETRIC = rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.99, upper=1.01)
VETO = rc.Criterion("ratio", over="sequence", reduce="min", lower=1e-4, upper=None)
SPECS = {
    "metrics": rc.Spec(),
    "weights": rc.Spec(TOKEN),
    "weights + geometric + veto + verl's report": rc.Spec(TOKEN, (GEOMETRIC, VETO), report=("verl",)),
}


class Call(NamedTuple):
    """A call to time.

    Attributes:
        name: Its name in the table.
        run: Calls it.
        part: It is a part of the call above it.
    """

    name: str
    run: Callable[[], object]
    part: bool = False


def calls() -> Iterator[Call]:
    """Yield all calls: each has run once, so that its kernels are there."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(TOKENS, generator=generator)
    train = rollout + 0.01 * torch.randn(TOKENS, generator=generator)
    mask = torch.ones(TOKENS, dtype=torch.bool)
    offsets = torch.tensor([0, TOKENS], dtype=torch.int32)
    for name, spec in SPECS.items():
        yield from _of_correct(name, spec, train, rollout, rc.Batch(mask=mask, cu_seqlens=offsets))
    yield from _of_metrics(train, rollout, mask, offsets)
    yield from _of_loss(train, rollout, rc.Batch(mask=mask, cu_seqlens=offsets))


def _of_correct(
    name: str, spec: rc.Spec, train: torch.Tensor, rollout: torch.Tensor, batch: rc.Batch
) -> Iterator[Call]:
    def whole() -> object:
        return rc.correct(train, rollout, batch, spec=spec, backend="triton")

    def short() -> object:
        return rc.correct(train, rollout, mask=batch.mask, cu_seqlens=batch.cu_seqlens, spec=spec, backend="triton")

    def read() -> OpenBatch:
        return read_batch(Given(train, rollout, batch, spec))

    yield _warm(Call(f"correct: {name}", whole))
    yield _warm(Call("by the short forms mask= and cu_seqlens=", short, part=True))
    yield _warm(Call("reading the batch", read, part=True))
    operands = operators.operands_of(read(), spec)
    given = operators.beside_tokens(operands)
    yield _warm(Call("preparing the launches", lambda: launch.prepare(given, spec), part=True))
    launches = launch.prepare(given, spec)[1]
    yield _warm(Call("launching", lambda: [one.run() for one in launches], part=True))


def _of_metrics(
    train: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, offsets: torch.Tensor
) -> Iterator[Call]:
    # Numbers as they are, from plain torch: the kernels leave what was in memory.
    found = rc.correct(train, rollout, mask=mask, cu_seqlens=offsets.long(), backend="torch")
    pending = found.metrics_async()
    yield _warm(Call("metrics() of a copied vector", pending.result))
    yield _warm(Call("starting the copy", found.metrics_async, part=True))


def _of_loss(train: torch.Tensor, rollout: torch.Tensor, batch: rc.Batch) -> Iterator[Call]:
    new, advantages = train.clone().requires_grad_(), torch.ones_like(train)
    factors = rc.Factors(torch.ones_like(train))
    with_kl, of_sequences = rc.Loss(kl=rc.KL("k3", 0.001)), rc.Loss(rc.GSPO(), mean=rc.Mean("sequence"))

    def ppo() -> rc.PolicyLoss:
        return rc.policy_loss(
            new, advantages, batch, with_kl, old_logp=train, ref_logp=rollout, correction=factors, backend="triton"
        )

    def gspo() -> rc.PolicyLoss:
        return rc.policy_loss(new, advantages[:1], batch, of_sequences, old_logp=train, backend="triton")

    for name, loss in (("PPO + KL", ppo), ("GSPO", gspo)):
        yield _warm(Call(f"policy_loss: {name}, forward and backward", lambda loss=loss: _backward(loss(), new)))
        yield _warm(Call("forward", loss, part=True))


def _backward(loss: rc.PolicyLoss, new: torch.Tensor) -> None:
    loss.value.backward()
    new.grad = None


def _warm(call: Call) -> Call:
    for _ in range(3):
        call.run()
    return call
