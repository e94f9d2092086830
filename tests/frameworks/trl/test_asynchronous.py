"""The drop-in for TRL's AsyncGRPOTrainer against plain loops, on rows laid out as TRL's collator does.

tests/conformance/peers/trl.py calls TRL's own `compute_loss`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import rollout_corr as rc
from builders.rounding import near
from conformance import trl_packed
from conformance.batches import batch
from rollout_corr.frameworks.trl import asynchronous, dropin

LAYOUTS = [trl_packed.in_terms, trl_packed.in_a_row]
GEOMETRIC = rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.95, upper=1.05)


class Trainer:
    """As much of AsyncGRPOTrainer as the drop-in touches; its loss is 7."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        model(input_ids=inputs["input_ids"])
        return 7.0


@pytest.fixture
def cls(monkeypatch):
    """AsyncGRPOTrainer of a TRL; only that module of it is imported."""
    module, root = ModuleType(asynchronous.MODULE), ModuleType("trl")
    module.AsyncGRPOTrainer = type("AsyncGRPOTrainer", (), dict(vars(Trainer)))
    root.__version__ = dropin.DROP_IN.checked[0]
    monkeypatch.setitem(sys.modules, "trl", root)
    monkeypatch.setitem(sys.modules, asynchronous.MODULE, module)
    yield module.AsyncGRPOTrainer
    dropin.uninstall()


def step(cls, given, layout=trl_packed.in_terms, **attributes):
    """The loss and the gradient of one row, and the trainer."""
    given = given.trains()
    inputs, model = layout(given)
    made = trl_packed.trainer(aux_loss_enabled=False, **attributes)
    if dropin.installed().switches["spec"] is not None:
        # Its statistics would be merged over two processes.
        made.accelerator.num_processes = 1
        inputs["global_n_tokens"] /= 2
    loss = cls.compute_loss(made, model, inputs)
    (slope,) = torch.autograd.grad(loss, given.new)
    return loss.item(), slope, made


def by_hand(given, kept, delta=math.inf):
    """The loss of the tokens that are kept, over all of them, of two accumulated rows."""
    total = 0.0
    for i, row in enumerate(given.mask.tolist()):
        for t, valid in enumerate(row):
            if valid and kept[i][t]:
                r = min(math.exp(given.new[i, t] - given.rollout[i, t]), delta)
                a = given.advantages[i].item()
                total -= min(r * a, min(max(r, 0.8), 1.28) * a)
    return total / int(given.mask.sum()) / 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spec_rejects_by_the_ratio_that_trains(cls, layout):
    """Completions whose geometric mean of new/rollout lies outside; they stay in the denominator."""
    dropin.install(spec=rc.Spec(criteria=(GEOMETRIC,)))
    rejected = 0
    for seed in range(2, 14, 2):
        given = batch("holes", seed)
        kept = []
        for new, rollout, mask in zip(given.new, given.rollout, given.mask, strict=True):
            mean = math.exp(math.fsum((new - rollout)[mask].tolist()) / int(mask.sum()))
            kept.append([0.95 <= mean <= 1.05] * len(mask))
        loss, slope, made = step(cls, given, layout)
        assert loss == near(by_hand(given, kept))
        assert not slope[~torch.tensor(kept)].any()
        (share,) = made._metrics["train"]["rollout_corr/tokens_kept_fraction"]
        assert share == int((given.mask & torch.tensor(kept)).sum()) / int(given.mask.sum())
        assert "rollout_corr/tokens_kept" not in made._metrics["train"]
        rejected += sum(not row[0] for row in kept)
    assert rejected > 3


def test_long_completions_that_drift(cls):
    """A product over 700 tokens rejects all of them (TRL#7120), a geometric mean none, and neither is infinite."""
    given = batch("long", 2)
    given = replace(given, new=given.rollout + 0.005)
    product = rc.spec("trl.sequence_mask")
    dropin.install(spec=product)
    assert step(cls, given)[0] == 0.0
    dropin.install(spec=rc.Spec(criteria=(GEOMETRIC,)))
    assert step(cls, given)[0] == near(by_hand(given, given.mask))
    dropin.install(spec=rc.spec("trl.sequence_truncate", clip_min=0.8))
    assert step(cls, replace(given, new=given.rollout - 0.3))[1].isfinite().all()


def test_one_broken_token(cls):
    """A log-prob of -inf or NaN costs its token; a ratio of e^60 is bounded, and by `delta` further."""
    dropin.install()
    given = batch("mild", 2)
    rows = given.mask.nonzero()[:2]
    broken = given.rollout.clone()
    broken[tuple(rows[0])], broken[tuple(rows[1])] = -math.inf, math.nan
    kept = given.mask.clone()
    kept[tuple(rows[0])] = kept[tuple(rows[1])] = False
    loss, slope, _ = step(cls, replace(given, rollout=broken))
    assert loss == near(by_hand(given, kept)) and slope.isfinite().all()
    far = replace(given, rollout=torch.where(given.mask, given.new - 60.0, 0.0), advantages=-given.advantages.abs())
    assert step(cls, far)[1].isfinite().all()
    dropin.install(delta=4.0)
    assert step(cls, far)[0] == near(by_hand(far, far.mask, 4.0))


def test_the_router_s_loss_stays(cls):
    dropin.install()
    given = batch("mild", 2)
    inputs, model = trl_packed.in_terms(given.trains())
    with_router = cls.compute_loss(trl_packed.trainer(), model, inputs).item()
    without = cls.compute_loss(trl_packed.trainer(aux_loss_enabled=False), model, inputs).item()
    assert with_router - without == near(0.5 * 0.25 / 2)


def test_a_trl_without_it_is_not_covered(tmp_path, monkeypatch):
    """GRPOTrainer is replaced all the same, and `installed` says what is missing."""
    for folder in ("trl", "trl/trainer"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("__version__ = '0.1'\n")
    (tmp_path / "trl/trainer/grpo_trainer.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    try:
        status = dropin.install()
    finally:
        dropin.uninstall()
    assert all(asynchronous.MODULE not in path for path in status.covered)
    assert status.not_covered == ("AsyncGRPOTrainer, which this TRL does not have",)


def test_errors(cls):
    with pytest.raises(ValueError, match="delta: expected"):
        dropin.install(delta=0.5)
    assert not dropin.installed().in_place
    given = batch("mild", 2)
    spec = rc.Spec(criteria=(replace(GEOMETRIC, of="new/old"),))
    dropin.install(spec=spec)
    with pytest.raises(ValueError, match="old_logp: expected log-probs"):
        step(cls, given)


def test_a_row_of_padding_alone():
    """A rank may hold no token that trains; its loss is 0 and has a gradient."""
    new = torch.zeros(3, requires_grad=True)
    nothing = torch.zeros(3, dtype=torch.int64)
    out = asynchronous.packed_policy_loss(new, new.detach(), torch.ones(3), nothing, nothing, tokens=1.0)
    out.value.backward()
    assert out.value.item() == 0.0 and new.grad.tolist() == [0.0, 0.0, 0.0]
