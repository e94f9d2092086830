"""The first call on a kind of device: kernels are compared with plain torch, and a difference names itself."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders.kernel_cases import INTERPRETED
from rollout_corr.backends import first_call, loss_operators, operators

pytestmark = [*INTERPRETED, pytest.mark.usefixtures("quick_interpreter")]

SPEC = rc.Spec(rc.Weight.token(upper=1.2), (rc.Criterion("abs", over="sequence", reduce="mean", upper=0.2),), "both")
KIND = "a GPU of the tests"


@pytest.fixture
def compares(monkeypatch):
    """The CPU, on which kernels are interpreted, is a kind of device of its own."""
    monkeypatch.setattr(first_call, "kind_of", lambda device: KIND)
    monkeypatch.setattr(first_call, "kinds", lambda: {KIND})
    monkeypatch.setattr(first_call, "may_wait", lambda: True)
    monkeypatch.setattr(first_call, "COMPARED", set())
    for module in (operators, loss_operators):
        module.launcher.cache_clear()
    yield
    for module in (operators, loss_operators):
        module.launcher.cache_clear()


def batch(packed=True, sequences=3, width=8):
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(sequences, width, generator=generator)
    train = rollout + 0.2 * torch.randn(sequences, width, generator=generator)
    mask, advantages = torch.rand(sequences, width, generator=generator) < 0.9, torch.randn(sequences, 1)
    if not packed:
        return train, rollout, rc.Batch(mask=mask), advantages
    offsets = torch.arange(0, sequences * width + 1, width)
    return train.view(-1), rollout.view(-1), rc.Batch(mask=mask.view(-1), cu_seqlens=offsets), advantages


def call(module, packed=True):
    train, rollout, of, advantages = batch(packed)
    if module is operators:
        rc.correct(train, rollout, of, spec=SPEC, backend="triton")
    else:
        weights = rc.Factors((train - rollout).exp())
        new = (train + 0.01).requires_grad_()
        rc.policy_loss(new, advantages, of, old_logp=train, correction=weights, backend="triton").value.backward()


@contextmanager
def broken(module, **faults):
    """A launcher whose results are changed behind its back."""
    run = module.kernels().run

    def wrong(*arguments):
        found = run(*arguments)
        for name, fault in faults.items():
            fault(getattr(found, name))
        return found

    with mock.patch.object(module.kernels(), "run", wrong):
        yield


@pytest.mark.parametrize(("module", "packed"), [(operators, False), (loss_operators, True)])
def test_it_compares_once_and_is_gone(compares, module, packed):
    ran, run = [], module.kernels().run
    with mock.patch.object(module.kernels(), "run", lambda *given: ran.append(given) or run(*given)):
        call(module, packed)
        assert len(ran) == 2 and {kind for _, kind in first_call.COMPARED} == {KIND}
        call(module, packed)
        assert len(ran) == 3 and module.launcher() is module.kernels()


FAULTS = [
    (operators, "weights", lambda x: x.view(-1)[0].add_(1e-3), r"correct.*weights\[0\] is \d\.\d+ by the kernels"),
    (operators, "keep", lambda x: x[2].logical_not_(), r"keep\[2\] is (True|False|0|1) by the kernels"),
    (operators, "mask", lambda x: x.view(-1)[7].logical_not_(), r"mask\[7\] is "),
    (operators, "statistics", lambda x: x[0].add_(1.0), "statistic abs_d is "),
    (loss_operators, "value", lambda x: x.add_(0.01), "policy_loss.*value is "),
    (loss_operators, "gradient", lambda x: x.view(-1)[9].add_(0.5), r"gradient\[9\] is "),
    (loss_operators, "statistics", lambda x: x[0].add_(1.0), "count loss_valid_tokens is "),
]


@pytest.mark.parametrize(
    ("module", "name", "fault", "said"), FAULTS, ids=[f"{x[0].__name__[22:]}-{x[1]}" for x in FAULTS]
)
def test_a_wrong_result_is_named(compares, module, name, fault, said):
    with broken(module, **{name: fault}), pytest.raises(RuntimeError, match=said) as caught:
        call(module)
    for part in (KIND, torch.__version__, "Triton", "ROLLOUT_CORR_BACKEND=torch", "report"):
        assert part in str(caught.value)
    assert not first_call.COMPARED  # so the next call raises too


def test_a_decision_on_the_threshold_is_left_to_the_next_call(compares):
    """The exponential of another device may turn it, which is no fault."""
    train, rollout, of, _ = batch()
    flip = {"keep": lambda x: x[1].logical_not_()}
    second = slice(8, 16)
    mean = (rollout[second].exp() - train[second].exp()).abs()[of.mask[second]].mean()
    on_it = rc.Spec(criteria=(rc.Criterion("tv", over="sequence", reduce="mean", upper=float(mean)),))
    with broken(operators, **flip):
        rc.correct(train, rollout, of, spec=on_it, backend="triton")
    assert not first_call.COMPARED
    rc.correct(train, rollout, of, spec=SPEC, backend="triton")
    assert {("correct", KIND)} == first_call.COMPARED


@pytest.mark.parametrize("reason", ["captured", "no waiting", "nothing valid", "equal"])
def test_what_says_nothing_is_left_to_the_next_call(compares, monkeypatch, reason):
    train, rollout, of, _ = batch()
    if reason == "nothing valid":
        of = rc.Batch(mask=torch.zeros_like(of.mask), cu_seqlens=of.cu_seqlens)
    elif reason == "equal":  # as in `warmup`
        rollout = train
    else:
        monkeypatch.undo()
        monkeypatch.setattr(first_call, "COMPARED", set())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: reason == "captured")
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 2 if reason == "no waiting" else 0)
        assert not first_call.may_wait()
        monkeypatch.setattr(first_call, "kind_of", lambda device: KIND)
        monkeypatch.setattr(first_call, "kinds", lambda: {KIND})
    rc.correct(train, rollout, of, spec=SPEC, backend="triton")
    assert not first_call.COMPARED


def test_calls_that_never_decide_anything_are_not_compared_for_ever(compares):
    tried, launcher = [], SimpleNamespace(run=lambda operands, wanted: None)
    first = first_call.FirstCall("correct", launcher, None, None, None)
    for i in range(1, 71):
        with mock.patch.object(first, "agrees", lambda operands, wanted, i=i: tried.append(i)):
            first.run(SimpleNamespace(first=torch.zeros(0)), SPEC)
    assert tried == [*range(1, 17), 32, 64]


def test_the_part_is_whole_sequences():
    """As many as there are in `TOKENS`, one at least, empty ones before it not counted; wrong offsets give none."""
    train = torch.zeros(10_000)

    def part(offsets, turns=None):
        operands = operators.CorrectOperands(
            train, train, None, torch.tensor(offsets), torch.zeros(len(offsets) - 1), True, [train], turns=turns
        )
        found = first_call.first_sequences(operands)
        if found is None:
            return None
        assert found.train.shape == found.externals[0].shape and found.advantages.shape[0] == found.offsets.shape[0] - 1
        return found.train.shape[0], found.offsets.tolist(), None if found.turns is None else found.turns.tolist()

    assert part([0, 4000, 4100, 10_000]) == (4000, [0, 4000], None)
    assert part([0, 2000, 4096, 10_000]) == (4096, [0, 2000, 4096], None)
    assert part([3, 3, 9000, 10_000]) == (9000, [3, 3, 9000], None)
    assert part([0, 4000, 10_000], torch.tensor([0, 1, 4000, 5000, 10_000])) == (4000, [0, 4000], [0, 1, 4000])
    assert part([0, 20, 10]) is part([5, 5]) is part([0, 10_001]) is part([-1, 8]) is None
