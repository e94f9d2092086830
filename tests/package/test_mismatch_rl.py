"""The training runs of docs/trust.md: repeatable, every arm does what its name says, the page has its numbers."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import rollout_corr as rc

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def load():
    """Return a function that imports an example as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        yield importlib.import_module


@pytest.fixture(scope="module")
def example(load):
    return load("mismatch_rl")


@pytest.fixture(scope="module")
def results(load):
    return load("mismatch_results")


def test_rollouts_are_as_old_as_they_should_be(example):
    """With 20-bit integers only the age matters: no mismatch in the first step, and never at age 0."""
    fine = replace(example.TINY, bits=20, every=1)
    ages = {s: [p["kl"] for p in example.train("uncorrected", 0, replace(fine, stale=s))] for s in (0, 1, 2)}
    assert max(ages[0]) < 1e-6 and ages[1][0] < 1e-6 < 1e-5 < max(ages[1][1:])
    assert ages[2][:2] == ages[1][:2] and ages[2][2] > ages[1][2]


def test_the_sampler_says_what_it_sampled_with(example):
    policy = example.warm_start(0, 32, 60, (1, 2))
    generator = torch.Generator().manual_seed(3)
    prompt, wanted = example.draw(64, generator, (1, 8))
    answer, logp, mask = example.sample(policy, prompt, generator)
    with torch.no_grad():
        torch.testing.assert_close(logp[mask], example.logp_of(policy, prompt, answer)[mask], rtol=1e-4, atol=1e-5)
    for given, ok in zip(answer.tolist(), mask.tolist(), strict=True):
        length = given.index(example.STOP) + 1 if example.STOP in given else len(given)
        assert ok == [i < length for i in range(len(given))]
        assert given[length:] == [example.EMPTY] * (len(given) - length)
    assert example.reward_of(wanted, wanted).tolist() == [1.0] * 64
    assert example.reward_of(wanted.roll(1, 0), wanted).mean() < 0.1


def test_the_p_value_and_the_table(results):
    """Sign patterns are counted by hand; means of last quarters of curves that are easy to add up."""
    assert results.p_value([1.0, 2.0, 3.0]) == 2 / 8 and results.p_value([3.0, 1.0, -1.0]) == 4 / 8 + 2 / 8
    assert results.p_value([0.0, 0.0]) == 1.0

    def runs(*ends):
        flat = {"kl": 0.5, "ess": 0.25, "kept": 1.0}
        return [[{"step": i, "reward": end if i >= 6 else 9.0, **flat} for i in range(8)] for end in ends]

    plain, better = results.rows_of({"uncorrected": runs(0.1, 0.3), "token truncation": runs(0.3, 0.4)})
    assert plain == ["uncorrected", "0.200 +- 0.100", "-", "0.500", "0.250", "1.000"]
    assert better[1:3] == ["0.350 +- 0.050", "+0.150 (within noise, p = 0.500, better in 2 of 2 seeds)"]


def test_the_bounds_of_readme_are_suggested_once(example, monkeypatch):
    asked, suggest = [], rc.suggest
    monkeypatch.setattr(rc, "suggest", lambda *given: asked.append(given) or suggest(*given))
    for arm in example.ARMS:
        kept = [point["kept"] for point in example.train(arm, 0, replace(example.TINY, prompts=32))]
        assert len(asked) == (arm == example.SUGGESTED), arm
        if asked:
            assert min(kept) < 1.0
            asked.clear()


def published(folder: str, run: str = "results") -> dict:
    return json.loads((DOCS / folder / f"{run}.json").read_text(encoding="utf-8"))


def ends_of(results, made: dict) -> dict:
    return {arm: [results.at_end(run, "reward") for run in runs] for arm, runs in made["curves"].items()}


def test_fresh_weights_end_where_no_mismatch_does(results):
    whole, fresh = (ends_of(results, published("engine_rl", run)) for run in ("results", "fresh"))
    assert results.p_value([a - b for a, b in zip(fresh["uncorrected"], whole["no mismatch"], strict=True)]) > 0.05
    assert min(a - b for a, b in zip(fresh["uncorrected"], whole["uncorrected"], strict=True)) > 0


