"""verl's policy losses by ours: what tests/conformance, which compares them with verl's functions, does not ask."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from rollout_corr.frameworks.verl import losses as verl_losses

LOW, HIGH, C = 0.1, 0.25, 1.6


class Config(SimpleNamespace):
    """As much of ActorConfig as the losses read."""

    def get(self, name, default=None):
        return getattr(self, name, default)


def configuration(**changed):
    fields = {
        "clip_ratio": 0.3,
        "clip_ratio_low": LOW,
        "clip_ratio_high": HIGH,
        "clip_ratio_c": C,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "policy_loss": SimpleNamespace(dro_beta=0.2),
        "global_batch_info": {},
    }
    return Config(**fields | changed)


def batch(seed=0):
    made = torch.Generator().manual_seed(seed)

    def random(draw):
        return draw(5, 11, generator=made, dtype=torch.float64)

    old = random(torch.rand).log()
    # A log-prob is never positive, and a probability never above 1.
    new = (old + 0.3 * random(torch.randn)).clamp(max=-0.01)
    mask = random(torch.rand) < 0.7
    mask[3] = False
    return old, new, random(torch.randn), mask


VANILLA = verl_losses.FUNCTIONS["vanilla"]


@pytest.mark.parametrize(("version", "obeys"), [("0.9.1", True), ("0.9.0", False), ("0.10.0.dev0", False)])
def test_gspo_averages_like_the_verl_that_is_there(version, obeys, monkeypatch):
    """verl 0.9.1 obeys loss_agg_mode, 0.9.0 and the main branch do not."""
    monkeypatch.setitem(sys.modules, "verl", SimpleNamespace(__version__=version, __path__=[]))
    (target,) = [target for target in verl_losses.TARGETS if target.name == "compute_policy_loss_gspo"]
    old, new, advantages, mask = batch()
    arguments = (old, new, advantages, mask, "token-sum", configuration())
    expected = verl_losses.FUNCTIONS["gspo"](*arguments)[0]
    if not obeys:
        expected = verl_losses.FUNCTIONS["gspo"](*arguments[:4], "seq-mean-token-mean", configuration())[0]
    assert target.ours(None)(*arguments)[0] == expected


def test_nothing_trains():
    """verl divides by zero."""
    old, new, advantages, mask = batch()
    leaf = new.requires_grad_()
    value, _ = VANILLA(old, leaf, advantages, mask & False, "token-mean", configuration())
    value.backward()
    assert value == 0.0 and not leaf.grad.any()


def test_clip_ratio_is_the_fallback():
    old, new, advantages, mask = batch()
    both = configuration(clip_ratio_low=0.3, clip_ratio_high=0.3)
    neither = configuration(clip_ratio_low=None, clip_ratio_high=None)
    found = [VANILLA(old, new, advantages, mask, config=config) for config in (both, neither)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vanilla", {"clip_ratio_c": 1.0}, "clip_ratio_c: expected a number > 1, got 1.0"),
        ("vanilla", {"global_batch_info": {"dp_size": 2}}, "batch_num_tokens: expected the count of all ranks"),
    ],
)
def test_errors(name, change, message):
    given = batch()
    with pytest.raises((TypeError, ValueError), match=message):
        verl_losses.FUNCTIONS[name](*given, "token-mean", configuration(**change))


@pytest.mark.parametrize("beta", [None, 0.0, -1.0])
def test_dro_needs_a_beta(beta):
    """verl raises a ValueError that names the setting, where there is none too."""
    config = configuration(policy_loss=SimpleNamespace(dro_beta=beta))
    with pytest.raises(ValueError, match="dro_beta"):
        verl_losses.FUNCTIONS["dro"](*batch(), "token-mean", config)


def test_wrong_arguments():
    given = batch()
    with pytest.raises(ValueError, match="loss_agg_mode: expected one of"):
        verl_losses.FUNCTIONS["gpg"](*given, "word", configuration())
    for function in verl_losses.FUNCTIONS.values():
        with pytest.raises(ValueError, match="config: expected verl's ActorConfig, got None"):
            function(*given, "token-mean", None)
