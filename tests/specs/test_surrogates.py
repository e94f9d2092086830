"""A surrogate is one class: nothing but its formula, its Triton branch and the frameworks that use it names it."""

from __future__ import annotations

import ast
import random
from dataclasses import fields

import pytest

import rollout_corr as rc
from builders.sources import nodes, paths
from frozen.generator import SURROGATES
from rollout_corr.specs import batch_losses, surrogates
from rollout_corr.specs.batch_losses import OF_BATCH as THAT_LOOK
from rollout_corr.specs.surrogate import Surrogate
from rollout_corr.specs.surrogates import SURROGATES as WITH_KERNELS

NAMES = {kind.__name__ for kind in (*WITH_KERNELS, *THAT_LOOK)}
MAY_NAME_ONE = (
    "rollout_corr/specs/published.py",
    "rollout_corr/specs/surrogates.py",
    "rollout_corr/specs/batch_losses.py",
    "rollout_corr/eject/wanted.py",
    "rollout_corr/frameworks/",
    "kernels/policy_loss/",
)


def named(path):
    """Names and strings of a module that are a surrogate's."""
    words = set()
    for node in nodes(path):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.alias):
            words.add(node.name.rpartition(".")[2])
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
    return words & NAMES


def test_nothing_else_names_a_surrogate():
    assert len(paths()) > 100
    by_file = {name: named(path) for name, path in paths().items() if not name.startswith(MAY_NAME_ONE)}
    assert not {name: some for name, some in by_file.items() if some}
    assert {kind.__name__ for kind in WITH_KERNELS} <= named(paths()["rollout_corr/specs/surrogates.py"])


def test_all_are_listed_exported_and_tried():
    every = [*vars(surrogates).values(), *vars(batch_losses).values()]
    kinds = {kind for kind in every if isinstance(kind, type) and issubclass(kind, Surrogate)}
    assert {*WITH_KERNELS, *THAT_LOOK} == {type(make(random.Random(0), {})) for make in SURROGATES.values()}
    assert kinds - {Surrogate} == {*WITH_KERNELS, *THAT_LOOK}
    assert all(getattr(rc, kind.__name__) is kind for kind in kinds - {Surrogate})
    assert all(kind.traits.sees != "token" and kind.traits.sums for kind in THAT_LOOK)
    assert not any(kind.traits.sees != "token" for kind in WITH_KERNELS)
    assert set(rc.__all__) >= NAMES


@pytest.mark.parametrize("name", SURROGATES)
def test_facts(name):
    """Check the properties of a class apart from its formula; the kernels and `policy_loss` read nothing else."""
    for seed in range(9):
        surrogate = SURROGATES[name](random.Random(seed), {})
        assert surrogate.explain()
        assert set(surrogate.clips(own_ratio=True)) <= {"low", "high", "dual"}
        assert set(surrogate.clips(own_ratio=False)) <= set(surrogate.clips(own_ratio=True))
        assert all(isinstance(number, float) for number in surrogate.numbers.values())


@pytest.mark.parametrize("kind", [*WITH_KERNELS, *THAT_LOOK])
def test_numbers_beyond_float32_are_refused(kind):
    """torch raises an error of its own where a formula in float32 meets one."""
    for name in (x.name for x in fields(kind) if isinstance(x.default, (int, float)) or "float" in str(x.type)):
        for value in (1e39, 10**39):
            with pytest.raises(ValueError, match=f"{kind.__name__}.{name}: expected"):
                kind(**{name: value})
