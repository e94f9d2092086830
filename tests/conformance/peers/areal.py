"""AReaL: its rejection sampling, its losses, and grpo_loss_fn under its own configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

from conformance.batches import FINITE, KINDS, Batch
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


def rounds_to_one(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell of batches with a probability that AReaL's clamp to 1 - 1e-8 leaves at 1."""
    front = torch.stack([given.old, given.rollout])[:, given.mask]
    return bool((front.exp() == 1.0).any())


def nothing_finite(given: Batch) -> bool:
    """Tell of batches that hold no token with a finite D."""
    return not bool((given.old - given.rollout)[given.mask].isfinite().any())


def ties(given: Batch) -> bool:
    """Tell of batches with two tokens of equal D^2."""
    d = (given.old - given.rollout)[given.mask]
    return d.square().unique().shape[0] < d.shape[0]


KL_NONFINITE = Declared(
    "a divergence that is no number rejects its sequence here, its token there",
    "AReaL, metrics kl_* and binary_kl",
    lambda given, settings: NONFINITE(given, settings) and settings.get("metric", "binary_kl") != "ratio",
)
ROUNDS_TO_ONE = Declared(
    "probability 1 passes here, fails there", "AReaL drops a token whose probability", rounds_to_one
)
SMALL = Declared(
    "a probability below 1e-8",
    "Values differ for tokens whose probability is below eps",
    lambda given, settings: bool(
        (torch.stack([given.old, given.rollout])[:, given.mask].double() < torch.tensor(1e-8).log()).any()
    ),
)
BINARY_BF16 = Declared("divergence in bf16", "AReaL computes the binary KL in bf16", among("bf16"))
TIES = Declared(
    "tokens of equal D^2", "areal.m2po keeps or drops tokens of equal D^2 together", lambda given, settings: ties(given)
)
NOTHING_FINITE = Declared(
    "no token has a finite D", "areal.m2po drops a token whose D is NaN", lambda given, settings: nothing_finite(given)
)
PROXIMAL = Declared(
    "AReaL stops at a proximal policy that is not finite",
    "proximal log-probs that are not finite",
    lambda given, settings: NONFINITE(given, settings) and not bool(given.old[given.mask].isfinite().all()),
)
INTERPOLATED = Declared(PROXIMAL.name, PROXIMAL.says, NONFINITE)


