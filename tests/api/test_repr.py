"""Results print their shapes and dtypes, and nothing that would have to be read from a device."""

from __future__ import annotations

import torch

import rollout_corr as rc

SPEC = rc.Spec(rc.Weight.token())


def test_each_layout():
    x = torch.zeros(2, 3)
    rows = [torch.zeros(3), torch.zeros(2)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    shown = {
        repr(rc.correct(x, x)): "weights=None, mask=bool[2, 3], keep=bool[2]",
        repr(
            rc.correct(x.double(), x, mask=x.int(), spec=SPEC)
        ): "weights=float64[2, 3], mask=int32[2, 3], keep=bool[2]",
        repr(rc.correct(rows, rows, spec=SPEC)): "weights=list of 2 float32, mask=list of 2 bool, keep=bool[2]",
        repr(rc.correct([], [], spec=SPEC)): "weights=list of 0, mask=list of 0, keep=bool[0]",
        repr(rc.correct(nested, nested, spec=SPEC)): "weights=float32[2, ragged], mask=bool[2, ragged], keep=bool[2]",
    }
    for got, wanted in shown.items():
        assert got == f"Correction({wanted}, device='cpu')"
    assert repr(rc.policy_loss(x, x)) == (
        "PolicyLoss(value=float32[], mask=bool[2, 3], weights=None, keep=None, device='cpu')"
    )


def test_nothing_is_read():
    """Tensors on the meta device have no values."""
    batch = rc.Batch(mask=torch.zeros(2, 3, device="meta"), turns="runs", total=3, validate=True)
    assert repr(batch) == "Batch(mask=float32[2, 3], turns='runs', total=3, validate=True)"
    out = rc.correct(torch.zeros(2, 3), torch.zeros(2, 3), spec=SPEC)
    meta = rc.Correction(out.weights.to("meta"), out.mask.to("meta"), out.keep.to("meta"), out.statistics)
    assert repr(meta) == "Correction(weights=float32[2, 3], mask=bool[2, 3], keep=bool[2], device='meta')"


def test_notebooks_show_metrics_and_warnings():
    """Row 27 of the users' review: results have a table for notebooks; what is beyond its bound stands out."""
    x = -torch.rand(4, 50, generator=torch.Generator().manual_seed(0))
    loss = rc.policy_loss(x, torch.ones(4), rollout_logp=x - 20.0, spec=rc.Spec(rc.Weight.token()))
    out = rc.correct(x, x - 20.0, spec=SPEC)
    for made in (out, out.statistics, loss):
        text = made._repr_html_()
        assert repr(made).split("(")[0] in text and "<td><code>kl_rollout_train_k3</code></td><td><b style=" in text
        assert "healthy: &lt; 0.01" in text and "<li>kl_rollout_train_k3 is" in text and "more</summary>" in text
    healthy = rc.correct(x, x - 1e-3, spec=SPEC)._repr_html_()
    assert "<b" not in healthy and "<ul>" not in healthy
    found = rc.suggest(x, x + 0.01 * torch.randn(4, 50, generator=torch.Generator().manual_seed(1)))
    assert found._repr_html_().count("<li><b>") == 3 and "<b>geometric</b>: 0.9" in found._repr_html_()
