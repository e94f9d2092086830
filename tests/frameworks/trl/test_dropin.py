"""The drop-in for TRL: masked tokens, Specs, what it logs. tests/conformance compares its modes with TRL's."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from types import ModuleType, SimpleNamespace

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


def test_a_masked_token_is_bounded():
    """As in TRL, whose sum over no token is 0; VESPO takes the ratio's logarithm."""
    logp, mask = -torch.ones(2, 3), torch.tensor([[1, 1, 0], [0, 0, 0]])
    for mode, bounds, expected in (
        ("sequence_truncate", (3.0, None), 1.0),
        ("sequence_truncate", (0.5, None), 0.5),
        ("sequence_mask", (0.5, None), 0.0),
        ("token_truncate", (None, 1.5), 1.5),
    ):
        found = dropin.importance_sampling_ratio(logp, logp - 1.0, mask, mode, *bounds)
        assert set(found[1].tolist()) == {expected}


def test_dtype_and_gradient():
    old, sampling, mask = batch(dtype=torch.bfloat16)
    found = dropin.importance_sampling_ratio(old.requires_grad_(), sampling.float(), mask, "token_mask")
    assert found.dtype == torch.float32 and not found.requires_grad


@pytest.mark.parametrize("per_token", [False, True])
def test_off_policy_mask(per_token):
    old, sampling, mask = batch()
    sampling[0, 0] = math.nan
    advantages = torch.tensor([[-1.0], [-1.0], [1.0], [-1.0], [0.0]])
    if per_token:
        advantages = advantages * torch.linspace(-1.0, 1.0, 9)
    found = dropin.get_off_policy_mask(advantages, old, sampling, mask, 0.01)
    assert found.dtype == mask.dtype
    gaps = ((sampling - old).nan_to_num(0.0) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    assert (gaps > 0.01).any() and torch.equal(found, ((gaps <= 0.01) | (advantages >= 0)).long())


class Trainer:
    """As much of GRPOTrainer as the drop-in touches."""

    use_vllm = True
    vllm_importance_sampling_mode = "token_mask"
    vllm_importance_sampling_clip_max = 1.2
    vllm_importance_sampling_clip_min = 0.8
    model = SimpleNamespace(training=True)
    # Of two processes; the ratios of the other one are twice as far from 0.
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: torch.stack([x, 2.0 * x]))

    def __init__(self):
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}

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
    assert dropin.install().in_place
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


def test_logs_the_ratio_in_use(trainer, caplog):
    """Over what TRL has just logged of its own ratio, in the mode of the model; and the metrics of a Spec."""
    old, sampling, mask = batch()
    given = {"old_per_token_logps": old, "sampling_per_token_logps": sampling, "completion_mask": mask}
    given["importance_sampling_ratio"] = None
    key = "sampling/importance_sampling_ratio/"
    own = rc.Spec(weight=rc.Weight.token(upper=1.1))
    for training, spec, names in (
        (True, None, "dashboard"),
        (False, None, "native"),
        (True, own, "dashboard"),
        (True, own, "native"),
    ):
        dropin.install(spec=spec, metrics=names)
        trainer.model = SimpleNamespace(training=training)
        logged = trainer._metrics["train" if training else "eval"]
        logged.clear()
        logged |= {f"{key}{name}": [7.0, 7.0] for name in ("min", "mean", "max")}
        ratio = trainer._generate_and_score_completions(given)["importance_sampling_ratio"][mask != 0]
        expected = ratio.min().item(), 1.5 * ratio.mean().item(), 2.0 * ratio.max().item()
        found = tuple(logged[f"{key}{name}"] for name in ("min", "mean", "max"))
        assert found == tuple([7.0, pytest.approx(value)] for value in expected)
        ours = {name: values for name, values in logged.items() if name.startswith("rollout_corr/")}
        if spec is None:
            assert not ours
        else:
            out = rc.correct(old, sampling, mask=mask, spec=spec)
            expected = out.metrics(names, prefix="rollout_corr/")
            assert ours == {name: [value] for name, value in expected.items()}
    assert "kl_rollout_train_k3 is" in caplog.text and "install(warnings=False)" in caplog.text


def test_a_spec_may_read_advantages(trainer, tmp_path):
    """They lie in the batch, and so do the ids that a dump is written with."""
    old, sampling, mask = batch()
    gated = rc.Criterion("abs", upper=0.2, when="negative_advantage")
    ids, advantages = torch.arange(45).view(5, 9), torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0])
    given = {"old_per_token_logps": old, "sampling_per_token_logps": sampling, "completion_mask": mask}
    given |= {"importance_sampling_ratio": None, "advantages": advantages, "completion_ids": ids}
    dropin.install(spec=rc.Spec(criteria=(gated,)), dump=tmp_path / "dumps")
    found = trainer._generate_and_score_completions(given)["importance_sampling_ratio"]
    far = ((old - sampling).abs() > 0.2) & (mask != 0)
    assert far[0].any() and torch.equal(found == 0.0, far & (advantages < 0.0)[:, None])
    dropin.uninstall()
    for _ in range(500):
        if files := list((tmp_path / "dumps").glob("*.pt")):
            break
        time.sleep(0.02)
    assert torch.equal(torch.load(files[0])["token_ids"], ids)


def test_a_spec_that_trl_s_switch_keeps_from_running(trainer, caplog):
    """A second run in the same process says it too, and the state tells functions in place from a correction."""
    old, sampling, mask = batch()
    given = {"old_per_token_logps": old, "sampling_per_token_logps": sampling, "completion_mask": mask}
    for spec in (None, rc.spec("trl.default")):
        dropin.install(spec=spec)
        assert trainer._generate_and_score_completions(given) == given
    plain, unused = (said.partition("active: ")[2] for said in caplog.messages if "correction active" in said)
    assert plain == "no, vllm_importance_sampling_correction is off"
    assert unused == "no, your Spec is not used: vllm_importance_sampling_correction is off"
    state = dropin.installed()
    assert state.in_place and state.active is False and state.last == unused.removeprefix("no, ")


def test_says_what_it_does(trainer, caplog):
    """No engine, and an engine whose correction is off, are logged."""
    old, sampling, mask = batch()
    dropin.install()
    given = {"old_per_token_logps": old, "sampling_per_token_logps": sampling, "completion_mask": mask}
    for _ in range(2):
        trainer._generate_and_score_completions(given | {"importance_sampling_ratio": None})
        trainer._generate_and_score_completions(given)
        trainer.use_vllm = False
        assert trainer._generate_and_score_completions(given) == given
        trainer.use_vllm = True
    yes, off, no_engine = (said for said in caplog.messages if "correction active" in said)
    assert "active: yes, vllm_importance_sampling_mode 'token_mask', clip_max 1.2, clip_min 0.8" in yes
    assert "active: no, vllm_importance_sampling_correction is off" in off
    assert "active: no, use_vllm is off" in no_engine