def test_the_committed_tables_are_the_committed_numbers(results):
    short, engine = published("mismatch_rl"), published("engine_rl")
    for page, table in (
        ("docs/trust.md", results.table_of(short)),
        ("docs/trust.md", results.table_of(engine)),
        ("tests/lab/engine/README.md", results.over_time(engine)),
    ):
        assert table in (ROOT / page).read_text(encoding="utf-8"), page
    alone = engine | {"curves": {"no mismatch": engine["curves"]["no mismatch"]}}
    assert "| no mismatch | 0.0000 | 0.0001 | 0.0001 | healthy 48 |" in results.over_time(alone)


def test_the_committed_settings_are_the_defaults(example):
    assert published("mismatch_rl")["about"]["setting"] == json.loads(json.dumps(asdict(example.Setting())))


def test_the_rewards_in_readme_are_the_committed_ones(results):
    engine = published("engine_rl")
    end = ends_of(results, engine) | {"before RL": engine["start"]}
    rewards = {arm: statistics.fmean(runs) for arm, runs in end.items()}
    gains = [a - b for a, b in zip(end["token truncation"], end["uncorrected"], strict=True)]
    told = [rewards[arm] for arm in ("no mismatch", "uncorrected", "before RL", "token truncation")]
    told += [statistics.fmean(gains), results.p_value(gains)]
    told.append(rewards["TIS + suggest"])
    short = ends_of(results, published("mismatch_rl"))
    told += [statistics.fmean(short[arm]) for arm in ("TIS + suggest", "token truncation", "uncorrected")]
    part = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What it does to a run")[2]
    assert re.findall(r"0\.\d{3}", part) == [f"{x:.3f}" for x in told]


TIS, SUGGEST, PRODUCT, GEOMETRIC = "token truncation", "TIS + suggest", "sequence rejection", "geometric masking"


# In every seed the first is above each of the second; or no seed tells the two apart.
@pytest.mark.parametrize(
    ("folder", "run", "above", "alike"),
    [
        (
            "mismatch_rl", "results",
            {"no mismatch": ("start", "uncorrected", PRODUCT, TIS, SUGGEST, GEOMETRIC), TIS: ("uncorrected",),
             SUGGEST: ("uncorrected",), GEOMETRIC: ("uncorrected",)},
            [*itertools.combinations((TIS, SUGGEST, PRODUCT, GEOMETRIC), 2), (PRODUCT, "uncorrected"),
             ("uncorrected", "start")],
        ),
        (
            "engine_rl", "results",
            dict.fromkeys(("start", TIS, SUGGEST, "no mismatch"), ("uncorrected",)),
            [*itertools.combinations(("no mismatch", TIS, SUGGEST), 2), ("suggested rejection", "uncorrected")],
        ),
        (
            "engine_rl", "second",
            {TIS: ("uncorrected", "suggested rejection"), "no mismatch": ("uncorrected",)},
            [("no mismatch", TIS), ("suggested rejection", "uncorrected")],
        ),
    ],
)  # fmt: skip
def test_what_the_page_says_of_the_committed_numbers(results, folder, run, above, alike):
    made = published(folder, run)
    end = ends_of(results, made) | {"start": made["start"]}

    def gains(a, b):
        return [x - y for x, y in zip(end[a], end[b], strict=True)]

    for one, others in above.items():
        assert all(min(gains(one, other)) > 0 for other in others), one
    for pair in alike:
        assert results.p_value(gains(*pair)) > 0.05, pair


def test_make_example_leaves_what_is_published(example):
    """`make example ARGS="--tiny"` writes to build, and says that six steps mean nothing."""
    (recipe,) = re.findall(r"^example: .*\n\t(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert "--out build/" in recipe and recipe.endswith("$(ARGS)")
    assert example.too_short(example.Setting(), 6) == ""
    assert "6 steps" in example.too_short(example.TINY, 6) and "5 seeds" in example.too_short(example.Setting(), 5)
