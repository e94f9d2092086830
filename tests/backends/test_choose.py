"""Which backend runs for a tensor, and why; an explicit choice never falls back."""

from __future__ import annotations

import re

import pytest
import torch

import rollout_corr as rc
from rollout_corr.api.policy_loss import LOSSES
from rollout_corr.backends import operators
from rollout_corr.backends.choose import RUNNERS, Call, chosen
from rollout_corr.backends.run import CORRECTIONS


@pytest.mark.parametrize(
    ("installed", "why"),
    [
        ({"triton": "3.5.0"}, None),
        ({"pytorch-triton-rocm": "10.0.1+git0bcc8265"}, None),
        ({"triton": "3.4.9"}, "the kernels need Triton >= 3.5, and 3.4.9 is installed"),
        ({"triton": "main"}, "the kernels need Triton >= 3.5, and main is installed"),
        ({}, "the kernels need Triton >= 3.5, and none is installed"),
    ],
)
def test_which_triton_will_do(installed: dict[str, str], why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked at the import, so no version may break that."""

    def version(name: str) -> str:
        if name not in installed:
            raise operators.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(operators.metadata, "version", version)
    assert operators._missing_triton() == why
    monkeypatch.setattr(operators, "MISSING_TRITON", why)
    assert why is None or operators.why_not(torch.device("cuda")) == why


def test_explicit_choices_do_not_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "interprets", lambda: False)
    logp = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"backend: expected one of .*'triton'.*got 'cuda'"):
        rc.correct(logp, logp, backend="cuda")
    with pytest.raises(
        ValueError, match=r"backend: expected 'auto' or 'torch' for cpu tensors, got 'triton': the kernels run on cuda"
    ):
        rc.correct(logp, logp, backend="triton")


def test_backend_for_says_which_and_why() -> None:
    name, runner, reason = rc.backend_for(torch.zeros(1))
    assert (name, runner) == ("torch", "blocks")
    assert reason == "tensors on cpu run on the definition on blocks of whole sequences, which stay in cache"
    with pytest.raises(TypeError, match="tensor: expected a tensor, got int"):
        rc.backend_for(3)  # type: ignore[arg-type]  # the wrong type is the point
    with pytest.raises(TypeError, match="spec: expected a Spec or None"):
        rc.backend_for(torch.zeros(1), 3)  # type: ignore[arg-type]  # the wrong type is the point


def test_backend_for_names_what_a_spec_leaves_to_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is the one by which an explicit backend="triton" refuses the Spec."""
    monkeypatch.setattr(operators, "MISSING_TRITON", None)
    on_gpu = torch.zeros(1, device="meta")
    monkeypatch.setattr(operators, "DEVICES", ("meta",))
    weights = rc.Spec(weight=rc.Weight.token(upper=2.0))
    assert rc.backend_for(on_gpu, weights) == ("triton", "kernels", "tensors on meta run on the Triton kernels")
    decided = rc.Spec(criteria=(rc.Criterion("abs", over="token", upper=rc.Quantile(0.9)),))
    name, runner, reason = rc.backend_for(on_gpu, decided)
    refused = operators.beyond_kernels(decided)
    assert refused is not None and (name, runner) == ("torch", "whole") and reason.startswith(refused)
    with pytest.raises(ValueError, match=f"got 'triton': {re.escape(refused)}"):
        rc.correct(torch.zeros(2, 3), torch.zeros(2, 3), spec=decided, backend="triton")


def test_backend_for_names_a_surrogate_that_runs_on_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "MISSING_TRITON", None)
    monkeypatch.setattr(operators, "DEVICES", ("meta",))
    on_gpu = torch.zeros(1, device="meta")
    assert rc.backend_for(on_gpu, surrogate=rc.PPO(0.2, 0.2)).name == "triton"
    name, runner, reason = rc.backend_for(on_gpu, surrogate=rc.REAL())
    assert (name, runner) == ("torch", "whole") and reason.startswith("REAL() looks at groups of sequences")
    with pytest.raises(TypeError, match="surrogate: expected a surrogate such as"):
        rc.backend_for(on_gpu, surrogate=3)  # type: ignore[arg-type]  # the wrong type is the point


CALLS = [
    (Call("triton", None, False, False, True), "split kernels"),
    (Call("triton", "prefixes", False, False, True), "split"),
    (Call("torch", None, True, False, True), "split"),
    (Call("triton", None, False, False, False), "kernels"),
    (Call("triton", None, False, True, False), "kernels"),
    (Call("triton", None, True, False, False), "kernels"),  # the interpreter
    (Call("torch", None, True, True, False), "operator"),
    (Call("torch", "prefixes", True, True, False), "traced"),
    (Call("torch", None, False, True, False), "traced"),
    (Call("triton", "prefixes", False, True, False), "traced"),
    (Call("torch", "prefixes", True, False, False), "blocks"),
    (Call("torch", None, False, False, False), "whole"),
    (Call("triton", "prefixes", False, False, False), "whole"),
]


@pytest.mark.parametrize(("call", "name"), CALLS)
def test_the_table_of_runners(call: Call, name: str) -> None:
    assert chosen(*call).name == name


def test_both_calls_have_a_function_for_every_row() -> None:
    """But for ranks that share sequences: corrections are started, and a loss has no kernels for them."""
    names = [runner.name for runner in RUNNERS]
    assert list(CORRECTIONS) == [name for name in names if "split" not in name]
    assert set(LOSSES) == set(names) - {"split kernels"}
    assert {name for _, name in CALLS} == set(names)
