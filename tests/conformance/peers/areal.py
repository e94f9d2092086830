"""AReaL: its rejection sampling, its losses, and grpo_loss_fn under its own configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

from conformance.batches import FINITE, Batch, without
from conformance.declared import BF16, CLAMP, NONFINITE, Declared, among
from conformance.rows import Result, Row, both, configuration, draw, preset, recipe, spec_of
from conformance.sources import Source
from conformance.versions import CURRENT, interpolated
from rollout_corr.frameworks.areal import dropin

DISTRIBUTION, PACKAGE, CHECKOUT = "areal", "areal", "areal"

FUNCTIONAL = "areal/utils/functional/functional.py"
ACTOR = "areal/trainer/ppo/actor.py"
ARGUMENTS = "areal/api/cli_args.py"
REJECTION = "apply_rejection_sampling"
METRICS = ("kl_k1", "kl_k2", "kl_k3")


def gaps(given: Batch) -> Tensor:
    """D of the valid tokens."""
    return (given.old - given.rollout)[given.mask]


KL_NONFINITE = Declared(
    "a divergence that is no number rejects its sequence here, its token there",
    "AReaL, metrics kl_* and binary_kl",
    lambda given, settings: NONFINITE(given, settings) and settings.get("metric", "binary_kl") != "ratio",
)
ROUNDS_TO_ONE = Declared(
    "probability 1 passes here, fails there",
    "AReaL drops a token whose probability",
    lambda given, settings: bool((torch.stack([given.old, given.rollout])[:, given.mask].exp() == 1.0).any()),
)
SMALL = Declared(
    "a probability below 1e-8",
    "Values differ for tokens whose probability is below eps",
    lambda given, settings: bool(
        (torch.stack([given.old, given.rollout])[:, given.mask].double() < torch.tensor(1e-8).log()).any()
    ),
)
BINARY_BF16 = Declared("divergence in bf16", "AReaL computes the binary KL in bf16", among("bf16"))
OF_BINARY = (ROUNDS_TO_ONE, SMALL, BINARY_BF16)
TIES = Declared(
    "tokens of equal D^2",
    "areal.m2po keeps or drops tokens of equal D^2 together",
    lambda given, settings: len(gaps(given).square().unique()) < len(gaps(given)),
)
NOTHING_FINITE = Declared(
    "no token has a finite D",
    "areal.m2po drops a token whose D is NaN",
    lambda given, settings: not bool(gaps(given).isfinite().any()),
)
PROXIMAL = Declared(
    "AReaL stops at a proximal policy that is not finite",
    "proximal log-probs that are not finite",
    lambda given, settings: NONFINITE(given, settings) and not bool(given.old[given.mask].isfinite().all()),
)
# AReaL computes weights in float32.
SINGLE = (2e-6, 2e-5)


def of_kl(rng: Random) -> dict[str, Any]:
    """Draw a test of a divergence."""
    metric = rng.choice(METRICS)
    return {
        "metric": metric,
        "level": rng.choice(("token", "sequence")),
        "agg": rng.choice(("sum", "mean", "max")),
        "upper": rng.choice((0.001, 0.07, 0.9)),
        "lower": rng.choice((None, -0.11)) if metric == "kl_k1" else None,
    }


OF_CLIP = draw(eps_clip=(0.1, 0.2), eps_clip_higher=(None, 0.28), c_clip=(None, 3.0))
OF_TOKEN_MASK = draw(lower=(None, 0.5, 0.9), upper=(1.05, 5.0))
OF_SEQ = both(OF_TOKEN_MASK, draw(agg=("sum", "mean", "max")))
OF_KPOP = draw(upper=(0.0011, 0.1, 2.0))
# The fixed fields of a preset's rejection_sampling, the drawn ones, and differences.
PRESETS: dict[str, tuple[dict[str, Any], Any, tuple[Declared, ...]]] = {
    "token_mask": ({"metric": "ratio"}, OF_TOKEN_MASK, ()),
    "seq": ({"metric": "ratio", "level": "sequence"}, OF_SEQ, ()),
    "kl": ({}, of_kl, (KL_NONFINITE,)),
    "kpop": ({"metric": "binary_kl"}, OF_KPOP, (KL_NONFINITE, *OF_BINARY)),
}


def rows(source: Source) -> Iterator[Row]:
    """Compare presets, recipes, the drop-in and the reader."""
    reject = source.cut(FUNCTIONAL, REJECTION)
    config_class = source.cut(ARGUMENTS, "RejectionSamplingConfig")
    ppo, sapo = (source.cut(FUNCTIONAL, f"{name}_loss_fn") for name in ("ppo_actor", "sapo"))
    kpop, has_cispo = (source.has(FUNCTIONAL, x) for x in ("compute_binary_kl_divergence", "cispo_loss_fn"))

    def config_of(**settings: Any) -> Any:
        # The configuration refuses binary_kl, which the function has: so its fields are set afterwards.
        made = config_class()
        made.__dict__.update(settings)
        return made

    def weigh(given: Batch, **settings: Any) -> Result:
        found = reject(given.old, given.rollout, given.mask, None, config_of(**settings))
        return {"mask": found.loss_mask, "weights": found.behave_imp_weight}

    def loss(given: Batch, rejection: dict[str, Any] | None = None, **settings: Any) -> Tensor:
        return ppo(
            logprobs=given.new,
            proximal_logprobs=given.old,
            old_logprobs=given.rollout,
            advantages=given.token_advantages,
            loss_mask=given.mask,
            rejection_sampling=None if rejection is None else config_of(**rejection),
            **{"eps_clip": 0.2} | settings,
        )[0]

    def rejecting(fixed: dict[str, Any], given: Batch, **settings: Any) -> Tensor:
        clipped = {key: settings.pop(key) for key in ("eps_clip", "eps_clip_higher", "c_clip")}
        return loss(given, fixed | settings, **clipped)

    place = f"{FUNCTIONAL}: ppo_actor_loss_fn"
    for name, (fixed, drawn, known) in PRESETS.items():
        if name == "kpop" and not kpop:
            continue
        more: dict[str, Any] = {"declared": (*known, CLAMP), "within": SINGLE}
        yield preset(f"areal.{name}", f"{FUNCTIONAL}: {REJECTION}", partial(weigh, **fixed), drawn, **more)
        more["declared"] = (*known, PROXIMAL, BF16, CLAMP)
        yield recipe(f"areal.{name}", place, partial(rejecting, fixed), both(drawn, OF_CLIP), **more)
    if source.has(ACTOR, "_apply_m2po_masking"):
        yield from m2po(source.cut(ACTOR, "_apply_m2po_masking"), loss, weigh)
    losses: dict[str, Any] = {"declared": (PROXIMAL, BF16, CLAMP)}
    for name in ("ppo", "grpo"):
        yield recipe(f"areal.{name}", place, loss, OF_CLIP, **losses)
    run = partial(loss, importance_sampling_level="sequence")
    yield recipe("areal.gspo", f"{place}, sequence level", run, OF_CLIP, **losses)

    def of_sapo(given: Batch, sapo_tau_pos: float, sapo_tau_neg: float) -> Tensor:
        return sapo(given.new, given.old, given.token_advantages, sapo_tau_pos, sapo_tau_neg, given.mask)[0]

    taus = draw(sapo_tau_pos=(1.0, 2.0), sapo_tau_neg=(1.0, 1.05))
    yield recipe("areal.sapo", f"{FUNCTIONAL}: sapo_loss_fn", of_sapo, taus, **losses)
    if has_cispo:
        cispo = source.cut(FUNCTIONAL, "cispo_loss_fn")

        def of_cispo(given: Batch, eps_clip: float, eps_clip_higher: float) -> Tensor:
            return cispo(given.new, given.old, given.token_advantages, eps_clip, given.mask, eps_clip_higher)[0]

        drawn = draw(eps_clip=(0.2, 1.0), eps_clip_higher=(0.28, 4.0))
        yield recipe("areal.cispo", f"{FUNCTIONAL}: cispo_loss_fn", of_cispo, drawn, **losses)
    between = source.cut(ACTOR, "compute_prox_logp_approximations")

    def approximated(given: Batch, versions: Tensor, **drawn: Any) -> Tensor:
        proximal = between(given.rollout, given.new.detach(), versions, CURRENT, "loglinear")["loglinear"]
        return loss(replace(given, old=proximal), **drawn)

    more = {"declared": (replace(PROXIMAL, when=NONFINITE), BF16, CLAMP), "within": SINGLE}
    at = f"{ACTOR}: compute_prox_logp_approximations, {place}"
    yield interpolated("areal.a3po", "areal.a3po", at, approximated, OF_CLIP, **more)
    yield from drop_in(reject, config_of, kpop)
    yield reader(source, has_cispo)


def m2po(mask: Any, loss: Callable[..., Tensor], weigh: Callable[..., Result]) -> Iterator[Row]:
    """Compare M2PO, which drops tokens before anything counts them, and before `rejection_sampling` sees them."""

    def masked(given: Batch, m2_threshold: float) -> Batch:
        # What lies at invalid tokens is zeroed before.
        clean = [x.where(given.mask, 0.0) for x in (given.rollout, given.old)]
        return replace(given, mask=mask(*clean, given.mask, m2_threshold))

    def lose(given: Batch, m2_threshold: float, **clipped: Any) -> Tensor:
        return loss(masked(given, m2_threshold), **clipped)

    def reject_too(given: Batch, drawn: dict[str, Any]) -> Result:
        left = masked(given, drawn["m2_threshold"])
        found = weigh(left, **drawn["rejection_sampling"])
        return {**found, "mask": found["mask"].bool() & left.mask}

    def settings(rng: Random) -> dict[str, Any]:
        block = {
            "metric": "ratio",
            "level": rng.choice(("token", "sequence")),
            "agg": rng.choice(("sum", "mean")),
            "upper": rng.choice((1.05, 2.0)),
            "lower": rng.choice((None, 0.9)),
        }
        threshold = rng.choice((0.0007, 0.011, 0.04))
        return {"use_decoupled_loss": True, "m2_threshold": threshold, "rejection_sampling": block}

    drawn, place = draw(m2_threshold=(0.0007, 0.011, 0.04)), f"{ACTOR}: _apply_m2po_masking"
    declared = (TIES, NOTHING_FINITE, BF16, CLAMP)
    yield preset("areal.m2po", place, lambda given, **s: {"mask": masked(given, **s).mask}, drawn, declared=declared)
    drawn, declared = both(drawn, draw(eps_clip=(0.1, 0.2), c_clip=(None, 3.0))), (PROXIMAL, *declared)
    yield recipe("areal.m2po", f"{place}, {FUNCTIONAL}: ppo_actor_loss_fn", lose, drawn, declared=declared)
    place = f"{place}, {FUNCTIONAL}: {REJECTION}"
    more: dict[str, Any] = {"declared": (TIES, CLAMP), "within": SINGLE}
    more["kinds"] = tuple(kind for kind in FINITE if kind != "nan_behind_mask")
    yield spec_of("areal", place, reject_too, settings, ", m2_threshold", **more)


def drop_in(reject: Any, config_of: Any, kpop: bool) -> Iterator[Row]:
    """Compare the drop-in's function with AReaL's, padded and packed."""
    module = ModuleType(dropin.MODULE)
    module.RejectionSamplingResult = SimpleNamespace

    def side(function: Any, config: Any, given: Batch, packed: bool) -> Result:
        offsets = None
        tensors = [given.old, given.rollout, given.mask]
        if packed:
            rows, width = given.mask.shape
            offsets = torch.arange(rows + 1, dtype=torch.int32) * width
            tensors = [x.reshape(-1) for x in tensors]
        found = function(*tensors, offsets, config)
        return {
            "mask": found.loss_mask,
            "weights": found.behave_imp_weight.float(),
            "filtered": float(found.filtered_fraction),
        }

    def ours(given: Batch, settings: dict[str, Any]) -> Result:
        packed = settings.pop("packed")
        with patch.dict(sys.modules, {dropin.MODULE: module}):
            return side(dropin.apply_rejection_sampling, SimpleNamespace(**{"lower": None} | settings), given, packed)

    def theirs(given: Batch, settings: dict[str, Any]) -> Result:
        packed = settings.pop("packed")
        return side(reject, config_of(**settings), given, packed)

    drawn_by = (("ratio", OF_TOKEN_MASK), ("kl", of_kl), ("binary_kl", OF_KPOP))
    clamped = draw(
        action="clamp",
        metric="ratio",
        level=("sequence", "sequence", "token"),
        agg=("max", "mean", "sum"),
        lower=(0.9, None),
        upper=(1.05, 1.2),
        packed=(True, False),
    )

    def settings(rng: Random) -> dict[str, Any]:
        name, drawn = rng.choice(drawn_by[: 2 + kpop])
        made = {"metric": name, "level": rng.choice(("token", "sequence")), "agg": rng.choice(("sum", "mean", "max"))}
        made |= drawn(rng)
        action = rng.choice(dropin.areal_config.ACTIONS) if made["metric"] == "ratio" else "mask"
        return made | {"action": action, "packed": rng.random() < 0.5}

    def of_binary(known: Declared) -> Declared:
        return replace(known, when=lambda given, s: s["metric"] == "binary_kl" and known.when(given, s))

    declared = (KL_NONFINITE, *map(of_binary, OF_BINARY), CLAMP)
    place = f"{FUNCTIONAL}: {REJECTION}"
    yield Row("drop-in", f"areal.{REJECTION}", place, ours, theirs, settings, declared=declared, within=SINGLE)
    more: dict[str, Any] = {"declared": (CLAMP,), "within": SINGLE}
    yield Row("drop-in", f"areal.{REJECTION}, clamp", place, ours, theirs, clamped, **more)


def reader(source: Source, cispo: bool) -> Row:
    """Compare the reader: grpo_loss_fn with the settings that PPOActor hands on."""
    method = source.cut("areal/utils/constants.py", "ProxLogpMethod")
    grpo = source.cut(ACTOR, "grpo_loss_fn", stats_tracker=MagicMock(), infer_token_denominator=MagicMock())
    rejection_class = source.cut(ARGUMENTS, "RejectionSamplingConfig")

    def loss(given: Batch, **config: Any) -> Tensor:
        config = dict(config)
        if config.get("rejection_sampling") is not None:
            config["rejection_sampling"] = rejection_class(**config["rejection_sampling"])
        made = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None, "prox_logp_method": method("recompute").value}
        made |= {key: value for key, value in config.items() if key in grpo.__code__.co_varnames}
        data = {
            "logprobs": given.rollout if config["use_decoupled_loss"] else given.old,
            "prox_logp": given.old,
            "advantages": given.token_advantages,
            "loss_mask": given.mask,
        }
        clean = {key: value.where(given.mask, 0.0) for key, value in data.items() if key != "loss_mask"}
        return grpo(given.new, torch.zeros_like(given.new), data | clean, **made)

    def settings(rng: Random) -> dict[str, Any]:
        config: dict[str, Any] = {
            "eps_clip": rng.choice((0.1, 0.2)),
            "eps_clip_higher": rng.choice((None, 0.28)),
            "use_decoupled_loss": rng.random() < 0.7,
        }
        way = rng.choice(("ppo", "gspo", "sapo", *(["cispo"] if cispo else [])))
        if way == "sapo":
            config |= {"use_sapo_loss": True, "sapo_tau_neg": rng.choice((1.05, 2.0)), "use_decoupled_loss": False}
        elif way == "cispo":
            config |= {"use_cispo_loss": True, "eps_clip_higher": 4.0}
        else:
            config |= {"c_clip": rng.choice((None, 3.0))}
            config |= {"importance_sampling_level": "sequence" if way == "gspo" else "token"}
        if rng.random() < 0.8:
            metric = rng.choice(("ratio", "ratio", *METRICS))
            block = {"metric": metric, "level": rng.choice(("token", "sequence"))}
            if metric == "ratio":
                block |= {"upper": rng.choice((1.05, 2.0)), "lower": rng.choice((None, 0.5, 0.9))}
                block |= {"action": rng.choice(("mask", "clamp"))}
            else:
                block |= {"upper": rng.choice((0.001, 0.07, 0.9))}
            if block.get("action") != "clamp" and block["level"] == "sequence":
                block |= {"agg": rng.choice(("sum", "mean", "max"))}
            config["rejection_sampling"] = block
        return config

    def hold(config: dict[str, Any]) -> object:
        return {"actor": {**config, "kl_ctl": 0.0, "path": "model"}, "rollout": {}, "gconfig": {}}

    # grpo_loss_fn raises where the proximal log-probs are not finite.
    more: dict[str, Any] = {"kinds": without("infinite", "nan_in_front"), "within": SINGLE}
    return configuration("areal", f"{ACTOR}: grpo_loss_fn", loss, settings, hold, declared=(BF16, CLAMP), **more)
