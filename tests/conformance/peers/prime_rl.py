"""prime-rl: its losses of a sample, through the function that adds them up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from conformance.batches import Batch
from conformance.rows import BF16, Declared, Result, Row, configuration, loss_and_gradient, recipe
from conformance.samples import lengths_of, samples_of
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = None, "prime_rl", "prime-rl"
UNDER = "src"

LOSS = "prime_rl/trainer/rl/loss.py"

PROPAGATES = Declared(
    "non-finite log-probs go on into the loss there",
    "presets.md",
    "let the NaN through into the loss",
    lambda given, settings: given.kind in ("infinite", "nan_in_front"),
)
CLAMP = Declared(
    "exponents beyond +-20",
    "presets.md",
    "the exponent is then clamped to +-20",
    lambda given, settings: bool(((given.new - given.rollout).abs() > 20.0)[given.mask].any()),
)
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
        lengths = lengths_of(given)

        def cut(x: Tensor) -> list[Tensor]:
            return samples_of(x, lengths)

        counted = given.mask if of_tokens is None else given.mask & (of_tokens != 0)
        scale = counted.sum().clamp(min=1)
        ref_kl = weights == "ref_kl"
        nothing = [given.new.new_zeros(n) for n in lengths]
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
        result: Tensor = value
        return result

    def ref_kl(given: Batch, drawn: dict[str, Any]) -> tuple[Result, Result]:
        mine, peer = given.trains(), given.trains()
        advantages = (given.ref - given.new).where(given.mask, 0.0)
        spec, terms = rc.recipe("prime_rl.ref_kl")
        policies = {"rollout_logp": given.rollout, "spec": spec}
        made = rc.policy_loss(mine.new, advantages, loss=terms, mask=given.mask, **policies)
        theirs = loss(peer, IPOLossConfig(), "ref_kl")
        return loss_and_gradient(made.value, mine), loss_and_gradient(theirs, peer)

    def weighted(given: Batch, drawn: dict[str, Any]) -> tuple[Result, Result]:
        mine, peer = given.trains(), given.trains()
        made = torch.Generator().manual_seed(given.seed)
        of_tokens = torch.randint(0, 4, given.new.shape, generator=made).to(given.new.dtype) / 2
        spec, terms = rc.recipe("prime_rl.ipo", **drawn)
        batch = rc.Batch(mask=given.mask & (of_tokens != 0), scale=of_tokens)
        out = rc.policy_loss(mine.new, given.advantages, batch, terms, rollout_logp=given.rollout, spec=spec)
        config = IPOLossConfig(**{"ipo_threshold" if name == "eps" else name: x for name, x in drawn.items()})
        return loss_and_gradient(out.value, mine), loss_and_gradient(loss(peer, config, of_tokens=of_tokens), peer)

    def drawn_ipo(rng: Random) -> dict[str, Any]:
        return {"eps": rng.choice((0.01, 0.1)), **tau(rng)}

    more: dict[str, Any] = {"declared": DECLARED}
    yield recipe(
        "prime_rl.dppo",
        f"{LOSS}: compute_loss, default_loss_fn",
        lambda given, **drawn: loss(given, DefaultLossConfig(**drawn)),
        lambda rng: {"dppo_mask_low": rng.choice((0.05, 0.2)), "dppo_mask_high": rng.choice((0.01, 0.2)), **tau(rng)},
        **more,
    )
    yield recipe(
        "prime_rl.ipo",
        f"{LOSS}: compute_loss, ipo_loss_fn",
        lambda given, eps, **drawn: loss(given, IPOLossConfig(ipo_threshold=eps, **drawn)),
        drawn_ipo,
        **more,
    )
    yield Row("recipe", "prime_rl.ipo", f"{LOSS}: compute_loss, rl_weights", weighted, drawn_ipo, **more)
    yield Row("recipe", "prime_rl.ref_kl", f"{LOSS}: compute_loss, ref_kl_loss_fn", ref_kl, **more)
    yield configuration(
        "prime_rl",
        f"{LOSS}: setup_rl_loss_fn, compute_loss",
        lambda given, **drawn: loss(given, held(drawn)),
        drawn_config,
        lambda drawn: {"loss": held(drawn), "optim": {}} if drawn.get("type") == "ipo" else held(drawn),
        lambda given, drawn: None,
        **more,
    )


def tau(rng: Random) -> dict[str, float]:
    """Draw the factors of the regularizer and of the advantages."""
    return {"kl_tau": rng.choice((1e-3, 0.0, 0.1)), "adv_tau": rng.choice((1.0, 0.5))}


def drawn_config(rng: Random) -> dict[str, Any]:
    """Draw a block `loss`."""
    if rng.random() < 0.5:
        return {"type": "ipo", "ipo_threshold": rng.choice((0.01, 0.1)), **tau(rng)}
    return {"dppo_mask_low": rng.choice((0.05, 0.2)), "dppo_mask_high": rng.choice((0.01, 0.2)), **tau(rng)}


def held(drawn: dict[str, Any]) -> Any:
    """Put a block into prime-rl's class."""
    return IPOLossConfig(**drawn) if drawn.get("type") == "ipo" else DefaultLossConfig(**drawn)
