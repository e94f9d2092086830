"""What specializing leaves of a condition that a plan decides in part."""

import ast

import pytest
import triton
import triton.language as tl

from rollout_corr.eject.residual import cleaned, unparsed
from rollout_corr.eject.specialize import Specializer
from rollout_corr.eject.values import Dyn, name


@triton.jit
def both(out: tl.tensor, n: tl.int32, FLAG: tl.constexpr) -> None:
    """Store where two things hold."""
    if n == 3 and FLAG:
        tl.store(out, 1)


@triton.jit
def either(out: tl.tensor, n: tl.int32, FLAG: tl.constexpr) -> None:
    """Store where one of two things holds."""
    if n == 3 or FLAG or n == 5:
        tl.store(out, 1)


@pytest.mark.parametrize(
    ("function", "flag", "left"),
    [
        (both, True, "if n == 3:\n    tl.store(out, 1)"),
        (both, False, ""),
        (either, True, "tl.store(out, 1)"),
        (either, False, "if n == 3 or n == 5:\n    tl.store(out, 1)"),
    ],
)
def test_a_condition_is_decided_in_part(function, flag, left):
    specializer = Specializer((), {}, lambda *_: None, cleaned)
    given = {"out": Dyn(name("out"), tl.int32, (), True), "n": Dyn(name("n"), tl.int32), "FLAG": flag}
    kernel = specializer.specialized(function, given, top=True)
    assert unparsed(ast.Module(kernel.body, [])) == left
