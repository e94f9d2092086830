"""prime-rl: its losses of a sample, through the function that adds them up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from conformance.batches import Batch
from conformance.declared import BF16, CLAMP, PROPAGATES
from conformance.rows import Row, both, configuration, draw, loss_of, of_loss, recipe
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = None, "prime_rl", "prime-rl"
UNDER = "src"

LOSS = "prime_rl/trainer/rl/loss.py"

# The factors of the regularizer and of the advantages, and the bounds of the two losses.
TAU = draw(kl_tau=(1e-3, 0.0, 0.1), adv_tau=(1.0, 0.5))
IPO = both(draw(eps=(0.01, 0.1)), TAU)
DPPO = both(draw(dppo_mask_low=(0.05, 0.2), dppo_mask_high=(0.01, 0.2)), TAU)
DECLARED = (PROPAGATES, BF16, CLAMP)


@dataclass
class DefaultLossConfig:
    """Fields of pydantic's model of that name."""

    dppo_mask_low: float = 0.2
    dppo_mask_high: float = 0.2
    adv_tau: float = 1.0
    kl_tau: float = 1e-3
    type: str = "default"


@dataclass
class IPOLossConfig:
    """Fields of pydantic's model of that name; the threshold's name has changed."""

    ipo_threshold: float = 0.1
    adv_tau: float = 1.0
    kl_tau: float = 1e-3
    type: str = "ipo"


def rows(source: Source) -> Iterator[Row]:
    """Compare the recipes and the reader. IcePop and KPop are younger than the version at hand."""
    records = {"LossInputs": SimpleNamespace, "LossOutputs": SimpleNamespace}
    classes = {"DefaultLossConfig": DefaultLossConfig, "IPOLossConfig": IPOLossConfig, "CustomLossConfig": type(None)}
    compute_loss = source.cut(LOSS, "compute_loss", **records)
    setup = source.cut(LOSS, "setup_rl_loss_fn", **records, **classes)

    def loss(given: Batch, config: Any, weights: str = "rl", of_tokens: Tensor | None = None) -> Tensor:
        cut = given.samples
        counted = given.mask if of_tokens is None else given.mask & (of_tokens != 0)
        scale = counted.sum().clamp(min=1)
        ref_kl = weights == "ref_kl"
        nothing = [given.new.new_zeros(n) for n in given.lengths]
        value, _ = compute_loss(
            cut(given.new),
            cut(given.rollout),
            cut(given.ref),
            cut(given.token_advantages),
            cut(given.mask),
            nothing if ref_kl else None if of_tokens is None else cut(of_tokens),
            None,
            cut(given.mask.to(given.new.dtype)) if ref_kl else None,
            setup(config),
            scale,
            scale,
            scale,
        )
        return value

    def our_ref_kl(given: Batch) -> Tensor:
        towards = replace(given, advantages=(given.ref - given.new.detach()).where(given.mask, 0.0))
        return loss_of(rc.recipe("prime_rl.ref_kl"), towards, rollout_logp=given.rollout)

    def ipo(given: Batch, eps: float, of_tokens: Tensor | None = None, **drawn: Any) -> Tensor:
        return loss(given, IPOLossConfig(ipo_threshold=eps, **drawn), of_tokens=of_tokens)

    def of_tokens(given: Batch) -> Tensor:
        made = torch.Generator().manual_seed(given.seed)
        return torch.randint(0, 4, given.new.shape, generator=made).to(given.new.dtype) / 2

    def our_weighted(given: Batch, **drawn: Any) -> Tensor:
        weights = of_tokens(given)
        made = rc.recipe("prime_rl.ipo", **drawn)
        made = rc.Recipe(made.spec, made.loss, {"scale": weights})
        return loss_of(made, given, given.mask & (weights != 0), rollout_logp=given.rollout)

    more: dict[str, Any] = {"declared": DECLARED}
    yield recipe(
        "prime_rl.dppo",
        f"{LOSS}: compute_loss, default_loss_fn",
        lambda given, **drawn: loss(given, DefaultLossConfig(**drawn)),
        DPPO,
        **more,
    )
    yield recipe("prime_rl.ipo", f"{LOSS}: compute_loss, ipo_loss_fn", ipo, IPO, **more)
    sides = of_loss(our_weighted), of_loss(lambda given, **drawn: ipo(given, of_tokens=of_tokens(given), **drawn))
    yield Row("recipe", "prime_rl.ipo, rl_weights", f"{LOSS}: compute_loss, rl_weights", *sides, IPO, **more)
    sides = of_loss(our_ref_kl), of_loss(lambda given: loss(given, IPOLossConfig(), "ref_kl"))
    yield Row("recipe", "prime_rl.ref_kl", f"{LOSS}: compute_loss, ref_kl_loss_fn", *sides, **more)
    yield configuration(
        "prime_rl",
        f"{LOSS}: setup_rl_loss_fn, compute_loss",
        lambda given, **drawn: loss(given, held(drawn)),
        drawn_config,
        lambda drawn: {"loss": held(drawn), "optim": {}} if drawn.get("type") == "ipo" else held(drawn),
        lambda given, drawn: None,
        **more,
    )


def drawn_config(rng: Random) -> dict[str, Any]:
    """Draw a block `loss`."""
    of_ipo = both(draw(type="ipo", ipo_threshold=(0.01, 0.1)), TAU)
    return rng.choice((of_ipo, DPPO))(rng)


def held(drawn: dict[str, Any]) -> Any:
    """Put a block into prime-rl's class."""
    return IPOLossConfig(**drawn) if drawn.get("type") == "ipo" else DefaultLossConfig(**drawn)
