"""What the tests of configurations share: the Specs that they expect, written short."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from rollout_corr.spec.correction import Criterion

VERL = {"report": ("native", "verl")}
XTUNER = {"report": ("native", "xtuner")}
SKYRL = {"report": ("native", "skyrl")}


def ratio(lower: float | None, upper: float | None, reduce: str | None = None, **more: object) -> Criterion:
    over = "token" if reduce is None else "sequence"
    return Criterion("ratio", over=over, reduce=reduce, lower=lower, upper=upper, **more)


def flat(**changes: object) -> dict[str, object]:
    """The values that verl 0.6.0 shipped in its flat generation, its switch turned on."""
    return {
        "rollout_is": True,
        "rollout_is_threshold": 2.0,
        "rollout_is_threshold_lower": None,
        "rollout_is_level": "token",
        "rollout_is_mode": "truncate",
        "rollout_is_veto_threshold": 1e-4,
    } | changes


def cases(table: str, *, pairs: bool = False) -> list[Any]:
    """Read a table of configurations and messages: rows `CONFIG | MESSAGE` or `CONFIG | TypeError MESSAGE`.

    A row may go on in an indented line. CONFIG is YAML, `flat CONFIG` a change of `flat()`; with `pairs` its lists are
    tuples. In MESSAGE "..." stands for anything, and "$" for the end. Each case is (config, kind of error, regex).
    """
    found = []
    for row in re.sub(r"\n +", " ", table.strip()).splitlines():
        given, _, message = row.partition(" | ")
        kind, _, rest = message.partition(" ")
        kinds = {"ValueError": ValueError, "TypeError": TypeError}
        text = (rest if kind in kinds else message).strip()
        pattern = ".*".join(map(re.escape, text.removesuffix("$").split("..."))) + "$" * text.endswith("$")
        config = yaml.safe_load(given.removeprefix("flat "))
        if pairs:
            config = {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}
        if given.startswith("flat "):
            config = flat(**config)
        found.append(pytest.param(config, kinds.get(kind), pattern, id=given[:60]))
    return found
