"""What papers publish by name: the type that it is, the numbers, and the presets that have the same."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest

import rollout_corr as rc
from rollout_corr.specs import published

MADE = inspect.getmembers(published, inspect.isfunction)
NAMES = [name for name, made in MADE if made.__module__ == published.__name__]
REQUIRED = {"MIS": (2.0,), "GeoRS": (0.99, 1.01), "OPSM": (0.1,)}
TYPES = {
    "TIS": rc.Weight.token(upper=2.0),
    "MIS": rc.Weight.product(upper=2.0, outside="zero"),
    "IcePop": rc.Weight.token(lower=0.5, upper=5.0, outside="zero"),
    "GeoRS": rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.99, upper=1.01),
    "OPSM": rc.Criterion(
        "k1", "sequence", "mean", upper=0.1, when="negative_advantage", of="new/rollout", label="opsm"
    ),
    "KPop": rc.Criterion("binary_kl_symmetric", upper=0.1, label="kpop"),
    "M2PO": rc.Criterion("k2", upper=rc.MeanBelow(0.02), label="m2po"),
    "CISPO": rc.Score(upper=5.0),
    "ClipHigher": rc.PPO(0.2, 0.28),
    "GSPOToken": rc.GSPO(3e-4, 4e-4, through="token"),
}


def test_every_name_is_public_and_tested():
    assert sorted(NAMES) == sorted(TYPES)
    assert all(getattr(rc, name) is getattr(published, name) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_value_of_ours(name):
    """Its repr is the call of the type, so a checkpoint does not depend on the name."""
    made = getattr(rc, name)(*REQUIRED.get(name, ()))
    assert made == TYPES[name] and hash(made) == hash(TYPES[name])
    assert eval(repr(made), {each: getattr(rc, each) for each in rc.__all__}) == made
    assert name not in repr(made)


def test_numbers_that_presets_have_too():
    assert rc.spec("flash_rl.tis").weight == rc.TIS()
    assert rc.spec("verl.decoupled_seq_is").weight == rc.TIS(over="sequence")
    assert rc.spec("verl.decoupled_token_icepop").weight == rc.IcePop()
    assert rc.spec("areal.m2po").criteria == (rc.M2PO(),)
    (kpop,) = rc.spec("prime_rl.kpop").criteria
    assert replace(kpop, eps=1e-8) == rc.KPop(of="new/rollout")
    (opsm,) = (c for c in rc.spec("trl.opsm").criteria if c.of == "new/rollout")
    assert replace(opsm, label="opsm") == rc.OPSM(0.1)


def test_cispo_has_the_bounds_of_its_distances_from_one():
    assert rc.CISPO(0.2, 0.28) == rc.Score(0.8, 1.28)
    assert rc.CISPO(1.0) == rc.CISPO(3.0) == rc.Score(0.0, 5.0)
    assert rc.CISPO(low=0.0, high=0.0) == rc.Score(1.0, 1.0)
