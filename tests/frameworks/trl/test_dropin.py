"""The drop-in for TRL beside plain loops: its four modes and its off-policy mask.

test_peer_dropin.py trains with it.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch

import rollout_corr as rc
from rollout_corr.frameworks.trl import dropin


def batch(seed=0, dtype=torch.float64):
    made = torch.Generator().manual_seed(seed)
    sampling = torch.rand(5, 9, generator=made, dtype=torch.float64).log()
    old = sampling + 0.3 * torch.randn(5, 9, generator=made, dtype=torch.float64)
    mask = (torch.rand(5, 9, generator=made) < 0.8).long()
    mask[3] = 0
    return old.to(dtype), sampling.to(dtype), mask


def by_hand(old, sampling, mask, mode, clip_max, clip_min):
    """TRL's ratio of each token (or sequence), as loops."""
    found = []
    for row in zip(old.tolist(), sampling.tolist(), mask.tolist(), strict=True):
        d = [(o - s if not math.isnan(o - s) else 0.0) if ok else 0.0 for o, s, ok in zip(*row, strict=True)]
        values = [math.fsum(d)] if mode.startswith("sequence") else d
        low, high = (-math.inf if clip_min is None else clip_min), (math.inf if clip_max is None else clip_max)
        ratios = [math.exp(x) for x in values]
        if mode.endswith("mask"):
            found.append([r if low <= r <= high else 0.0 for r in ratios])
        else:
            found.append([min(max(r, low), high) for r in ratios])
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("bounds", [(3.0, None), (1.2, 0.8), (None, 0.9), (0.95, None)])
@pytest.mark.parametrize("mode", dropin.MODES)
def test_modes(mode, bounds):
    for seed in range(3):
        given = batch(seed)
        given[1][0, 0] = math.nan
        found = dropin.importance_sampling_ratio(*given, mode, *bounds)
        expected = by_hand(*given, mode, *bounds)
        assert found.shape == expected.shape
        some = given[2].any(dim=-1) if mode.startswith("sequence") else slice(None)
        torch.testing.assert_close(found[some], expected[some], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_and_gradient(dtype):
    old, sampling, mask = batch(dtype=dtype)
    found = dropin.importance_sampling_ratio(old.requires_grad_(), sampling.float(), mask, "token_mask")
    assert found.dtype == torch.float32 and not found.requires_grad


def test_a_spec_of_your_own():
    """Rejected tokens have the ratio 0, whatever the Spec edits; without a weight kept ones have 1."""
    old, sampling, mask = batch()
    geometric = rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.95, upper=1.1)
    for rejected in ("mask", "zero", "both"):
        spec = rc.Spec(criteria=(geometric,), rejected=rejected)
        found = dropin.importance_sampling_ratio(old, sampling, mask, spec=spec)
        keep = rc.correct(old, sampling, mask=mask, spec=spec).keep
        assert not keep.all() and keep[0] != keep[2]
        assert torch.equal(found, torch.where((mask != 0) & ~keep[:, None], 0.0, 1.0))


@pytest.mark.parametrize("per_token", [False, True])
def test_off_policy_mask(per_token):
    for seed in range(4):
        old, sampling, mask = batch(seed)
        sampling[0, 0] = math.nan
        advantages = torch.tensor([[-1.0], [-1.0], [1.0], [-1.0], [0.0]])
        if per_token:
            advantages = advantages * torch.linspace(-1.0, 1.0, 9)
        found = dropin.get_off_policy_mask(advantages, old, sampling, mask, 0.01)
        assert found.dtype == mask.dtype and found.shape == advantages.shape
        for i, row in enumerate(zip(old.tolist(), sampling.tolist(), mask.tolist(), strict=True)):
            gaps = [0.0 if math.isnan(s) else s - o for o, s, ok in zip(*row, strict=True) if ok]
            low = math.fsum(gaps) / max(len(gaps), 1) <= 0.01
            assert found[i].tolist() == [int(low or a >= 0) for a in advantages[i].tolist()]


