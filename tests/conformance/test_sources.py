"""Functions cut out of files run as they stand there, with what they need of the framework's other files."""

from __future__ import annotations

import pytest
import torch

from conformance.sources import Source, StubReached

FILES = {
    "toy/__init__.py": "",
    "toy/maths.py": "SCALE = 3.0\n\n\ndef masked_mean(x, mask):\n    return SCALE * (x * mask).sum() / mask.sum()\n",
    "toy/loss.py": """
from __future__ import annotations
import torch
import absent_engine as engine
from absent_engine import registered, Base, reduce
from toy.maths import masked_mean
from . import maths
try:
    import numpy as np
except ImportError:
    np = None


@registered("loss")
class Loss(Base):
    limit: absent.Type = 2.0

    def __init__(self, weight):
        self.weight = weight

    @engine.timed
    def value(self, logp, mask):
        from toy.maths import SCALE
        total = (logp * mask).sum()
        if total > 1e6:
            total = reduce(total)
        mean = masked_mean(logp, mask) * self.weight
        doubled = 2 * mean
        return doubled + maths.SCALE - SCALE


def calls_what_is_absent(x):
    return reduce(x)


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)
""",
}


@pytest.fixture
def toy(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return Source("toy", "1.0", tmp_path, "checkout")


X, MASK = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.0, 1.0, 0.0])


def test_a_class_with_absent_bases_and_decorators(toy):
    assert toy.cut("toy/loss.py", "Loss")(2.0).value(X, MASK) == 18.0


def test_a_method_alone(toy):
    assert toy.instance("toy/loss.py", "Loss", ("value",), weight=1.0).value(X, MASK) == 9.0


def test_functions_that_call_each_other(toy):
    assert toy.cut("toy/loss.py", "even")(4) and not toy.cut("toy/loss.py", "even")(3)


def test_consecutive_statements(toy):
    run = toy.lines("toy/loss.py", "Loss.value", "mean = ", "doubled = ")
    found = run(self=toy.instance("toy/loss.py", "Loss", (), weight=2.0), logp=X, mask=MASK)
    assert found["mean"] == 9.0 and found["doubled"] == 18.0
    with pytest.raises(LookupError, match="no statements"):
        toy.lines("toy/loss.py", "Loss.value", "mean = ", "nothing")


def test_a_stub_that_a_run_reaches_raises(toy):
    with pytest.raises(StubReached, match=r"absent_engine\.reduce was called"):
        toy.cut("toy/loss.py", "calls_what_is_absent")(X)
    assert toy.cut("toy/loss.py", "calls_what_is_absent", reduce=lambda x: x.sum())(X) == 8.0


def test_has(toy):
    assert toy.has("toy/loss.py") and toy.has("toy/loss.py", "Loss.value")
    assert not toy.has("toy/loss.py", "Loss.other") and not toy.has("toy/other.py")