def rows(source: Source) -> Iterator[Row]:
    """Compare presets, recipes, the drop-in and the reader."""
    reject = source.cut(FUNCTIONAL, REJECTION)
    config_class = source.cut(ARGUMENTS, "RejectionSamplingConfig")
    ppo = source.cut(FUNCTIONAL, "ppo_actor_loss_fn")
    sapo = source.cut(FUNCTIONAL, "sapo_loss_fn")
    kpop = source.has(FUNCTIONAL, "compute_binary_kl_divergence")
    cispo = source.cut(FUNCTIONAL, "cispo_loss_fn") if source.has(FUNCTIONAL, "cispo_loss_fn") else None

    def config_of(**settings: Any) -> Any:
        # The configuration refuses binary_kl, which the function has: so its fields are set afterwards.
        made = config_class()
        made.__dict__.update(settings)
        return made

    def weigh(given: Batch, **settings: Any) -> Result:
        found = reject(given.old, given.rollout, given.mask, None, config_of(**settings))
        return {"mask": found.loss_mask, "weights": found.behave_imp_weight}

    def loss(given: Batch, rejection: dict[str, Any] | None = None, **settings: Any) -> Tensor:
        value, _ = ppo(
            logprobs=given.new,
            proximal_logprobs=given.old,
            old_logprobs=given.rollout,
            advantages=given.token_advantages,
            loss_mask=given.mask,
            rejection_sampling=None if rejection is None else config_of(**rejection),
            **{"eps_clip": 0.2} | settings,
        )
        return value

    of_clip = draw(eps_clip=(0.1, 0.2), eps_clip_higher=(None, 0.28), c_clip=(None, 3.0))
    of_token_mask = draw(lower=(None, 0.5, 0.9), upper=(1.05, 5.0))
    of_seq = both(of_token_mask, draw(agg=("sum", "mean", "max")))
    of_kpop = draw(upper=(0.0011, 0.1, 2.0))

    def of_kl(rng: Random) -> dict[str, Any]:
        metric = rng.choice(METRICS)
        return {
            "metric": metric,
            "level": rng.choice(("token", "sequence")),
            "agg": rng.choice(("sum", "mean", "max")),
            "upper": rng.choice((0.001, 0.07, 0.9)),
            "lower": rng.choice((None, -0.11)) if metric == "kl_k1" else None,
        }

    presets: dict[str, tuple[dict[str, Any], Any, tuple[Declared, ...]]] = {
        "token_mask": ({"metric": "ratio"}, of_token_mask, ()),
        "seq": ({"metric": "ratio", "level": "sequence"}, of_seq, ()),
        "kl": ({}, of_kl, (KL_NONFINITE,)),
    }
    if kpop:
        presets["kpop"] = ({"metric": "binary_kl"}, of_kpop, (KL_NONFINITE, ROUNDS_TO_ONE, SMALL, BINARY_BF16))
    mask = source.cut(ACTOR, "_apply_m2po_masking") if source.has(ACTOR, "_apply_m2po_masking") else None
    # AReaL computes weights in float32.
    single: dict[str, Any] = {"within": (2e-6, 2e-5)}
    for name, (fixed, drawn, declared) in presets.items():

        def run(given: Batch, fixed: dict[str, Any] = fixed, **settings: Any) -> Result:
            return weigh(given, **fixed, **settings)

        def lose(given: Batch, fixed: dict[str, Any] = fixed, **settings: Any) -> Tensor:
            clipped = {key: settings.pop(key) for key in ("eps_clip", "eps_clip_higher", "c_clip")}
            return loss(given, fixed | settings, **clipped)

        yield preset(f"areal.{name}", f"{FUNCTIONAL}: {REJECTION}", run, drawn, declared=(*declared, CLAMP), **single)
        yield recipe(
            f"areal.{name}",
            f"{FUNCTIONAL}: ppo_actor_loss_fn",
            lose,
            both(drawn, of_clip),
            declared=(*declared, PROXIMAL, BF16, CLAMP),
            **single,
        )

    if mask is not None:
        yield from m2po(mask, loss)
        yield m2po_and_rejection(mask, weigh)
    losses: dict[str, Any] = {"declared": (PROXIMAL, BF16, CLAMP)}
    for name in ("ppo", "grpo"):
        yield recipe(f"areal.{name}", f"{FUNCTIONAL}: ppo_actor_loss_fn", loss, of_clip, **losses)
    yield recipe(
        "areal.gspo",
        f"{FUNCTIONAL}: ppo_actor_loss_fn, sequence level",
        lambda given, **settings: loss(given, importance_sampling_level="sequence", **settings),
        of_clip,
        **losses,
    )
    yield recipe(
        "areal.sapo",
        f"{FUNCTIONAL}: sapo_loss_fn",
        lambda given, **taus: sapo(
            given.new, given.old, given.token_advantages, taus["sapo_tau_pos"], taus["sapo_tau_neg"], given.mask
        )[0],
        draw(sapo_tau_pos=(1.0, 2.0), sapo_tau_neg=(1.0, 1.05)),
        **losses,
    )
    if cispo is not None:
        yield recipe(
            "areal.cispo",
            f"{FUNCTIONAL}: cispo_loss_fn",
            lambda given, eps_clip, eps_clip_higher: cispo(
                given.new, given.old, given.token_advantages, eps_clip, given.mask, eps_clip_higher
            )[0],
            draw(eps_clip=(0.2, 1.0), eps_clip_higher=(0.28, 4.0)),
            **losses,
        )

    between = source.cut(ACTOR, "compute_prox_logp_approximations")

    def approximated(given: Batch, versions: Tensor, **drawn: Any) -> Tensor:
        proximal = between(given.rollout, given.new.detach(), versions, CURRENT, "loglinear")["loglinear"]
        return loss(replace(given, old=proximal), **drawn)

    place = f"{ACTOR}: compute_prox_logp_approximations, {FUNCTIONAL}: ppo_actor_loss_fn"
    yield interpolated(
        "areal.a3po", "areal.a3po", place, approximated, of_clip, declared=(INTERPOLATED, BF16, CLAMP), **single
    )
    yield drop_in(reject, config_of, [of_token_mask, of_kl, *([of_kpop] if kpop else [])])
    yield from readers(source, cispo is not None)