class Trainer:
    """As much of GRPOTrainer as the drop-in touches."""

    use_vllm = True
    vllm_importance_sampling_mode = "token_mask"
    vllm_importance_sampling_clip_max = 1.2
    vllm_importance_sampling_clip_min = 0.8

    def _generate_and_score_completions(self, inputs):
        return dict(inputs)

    @staticmethod
    def get_off_policy_mask(advantages, per_token_logps, sampling_per_token_logps, mask, off_policy_threshold):
        return "theirs"


@pytest.fixture
def trainer(monkeypatch):
    module, root = ModuleType(dropin.MODULE), ModuleType("trl")
    module.GRPOTrainer = type("GRPOTrainer", (), dict(vars(Trainer)))
    root.__version__ = dropin.DROP_IN.checked[0]
    monkeypatch.setitem(sys.modules, "trl", root)
    monkeypatch.setitem(sys.modules, dropin.MODULE, module)
    yield module.GRPOTrainer()
    dropin.uninstall()


def test_install(trainer):
    old, sampling, mask = batch()
    tool_mask = torch.ones_like(mask)
    tool_mask[:, 4] = 0
    output = {
        "importance_sampling_ratio": None,
        "old_per_token_logps": old,
        "sampling_per_token_logps": sampling,
        "completion_mask": mask,
        "tool_mask": tool_mask,
    }
    assert dropin.install().active
    found = trainer._generate_and_score_completions(output)
    expected = dropin.importance_sampling_ratio(old, sampling, mask * tool_mask, "token_mask", 1.2, 0.8)
    assert torch.equal(found["importance_sampling_ratio"], expected) and output["importance_sampling_ratio"] is None
    assert trainer.get_off_policy_mask(torch.ones(5, 1), old, sampling, mask, off_policy_threshold=0.1).shape == (5, 1)
    dropin.install(spec=rc.Spec(weight=rc.Weight.geometric(upper=1.5)))
    found = trainer._generate_and_score_completions(output)["importance_sampling_ratio"]
    assert torch.equal(
        found[mask * tool_mask != 0],
        dropin.importance_sampling_ratio(
            old, sampling, mask * tool_mask, spec=rc.Spec(weight=rc.Weight.geometric(upper=1.5))
        )[mask * tool_mask != 0],
    )
    assert not torch.equal(found, expected)
    dropin.uninstall()
    assert trainer._generate_and_score_completions(output)["importance_sampling_ratio"] is None
    assert trainer.get_off_policy_mask(1, 2, 3, 4, 5) == "theirs"


def test_says_what_it_does(trainer, caplog, monkeypatch):
    """No engine, and an engine whose correction is off, are logged."""
    monkeypatch.setattr(dropin.DROP_IN, "_said", set())
    old, sampling, mask = batch()
    dropin.install()
    given = {"old_per_token_logps": old, "sampling_per_token_logps": sampling, "completion_mask": mask}
    for _ in range(2):
        trainer._generate_and_score_completions(given | {"importance_sampling_ratio": None})
        trainer._generate_and_score_completions(given)
        trainer.use_vllm = False
        assert trainer._generate_and_score_completions(given) == given
        trainer.use_vllm = True
    yes, off, no_engine = (record.getMessage() for record in caplog.records)
    assert "active: yes, vllm_importance_sampling_mode 'token_mask', clip_max 1.2, clip_min 0.8" in yes
    assert "active: no, vllm_importance_sampling_correction is off" in off
    assert "active: no, use_vllm is off" in no_engine


def test_errors():
    given = batch()
    with pytest.raises(ValueError, match="vllm_importance_sampling_mode: expected one of"):
        dropin.importance_sampling_ratio(*given, "word")
    with pytest.raises(ValueError, match=r"trl.token_truncate.*expected clip_max, clip_min or both, got neither"):
        dropin.importance_sampling_ratio(*given, "token_truncate", None, None)


def test_a_row_without_tokens_has_the_ratio_of_one():
    """As in TRL, whose sum over no token is 0; VESPO takes the ratio's logarithm."""
    logp, mask = -torch.ones(2, 3), torch.tensor([[1, 1, 0], [0, 0, 0]])
    ratio = dropin.importance_sampling_ratio(logp, logp - 1.0, mask, "sequence_truncate")
    assert ratio[1].item() == 1.0 and ratio[0].item() == 3.0
    assert dropin.importance_sampling_ratio(logp, logp, mask, "sequence_mask", 0.5)[1].item() == 0.0
