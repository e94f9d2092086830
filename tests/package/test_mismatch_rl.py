"""The training run of docs/training_run.md: repeatable, every arm does what its name says, the page has its numbers."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import rollout_corr as rc

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]
MADE = ROOT / "docs" / "mismatch_rl"


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


@pytest.fixture(scope="module")
def curves(example):
    """Train every arm from one seed, in the tiny setting."""
    return {arm: list(example.train(spec, 0, example.TINY, arm != "no mismatch")) for arm, spec in example.ARMS.items()}


def test_a_seed_gives_one_curve(example, curves):
    """The global generator has no influence, and stays as it was."""
    example.warm_start.cache_clear()
    for arm in ("no mismatch", "token truncation"):
        spec = example.ARMS[arm]
        torch.manual_seed(len(arm))
        state = torch.random.get_rng_state()
        again = list(example.train(spec, 0, example.TINY, arm != "no mismatch"))
        assert again == curves[arm], arm
        assert torch.equal(state, torch.random.get_rng_state())
    # Few lessons: they only have to make two starts.
    short = replace(example.TINY, lessons=3)
    one, other = (list(example.train(example.ARMS["uncorrected"], seed, short)) for seed in (0, 1))
    assert one != other


def test_measuring_more_often_changes_no_run(example, curves):
    often = list(example.train(example.ARMS["token truncation"], 0, replace(example.TINY, every=1)))
    assert [p["reward"] for p in often[1::2]] == [p["reward"] for p in curves["token truncation"]]


def test_without_a_mismatch(curves):
    for point in curves["no mismatch"]:
        assert point["kl"] <= 1e-6 and point["ess"] >= 1.0 - 1e-6 and point["kept"] == 1.0, point


def test_uncorrected_is_a_correction_switched_off(example, curves):
    for arm, spec in example.ARMS.items():
        if arm not in ("no mismatch", "uncorrected"):
            off = list(example.train(replace(spec, apply=False), 0, example.TINY))
            rest = [{name: x for name, x in point.items() if name != "kept"} for point in off]
            assert rest == [{k: x for k, x in point.items() if k != "kept"} for point in curves["uncorrected"]], arm
            assert curves[arm] != off, f"{arm} changes nothing, so switching it off shows nothing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "none"], "--arms: expected some of ['no mismatch', 'uncorrected',"),
        (["--arms", "none"], "got ['none']"),
        (["--steps", "1"], "--steps >= 2, --bits >= 2"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, example, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["mismatch_rl.py", "--tiny", *arguments])
    with pytest.raises(SystemExit):
        example.main()
    assert message in capsys.readouterr().err


def test_what_is_measured_makes_sense(curves):
    rewards = set()
    for arm, points in curves.items():
        assert [point["step"] for point in points] == [2, 4, 6]
        for point in points:
            assert 0.0 < point["ess"] <= 1.0 and 0.0 <= point["reward"] <= 1.0, (arm, point)
            rejects = arm in ("sequence rejection", "geometric masking")
            assert 0.0 < point["kept"] < 1.0 if rejects else point["kept"] == 1.0, (arm, point)
            assert point["kl"] > 1e-3 or arm == "no mismatch", (arm, point)
            rewards.add(point["reward"])
    assert len(rewards) > 3, "nothing was learned or unlearned, so equal curves show nothing"


def test_rollouts_are_as_old_as_they_should_be(example):
    """With 20-bit integers only the age matters: no mismatch in the first step, and never at age 0."""
    fine = replace(example.TINY, bits=20, every=1)
    spec = example.ARMS["uncorrected"]
    ages = {stale: [p["kl"] for p in example.train(spec, 0, replace(fine, stale=stale))] for stale in (0, 1, 2)}
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
    for asked, right in zip(prompt.tolist(), wanted.tolist(), strict=True):
        digits = sorted(x for x in asked if x < 10)
        assert right == [*digits, example.STOP, *[example.EMPTY] * (example.LONGEST - len(digits))]
    assert example.reward_of(wanted, wanted).tolist() == [1.0] * 64
    assert example.reward_of(wanted.roll(1, 0), wanted).mean() < 0.1


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounded(example, bits):
    weight = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    close = example.rounded(weight, bits)
    step = weight.abs().amax(1) / (2 ** (bits - 1) - 1)
    assert ((close - weight).abs().amax(1) <= step / 2 * 1.001).all()
    assert max(len(row.unique()) for row in close) <= 2**bits - 1
    vector = torch.randn(5)
    assert example.rounded(vector, bits) is vector


def test_the_p_value(results):
    """Sign patterns are counted by hand."""
    assert results.p_value([1.0, 2.0, 3.0]) == 2 / 8
    assert results.p_value([1.0, -1.0]) == 1.0
    assert results.p_value([3.0, 1.0, -1.0]) == 4 / 8 + 2 / 8
    assert results.p_value([0.0, 0.0]) == 1.0


def test_the_table(results):
    """Means of last quarters, standard errors and signs of curves that are easy to add up."""

    def runs(*ends):
        flat = {"kl": 0.5, "ess": 0.25, "kept": 1.0}
        return [[{"step": i, "reward": end if i >= 6 else 9.0, **flat} for i in range(8)] for end in ends]

    found = {"uncorrected": runs(0.1, 0.3), "token truncation": runs(0.3, 0.4)}
    plain, better = results.rows_of(found)
    assert plain == ["uncorrected", "0.200 +- 0.100", "-", "0.500", "0.250", "1.000"]
    assert better[1:3] == ["0.350 +- 0.050", "+0.150 (within noise, p = 0.500, better in 2 of 2 seeds)"]
    six = {"uncorrected": runs(*[0.1] * 6), "token truncation": runs(*[0.2] * 6)}
    assert results.rows_of(six)[1][2] == "+0.100 (p = 0.031, better in 6 of 6 seeds)"
    assert math.isclose(results.standard_error([1.0, 2.0, 3.0]), math.sqrt(1 / 3))


def test_arms_are_the_recipes(example):
    """The arms are what the page says."""
    arms = example.ARMS
    assert arms["no mismatch"] == arms["uncorrected"] and not arms["uncorrected"].criteria
    assert arms["uncorrected"].weight is None and arms["token truncation"].weight == rc.Weight.token(upper=2.0)
    (product,), (geometric,) = (arms[x].criteria for x in ("sequence rejection", "geometric masking"))
    assert (product.reduce, product.lower, product.upper) == ("sum", 0.5, 2.0)
    assert (geometric.reduce, geometric.lower, geometric.upper) == ("mean", 1 / 1.1, 1.1)


@pytest.fixture(scope="module")
def made():
    """Read the committed results."""
    return json.loads((MADE / "results.json").read_text(encoding="utf-8"))


def test_the_committed_table_is_the_committed_numbers(example, results, made):
    """Every page shows the committed table, and its setting is today's default."""
    table = (MADE / "results.md").read_text(encoding="utf-8")
    assert table == results.table_of(made)
    assert all(table in (ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/training_run.md"))
    assert made["about"]["setting"] == json.loads(json.dumps(asdict(example.Setting())))
    assert made["about"]["version"].startswith("commit ") and list(made["curves"]) == list(example.ARMS)


def test_what_the_page_says_of_the_committed_numbers(example, results, made):
    end = {arm: [results.at_end(run, "reward") for run in runs] for arm, runs in made["curves"].items()}
    end["start"] = made["start"]

    def apart(a, b):
        """Return the difference of the means and its p-value."""
        gains = [x - y for x, y in zip(end[a], end[b], strict=True)]
        return sum(gains) / len(gains), results.p_value(gains)

    for corrected in ("token truncation", "geometric masking"):
        assert apart(corrected, "uncorrected")[0] > 0 and apart(corrected, "uncorrected")[1] < 0.05
    rejected = [x - y for x, y in zip(end["sequence rejection"], end["uncorrected"], strict=True)]
    assert sum(rejected) > 0 and results.p_value(rejected) > 0.05 and sum(x < 0 for x in rejected) == 1
    assert apart("uncorrected", "start")[1] > 0.05
    for arm in set(end) - {"no mismatch"}:
        assert apart("no mismatch", arm)[0] > 0 and apart("no mismatch", arm)[1] < 0.05, arm
    corrections = ("token truncation", "sequence rejection", "geometric masking")
    assert all(apart(a, b)[1] > 0.05 for a, b in itertools.combinations(corrections, 2))
    assert 1.7 < sum(end["no mismatch"]) / sum(end["start"]) < 2.0
    first = [run[0]["reward"] for run in made["curves"]["uncorrected"]]
    assert sum(first) < sum(made["start"])
    for arm in ("sequence rejection", "geometric masking"):
        kept = [results.at_end(run, "kept") for run in made["curves"][arm]]
        assert 0.5 < sum(kept) / len(kept) < 0.6
    kl = {arm: sum(results.at_end(run, "kl") for run in runs) for arm, runs in made["curves"].items()}
    assert all(kl["uncorrected"] > 1.4 * kl[arm] for arm in corrections)
    count = sum(x.numel() for x in example.Policy(example.Setting().width).parameters())
    assert round(count, -3) == 58_000, count


def test_the_committed_sweep(load, example, results):
    """The page shows the committed table, and its sentences hold."""
    sweep = load("mismatch_sweep")
    found = json.loads((MADE / "sweep.json").read_text(encoding="utf-8"))
    table = (MADE / "sweep.md").read_text(encoding="utf-8")
    assert table == sweep.table_of(found) and table in (ROOT / "docs" / "training_run.md").read_text(encoding="utf-8")
    assert found["about"]["setting"] == json.loads(json.dumps(asdict(example.Setting())))
    assert [(cell["bits"], cell["stale"]) for cell in found["cells"]] == sweep.CELLS
    end = {
        (cell["bits"], cell["stale"]): {
            arm: [results.at_end(run, "reward") for run in runs] for arm, runs in cell["curves"].items()
        }
        for cell in found["cells"]
    }

    def gains(cell, arm):
        return [x - y for x, y in zip(end[cell][arm], end[cell]["uncorrected"], strict=True)]

    best = sum(results.at_end(run, "reward") for run in found["curves"]["no mismatch"])
    cost = {cell: best - sum(arms["uncorrected"]) for cell, arms in end.items()}
    assert 0.8 < cost[8, 4] / cost[4, 4] < 1.25 and cost[4, 0] < cost[4, 4] / 4
    assert min(cost[4, 8], cost[3, 4]) > cost[4, 4]
    assert max(gains((4, 0), "geometric masking")) < 0
    assert all(min(gains(cell, "token truncation")) > 0 for cell in end)


def test_the_committed_picture_is_of_the_committed_numbers(results, made):
    drawn = (MADE / "curves.svg").read_text(encoding="utf-8")
    assert len(drawn) < 150_000 and results.caption_of(made) in drawn
    assert all(name in drawn for name in made["curves"])
    for page in ("README.md", "docs/training_run.md"):
        assert "mismatch_rl/curves.svg)" in (ROOT / page).read_text(encoding="utf-8")


def test_make_example_leaves_what_is_published(example):
    """Row 4 of the users' review: `make example ARGS="--tiny"` overwrote docs/mismatch_rl with six steps of noise."""
    (recipe,) = re.findall(r"^example: .*\n\t(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    folder = recipe.partition("--out ")[2].split()[0]
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert folder.partition("/")[0] + "/" in ignored and recipe.endswith("$(ARGS)")
    assert example.too_short(example.Setting(), 6) == ""
    for setting, seeds, reason in (
        (example.TINY, 6, "6 steps"),
        (example.Setting(), 5, "5 seeds, and with fewer than 6"),
    ):
        assert reason in example.too_short(setting, seeds)
