"""The files that `rollout-corr eject` prints against the package, on five batches each; the nightly run takes 200."""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

import rollout_corr as rc
import rollout_corr.eject as room
from builders.files_to_copy import (
    batch,
    correction_differs,
    differences,
    every,
    loaded,
    random_loss,
    random_spec,
    values_differ,
)
from rollout_corr.eject import CannotEject, correction, loss, wanted
from rollout_corr.eject.markers import cut
from rollout_corr.frameworks.shared.preset import RECIPES

PAGE = Path(__file__).parents[2] / "docs" / "eject.md"

# --- every name ---


def asked(name, of_loss):
    """What a file is made from: names with the same settings have the same file."""
    if not of_loss:
        return repr(wanted.of_correction(rc.spec(name)))
    made, entry = rc.recipe(name), RECIPES[name]
    correction = made.spec and wanted.of_correction(made.spec)
    return repr((wanted.of_loss(made.spec, made.loss, entry, made.batch), correction, entry.needs))


# What can be said, by name and kind, and a name for each of the files, by framework.
SAID, NAMES = {}, defaultdict(list)
for one in every():
    with suppress(CannotEject):
        SAID[one] = asked(*one)
for one in {made: one for one, made in reversed(SAID.items())}.values():
    NAMES[one[0].partition(".")[0]].append(one)


# Neighbors of a framework share nearly all settings; every second one is left to `make test-all`.
HALVES = [(framework, 0) for framework in NAMES] + [
    pytest.param(framework, 1, marks=pytest.mark.slow) for framework, names in NAMES.items() if names[1:]
]


@pytest.mark.parametrize(("framework", "half"), HALVES)
def test_files_are_the_package_on_random_batches(framework, half):
    """Masks and verdicts are equal, weights to 1e-6, value and gradient of a loss to 2e-5 of the largest."""
    for name, of_loss in NAMES[framework][half::2]:
        assert list(differences(name, of_loss, 5)) == [], (name, of_loss)


@pytest.mark.parametrize("seed", range(30))
def test_a_correction_is_the_package_for_any_settings(seed):
    """The file as it stands, and without the branches that these settings never take."""
    spec = random_spec(Random(seed))
    values = wanted.of_correction(spec) | {"metrics": True}
    source = room._source("correction")
    whole = correction.Settings(
        **values | {"criteria": tuple(correction.Criterion(**one) for one in values["criteria"])}
    )
    uncut = SimpleNamespace(correct=partial(correction.correct, settings=whole))
    for file in (loaded(cut(source, values)), uncut):
        for number in range(4):
            assert list(correction_differs(file, spec, batch(1000 * seed + number))) == [], spec


@pytest.mark.parametrize("seed", range(0, 200, 10))
def test_a_loss_is_the_package_for_any_settings(seed):
    """With weights that may be NaN, a training mask of 0.3 and a total from outside, or without."""
    for number in range(seed, seed + 10):
        given, draw = batch(number), torch.Generator().manual_seed(number)
        needs = given.random.choice((("old_logp", "ref_logp"), ("ref_logp",)))
        asked = random_loss(given.random, needs)
        new, advantages, mask, cu_seqlens = given.new, given.advantages, given.mask, given.cu_seqlens
        old, ref = given.train if "old_logp" in needs else None, given.ref if asked.kl else None
        weights = torch.rand(new.shape, generator=draw)
        weights[torch.rand(new.shape, generator=draw) < 0.1] = float("nan")
        factors = {
            "weights": given.random.choice((None, weights)),
            "mask": given.random.choice((None, 0.3 * (weights < 0.7))),
        }
        counts = asked.mean.of != "sum" and asked.mean.over == "original"
        total = 17.0 if counts and given.random.random() < 0.5 else None
        settings = loss.Settings(**wanted.of_loss(None, asked, SimpleNamespace(needs=needs), None))
        mine, theirs = (new.detach().clone().requires_grad_() for _ in range(2))
        of_package = rc.Batch(mask=mask, cu_seqlens=cu_seqlens, total=total)
        out = rc.policy_loss(theirs, advantages, of_package, asked, old_logp=old, ref_logp=ref,
                             correction=rc.Factors(**factors))  # fmt: skip
        value = loss.policy_loss(mine, old, advantages, mask, cu_seqlens, factors["weights"], factors["mask"], ref,
                                 total, settings)  # fmt: skip
        assert list(values_differ(value, mine, out.value, theirs)) == [], (number, asked)


