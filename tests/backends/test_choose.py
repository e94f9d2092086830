"""Which backend runs for a tensor, and why; an explicit choice never falls back."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import rollout_corr as rc
from rollout_corr.api.policy_loss import LOSSES
from rollout_corr.backends import choose, operators
from rollout_corr.backends.choose import RUNNERS, Call, chosen, chosen_backend
from rollout_corr.backends.run import CORRECTIONS


@pytest.mark.parametrize(
    ("installed", "why"),
    [
        ({"triton": "3.6.0"}, None),
        ({"pytorch-triton-rocm": "10.0.1+git0bcc8265"}, None),
        ({"triton": "3.5.1"}, "the kernels need Triton >= 3.6, and 3.5.1 is installed"),
        ({"triton": "main"}, "the kernels need Triton >= 3.6, and main is installed"),
        ({}, "the kernels need Triton >= 3.6, and none is installed"),
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


def test_backend_for_says_which_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is left to plain torch the reason is the one by which backend="triton" is refused."""
    name, runner, reason = rc.backend_for(torch.zeros(1))
    assert (name, runner) == ("torch", "blocks")
    assert reason == "tensors on cpu run on the definition on blocks of whole sequences, which stay in cache"
    monkeypatch.setattr(operators, "MISSING_TRITON", None)
    monkeypatch.setattr(operators, "DEVICES", ("meta",))
    on_gpu, weights = torch.zeros(1, device="meta"), rc.Spec(weight=rc.Weight.token(upper=2.0))
    assert rc.backend_for(on_gpu, weights) == ("triton", "kernels", "tensors on meta run on the Triton kernels")
    assert rc.backend_for(on_gpu, surrogate=rc.PPO(0.2, 0.2)).name == "triton"
    decided = rc.Spec(criteria=(rc.Criterion("abs", over="token", upper=rc.Quantile(0.9)),))
    name, runner, reason = rc.backend_for(on_gpu, decided)
    refused = operators.beyond_kernels(decided)
    assert refused is not None and (name, runner) == ("torch", "whole") and reason.startswith(refused)
    name, runner, reason = rc.backend_for(on_gpu, surrogate=rc.REAL())
    assert (name, runner) == ("torch", "whole") and reason.startswith("REAL() looks at groups of sequences")
    name, runner, reason = rc.backend_for(on_gpu.double(), weights)
    assert (name, runner) == ("torch", "whole") and "float64" in reason
    of_cpu = torch.zeros(1, dtype=torch.float64)
    assert [rc.backend_for(of_cpu, spec).runner for spec in (weights, decided)] == ["blocks", "whole"]


WITHOUT_NUMPY = """
import os, sys
sys.modules["numpy"] = None
import torch
for interprets in "01":
    if not os.fork():
        os.environ["TRITON_INTERPRET"] = interprets
        import rollout_corr as rc
        logp = -torch.ones(2, 3)
        rc.correct(logp, logp, backend="triton")
    os.wait()
"""


def test_the_kernels_on_a_cpu_without_numpy() -> None:
    """As after a plain installation, which brings no NumPy; outside of Triton's interpreter and in it."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMPY], capture_output=True, text=True, check=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("ValueError: ")]
    expected = "ValueError: backend: expected 'auto' or 'torch' for cpu tensors, got 'triton': "
    why = (
        "the kernels run on cuda tensors; on a CPU they run only in Triton's interpreter (TRITON_INTERPRET=1)",
        "TRITON_INTERPRET is set, and Triton's interpreter needs NumPy, which is not installed",
    )
    assert [line.startswith(expected + each) for line, each in zip(said, why, strict=True)] == [True, True], said


def test_the_environment_stands_for_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for nothing that a call says itself; what is no backend is named."""
    monkeypatch.setattr(operators, "MISSING_TRITON", None)
    monkeypatch.setattr(operators, "DEVICES", ("meta",))
    on_gpu, on_cpu = torch.zeros(1, device="meta"), torch.zeros(1)
    assert [choose.wanted_by(x) for x in ({}, {"ROLLOUT_CORR_BACKEND": "torch"})] == ["auto", "torch"]
    with pytest.raises(ValueError, match=r"ROLLOUT_CORR_BACKEND: expected one of \['auto'.*got 'cuda'"):
        choose.wanted_by({"ROLLOUT_CORR_BACKEND": "cuda"})
    monkeypatch.setattr(choose, "WANTED", "torch")
    assert chosen_backend(on_gpu, "auto") == "torch" and chosen_backend(on_gpu, "triton") == "triton"
    name, runner, reason = rc.backend_for(on_gpu)
    assert (name, runner) == ("torch", "whole") and reason.startswith("ROLLOUT_CORR_BACKEND=torch; ")
    monkeypatch.setattr(choose, "WANTED", "triton")
    assert chosen_backend(on_gpu, "auto") == chosen_backend(on_cpu, "auto") == "triton"  # the interpreter on the CPU
    monkeypatch.setattr(operators, "MISSING_TRITON", "none is installed")
    assert chosen_backend(on_cpu, "auto") == "torch"
    with pytest.raises(ValueError, match=r"ROLLOUT_CORR_BACKEND: expected 'auto' or 'torch' for meta.*none is inst"):
        chosen_backend(on_gpu, "auto")


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
    (Call("torch", "bounds", True, False, False, True), "whole"),  # those of a float64 batch
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
