"""Numbers of every type in every argument of the frozen types: read as floats, or refused by the argument's name."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

import rollout_corr as rc
from rollout_corr.specs.batch_losses import OF_BATCH
from rollout_corr.specs.surrogates import SURROGATES

# A value of each type by its required fields alone.
LEAST = {
    rc.Weight: {"over": "token"},
    rc.Criterion: {"stat": "k1", "upper": 1.0},
    rc.Spec: {},
    rc.KL: {"kind": "k1", "coef": 1.0},
    rc.SquaredLogRatio: {"coef": 1.0},
    rc.EntropyBonus: {"coef": 1.0},
    rc.Mean: {},
    rc.Loss: {},
    **{kind: {} for kind in (*SURROGATES, *OF_BATCH)},
}

BEYOND = {
    "an integer of 401 digits": 10**400,
    "a negative one": -(10**400),
    "an integer of 5,001 digits": 10**5000,
    "a fraction": Fraction(10**400, 3),
    "a list of an integer": [10**5000],
    "a long double": np.longdouble("1e400"),
    "a Decimal": Decimal(10) ** 400,
}


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_no_argument_takes_a_number_beyond_the_floats(kind: type) -> None:
    """Whatever an argument is for, its error begins with its name."""
    for name, what in itertools.product((field.name for field in dataclasses.fields(kind)), BEYOND):
        with pytest.raises((ValueError, TypeError)) as caught:
            kind(**{**LEAST[kind], name: BEYOND[what]})
        text = str(caught.value)
        assert not isinstance(caught.value, OverflowError)
        assert text.startswith((f"{kind.__name__}.{name}: ", f"{name}: ")) and len(text) < 1500, (what, text)


def numbers_of(kind: type) -> list[str]:
    """The fields that take numbers, by their annotations."""
    hints = typing.get_type_hints(kind)
    return [
        field.name
        for field in dataclasses.fields(kind)
        if float in (hints[field.name], *typing.get_args(hints[field.name]))
    ]


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_numbers_of_every_type_become_floats(kind: type) -> None:
    needed = {rc.KL: {"weight": "ratio"}, rc.Mean: {"of": "sequence_sum"}}.get(kind, {})
    ones = 1, Fraction(1), np.float32(1), np.float16(1), np.int64(1), np.uint8(1), np.longdouble(1)
    for name, number in itertools.product(numbers_of(kind), ones):
        value = getattr(kind(**{**LEAST[kind], **needed, name: number}), name)
        assert type(value) is float and value == 1.0, (name, number)
