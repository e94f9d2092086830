"""`python -m builders.files_to_copy`: the files that `rollout-corr eject` prints against the package.

Every preset and recipe that a file can say, on 200 random batches each. Prints what differs; exits with 1 if anything
does.
"""

from __future__ import annotations

import argparse
import math
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.resources import files
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rollout_corr as rc
from frozen import generator
from frozen.generator import Wants, random_batch, random_layout
from rollout_corr.definition.offsets import OffsetsError
from rollout_corr.eject import CannotEject, eject, wanted
from rollout_corr.eject.markers import cut
from rollout_corr.frameworks.shared.preset import RECIPES

LAYOUTS = ("packed", "row", "gaps", "right", "left", "holes")


class Given(NamedTuple):
    """The tensors of a call, and a source of more of them."""

    train: Tensor
    rollout: Tensor
    new: Tensor
    ref: Tensor
    advantages: Tensor
    mask: Tensor | None
    cu_seqlens: Tensor | None
    random: Random

    @property
    def finite(self) -> bool:
        """True if nothing at a valid token is NaN or infinite."""
        valid = torch.ones_like(self.train, dtype=torch.bool) if self.mask is None else self.mask != 0
        every = all(x[valid].isfinite().all() for x in (self.train, self.rollout, self.new, self.ref))
        return every and bool(self.advantages.isfinite().all())


def batch(seed: int) -> Given:
    """A random batch of the layouts that files take."""
    random = Random(seed)
    layout = replace(random_layout(random), kind=random.choice(LAYOUTS))
    kind = "middle" if random.random() < 0.04 else "small"
    drawn = random_batch(random, Wants(), kind=kind, layout=layout, extras=0.0)
    return Given(**drawn.tensors, mask=drawn.batch.get("mask"), cu_seqlens=drawn.batch.get("cu_seqlens"), random=random)


def loaded(source: str) -> Any:
    """The module of a file."""
    module = types.ModuleType(f"copied_{zlib.crc32(source.encode())}")
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(compile(source, module.__name__, "exec"), vars(module))
    return module


def correction_differs(file: Any, spec: rc.Spec, given: Given, metrics: bool = True) -> Iterator[str]:
    """Say what differs between a file and the package: masks and verdicts at all, weights and metrics beyond 1e-6."""
    train, rollout, mask, cu_seqlens = given.train, given.rollout, given.mask, given.cu_seqlens
    try:
        out = rc.correct(train, rollout, mask=mask, cu_seqlens=cu_seqlens, spec=spec)
    except OffsetsError:
        return  # [0] with one token looks like lengths
    got = file.correct(train, rollout, mask, cu_seqlens)
    yield from weights_differ(got.weights, out.weights)
    for name, mine, theirs in (("mask", got.mask, out.mask), ("keep", got.keep, out.keep)):
        if mine.dtype != theirs.dtype or not torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)):
            yield name
    if metrics:
        # In float64 the package's sums of weights do not cancel.
        d = train.detach().to(torch.promote_types(torch.float32, train.dtype)) - rollout
        batch = rc.Batch(mask=mask, cu_seqlens=cu_seqlens)
        expected = rc.correct(d.double(), torch.zeros_like(d, dtype=torch.float64), batch, spec=spec).metrics(
            "dashboard"
        )
        if math.isfinite(expected["logratio_abs_max"]):
            expected["logratio_abs_max"] = min(expected["logratio_abs_max"], 1024.0)
        if got.metrics.keys() != expected.keys():
            yield f"keys {sorted(got.metrics.keys() ^ expected.keys())}"
        for key in got.metrics.keys() & expected.keys():
            mine, theirs = got.metrics[key], expected[key]
            if not (math.isclose(mine, theirs, rel_tol=1e-6, abs_tol=1e-12) or (mine != mine and theirs != theirs)):
                yield f"{key}: {mine!r}, not {theirs!r}"


def weights_differ(mine: Tensor | None, theirs: Tensor | None) -> Iterator[str]:
    if mine is None or theirs is None:
        if mine is not theirs:
            yield "one has weights"
    elif (mine.dtype, mine.shape, mine.requires_grad) != (theirs.dtype, theirs.shape, False):
        yield "dtype, shape or history of weights"
    elif not torch.allclose(mine, theirs, rtol=1e-6, atol=0.0, equal_nan=True):
        yield f"weights, by {(mine - theirs).abs().max():g}"


