"""The grammar of keys that heads docs/metrics.md: unit, quantity, statistic."""

from __future__ import annotations

import re

import torch

import rollout_corr as rc
from builders.metrics_page import rows

# Of a whole call, whatever it counts.
OF_CALLS = {"weight_divisor"}
STATISTICS = (
    r"mean|std|min|max|argmin|ess|fraction|p[0-9.]+|k[123]|correlation|divergence|divisor|over_entropy|chi2_\w+"
)


def test_a_key_names_its_unit_and_ends_with_its_statistic():
    for row in rows():
        key, unit, over = row.key, row.unit, row.over.words
        name = key.rpartition("/")[2].removeprefix("route_")
        if over == "-":
            assert name.startswith(unit), key
            continue
        assert re.search(rf"(^|_)({STATISTICS})$", name) or key.endswith("chi2_train_rollout"), key
        if "/" in key or name in OF_CALLS or over == "calls":
            continue
        begins = re.match(r"(sequence|turn)s?_", name)
        of = re.search(r"^(?:\S+ )?(sequences|turns)\b", over)
        assert (begins and begins[1] + "s") == (of and of[1]), key
        assert not begins or begins[0][-2] != "s" or name.endswith("_fraction"), key


def test_every_kl_has_the_sign_of_its_direction():
    """Where tokens are sampled by the first policy, the mean of k1 and of k3 tend to the exact divergence."""
    generator = torch.Generator().manual_seed(0)
    rollout, train = (torch.randn(8, generator=generator).log_softmax(0) for _ in range(2))
    tokens = torch.multinomial(rollout.exp(), 400_000, replacement=True, generator=generator)
    offsets = torch.tensor([0, tokens.numel()])
    found = rc.correct(train[tokens], rollout[tokens], cu_seqlens=offsets).metrics()
    exact = (rollout.exp() * (rollout - train)).sum().item()
    other = (train.exp() * (train - rollout)).sum().item()
    assert abs(exact - other) > 0.05 * exact
    # Of 400,000 samples: some deviations of their means.
    for estimator in ("k1", "k3"):
        assert abs(found[f"kl_rollout_train_{estimator}"] - exact) < 0.02 * exact
    chi2 = (train.exp() ** 2 / rollout.exp()).sum().item() - 1.0
    assert abs(found["chi2_train_rollout"] - chi2) < 0.05 * chi2

    # The other direction, of tokens that the trainer sampled.
    tokens = torch.multinomial(train.exp(), 400_000, replacement=True, generator=generator)
    found = rc.correct(train[tokens], rollout[tokens], cu_seqlens=offsets, spec=rc.Spec(detail="full")).metrics()
    assert abs(found["kl_train_rollout_k3"] - other) < 0.02 * other
