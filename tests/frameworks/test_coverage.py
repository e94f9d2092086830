"""coverage.md: all that verl, xtuner and SkyRL list for their corrections has a row, and the page is fresh."""

from __future__ import annotations

import pytest

import rollout_corr as rc
from builders import coverage_page
from builders.coverage_page import FRAMEWORKS

FRAMEWORK = pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)


@FRAMEWORK
def test_the_page_is_fresh(framework):
    wanted = "PYTHONPATH=tests python -m builders.coverage_page"
    assert coverage_page.part(framework) in coverage_page.PAGE.read_text(encoding="utf-8"), wanted


@FRAMEWORK
def test_each_metric_has_its_key_here_or_an_answer(framework):
    emitted = coverage_page.emitted(framework)
    assert {key for key in framework.metrics if key not in emitted} == {*framework.answers} - {*framework.options}
    assert not emitted & framework.answers.keys()


OTHER_WORDS = {"token": "sequence", "token_k1": "seq_sum_k1", "geometric": "product", "mask": "both"}


def another(value):
    """Another value of an option, of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return 0.999 * value[0], value[1]
    return OTHER_WORDS.get(value) or value.replace("2.0", "3.0") if isinstance(value, str) else 0.999 * value


@FRAMEWORK
def test_each_option_changes_the_spec_or_has_an_answer(framework):
    examples = {key: settings for settings in reversed(framework.settings) for key in settings}
    assert {*examples, *framework.answers} >= {*framework.options} >= {*examples}
    for option, settings in examples.items():
        changed = {**settings, option: another(settings[option])}
        assert rc.spec(framework.name, changed) != rc.spec(framework.name, settings), option
