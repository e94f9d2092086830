"""The functions for slime and miles: context parallelism, gradients, errors; numbers are in tests/conformance."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from builders.rounding import assert_near
from rollout_corr.frameworks.slime import functions

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [5, 1, 9, 4, 6]
MIS = {
    "use_tis": True,
    "use_rs": True,
    "tis_level": "token",
    "rs_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": 0.7,
    "tis_upper_bound": 1.4,
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": 0.5,
    "tis_batch_normalize": True,
}


def settings(**changed):
    assert set(changed) <= set(MIS)
    return SimpleNamespace(**MIS | changed)


def batch(seed=0, dtype=torch.float64):
    made = torch.Generator().manual_seed(seed)

    def random(draw, n):
        return draw(n, generator=made, dtype=torch.float64)

    rollout = [random(torch.rand, n).log() for n in LENGTHS]
    train = [x + 0.3 * random(torch.randn, x.shape[0]) for x in rollout]
    masks = [(random(torch.rand, n) < 0.8).int() for n in LENGTHS]
    masks[3] *= 0
    loss = random(torch.randn, sum(LENGTHS))
    given = {"train_log_probs": train, "rollout_log_probs": rollout, "loss_masks": masks, "pg_loss": loss}
    for name in ("train_log_probs", "rollout_log_probs"):
        given[name] = [x.to(dtype) for x in given[name]]
    lengths = {"total_lengths": [n + 3 for n in LENGTHS], "response_lengths": LENGTHS}
    return given | lengths


def test_metrics_only():
    """Without --use-tis nothing is corrected, and eleven metrics of the mismatch are given."""
    given = batch()
    loss, masks, metrics = functions.mis(settings(use_tis=False), **given)
    assert loss is given["pg_loss"] and all(a is b for a, b in zip(masks, given["loss_masks"], strict=True))
    assert len(metrics) == 11


def test_gradient():
    """Through the loss alone."""
    given = batch()
    given["pg_loss"].requires_grad_()
    given["train_log_probs"][0].requires_grad_()
    for function, args in (
        (functions.mis, settings()),
        (functions.tis, SimpleNamespace(tis_clip=2.0, tis_clip_low=0.0)),
    ):
        loss, _, metrics = function(args, **given)
        assert loss.requires_grad and not any(value.requires_grad for value in metrics.values())
        loss.sum().backward()
    assert given["pg_loss"].grad.any() and given["train_log_probs"][0].grad is None


def test_nonfinite():
    """A token without a log-prob takes its sample along; behind the mask it is nothing."""
    given = batch()
    expected = functions.mis(settings(tis_batch_normalize=False), **given)
    behind = int((given["loss_masks"][2] == 0).nonzero()[0])
    given["rollout_log_probs"][2][behind] = math.nan
    found = functions.mis(settings(tis_batch_normalize=False), **given)
    assert torch.equal(found[0], expected[0]) and all(map(torch.equal, found[1], expected[1]))
    given["rollout_log_probs"][2][:] = math.nan
    loss, masks, metrics = functions.mis(settings(), **given)
    assert not masks[2].any() and loss.isfinite().all() and all(value.isfinite().all() for value in metrics.values())


class Tools(ModuleType):
    """Context parallelism over two ranks; this is the first, which has the first half of each response."""

    def __init__(self, name, wholes, *layout):
        super().__init__(name)
        self.wholes, self.layout = wholes, layout

    def slice_log_prob_with_cp(self, x, total, response, *layout):
        assert len(x) == response == total - 3 and layout == self.layout
        return x[: (response + 1) // 2]

    def all_gather_with_cp(self, x, total, response, *layout):
        assert layout == self.layout
        (whole,) = (y for y in self.wholes if len(y) == response and torch.equal(y[: len(x)], x))
        return whole


@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
@pytest.mark.parametrize("name", functions.CONTEXT_PARALLEL)
def test_context_parallel(name, qkv_format, monkeypatch):
    """A rank gets the part of its tokens of what one rank alone gets; the masks are whole.

    The conformance rows do it with slime's and miles's own tools.
    """
    given = batch()
    alone = {"mis": functions.mis(settings(), **given)}
    bounds = SimpleNamespace(tis_clip=1.3, tis_clip_low=0.8)
    alone["tis"] = functions.tis(bounds, **given)
    here = torch.cat([torch.arange(n) < (n + 1) // 2 for n in LENGTHS])
    part = dict(given, pg_loss=given["pg_loss"][here])
    for key in ("train_log_probs", "rollout_log_probs"):
        part[key] = [x[: (len(x) + 1) // 2] for x in given[key]]
    layout = ("bshd", 16) if qkv_format == "bshd" else ()
    tools = Tools(name, [*given["train_log_probs"], *given["rollout_log_probs"]], *layout)
    monkeypatch.setitem(sys.modules, name, tools)
    for function, args in (("mis", settings()), ("tis", bounds)):
        args.qkv_format = qkv_format
        if layout:
            with pytest.raises(ValueError, match="max_seq_lens: expected the padded lengths"):
                getattr(functions, function)(args, **part)
            part["max_seq_lens"] = [16] * len(LENGTHS)
        loss, masks, metrics = getattr(functions, function)(args, **part)
        part.pop("max_seq_lens", None)
        expected = alone[function]
        assert_near(loss, expected[0][here], size=0.0)
        assert all(map(torch.equal, masks, expected[1]))
        for key, value in metrics.items():
            assert_near(value, expected[2][key][here], torch.float32)


def test_errors():
    given = batch()
    given["loss_masks"][1] = torch.ones(2)
    with pytest.raises(ValueError, match=r"loss_masks: expected samples of lengths .*, got \[5, 2, 9, 4, 6\]"):
        functions.mis(settings(), **given)