def loss_differs(file: Any, correct: Any, name: str, given: Given) -> Iterator[str]:
    """Say what differs between the package and a file of a loss, which takes what its correction's file gives.

    The value and its gradient, beyond 2e-5 of the largest, or the rounding of the dtype that the gradient is in.
    """
    spec, loss, needs = *rc.recipe(name), RECIPES[name].needs
    new, advantages, mask, cu_seqlens = given.new, given.advantages, given.mask, given.cu_seqlens
    every = {"old_logp": given.train, "rollout_logp": given.rollout, "ref_logp": given.ref}
    logps = {name: every[name] for name in needs}
    mine, theirs = (new.detach().clone().requires_grad_() for _ in range(2))
    try:
        out = rc.policy_loss(theirs, advantages, rc.Batch(mask=mask, cu_seqlens=cu_seqlens), loss, spec=spec, **logps)
    except OffsetsError:
        return
    factors: dict[str, Tensor | None] = {}
    if correct is not None:
        corrected = correct(logps.get("old_logp", mine), logps["rollout_logp"], mask, cu_seqlens)
        factors["train_mask"] = corrected.mask
        if wanted.use_of_weights(loss, needs) != "report":
            factors["weights"] = corrected.weights
    base = wanted.base_of(loss, needs)
    value = file.policy_loss(mine, base and logps[base], advantages, mask, cu_seqlens, ref_logp=logps.get("ref_logp"),
                             **factors)  # fmt: skip
    passed_on = spec is not None and spec.nonfinite == "propagate"
    # What NaN and infinity become in a gradient, where they are passed on, is nobody's promise.
    yield from values_differ(value, mine, out.value, theirs, gradient=given.finite or not passed_on)


def values_differ(value: Tensor, mine: Tensor, other: Tensor, theirs: Tensor, gradient: bool = True) -> Iterator[str]:
    """Say what differs between two losses, each of its own copy of new_logp."""
    for of in (value, other):
        (1.7 * of).backward()
    if value.dtype != other.dtype:
        yield "dtype"
    if not torch.isclose(value, other, rtol=2e-5, atol=2e-6, equal_nan=True):
        yield f"value {value.item()!r}, not {other.item()!r}"
    assert mine.grad is not None and theirs.grad is not None
    largest = theirs.grad.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if mine.numel() else 0.0
    near = max(2e-5, torch.finfo(mine.dtype).eps if mine.dtype in (torch.bfloat16, torch.float16) else 0.0) * largest
    near += 1e-7  # the rounding of advantages that cancel within a sequence
    if gradient and not torch.allclose(mine.grad.double(), theirs.grad.double(), rtol=0.0, atol=near, equal_nan=True):
        yield f"gradient, by {(mine.grad - theirs.grad).abs().max():g} of {largest:g}"


@cache
def corrects(spec: rc.Spec) -> Any:
    """`correct` of a file; many recipes have one Spec."""
    source = files("rollout_corr.eject").joinpath("correction.py").read_text(encoding="utf-8")
    return loaded(cut(source, wanted.of_correction(spec))).correct


def differences(name: str, loss: bool, batches: int, first: int = 0) -> Iterator[str]:
    """Say what differs on so many batches, whose seeds begin with `first`.

    Raises:
        CannotEject: No file says it.
    """
    file = loaded(eject(name, loss=loss, metrics=not loss))
    spec = rc.recipe(name).spec if loss else rc.spec(name)
    correct = corrects(spec) if loss and spec is not None else None
    for seed in range(first, first + batches):
        given = batch(zlib.crc32(name.encode()) + seed)
        found = loss_differs(file, correct, name, given) if loss else correction_differs(file, spec, given)
        yield from (f"batch {seed}: {what}" for what in found)


def random_spec(random: Random) -> rc.Spec:
    """A Spec that the files say: each part is drawn until they do."""
    units = "token", "sequence"

    def said(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        while True:
            with suppress(CannotEject):
                made = part()
                wanted.of_correction(rc.Spec(**made))
                return made

    criteria = {}
    for _ in range(random.choice((0, 1, 2, 3))):
        (one,) = said(lambda: {"criteria": (generator.random_criterion(random, units, False, False),)})["criteria"]
        criteria[one.label] = one
    weight = said(lambda: {"weight": random.choice((None, generator.random_weight(random, units, False)))})
    whole = generator.random_spec(random, units, rules=False)
    return replace(whole, criteria=tuple(criteria.values()), **weight, report=("native",), apply=True)


def random_loss(random: Random, needs: tuple[str, ...]) -> rc.Loss:
    """A Loss that the files say, of the policies that it compares by default."""
    while True:
        asked = generator.random_loss(random)
        with suppress(CannotEject):
            wanted.of_loss(None, asked, SimpleNamespace(needs=needs), None)
            if asked.surrogate.of is None:
                return asked


def every() -> Iterator[tuple[str, bool]]:
    """Name and kind of all that could be asked for: presets, and losses of recipes."""
    yield from ((name, False) for name in rc.spec_names())
    yield from ((name, True) for name in rc.recipe_names())


def main() -> int:
    """Compare, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="presets and recipes; default: all")
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="the first batch's")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    compared = wrong = 0
    for name, loss in every():
        if chosen.names and name not in chosen.names:
            continue
        label = f"{name} --loss" if loss else name
        try:
            found = list(differences(name, loss, chosen.batches, chosen.seed))
        except CannotEject as refused:
            sys.stdout.write(f"{label}: {refused}\n")
            continue
        compared, wrong = compared + 1, wrong + bool(found)
        for what in found[:3]:
            sys.stdout.write(f"{label}: {what}\n")
    sys.stdout.write(f"{compared} files on {chosen.batches} batches each, {wrong} differ\n")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
