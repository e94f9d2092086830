"""Every call in every mode of torch, over the layouts; derivatives and subclasses that are refused in words."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import tempfile
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
from builders.batches import LAYOUTS, Laid, lay_out, random_sequences, rounded
from builders.same_bits import in_hex

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
# Of an inference tensor, and without a graph, there is no derivative to compare.
WITHOUT_GRADIENT = ("inference", "no_grad")


def _metrics(found: dict[str, float]) -> dict[str, str]:
    return {name: float(value).hex() for name, value in found.items()}


def call_correct(laid: Laid, spec: rc.Spec, gradient: bool) -> object:
    """Weights, mask and decisions."""
    out = laid.correct(spec)
    devices = {x.device.type for x in (out.keep, out.statistics.sums)}
    weights = None if out.weights is None else in_hex(laid.read(out.weights))
    return weights, laid.read(out.mask), out.keep.tolist(), devices


def call_metrics(laid: Laid, spec: rc.Spec, gradient: bool) -> object:
    """Metrics, and those of two statistics merged."""
    found = laid.correct(spec).statistics
    return _metrics(found.metrics()), _metrics(rc.Statistics.sum([found, found]).metrics())


def call_policy_loss(laid: Laid, spec: rc.Spec, gradient: bool) -> object:
    """Value, gradient and metrics of a loss with its correction inside."""
    new = laid.train
    if gradient:
        with torch.enable_grad():
            new = [x.clone().requires_grad_() for x in new] if isinstance(new, list) else new.clone().requires_grad_()
    versions = rc.Versions(laid.versions, laid.current_version) if spec.reads_versions else None
    out = rc.policy_loss(
        new,
        laid.advantages,
        rc.Batch(mask=laid.mask, cu_seqlens=laid.cu_seqlens, external=laid.external, versions=versions),
        rc.Loss(rc.PPO()),
        old_logp=laid.train,
        rollout_logp=laid.rollout,
        spec=spec,
    )
    slopes = None
    if gradient:
        found = torch.autograd.grad(out.value, new)
        slopes = in_hex(laid.read(list(found) if isinstance(new, list) else found[0]))
    return float(out.value.detach()).hex(), slopes, _metrics(out.metrics())


def call_filter_groups(laid: Laid, spec: rc.Spec, gradient: bool) -> object:
    """Rewards centered by group."""
    keep = laid.correct(spec).keep
    count = keep.shape[0]
    rewards = torch.linspace(-1.0, 2.0, count, dtype=torch.float32, device="cpu")
    found = rc.filter_groups(rewards, keep, torch.arange(count, device="cpu") // 2)
    return [None if x is None else x.tolist() for x in found]


def call_dump(laid: Laid, spec: rc.Spec, gradient: bool) -> object:
    """The lines and the tensors of a dump."""
    with tempfile.TemporaryDirectory() as folder:
        for path in (Path(folder, "x.jsonl"), Path(folder, "shards")):
            done = rc.dump(
                path, laid.train, laid.rollout, mask=laid.mask, cu_seqlens=laid.cu_seqlens, sequences=3, seed=1, step=2
            )
            done.result(60)
        lines = [json.loads(line) for line in Path(folder, "x.jsonl").read_text().splitlines()]
        shards = [torch.load(path, weights_only=True, map_location="cpu") for path in Path(folder).glob("shards/*.pt")]
        return repr(lines), [{name: (str(x.dtype), repr(x.tolist())) for name, x in shard.items()} for shard in shards]


CALLS: dict[str, Callable[[Laid, rc.Spec, bool], object]] = {
    "correct": call_correct,
    "metrics": call_metrics,
    "policy_loss": call_policy_loss,
    "filter_groups": call_filter_groups,
    "dump": call_dump,
}


def difference(call: str, modes: list[str], laid: Laid, spec: rc.Spec) -> str:
    """Compare a call in some modes with the call in none; empty where both answer alike."""
    gradient = not set(modes) & set(WITHOUT_GRADIENT)
    wanted = CALLS[call](laid, spec, gradient)
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(MODES[mode]())
        found = CALLS[call](laid, spec, gradient)
    return "" if found == wanted else f"{call} in {modes}: {found!r:.300} for {wanted!r:.300}"


SPEC = rc.Spec(
    rc.Weight.product(lower=0.789, upper=1.234, normalize="batch"),
    (
        rc.Criterion("external", upper=1.1, name="entropy"),
        rc.Criterion("k3", over="sequence", reduce="mean", upper=0.4),
    ),
    "both",
    detail="full",
)


@pytest.mark.parametrize(("mode", "call"), list(itertools.product(MODES, CALLS)))
def test_a_mode_changes_no_answer(mode: str, call: str) -> None:
    """In two layouts; the calls of a mode have all of them, each in one of the dtypes."""
    sequences = random_sequences(5, (5, 1, 7, 0, 4, 6))
    first = (list(MODES).index(mode) + list(CALLS).index(call)) % 5
    for layout, dtype in list(zip(LAYOUTS, itertools.cycle((torch.float32, torch.bfloat16, torch.float16))))[first::5]:
        laid = lay_out(rounded(sequences, dtype), layout, dtype, torch.int64)
        assert not difference(call, [mode], laid, SPEC), layout


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
