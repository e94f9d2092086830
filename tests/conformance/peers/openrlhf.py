"""OpenRLHF: PolicyLoss is constructed and called, compute_approx_kl and aggregate_loss make its KL, all as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.batches import PADDED, Batch
from conformance.declared import BF16, CLAMP, NONFINITE, Declared, among
from conformance.rows import Result, Row, both, configuration, draw, loss_and_gradient, preset, recipe
from conformance.sources import Source
from rollout_corr.frameworks.openrlhf import dropin

DISTRIBUTION, PACKAGE, CHECKOUT = "openrlhf", "openrlhf", "openrlhf"

LOSS, UTILS = "openrlhf/models/loss.py", "openrlhf/models/utils.py"
# The names before 0.11.2, by level and mode.
OLD_TYPES = {("token", "clip"): "tis", ("token", "mask"): "icepop", ("seq", "mask"): "seq-mask-tis"}


def rounds_below_zero(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether OpenRLHF's formula of the binary KL comes out below 0 at a token."""
    p, q = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (given.rollout, given.old))
    found = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    return bool((found.where(given.mask, 0.0) < 0).any())


def beyond_eps(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether a probability lies outside [1e-6, 1 - 1e-6]."""
    found = torch.stack([given.old, given.rollout]).exp()
    return bool(((found < 1e-6) | (found > 1 - 1e-6))[:, given.mask].any())


NO_NUMBER = Declared(
    "a non-finite token", "OpenRLHF, mode mask | weight 0 at the token, or its sequence at level seq", NONFINITE
)
ROUNDED = Declared("its binary KL rounds below 0", "drops tokens whose KL rounds", rounds_below_zero)
EPS = Declared("a probability below eps", "Values differ for tokens whose probability", beyond_eps)
DECLARED, OF_GATING = (NO_NUMBER, CLAMP, BF16), (ROUNDED, EPS)
NOTHING = Declared("no token: NaN there", "a batch without a token is a loss of NaN", among("all_masked"))


def rows(source: Source) -> Iterator[Row]:
    """Compare presets, recipes and the reader."""
    loss_class = source.cut(LOSS, "PolicyLoss")
    approximate, aggregate = source.cut(UTILS, "compute_approx_kl"), source.cut(LOSS, "aggregate_loss")
    new_names = source.says(LOSS, "is_correction_level")
    weigh = source.lines(LOSS, "PolicyLoss.forward", "vllm_kl =", "if self.")

    def named(level: str, mode: str, gating: str, threshold: Any) -> dict[str, Any]:
        """The names of a correction in this version."""
        threshold = (0.0, *threshold)[-2:]
        if new_names:
            fields = {"level": level, "mode": mode, "gating": gating, "threshold": threshold}
            return {f"is_correction_{name}": value for name, value in fields.items()}
        return {
            "enable_vllm_is_correction": level != "off",
            "vllm_is_truncated_threshold": threshold,
            "vllm_is_correction_type": OLD_TYPES.get((level, mode), "tis"),
        }

    def made(
        level: str = "off", mode: str = "mask", gating: str = "ratio", threshold: Any = (0.5, 5.0), **config: Any
    ) -> Any:
        return loss_class(**named(level, mode, gating, threshold), **config)

    def loss(
        given: Batch,
        eps_clip: float = 0.2,
        eps_clip_low_high: tuple[float, float] | None = None,
        loss_agg_mode: str = "token-mean",
        kl: dict[str, Any] | None = None,
        **config: Any,
    ) -> Tensor:
        low, high = eps_clip_low_high or (eps_clip, eps_clip)
        run = made(clip_eps_low=low, clip_eps_high=high, token_level_loss=loss_agg_mode == "token-mean", **config)
        # The counts over all ranks; some ranks have tokens.
        counts = {
            "batch_num_tokens": given.mask.sum().clamp(min=1),
            "global_batch_size": given.mask.any(1).sum().clamp(min=1),
        }
        value = run(
            given.new, given.old, given.token_advantages, given.mask, rollout_log_probs=given.rollout, **counts
        )[0]
        if kl is not None and kl["use_loss"]:
            found = approximate(given.new, given.ref, kl_estimator=kl["estimator"])
            value = value + kl["init_coef"] * aggregate(found, given.mask, **counts)
        return value

    def weights(given: Batch, **config: Any) -> Result:
        tokens = {"old_log_probs": given.old, "rollout_log_probs": given.rollout, "action_mask": given.mask}
        return {"weights": weigh(self=made(**config), loss=torch.ones_like(given.old), **tokens)["loss"]}

    # OpenRLHF multiplies by its mask, so what stands behind it is finite; it adds 1e-8 to a sequence's tokens.
    more: dict[str, Any] = {"declared": DECLARED, "kinds": PADDED, "within": (3e-8, 2e-5)}
    gated = more | {"declared": (*DECLARED, *OF_GATING)}

    bounds, delta = draw(low=(0.5, 0.9), high=(1.05, 5.0)), draw(delta=(1e-4, 3e-3, 0.05))
    clips = draw(eps_clip_low_high=(None, (0.1, 0.3)), dual_clip=(None, 3.0))
    of_plain = both(clips, draw(loss_agg_mode=("token-mean", "seq-mean-token-mean")))

    def thresholded(run: Any, fixed: dict[str, Any], given: Batch, low: float, high: float, **config: Any) -> Any:
        return run(given, threshold=(low, high), **fixed, **config)

    def bounded(run: Any, fixed: dict[str, Any], given: Batch, delta: float, **config: Any) -> Any:
        return run(given, threshold=(delta,), **fixed, **config)

    token, seq = {"level": "token"}, {"level": "seq"}
    cases: list[tuple[Any, ...]] = [
        ("tis", thresholded, bounds, token | {"mode": "clip"}, more),
        ("icepop", thresholded, bounds, token, more),
        ("seq_mask_tis", thresholded, bounds, seq, more),
        ("flash_reinforce", bounded, delta, seq | {"gating": "binary_kl"}, gated),
        ("dppo_like", bounded, both(delta, draw(gating=("binary_kl", "tv"))), token, gated),
    ]
    for name, by, settings, fixed, known in cases if new_names else cases[:3]:
        place = f"{LOSS}: PolicyLoss, {' '.join(fixed.values())}"
        yield preset(f"openrlhf.{name}", place, partial(by, weights, fixed), settings, **known)
        yield recipe(f"openrlhf.{name}", place, partial(by, loss, fixed), both(settings, of_plain), **known)
    for name in ("ppo", "grpo"):
        yield recipe(f"openrlhf.{name}", f"{LOSS}: PolicyLoss", loss, of_plain, **more)
    yield recipe("openrlhf.gspo", f"{LOSS}: PolicyLoss, gspo", partial(loss, policy_loss_type="gspo"), clips, **more)
    # Its metrics stay OpenRLHF's.
    replacement = dropin.replaced(lambda *args, **kwargs: (None,))

    def called(forward: Callable[..., Any], module: Any, given: Batch, over_all: bool) -> Result:
        # The counts over all ranks and their number, or what this batch has.
        counts = {"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 9} if over_all else {}
        side = given.trains()
        value = forward(module, side.new, side.old, side.token_advantages, side.mask, side.rollout, **counts)[0]
        return loss_and_gradient(value, side)

    def replaced(given: Batch, config: dict[str, Any]) -> Result:
        fields = [config.pop(name) for name in ("over_all", "level", "mode", "gating", "threshold")]
        return called(replacement, SimpleNamespace(**sided(config), **named(*fields[1:])), given, fields[0])

    def original(given: Batch, config: dict[str, Any]) -> Result:
        over_all = config.pop("over_all")
        return called(loss_class.forward, made(**sided(config)), given, over_all)

    def sided(config: dict[str, Any]) -> dict[str, Any]:
        low, high = config.pop("sides")
        return {"clip_eps_low": low, "clip_eps_high": high, **config}

    def of_module(rng: Random) -> dict[str, Any]:
        config = config_of(rng, new_names)
        names = ("dual_clip", "policy_loss_type", "level", "mode", "gating", "threshold")
        more = {"sides": (config["eps_clip"], rng.choice((0.2, 0.28))), "over_all": rng.random() < 0.5}
        # Its constructor sets it to False for gspo.
        tokens = rng.random() < 0.5 and config["policy_loss_type"] != "gspo"
        return {name: config[name] for name in names} | more | {"token_level_loss": tokens}

    known = gated | {"declared": (*DECLARED, *OF_GATING, NOTHING)}
    sides, place = (replaced, original), f"{LOSS}: PolicyLoss.forward"
    yield Row("drop-in", "openrlhf.PolicyLoss", place, *sides, of_module, **known)
    place, drawn = f"{LOSS}: PolicyLoss; {UTILS}: compute_approx_kl", partial(config_of, new_names=new_names)
    # Its KL is computed in float32, whatever comes.
    known = gated | {"within": (2e-5, 2e-5)}
    yield configuration("openrlhf", place, loss, drawn, partial(hold, new_names=new_names), **known)


def config_of(rng: Random, new_names: bool) -> dict[str, Any]:
    """Draw a configuration."""
    level, mode = rng.choice((("off", "mask"), *OLD_TYPES))
    gating = rng.choice(("ratio", "binary_kl", "tv")) if new_names and mode == "mask" else "ratio"
    kind = rng.choice(("ppo", "ppo", "gspo"))
    aggregated = rng.choice(("token-mean", "seq-mean-token-mean")) if new_names and kind == "ppo" else "token-mean"
    tokens = kind == "ppo" and aggregated == "token-mean"
    return {
        "eps_clip": rng.choice((0.1, 0.2)),
        "eps_clip_low_high": rng.choice((None, (0.2, 0.28))),
        "dual_clip": rng.choice((None, 3.0)),
        "policy_loss_type": kind,
        "loss_agg_mode": aggregated,
        "level": level,
        "mode": mode,
        "gating": gating,
        "threshold": rng.choice(((0.5, 5.0), (1.05,))) if gating == "ratio" else (rng.choice((1e-3, 0.05)),),
        "kl": {
            "use_loss": tokens and rng.random() < 0.5,
            "init_coef": rng.choice((0.01, 0.1)),
            "estimator": rng.choice(("k1", "k2", "k3")),
        },
    }


def hold(config: dict[str, Any], new_names: bool) -> SimpleNamespace:
    """Put a configuration into the nested namespace that OpenRLHF makes of its flags."""
    actor = {name: config[name] for name in ("eps_clip", "eps_clip_low_high", "dual_clip", "policy_loss_type")}
    advantage = {"estimator": "rloo", "is_correction_threshold": list(config["threshold"])}
    if new_names:
        actor["loss_agg_mode"] = config["loss_agg_mode"]
        advantage |= {f"is_correction_{name}": config[name] for name in ("level", "mode", "gating")}
    else:
        advantage["is_correction_enable"] = config["level"] != "off"
        advantage["is_correction_type"] = OLD_TYPES.get((config["level"], config["mode"]), "tis")
    algo = SimpleNamespace(advantage=SimpleNamespace(**advantage), kl=SimpleNamespace(**config["kl"]))
    return SimpleNamespace(actor=SimpleNamespace(**actor, adam=SimpleNamespace(lr=1e-6)), algo=algo, ckpt="./ckpt")
