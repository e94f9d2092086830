"""Losses that stand alone: value, gradient, weights, masks and metrics are the package's bit by bit."""

import sys
import types
from pathlib import Path

import pytest
import torch

import rollout_corr as rc
from builders import eject_page, ejected_losses
from rollout_corr.cli.main import main
from rollout_corr.eject import CannotEject, check, eject
from rollout_corr.specs.loss import explain
from rollout_corr.specs.ratio_losses import PPO

FILES = [
    ("verl.decoupled_geo_rs_token_tis", "padded"),
    ("trl.grpo", "packed"),
    ("prime_rl.dppo", "packed"),
    ("skyrl.gspo", "padded"),
    ("minirl.default", "packed"),
]


@pytest.mark.parametrize(("name", "layout"), FILES, ids=lambda x: x)
def test_equals_the_package_bit_by_bit(name, layout):
    made = eject(name, layout=layout, loss=True)
    assert ejected_losses.differences(made) == []
    assert len(made.source.splitlines()) <= 400
    assert max(map(len, made.source.splitlines())) <= 120


def test_its_own_test_passes(monkeypatch):
    made = eject("verl.decoupled_token_is", loss=True)
    module, tests = types.ModuleType("ejected_file"), {}
    exec(made.source, module.__dict__)
    monkeypatch.setitem(sys.modules, "ejected_file", module)
    exec(made.test("ejected_file"), tests)
    run = [test for name, test in tests.items() if name.startswith("test_")]
    assert len(run) == 8
    for test in run:
        test()


def test_a_second_derivative_is_refused():
    names = {}
    exec(eject("verl.ppo", loss=True, layout="padded").source, names)
    new = torch.zeros(2, 3, requires_grad=True)
    value, _ = names["policy_loss"](new, torch.ones(2, 3), None, torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="expected a backward pass without create_graph=True"):
        torch.autograd.grad(value, new, create_graph=True)


def test_a_change_of_a_formula_changes_the_file(monkeypatch):
    before, loss = eject("verl.grpo", layout="padded").source, PPO.loss

    def twice(self, tokens):
        found = loss(self, tokens)
        return found._replace(value=2.0 * found.value)

    monkeypatch.setattr(PPO, "loss", twice)
    after = eject("verl.grpo", layout="padded").source
    assert before != after and "* 2.0" in after.replace("2.0 *", "* 2.0")


def test_a_name_of_both_is_the_preset_without_the_flag():
    assert "def correct(" in eject("verl.decoupled_token_is").source
    assert "def policy_loss(" in eject("verl.decoupled_token_is", loss=True).source
    assert "def policy_loss(" in eject("verl.ppo").source


@pytest.mark.parametrize(("base", "weighs", "ratio", "weights"), [
    ("old", True, "r = new/old. PPO's clip: -min(r A, clip(r, 1 - low, 1 + high) A).", "multiply it"),
    ("rollout", True, "r = new/rollout. PPO's", "The ratio corrects"),
    ("new", False, "r = new/new, which is 1 with a gradient. PPO's", ""),
])  # fmt: skip
def test_the_words_are_of_the_mode_that_the_file_runs(base, weighs, ratio, weights):
    text = explain(rc.Loss(PPO()), base, weighs)
    assert ratio in text and weights in text
    assert "bypass" not in text and ("weights" in text) == weighs


def test_low_precision_and_a_mask_of_none():
    module = types.ModuleType("ejected")
    exec(eject("verl.ppo", layout="padded").source, module.__dict__)
    new = (-torch.rand(3, 5, dtype=torch.bfloat16)).requires_grad_()
    value, _ = module.policy_loss(new, torch.ones(3, 5), None, new.detach())
    value.backward()
    assert value.dtype == torch.float32 and new.grad.dtype == torch.bfloat16
    assert torch.equal(new.grad, torch.full_like(new.detach(), -1 / 15))


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("verl.clip_cov", {}, r"expected a surrogate of tokens, got ClipCov\(\), which looks at the whole batch"),
        ("skyrl.grpo", {}, "expected a KL with the mean of the loss"),
        ("verl.ppo", {"framework": "verl"}, r"framework: expected one of \['plain'\], got 'verl'"),
        ("kimi.interval", {"loss": True}, "expected the name of a recipe with loss=True, got 'kimi.interval'"),
        (rc.Spec(), {"loss": True}, "expected the name of a recipe"),
    ],
)
def test_errors(what, options, message):
    with pytest.raises(ValueError, match=message):
        eject(what, **options)
    assert issubclass(CannotEject, ValueError)


def test_command_and_check(capsys, tmp_path):
    test = tmp_path / "test_loss.py"
    assert main(["eject", "trl.dapo", "--loss", "--layout", "padded", "--test", str(test)]) == 0
    source = capsys.readouterr().out
    assert "from loss import policy_loss" in test.read_text()
    assert check(source)[0]
    assert not check(source.replace("CLAMP = 20.0", "CLAMP = 10.0"))[0]


@pytest.mark.slow
def test_the_page_has_the_lines():
    page = Path(__file__).resolve().parents[2] / "docs" / "eject.md"
    assert eject_page.table() in page.read_text(encoding="utf-8")
