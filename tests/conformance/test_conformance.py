"""Every row of the frameworks that are installed, or in the folder PEERS, on some batches (make test-peers)."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rollout_corr as rc
from conformance import campaign
from conformance.rows import compared

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("one_thread")]

SOURCES = [source for framework in campaign.frameworks() for source in campaign.sources_of(framework)]
NAMES = [f"{source.framework}-{source.version}" for source in SOURCES]
# What the recipes once had wrong, by row.
PLANTED = {"nemo.gspo_is": {"of": "token"}, "swift.opsm": {"over": "kept"}}


@pytest.mark.parametrize("source", SOURCES, ids=NAMES)
def test_no_undeclared_difference(source):
    rows = campaign.rows_of(source)
    assert rows
    for row in rows:
        assert all(known.is_documented() for known in row.declared), row.ours
        tally = compared(row, 39)
        assert not tally.undeclared, (row.ours, tally.undeclared[:3])


def test_planted_errors_are_reported(monkeypatch):
    """The recipes as they were before they were compared."""
    every = [row for source in SOURCES for row in campaign.rows_of(source)]
    rows = [row for row in every if row.kind == "recipe" and row.ours in PLANTED]
    assert rows
    true = rc.recipe

    def planted(name, **settings):
        made = true(name, **settings)
        mean = replace(made.loss.mean, **PLANTED.get(name, {}))
        return rc.Recipe(made.spec, replace(made.loss, mean=mean), made.batch)

    monkeypatch.setattr(rc, "recipe", planted)
    for row in rows:
        assert compared(row, 39).undeclared_finite > 0, row.ours
