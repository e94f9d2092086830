"""Presets, recipes, readers, drop-ins and reports next to the results that the frameworks' own functions gave."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders import preset_cases
from conformance import campaign, page, recording
from conformance.batches import batch
from conformance.declared import LEFT_OUT
from conformance.rows import BACKEND, Tally, size_of_terms, unequal
from conformance.sources import RECORDED, Source
from rollout_corr.frameworks.shared import lookup

pytestmark = pytest.mark.usefixtures("one_thread", "quiet")

# Papers, programs in JAX, and losses of versions that their frameworks have left: their formulas are restated in
# tests/oracles/published.py, and the Specs of their presets are written out in tests/builders/preset_cases.py.
NOT_RECORDED = {
    *("areal.cispo", "areal.kpop", "dppo.kl", "dppo.tv", "fast_llm.grpo", "fast_llm.gspo", "flash_rl.tis"),
    *("glm.double_sided", "glm.icepop", "kimi.interval", "kimi.k25", "megatron.grpo", "megatron.tis"),
    *("minirl.default", "minirl.mask", "prime_rl.icepop", "prime_rl.kpop", "rllm.cispo", "rllm.dppo_kl"),
    *("rllm.dppo_tv", "rllm.gspo", "rllm.icepop", "rllm.ppo_clip", "rllm.reinforce", "rllm.reinforce_kl"),
    *("tinker.cispo", "tinker.importance_sampling", "tinker.ppo", "torchforge.default", "tunix.dapo"),
    *("tunix.drgrpo", "tunix.grpo", "tunix.gspo_token", "tunix.ppo", "tunix.tis"),
}


@pytest.mark.parametrize("framework", recording.frameworks())
def test_what_was_recorded(framework):
    compared = campaign.replayed(framework)
    assert compared and all(tally.cases for _, tally in compared)
    assert not {tally.row: tally.undeclared[:2] for _, tally in compared if tally.undeclared}


@pytest.mark.parametrize("framework", recording.frameworks())
def test_differences_are_declared_on_a_page(framework):
    for recorded in recording.load(framework):
        for row in campaign.rows_of(recorded.source):
            assert [known.name for known in row.declared if not known.is_documented()] == [], row.key


def test_the_page_lists_what_is_recorded():
    assert page.standing() in page.PAGE.read_text(encoding="utf-8"), "write it again: make conformance ARGS=--list"


def in_float32(given):
    """The same numbers, rounded."""
    if given.new.dtype != torch.float64:
        return given
    return replace(given, **{name: getattr(given, name).float() for name in ("new", "old", "rollout", "ref")})


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize("framework", ["verl", "xtuner", "skyrl"])
def test_reports_of_the_kernels(framework):
    """The metrics under the framework's own keys from Triton's kernels, interpreted, on the batches that are shared.

    In float32, also those that were recorded in float64, which kernels refuse.
    """
    recorded = next(recording.load(framework))
    (row,) = (row for row in campaign.rows_of(recorded.source) if row.kind == "report")
    tally, token = Tally(row.title), BACKEND.set("triton")
    try:
        for case in recorded.rows[row.key]:
            if case.batch.kind != "aimed":
                tally.add(row, *case._replace(batch=in_float32(case.batch)))
    finally:
        BACKEND.reset(token)
    assert tally.cases > 8 and not tally.undeclared


def test_everything_is_recorded_that_can_be():
    """A new preset, recipe or reader gets a row in `peers`, or its name above."""
    said = [source for name in recording.frameworks() for source in recording.described(name)["sources"]]
    recorded = {row["row"] for source in said for row in source["rows"]}
    names = {title.partition("`")[2].rstrip("`").partition(",")[0] for title in recorded}
    assert recording.frameworks() == campaign.frameworks()
    assert {*lookup.spec_names(), *lookup.recipe_names()} - names == NOT_RECORDED
    assert NOT_RECORDED & {*lookup.spec_names()} == preset_cases.EXPECTED.keys()
    # rLLM has verl's function for its weights.
    assert {*lookup.readable("read"), *lookup.readable("recipe")} - names == {"rllm"}


def test_a_question_that_no_recording_answers_is_an_error():
    with pytest.raises(LookupError, match="make conformance ARGS='verl --record'"):
        Source("verl", "1.0", recording.FOLDER, RECORDED).has("verl/new.py")


def test_a_declared_difference_hides_no_other(monkeypatch):
    """verl's IcePop is declared where it leaves no weight, and nowhere else."""
    true = rc.spec

    def planted(name, *config, **settings):
        made = true(name, *config, **settings)
        return replace(made, weight=replace(made.weight, upper=1.05))

    monkeypatch.setattr(rc, "spec", planted)
    (found,) = campaign.replayed("verl", lambda row: row.title == "preset `verl.decoupled_token_icepop`")
    assert found.tally.undeclared


def test_what_stands_behind_the_mask_excuses_its_own_rows_alone():
    """SkyRL's sums over a row multiply NaN by 0; a row without padding has no such excuse."""
    given = next(b for b in (batch("nan_behind_mask", seed) for seed in range(20)) if b.new.isnan().any())
    ours = torch.ones(given.mask.shape, dtype=given.new.dtype).where(given.mask, 0.0)
    ours[0, 0] = 2.0
    padded, whole = ~given.mask.all(1), given.mask.all(1)
    for at, excused in ((padded, True), (whole, False)):
        theirs = ours.clone()
        theirs[at.nonzero()[0, 0], 0] = 0.0
        assert LEFT_OUT.explains("gradient", given, {}, theirs, ours) == excused


def test_terms_that_cancel_leave_their_rounding():
    """CISPO's loss of 1,400 tokens is a sum of +-4 that is about 0: in float32 it is right to 3e-5, and not to 3e-2."""
    given = batch("long", 1)
    slope = torch.where(torch.arange(700) % 2 == 0, 2.0, -2.0).expand(2, 700)
    found = {"loss": -3e-5, "gradient": slope}
    assert 1000 < size_of_terms(found, given) < 10_000
    assert unequal(0.0, -3e-5, 2e-5, size_of_terms(found, given)) is None
    assert unequal(0.0, -0.3, 2e-5, size_of_terms(found, given)) is not None
    assert unequal(0.0, -3e-5, 2e-5) is not None