def m2po(mask: Any, loss: Any) -> Iterator[Row]:
    """Compare M2PO, which drops tokens before anything counts them."""

    def masked(given: Batch, m2_threshold: float) -> Tensor:
        # What lies at invalid tokens is zeroed before.
        clean = [x.where(given.mask, 0.0) for x in (given.rollout, given.old)]
        return mask(*clean, given.mask, m2_threshold)

    def lose(given: Batch, m2_threshold: float, **clipped: Any) -> Tensor:
        return loss(replace(given, mask=masked(given, m2_threshold)), **clipped)

    drawn = draw(m2_threshold=(0.0007, 0.011, 0.04))
    place = f"{ACTOR}: _apply_m2po_masking"
    declared = (TIES, NOTHING_FINITE, BF16, CLAMP)
    yield preset("areal.m2po", place, lambda given, **s: {"mask": masked(given, **s)}, drawn, declared=declared)
    yield recipe(
        "areal.m2po",
        f"{place}, {FUNCTIONAL}: ppo_actor_loss_fn",
        lose,
        both(drawn, draw(eps_clip=(0.1, 0.2), c_clip=(None, 3.0))),
        declared=(TIES, PROXIMAL, NOTHING_FINITE, BF16, CLAMP),
    )


def m2po_and_rejection(mask: Any, weigh: Callable[..., Result]) -> Row:
    """Compare the reader of `m2_threshold` with `rejection_sampling`, which sees what M2PO has left."""

    def run(given: Batch, drawn: dict[str, Any]) -> Result:
        clean = [x.where(given.mask, 0.0) for x in (given.rollout, given.old)]
        left = replace(given, mask=mask(*clean, given.mask, drawn["m2_threshold"]))
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
        return {
            "use_decoupled_loss": True,
            "m2_threshold": rng.choice((0.0007, 0.011, 0.04)),
            "rejection_sampling": block,
        }

    finite = tuple(kind for kind in FINITE if kind != "nan_behind_mask")
    place = f"{ACTOR}: _apply_m2po_masking, {FUNCTIONAL}: {REJECTION}"
    return spec_of(
        "areal", place, run, settings, ", m2_threshold", declared=(TIES, CLAMP), kinds=finite, within=(2e-6, 2e-5)
    )


def drop_in(reject: Any, config_of: Any, drawn: list[Any]) -> Row:
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

    def settings(rng: Random) -> dict[str, Any]:
        number = rng.randrange(len(drawn))
        metric = {"metric": ("ratio", "kl", "binary_kl")[number]}
        made = metric | {"level": rng.choice(("token", "sequence")), "agg": rng.choice(("sum", "mean", "max"))}
        made |= drawn[number](rng)
        action = rng.choice(dropin.areal_config.ACTIONS) if made["metric"] == "ratio" else "mask"
        return made | {"action": action, "packed": rng.random() < 0.5}

    declared = tuple(
        Declared(d.name, d.says, lambda given, s, d=d: s["metric"] == "binary_kl" and d.when(given, s))
        for d in (ROUNDS_TO_ONE, SMALL, BINARY_BF16)
    )
    return Row(
        "drop-in",
        "areal.apply_rejection_sampling",
        f"{FUNCTIONAL}: {REJECTION}",
        ours,
        theirs,
        settings,
        declared=(KL_NONFINITE, *declared, CLAMP),
        within=(2e-6, 2e-5),
    )


def readers(source: Source, cispo: bool) -> Iterator[Row]:
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
    more: dict[str, Any] = {
        "kinds": tuple(kind for kind in KINDS if kind not in ("infinite", "nan_in_front")),
        "within": (2e-6, 2e-5),
    }
    yield configuration("areal", f"{ACTOR}: grpo_loss_fn", loss, settings, hold, declared=(BF16, CLAMP), **more)