def test_the_page_names_what_no_file_says():
    rows = PAGE.read_text(encoding="utf-8").partition("## What no file says")[2].splitlines()
    table = [row.split("|")[2:4] for row in rows if row.startswith("| ") and "`" in row.rpartition("|")[0]]
    named = [set(re.findall(r"`([a-z_]+\.\w+)`", cell)) for cell in map("".join, zip(*table, strict=True))]
    named[1] |= {
        name for presets, losses in table if "the same" in losses for name in re.findall(r"`([^`]+)`", presets)
    }
    assert named == [
        {name for name, kind in every() if kind == of_loss and (name, kind) not in SAID} for of_loss in (False, True)
    ]
    presets, recipes = (sum(kind == of_loss for _, kind in SAID) for of_loss in (False, True))
    told = (
        f"{presets} of {len(rc.spec_names())} presets and the losses of {recipes} of {len(rc.recipe_names())} recipes"
    )
    assert told in PAGE.read_text(encoding="utf-8")


# --- what no batch above shows ---


def test_no_result_has_a_history():
    logp = torch.zeros(1, 3, requires_grad=True)
    out = correction.correct(logp, logp, torch.ones(1, 3, requires_grad=True))
    assert not out.weights.requires_grad and not out.mask.requires_grad


ROWS, ONE = torch.zeros(2, 3), torch.zeros(3)
REFUSED = [
    ((ROWS, torch.zeros(2, 4)), "rollout_logp: expected shape [2, 3] like train_logp, got [2, 4]"),
    ((ROWS, ROWS, torch.ones(3)), "mask: expected shape [2, 3] like train_logp, got [3]"),
    ((ROWS, ROWS.long()), "rollout_logp: expected floats, got torch.int64"),
    ((ROWS, ROWS, None, torch.tensor([0, 6])), "train_logp: expected [N] or [1, N] with cu_seqlens, got [2, 3]"),
    ((ONE, ONE), "train_logp: expected [B, T] without cu_seqlens, got [3]"),
    ((torch.zeros(2, 3, 4),) * 2, "train_logp: expected [B, T] without cu_seqlens, got [2, 3, 4]"),
    ((ONE, ONE, None, torch.tensor([0.0, 3.0])), "cu_seqlens: expected [S + 1] int32 or int64, got torch.float32 [2]"),
    ((ONE, ONE, None, [0, 3]), "cu_seqlens: expected [S + 1] int32 or int64, got list"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_a_correction_refuses(given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        correction.correct(*given)


# --- torch.compile ---

STRICT = correction.Settings(
    level="product", rejected="both", sums_over="kept",
    criteria=(correction.Criterion("ratio", "sequence", "mean", 0.9, 1.1), correction.Criterion("k3", upper=0.1)),
)  # fmt: skip
PENALIZED = loss.Settings(surrogate="gspo", mean="sequence", kl="k3", kl_coef=0.1, kl_gradient="k2")
STOPPED = loss.Settings(surrogate="score", upper=2.0, mean="sequence_sum", length=5.0)


@pytest.mark.parametrize("settings", [correction.Settings(), STRICT], ids=["token", "strict"])
def test_a_correction_is_one_graph(settings):
    train, rollout = torch.arange(6.0) / 10, torch.zeros(6)
    given = train, rollout, torch.tensor([1, 1, 0, 1, 1, 1]), torch.tensor([0, 3, 3, 5]), settings
    compiled = torch.compile(correction.correct, fullgraph=True, backend="aot_eager")(*given)
    plain = correction.correct(*given)
    assert all(torch.equal(one, other) for one, other in zip(compiled[:3], plain[:3], strict=True))


@pytest.mark.parametrize("settings", [loss.Settings(dual=3.0), PENALIZED, STOPPED], ids=["ppo", "gspo", "score"])
def test_a_loss_is_one_graph_forward_and_backward(settings):
    ref = torch.zeros(6) if settings.kl else None
    found = []
    for call in (torch.compile(loss.policy_loss, fullgraph=True, backend="aot_eager"), loss.policy_loss):
        new = (torch.arange(6.0) / 10).requires_grad_()
        value = call(new, torch.zeros(6), torch.tensor([1.0, -1.0, 2.0]), None, torch.tensor([0, 3, 3, 5]), None, None,
                     ref, None, settings)  # fmt: skip
        value.backward()
        found.append((value.item(), new.grad.tolist()))
    assert found[0] == found[1] and any(found[0][1])
