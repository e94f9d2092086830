"""Calls in every mode of torch; derivatives and subclasses that are refused in words; the mask that is handed back."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import rollout_corr as rc
from frozen.calls import answer, correct_call, loss_call
from frozen.generator import random_loss, random_spec

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Deterministic", "ignore:The PyTorch API of nested"),
]

# --- modes, and calls whose answers compare to the bit ---


@contextlib.contextmanager
def _set(change: Callable[[Any], None], value: object, before: object) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


def _default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return _set(torch.set_default_dtype, dtype, torch.get_default_dtype())


# The meta device has no values, so that whatever is made there and used fails at once.
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "default device": lambda: _set(torch.set_default_device, "meta", None),
    "device context": lambda: torch.device("meta"),
    "default float64": lambda: _default_dtype(torch.float64),
    "default bfloat16": lambda: _default_dtype(torch.bfloat16),
    "default float16": lambda: _default_dtype(torch.float16),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
}
# Without a graph there is no derivative to compare.
WITHOUT_GRADIENT = ("inference", "no_grad")


def calls(mode: str) -> Iterator[tuple[Callable[[], object], str]]:
    """Random corrections and steps in every layout and dtype, whose tensors are made before the mode."""
    for seed in range(40):
        rng = random.Random(f"mode {seed}")
        spec, loss = random_spec(rng), replace(random_loss(rng), entropy_bonus=None)
        if seed % 2 or mode in WITHOUT_GRADIENT:
            call = correct_call(rng, spec)
            call.into = False
        else:
            call = loss_call(rng, loss, replace(spec, criteria=()))
        yield lambda call=call: answer(call, "torch"), f"{seed} {call.drawn.laid.layout} {call.spec!r} {call.loss!r}"


def dumped(folder: Path, batch: rc.Batch, train: torch.Tensor, rollout: torch.Tensor) -> object:
    """The lines and the tensors of a dump."""
    for path in (folder / "x.jsonl", folder / "shards"):
        rc.dump(path, train, rollout, batch, sequences=2, seed=1, step=2).result(60)
    shards = [torch.load(path, weights_only=True, map_location="cpu") for path in folder.glob("shards/*.pt")]
    read = [{name: (x.dtype, x.tolist()) for name, x in shard.items()} for shard in shards]
    return (folder / "x.jsonl").read_text(), repr(read)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_changes_no_answer(mode: str, tmp_path: Path) -> None:
    """To the bit: results, gradients and metrics of random calls, groups, and what a dump writes."""
    for call, case in calls(mode):
        wanted = call()
        with MODES[mode]():
            found = call()
        assert found == wanted, case
    (train, rollout, _), index = batch(), torch.tensor([0, 0, 1])
    keep, of_batch = torch.tensor([True, False, True]), rc.Batch(mask=torch.ones(3, 5, dtype=torch.bool))
    wanted = dumped(tmp_path / "plain", of_batch, train, rollout), rc.filter_groups(train[:, 0], keep, index)
    with MODES[mode]():
        found = dumped(tmp_path / "mode", of_batch, train, rollout), rc.filter_groups(train[:, 0], keep, index)
    assert found[0] == wanted[0] and all(map(torch.equal, found[1], wanted[1]))


@functools.cache
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rollout = -torch.rand(3, 5, generator=generator)
    return rollout + 0.1 * torch.randn(3, 5, generator=generator), rollout, torch.randn(3, 5, generator=generator)


def loss_of(new: torch.Tensor) -> torch.Tensor:
    _, rollout, advantages = batch()
    return rc.policy_loss(new, advantages, loss=rc.Loss(rc.PPO()), old_logp=rollout).value


def forward_mode(new: torch.Tensor) -> object:
    with forward_ad.dual_level():
        return loss_of(forward_ad.make_dual(new, torch.ones_like(new)))


DERIVATIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "grad": torch.func.grad(loss_of),
    "jvp": lambda new: torch.func.jvp(loss_of, (new,), (torch.ones_like(new),)),
    "jacrev": torch.func.jacrev(loss_of),
    "vmap of others": lambda new: torch.vmap(lambda x: loss_of(new) * x)(torch.ones(2)),
    "forward mode": forward_mode,
}


@pytest.mark.parametrize("kind", DERIVATIVES)
def test_other_derivatives_of_the_loss_are_refused(kind: str) -> None:
    """They were 0 without a word, or an error in the middle of autograd."""
    batch()
    with pytest.raises(RuntimeError, match=r"^policy_loss: expected a call outside of .*value\.backward\(\)"):
        DERIVATIVES[kind](batch()[0])


def test_weights_inside_torch_func_grad_are_constants() -> None:
    new, rollout, _ = batch()
    spec = rc.Spec(rc.Weight.token(upper=2.0))
    wanted = rc.correct(new, rollout, spec=spec).weights
    found = torch.func.grad(lambda x: (rc.correct(x, rollout, spec=spec).weights * x).sum())(new)
    assert torch.equal(found, wanted)


class Named(torch.Tensor):
    """A subclass that computes as a tensor does."""


def test_subclasses() -> None:
    """Those that wrap other tensors are refused by name; one that is a tensor, and a parameter, are tensors."""
    new, rollout, _ = batch()
    spec = rc.Spec(rc.Weight.product())
    wanted = rc.correct(new, rollout, spec=spec).weights
    for x in (new.as_subclass(Named), torch.nn.Parameter(new)):
        assert torch.equal(rc.correct(x, rollout, spec=spec).weights, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        masked = torch.masked.masked_tensor(new, torch.ones(3, 5, dtype=torch.bool))
    for x, message in (
        (TwoTensor(new, new.clone()), "got a TwoTensor, a subclass that computes in its own way"),
        (masked, r"got a MaskedTensor; pass its get_data\(\), and its get_mask\(\) as mask"),
    ):
        with pytest.raises(TypeError, match=rf"^train_logp: expected a plain tensor, {message}"):
            rc.correct(x, rollout, spec=spec)


def test_a_ready_mask_stays_inside_the_sequences():
    """Tokens before the first and behind the last sequence do not train, whatever a training mask says of them."""
    new = torch.zeros(6, requires_grad=True)
    given = {"cu_seqlens": torch.tensor([1, 4]), "old_logp": torch.zeros(6), "backend": "torch"}
    out = rc.policy_loss(new, torch.ones(6), correction=rc.Factors(mask=torch.ones(6, dtype=torch.bool)), **given)
    assert out.mask.tolist() == [False, True, True, True, False, False]


def test_the_mask_of_a_correction_is_handed_back():
    """Where it was made of the mask given; else the two are joined."""
    mask, logps = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.zeros(2, 3)
    batch, spec = rc.Batch(mask=mask), rc.Spec(criteria=(rc.Criterion("ratio", upper=1.5),))
    found = rc.correct(torch.tensor([[0.0, 1.0, 0.0], [0.0] * 3]), logps, batch, spec=spec)

    def handed(correction, batch):
        return rc.policy_loss(logps, torch.ones(2), batch, old_logp=logps, correction=correction).mask

    assert handed(found, batch) is found.mask
    other = replace(found, mask=torch.ones(2, 3))
    for joined in (
        handed(other, batch) - mask + found.mask,
        handed(found, rc.Batch(mask=mask.clone())),
        handed(rc.Factors(mask=found.mask), batch),
    ):
        assert joined is not found.mask and torch.equal(joined, found.mask) and joined.dtype == torch.int64


@pytest.mark.parametrize("layout", [lambda x: x, lambda x: list(x.unbind())], ids=["padded", "a list"])
@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_that_was_written_to_is_joined_again(layout, inference):
    """A token that the caller has masked between the two calls does not train, and the result says so."""
    with torch.inference_mode(inference):
        train = torch.tensor([[0.0, 1.0, 0.0], [0.0] * 3])
        given, logps = (layout(x) for x in (torch.ones(2, 3), torch.zeros(2, 3)))
        batch, spec = rc.Batch(mask=given), rc.Spec(criteria=(rc.Criterion("ratio", upper=1.5),))
        found = rc.correct(layout(train), logps, batch, spec=spec)
        given[1][2] = 0.0
        out = rc.policy_loss(logps, torch.ones(2), batch, old_logp=logps, correction=found)
    assert [row.tolist() for row in out.mask] == [[1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    assert out.metrics()["tokens_trained"] == 4
