"""`warmup` over a driver that records: what it compiles, where, and that nothing is left for the loop."""

from __future__ import annotations

import threading

import pytest
import torch

import rollout_corr as rc
from builders.calls import example
from builders.launched import dispatched
from rollout_corr.backends import batch as reading
from rollout_corr.backends import operators

SPEC = rc.Spec(rc.Weight.token(upper=2.0))
LOSS = rc.Loss(rc.PPO())


@pytest.fixture
def driver(monkeypatch):
    """Kernels are launched on CPU tensors, by Triton's dispatch."""
    monkeypatch.setattr(operators, "why_not", lambda device: None)
    monkeypatch.setattr(operators, "interprets", lambda: False)
    monkeypatch.setattr(reading, "checked_offsets", lambda offsets, tokens: offsets)
    with dispatched() as driver:
        driver.threads, compiles = [], driver.compile

        def compiled(*arguments, **others):
            driver.threads.append(threading.current_thread())
            return compiles(*arguments, **others)

        monkeypatch.setattr("triton.compiler.compile", compiled)
        yield driver


def step(tokens=5000, sequences=7, spec=SPEC, loss=LOSS, **of_batch):
    """One step of a loop, on packed tensors that begin anywhere new ones do."""
    rollout = -torch.rand(tokens)
    train, offsets = rollout + 0.1, torch.linspace(0, tokens, sequences + 1).to(torch.int32)
    batch = rc.Batch(mask=torch.ones(tokens, dtype=torch.bool), cu_seqlens=offsets, **of_batch)
    found = None if spec is None else rc.correct(train, rollout, batch, spec=spec, backend="triton")
    if loss is not None:
        new, given = train.clone().requires_grad_(), {"old_logp": train, "correction": found}
        rc.policy_loss(new, torch.ones(tokens), batch, loss, **given, backend="triton").value.backward()


SEQUENCES = torch.linspace(0, 5000, 8).to(torch.int32)


@pytest.mark.parametrize(
    ("like", "spec", "loss", "steps"),
    [
        ({"scale": torch.ones(8)}, SPEC, LOSS, [{"scale": torch.ones(5000)}, {"scale": torch.ones(7)}]),
        # Labels have no kernels of their own.
        (
            {}, SPEC, None,
            [{"labels": {"e": rc.Labels(x, 64)}} for x in (torch.arange(7)[:, None], torch.zeros(5000).long())],
        ),
        (
            {"turns": torch.tensor([0, 2, 4, 8])},
            rc.Spec(rc.Weight.geometric(lower=0.8, upper=1.25, over="turn")), rc.Loss(rc.GSPO(0.1, 0.1, over="turn")),
            [{"turns": SEQUENCES}, {"turns": SEQUENCES.long()}],
        ),
        # An entropy is given where a bonus reads it.
        (
            {"entropy": torch.ones(8)}, None, rc.Loss(rc.KLCov(), entropy_bonus=rc.EntropyBonus(0.1)),
            [{"entropy": torch.rand(5000)}],
        ),
    ],
    ids=["scale", "labels", "turns", "a loss that looks"],
)  # fmt: skip
def test_a_loop_is_warm(driver, like, spec, loss, steps):
    given = {name: x for name, x in {"spec": spec, "loss": loss}.items() if x is not None}
    rc.warmup(*example(**like), **given, aligned=True, mean_lengths=(512.0, 1000.0))
    compiled = len(driver.compiled)
    for more in steps:
        step(spec=spec, loss=loss, **more)
    assert 0 < compiled == len(driver.compiled)


def test_a_loop_whose_rows_repeat_an_advantage_is_warm(driver):
    train, rollout, batch = example("padded")
    given = {"aligned": True, "mean_lengths": (512.0, 1000.0)}
    rc.warmup(train, rollout, batch, loss=LOSS, advantages=torch.ones(2, 1).expand(2, 4), **given)
    compiled, new = len(driver.compiled), -torch.rand(4, 640)
    batch, advantages = rc.Batch(mask=torch.ones(4, 640, dtype=torch.bool)), torch.rand(4, 1).expand(4, 640)
    others = {"old_logp": new.clone(), "backend": "triton"}
    rc.policy_loss(new.requires_grad_(), advantages, batch, LOSS, **others).value.backward()
    assert 0 < compiled == len(driver.compiled)


def test_nothing_is_left_to_compile(driver):
    assert rc.warmup(*example(), spec=SPEC, loss=LOSS, aligned=True, threads=2) == 3
    compiled = len(driver.compiled)
    assert compiled and threading.current_thread() not in driver.threads
    for tokens, sequences in ((5000, 7), (64, 9), (40_000, 2), (20_000, 9)):
        step(tokens, sequences)
    assert len(driver.compiled) == compiled


def test_nothing_is_launched_before_all_is_compiled(driver, monkeypatch):
    seen = []
    real = driver.compile
    monkeypatch.setattr(
        "triton.compiler.compile", lambda *a, **k: (seen.append(len(driver.launched)), real(*a, **k))[1]
    )
    rc.warmup(*example(), spec=SPEC, mean_lengths=(0, 100))
    assert set(seen) == {0} and driver.launched


@pytest.mark.parametrize(
    ("others", "batches"),
    [({}, 6), ({"aligned": True}, 3), ({"mean_lengths": (300, 900)}, 2), ({"mean_lengths": (300, 1500)}, 4),
     ({"mean_lengths": (20_000, 20_000), "aligned": False}, 1)],
)  # fmt: skip
def test_only_what_the_loop_can_meet(driver, others, batches):
    assert rc.warmup(*example(), spec=SPEC, **others) == batches
