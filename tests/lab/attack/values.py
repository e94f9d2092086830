"""Calls of random values: Specs, layouts, dtypes and batches against the oracles, and calls that have to be refused."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

import rollout_corr as rc
from builders import judges
from builders.calls import bundled, bundled_loss
from frozen.generator import SURROGATES
from frozen.runners import run_as
from lab.attack.campaign import Area, Outcome

# A refusal begins with the name of an argument, such as "cu_seqlens: " or "external['entropy']: ".
REFUSAL = re.compile(r"[A-Za-z_][\w.]*(\[[^\]]+\])?(, \w+)?: ")
WAYS = ("blocks", "small blocks", "whole")
HUGE = (2**62, -(2**63), 2**63 - 1, -1, 10**9)
JUNK: tuple[Any, ...] = (None, "x", 3, object(), [], {}, 10**400, math.nan, [None], torch.zeros(2, 3, 4), b"", (1, 2))


def correction(rng: random.Random) -> Outcome:
    """A call that is right: decisions and masks equal to the oracle's, weights and metrics within rounding."""
    call = judges.correction(f"attack {rng.random()}")
    with run_as(rng.choice(WAYS)):
        judges.judge_correction(call, call.corrected(call.spec, "torch"))
    return Outcome("right")


def loss(rng: random.Random) -> Outcome:
    """A loss that is right: value, gradient and metrics."""
    call = judges.loss(f"attack {rng.random()}", rng.choice(list(SURROGATES)), rng.random() < 0.3)
    with run_as(rng.choice(WAYS)):
        judges.judge_loss(call, "torch")
    return Outcome("right")


# --- calls that have to be refused ---


def _offsets(rng: random.Random, tokens: int) -> list[int]:
    """Offsets that cannot be of so many tokens."""
    kind = rng.randrange(4)
    inside = sorted(rng.randint(0, tokens) for _ in range(rng.randint(1, 4)))
    if kind == 0:
        inside[rng.randrange(len(inside))] = rng.choice(HUGE)
        return inside
    if kind == 1:
        return [0, 2**62, -(2**63), -(2**62), 0]
    if kind == 2:
        return [rng.randint(1, tokens), 0]
    parts = next(d for d in (4, 3, 2, 5, 7, 1) if tokens % d == 0)
    return [tokens // parts] * parts


def _bad_offsets(rng: random.Random) -> Callable[[], object]:
    tokens = rng.randint(2, 40)
    x = torch.zeros(tokens)
    offsets = torch.tensor(_offsets(rng, tokens))
    return lambda: rc.correct(x, x, cu_seqlens=offsets, spec=rc.Spec(rc.Weight.product()))


def _bad_argument(rng: random.Random) -> Callable[[], object]:
    """One argument of a call is junk."""
    x = torch.zeros(3, 4)
    name = rng.choice(("train_logp", "rollout_logp", "mask", "advantages", "spec", "backend", "validate"))
    right = {"train_logp": x, "rollout_logp": x, "mask": x.bool(), "spec": rc.Spec()}
    # None is right for some, and a list of samples is a layout.
    junk = [j for j in JUNK if j is not None or name in ("train_logp", "rollout_logp", "spec", "backend", "validate")]
    junk = [j for j in junk if not (j == [] and name == "train_logp")]
    wrong = rng.choice(junk)
    return lambda: rc.correct(**bundled(**right | {name: wrong}))


def _bad_tensor(rng: random.Random) -> Callable[[], object]:
    """One tensor of a loss has a wrong shape, dtype, layout or device."""
    x = torch.zeros(3, 4)
    name = rng.choice(("new_logp", "advantages", "mask", "old_logp", "rollout_logp", "weights"))
    wrong = rng.choice(
        (x.to(torch.complex64), torch.zeros(4, 3), torch.zeros(3, 4, 1), x.to_sparse(), x.to("meta"), torch.zeros(0))
    )
    right = {"new_logp": x, "advantages": x, "mask": x.bool(), "old_logp": x, "rollout_logp": x, "surrogate": rc.PPO()}
    return lambda: rc.policy_loss(**bundled_loss(**right | {name: wrong}))


def _bad_spec(rng: random.Random) -> Callable[[], object]:
    """One argument of a frozen type is junk."""
    numbers = (10**400, -(10**5000), Fraction(10**400, 7), math.nan, -1.0, "2", True, [10**5000], {})
    wrong = rng.choice(numbers)
    makes: tuple[Callable[[], object], ...] = (
        lambda: rc.Spec(clamp=wrong),
        lambda: rc.Weight.token(upper=wrong),
        lambda: rc.Weight(wrong),
        lambda: rc.Weight.token(token_clamp=wrong),
        lambda: rc.Criterion("k2", upper=1.0, eps=wrong),
        lambda: rc.Criterion("k2", lower=wrong),
        lambda: rc.PPO(low=wrong),
        lambda: rc.PPO(dual=wrong),
        lambda: rc.KL("k3", coef=wrong),
        lambda: rc.Spec(report=(wrong,)),
        lambda: rc.Spec.from_dict({"clamp": wrong}),
    )
    return rng.choice(makes)


REFUSED = (_bad_offsets, _bad_argument, _bad_tensor, _bad_spec)


def refused(rng: random.Random) -> Outcome:
    """A call that must raise ValueError or TypeError and name the argument."""
    kind = rng.choice(REFUSED)
    call = kind(rng)
    try:
        found = call()
    except (ValueError, TypeError) as error:
        line = str(error).partition("\n")[0]
        named = REFUSAL.match(line) is not None and len(line) < 2000
        return Outcome("refused" if named else "wrong", f"{kind.__name__}: {line[:300]}")
    return Outcome("wrong", f"{kind.__name__}: expected a refusal, got {found!r:.200}")


def attempt(seed: int) -> Outcome:
    """One call of a seed."""
    rng = random.Random(seed)
    torch.set_num_threads(1)
    kind = rng.choices((correction, loss, refused), (12, 1, 4))[0]
    try:
        return kind(rng)
    except AssertionError as error:
        return Outcome("wrong", f"{kind.__name__}: {error!s:.600}")


AREA = Area("values", "calls", attempt, count=20_000, few=20)
