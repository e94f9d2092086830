"""No metric of any scheme raises on the host, whatever the log-probs hold: a training step would end there."""

from __future__ import annotations

import ast
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rollout_corr as rc
from rollout_corr.frameworks.skyrl import dropin as skyrl
from rollout_corr.frameworks.verl import dropin as verl
from rollout_corr.frameworks.verl import measures
from rollout_corr.metrics import rows
from rollout_corr.metrics.peers import SCHEMES
from rollout_corr.specs.choices import NONFINITE

ROOT = Path(__file__).resolve().parents[2] / "rollout_corr"
VALUES = (-9999.0, 9999.0, 700.0, -400.0, math.inf, -math.inf, math.nan, 0.0)
WEIGHTS = (None, rc.Weight.token(upper=2.0), rc.Weight.product(upper=2.0), rc.Weight.geometric())


def batches(dtype):
    """Rows of one value on either side, a mild row beside them, and all of it masked."""
    mild = torch.tensor([-0.5, -0.4, -0.3], dtype=dtype)
    for x, masked in itertools.product(VALUES, (False, True)):
        rows_of_x = torch.full((3,), x, dtype=dtype)
        train, rollout = torch.stack([mild, rows_of_x, rows_of_x]), torch.stack([rows_of_x, mild, rows_of_x])
        mask = torch.zeros(3, 3, dtype=torch.int64) if masked else torch.ones(3, 3, dtype=torch.int64)
        yield train, rollout, mask
        yield train[:1], rollout[:1], mask[:1]
        yield train[1:2], rollout[1:2], mask[1:2]


@pytest.mark.parametrize("nonfinite", NONFINITE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda weight: weight.kind if weight else "none")
def test_no_scheme_raises(weight, dtype, nonfinite):
    for clamp in (20.0,) if dtype is torch.float32 else (40.0,):
        criteria = (rc.Criterion("ratio", lower=0.5, upper=2.0), rc.Criterion("k3", upper=0.5))
        spec = rc.Spec(
            weight=weight,
            criteria=criteria,
            nonfinite=nonfinite,
            clamp=clamp,
            detail="full",
            report=("native", *SCHEMES),
        )
        for given in batches(dtype):
            out = rc.correct(*given[:2], mask=given[2], spec=spec)
            for scheme in ("native", *SCHEMES):
                assert all(isinstance(value, float) for value in out.metrics(scheme).values())


def test_skyrl_gives_what_skyrl_gives():
    """SkyRL clamps log-ratios to +-20 on either side, whichever row it is."""
    mild = torch.full((1, 4), -1.0)
    config = SimpleNamespace(tis_ratio_type="token", token_tis_ratio_clip_high=2.0)
    for train, rollout, expected in ((mild, mild - 9999.0, 20.0), (mild - 9999.0, mild, -20.0)):
        _, metrics, _ = skyrl.compute_off_policy_correction(train, rollout, torch.ones(1, 4), config)
        for name in ("is_ratio_min", "is_ratio_max"):
            assert metrics[name] == pytest.approx(math.exp(expected), rel=1e-6)


@pytest.mark.parametrize("x", VALUES)
def test_verls_functions_of_given_tensors(x):
    """`compute_is_metrics` gives what tensors give, also infinities."""
    d, mask = torch.full((2, 3), x), torch.ones(2, 3)
    sums = d.sum(dim=-1, keepdim=True)
    found = measures.compute_is_metrics(d.exp(), d.exp(), sums, mask, "sequence", 2.0)
    torch.testing.assert_close(found["rollout_is_min"], float(sums.double().min().exp()), equal_nan=True)


def test_a_loss_of_any_ratio_has_metrics():
    for new, old in itertools.product(VALUES, repeat=2):
        given = torch.full((1, 3), new, dtype=torch.float64, requires_grad=True), torch.ones(1, 3)
        out = rc.policy_loss(
            *given, loss=rc.Loss(rc.PPO(0.2, 0.2)), old_logp=torch.full((1, 3), old, dtype=torch.float64)
        )
        assert all(isinstance(value, float) for value in out.metrics().values())


@pytest.mark.parametrize(("x", "expected"), [(0.0, 1.0), (9999.0, math.inf), (-9999.0, 0.0), (math.inf, math.inf)])
def test_exp(x, expected):
    assert rows.exp(x) == expected and rows.squared(x) >= 0.0


@pytest.mark.parametrize(("x", "expected"), [(1.0, 0.0), (0.0, -math.inf), (math.inf, math.inf)])
def test_log(x, expected):
    assert rows.log(x) == expected
    assert math.isnan(rows.exp(math.nan)) and math.isnan(rows.log(-1.0)) and math.isnan(rows.log(math.nan))


def test_metrics_use_no_exp_that_raises():
    """Floats overflow with an exception in math.exp and **; rows.py has the ones that do not."""
    files = [*(ROOT / "metrics").glob("*.py"), *(ROOT / "frameworks").glob("*/metrics.py")]
    files += [ROOT / "frameworks/verl/measures.py"]
    assert len(files) > 8
    found = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            risky = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "math":
                risky = node.attr in ("exp", "log", "pow", "expm1", "log1p", "log2", "log10", "cosh", "sinh")
            if risky and path.name != "rows.py":
                found.append(f"{path.name}:{node.lineno}")
    assert found == []


def test_missing_log_probs_name_the_setting():
    """The field that is missing, and how the framework is told to provide it."""
    x, mask = torch.zeros(1, 3), torch.ones(1, 3)
    with pytest.raises(TypeError, match=r"^rollout_log_prob: expected a tensor, got None; .*calculate_log_probs=True"):
        verl.compute_rollout_correction_and_rejection_mask(x, None, mask, "token")
    batch = SimpleNamespace(batch={"old_log_probs": x, "response_mask": mask})
    with pytest.raises(KeyError, match=r"rollout_log_probs: expected among .*calculate_log_probs=True"):
        verl.compute_rollout_correction_and_add_to_batch(batch, {"rollout_is": "token"})
    with pytest.raises(TypeError, match=r"^rollout_logprobs: expected a tensor, got None; .*sampling_params\.logprobs"):
        skyrl.compute_off_policy_correction(x, None, mask, SimpleNamespace(tis_ratio_type="token"))
