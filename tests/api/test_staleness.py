"""Versions of policies: metrics of ages, a version of the future, fillers, and names; random calls judge the rest."""

from __future__ import annotations

import torch

import rollout_corr as rc

ZEROS = torch.zeros(2, 3)


def test_ages_are_reported_without_a_spec_that_reads_them():
    """Behind all other metrics, of the valid tokens; a filler at the end of int64 is old, and not of the future."""
    ids = torch.tensor([[7, 5, 99], [-(2**63), 8, 4]])
    batch = rc.Batch(mask=torch.tensor([[1, 1, 0], [0, 1, 1]]), versions=rc.Versions(ids, 7))
    plain, found = (rc.correct(ZEROS, ZEROS, one).metrics() for one in (rc.Batch(mask=batch.mask), batch))
    assert list(found)[-5:] == ["age_mean", "age_max", "age_min", "tokens_stale_fraction", "tokens_newer"]
    ages = {"age_mean": 1.0, "age_max": 3.0, "age_min": -1.0, "tokens_stale_fraction": 0.5, "tokens_newer": 1}
    assert found == plain | ages
    spec = rc.Spec(criteria=(rc.Criterion("age", upper=1),))
    out = rc.correct(ZEROS, ZEROS, rc.Batch(versions=rc.Versions(torch.tensor([7, -(2**63)]), 7)), spec=spec)
    assert out.mask.tolist() == [[True] * 3, [False] * 3] and out.metrics()["age_min"] == 0.0


def test_a_version_of_the_future_is_warned_of():
    x, versions = torch.linspace(-2.0, -0.1, 40).view(4, 10), torch.full((4, 10), 5)
    mask = (torch.arange(10) < 8).expand(4, 10)
    versions[0, 2:5], versions[1, 9] = 7, 99

    def said(current):
        return rc.correct(x, x - 0.001, rc.Batch(mask=mask, versions=rc.Versions(versions, current))).warnings()

    (warning,) = said(5)
    assert warning.startswith("3 valid tokens were sampled by a newer version than versions.current, by up to 2:")
    assert said(7) == []
    versions[0, 3:5] = 5
    assert said(5)[0].startswith("1 valid token was sampled")


def test_an_external_tensor_may_be_called_age():
    spec = rc.Spec(criteria=(rc.Criterion("age", upper=1), rc.Criterion("external", upper=0.5, name="age", label="x")))
    batch = rc.Batch(external={"age": ZEROS + 1}, versions=rc.Versions(torch.full((2, 3), 5), 5))
    out = rc.correct(ZEROS, ZEROS, batch, spec=spec)
    assert not out.mask.any() and out.metrics()["token_age/tokens_rejected_fraction"] == 0.0
