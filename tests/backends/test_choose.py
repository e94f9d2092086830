"""Which backend runs for a tensor, and why; an explicit choice never falls back."""

from __future__ import annotations

import pytest
import torch

import rollout_corr as rc
from rollout_corr.backends import operators


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
    name, reason = rc.backend_for(torch.zeros(1))
    assert name == "torch"
    assert "cpu" in reason
    with pytest.raises(TypeError, match="tensor: expected a tensor, got int"):
        rc.backend_for(3)  # type: ignore[arg-type]  # the wrong type is the point
