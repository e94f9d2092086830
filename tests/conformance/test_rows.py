"""The comparison finds planted differences, and a difference counts as declared only where a page states it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.batches import FINITE, KINDS, batch
from conformance.rows import Declared, compared, preset, recipe, unequal

pytestmark = pytest.mark.usefixtures("one_thread")


def truncated(given, threshold=2.0):
    return {"weights": (given.old - given.rollout).double().exp().clamp(max=threshold)}


def ppo(given, scale=1.0, rows=False):
    """PPO over min(exp(D), 2): a mean over rows where `rows`, else over tokens."""
    ratio = (given.new - given.old).exp()
    weight = (given.old - given.rollout).exp().clamp(max=2.0)
    a = given.advantages[:, None]
    loss = (-weight * torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)).where(given.mask, 0.0)
    if rows:
        held = given.mask.any(1)
        return (loss.sum(1) / given.mask.sum(1).clamp(min=1)).sum() / held.sum().clamp(min=1)
    return scale * loss.sum() / given.mask.sum().clamp(min=1)


CLEAN = tuple(kind for kind in FINITE if kind != "nan_behind_mask")


def row(run, **more):
    return recipe("nemo.tis", "written here", run, kinds=CLEAN, **more)


def test_what_agrees_agrees():
    tally = compared(row(ppo), 40)
    assert (tally.cases, tally.agreed, tally.undeclared) == (40, 40, [])


@pytest.mark.parametrize("wrong", [{"scale": 1.001}, {"rows": True}], ids=["scaled", "a mean over rows"])
def test_a_planted_difference_is_found(wrong):
    """The second is what the recipe of NeMo's GSPO had wrong."""
    tally = compared(row(lambda given: ppo(given, **wrong)), 40)
    assert tally.undeclared_finite > 20 and "loss" in tally.undeclared[0]


def test_a_preset_s_bound():
    rows = [preset("nemo.tis", "written here", lambda given, bound=b: truncated(given, bound)) for b in (2.0, 1.9)]
    rows = [replace(r, kinds=("mild", "heavy", "holes")) for r in rows]
    assert compared(rows[0], 30).undeclared == [] and compared(rows[1], 30).undeclared != []


def test_declared_by_a_page():
    known = Declared("other bound", "presets.md", "Safety clamp", lambda given, settings: given.kind == "heavy")
    assert known.is_documented() and not replace(known, says="a sentence that stands nowhere").is_documented()
    made = preset("nemo.tis", "written here", lambda given: truncated(given, 1.5), declared=(known,))
    tally = compared(replace(made, kinds=("heavy",)), 10)
    assert tally.declared["other bound"] > 0 and not tally.undeclared


def test_values():
    nan = torch.tensor([float("nan"), 1.0])
    assert unequal(nan, nan.clone(), 0.0) is None
    assert unequal(nan, torch.tensor([0.0, 1.0]), 0.1) is not None
    assert unequal(torch.tensor([True]), torch.tensor([1]), 0.0) is None
    assert unequal(torch.tensor([True]), torch.tensor([0]), 0.0) is not None
    assert unequal(1.0, 1.0 + 1e-12, 1e-9) is None and unequal(1.0, 1.1, 1e-9) is not None
    assert unequal("a", "b", 0.0) is not None and unequal(torch.zeros(2), torch.zeros(3), 1.0) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_batches(kind):
    """Each kind holds what its name says, twice the same, and finite numbers where it promises them."""
    for seed in range(6):
        given = batch(kind, seed)
        again = batch(kind, seed)
        assert torch.equal(given.old.nan_to_num(7.0), again.old.nan_to_num(7.0)) and torch.equal(given.mask, again.mask)
        front = torch.stack([given.new, given.old, given.rollout, given.ref])[:, given.mask]
        assert front.isfinite().all() == (kind not in ("infinite", "nan_in_front"))
        assert given.mask.any() == (kind != "all_masked")
    assert given.finite == (kind in FINITE)
