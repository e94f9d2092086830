"""Values in scripts and command lines, as Hydra and argparse read them."""

from __future__ import annotations

import pytest

from rollout_corr.frameworks.shared.scripts import scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a b'", "a b"),
        ('"0.5"', "0.5"),
        ("'a\"", "'a\""),
        ("'", "'"),
        (" 0.5_2 ", 0.52),
        ("1e-3", 1e-3),
        ("7", 7),
        ("[1, 'x', [2]]", [1, "x", [2]]),
        ("[]", []),
        ("null", None),
        ("True", True),
        ("no", "no"),
    ],
)
def test_a_scalar(text, value):
    found = scalar(text)
    assert found == value and type(found) is type(value)
