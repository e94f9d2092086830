"""The campaign counts what is right and refused, and finds every way to be wrong, under its seed."""

from __future__ import annotations

import datetime
import re
import time
from pathlib import Path

import pytest

from attack import __main__, bad_attempts, campaign, figures, worker
from attack.campaign import Area, Outcome

SEEDS = range(2, 6)


def area(attempt, limit=60.0, name="tried"):
    return Area(name, "attempts", attempt, count=4, few=1, limit=limit)


def found_by(attempt, limit=60.0):
    (found,) = campaign.run([(area(attempt, limit), SEEDS)])
    return found


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (bad_attempts.says_wrong, "1 is not 2"),
        (bad_attempts.raises, "KeyError: 'a name'"),
        (bad_attempts.exits, "SystemExit: 0"),
        (bad_attempts.dies, "the process ended by SIGSEGV"),
        (bad_attempts.leaves, "it left with exit code 0"),
        (bad_attempts.returns_nothing, "attempt() returned None"),
    ],
)
def test_what_is_wrong_is_found_under_its_seed(attempt, said):
    """The seeds after it are tried too: a process that has died is replaced."""
    found = found_by(attempt)
    assert list(found.wrong) == [bad_attempts.BAD] and said in found.wrong[bad_attempts.BAD]
    assert (found.tried, found.right + found.refused) == (4, 3)


def test_a_crash_says_where():
    assert "in dies" in found_by(bad_attempts.dies).wrong[bad_attempts.BAD]


def test_a_hung_attempt_is_wrong_and_says_where():
    begun = time.monotonic()
    found = found_by(bad_attempts.hangs, limit=0.5)
    assert list(found.wrong) == [bad_attempts.BAD]
    said = found.wrong[bad_attempts.BAD]
    assert said.startswith("no answer within 0.5 s") and "in hangs" in said
    assert found.right == 3 and time.monotonic() - begun < 60


def test_time_that_an_attempt_waits_for_a_core_does_not_count(monkeypatch):
    """A machine that is busy with other things makes nothing hang."""
    monkeypatch.setattr(worker.Worker, "_waited", lambda self: time.monotonic())
    assert found_by(bad_attempts.takes_its_time, limit=0.01).right == 4
    monkeypatch.setattr(worker.Worker, "_waited", lambda self: 0.0)
    (found,) = campaign.run([(area(bad_attempts.takes_its_time, limit=0.01), range(1))])
    assert list(found.wrong) == [0]


def test_what_a_hung_attempt_has_started_ends_with_it(tmp_path, monkeypatch):
    child = tmp_path / "child"
    monkeypatch.setenv("ATTACK_TEST_CHILD", str(child))
    monkeypatch.setattr(worker, "LAST_WORDS", 0.5)
    found = found_by(bad_attempts.hangs_deaf, limit=1.0)
    assert list(found.wrong) == [bad_attempts.BAD] and found.right == 3
    status = Path("/proc", child.read_text(encoding="utf-8"), "stat")
    # Whoever adopted it may not have reaped it yet: Z is a process that has ended.
    assert not status.exists() or status.read_text(encoding="utf-8").split()[2] == "Z"


def test_counts():
    found = found_by(bad_attempts.raises)
    assert (found.right, found.refused, len(found.wrong)) == (0, 3, 1)


def test_areas_share_the_processes():
    asked = [(area(bad_attempts.says_wrong, name="a"), SEEDS), (area(bad_attempts.raises, name="b"), range(3))]
    seen = []
    found = campaign.run(asked, workers=2, each=lambda area, seed, outcome: seen.append((area.name, seed)))
    assert [one.tried for one in found] == [4, 3]
    assert sorted(seen) == [("a", seed) for seed in SEEDS] + [("b", seed) for seed in range(3)]


def test_the_time_is_bounded():
    (found,) = campaign.run([(area(bad_attempts.takes_its_time), range(10**9))], seconds=0.3)
    assert 0 < found.tried < 10**9
    assert f"the time was up after {found.tried:,}" in figures.table([found])


def test_a_short_campaign_tries_every_area():
    asked = [(area(bad_attempts.takes_its_time, name=name), range(10**9)) for name in "ab"]
    assert all(found.tried for found in campaign.run(asked, seconds=2.0))


def test_an_outcome_has_one_of_three_verdicts():
    with pytest.raises(ValueError, match="verdict: expected one of"):
        Outcome("fine")


def a_finding():
    found = campaign.Figures(area(bad_attempts.says_wrong), SEEDS)
    for seed in SEEDS:
        found.count(seed, bad_attempts.says_wrong(seed), 0.5)
    return found


def test_table_names_the_seeds():
    lines = figures.table([a_finding()]).splitlines()
    assert lines[0].split() == list(figures.HEAD)
    assert lines[1].split() == ["tried", "2", "to", "5", "4", "attempts", "3", "0", "1", "2"]
    assert lines[2] == "wrong in tried: seeds 3"


def test_figures_are_written_between_the_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{figures.START}\n| `other` | kept |\n{figures.END}\nafter\n", encoding="utf-8")
    for _ in range(2):
        figures.write([a_finding()], page, datetime.date(2026, 1, 2))
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "before" and lines[-1] == "after"
    assert [line for line in lines if line.startswith("| `")] == [
        "| `other` | kept |",
        f"| `tried` | 2 to 5 | 4 attempts | 3 | 0 | 1 | 2 | 2026-01-02, linux, {figures.versions()} |",
    ]


def test_figures_need_their_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("no marks\n", encoding="utf-8")
    with pytest.raises(ValueError, match="expected the lines"):
        figures.write([a_finding()], page)


def test_exit_codes_and_replay(monkeypatch, capsys):
    monkeypatch.setattr(campaign, "names", lambda: ["tried"])
    monkeypatch.setattr(campaign, "load", lambda name: area(bad_attempts.says_wrong))
    assert __main__.main(["tried", "--seed", "4"]) == 0
    assert "tried --seed 4: right" in capsys.readouterr().out
    assert __main__.main(["--seed", "2", "--count", "2"]) == 1
    assert "tried --seed 3: wrong: 1 is not 2" in capsys.readouterr().out
    for arguments in (["others"], ["--count", "0"], ["--minutes", "0"], ["--workers", "0"]):
        with pytest.raises(SystemExit, match="2"):
            __main__.main(arguments)


def test_the_page_says_what_each_area_promises():
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \| .+ \|$", figures.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(campaign.names()) == set(rows)
