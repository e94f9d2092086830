"""OpenRLHF: PolicyLoss is constructed and called, compute_approx_kl and aggregate_loss make its KL, all as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.batches import KINDS, Batch
from conformance.declared import BF16, CLAMP, NONFINITE, Declared, among
from conformance.rows import Result, Row, both, configuration, draw, loss_and_gradient, preset, recipe
from conformance.sources import Source
from rollout_corr.frameworks.openrlhf import dropin

DISTRIBUTION, PACKAGE, CHECKOUT = "openrlhf", "openrlhf", "openrlhf"

LOSS, UTILS = "openrlhf/models/loss.py", "openrlhf/models/utils.py"
# The names before 0.11.2, by level and mode.
OLD_TYPES = {("token", "clip"): "tis", ("token", "mask"): "icepop", ("seq", "mask"): "seq-mask-tis"}


def clamped(log_prob: Tensor) -> Tensor:
    """Clamp a probability as OpenRLHF does."""
    return log_prob.exp().clamp(1e-6, 1 - 1e-6)


def rounds_below_zero(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether OpenRLHF's formula of the binary KL comes out below 0 at a token."""
    p, q = clamped(given.rollout), clamped(given.old)
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
NOTHING = Declared("no token: NaN there", "a batch without a token is a loss of NaN", among("all_masked"))


def rows(source: Source) -> Iterator[Row]:
    """Compare presets, recipes and the reader."""
    loss_class = source.cut(LOSS, "PolicyLoss")
    approximate, aggregate = source.cut(UTILS, "compute_approx_kl"), source.cut(LOSS, "aggregate_loss")
    new_names = source.says(LOSS, "is_correction_level")
    weigh = source.lines(LOSS, "PolicyLoss.forward", "vllm_kl =", "if self.")

    def made(
        level: str = "off", mode: str = "mask", gating: str = "ratio", threshold: Any = (0.5, 5.0), **config: Any
    ) -> Any:
        threshold = (0.0, *threshold)[-2:]
        if new_names:
            named = {"level": level, "mode": mode, "gating": gating, "threshold": threshold}
            return loss_class(**{f"is_correction_{name}": value for name, value in named.items()}, **config)
        return loss_class(
            enable_vllm_is_correction=level != "off",
            vllm_is_truncated_threshold=threshold,
            vllm_is_correction_type=OLD_TYPES.get((level, mode), "tis"),
            **config,
        )

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
        ones = torch.ones_like(given.old)
        found = weigh(
            self=made(**config),
            old_log_probs=given.old,
            rollout_log_probs=given.rollout,
            action_mask=given.mask,
            loss=ones,
        )
        return {"weights": found["loss"]}

    # OpenRLHF multiplies by its mask, so what stands behind it is finite; it adds 1e-8 to a sequence's tokens.
    more: dict[str, Any] = {"kinds": tuple(kind for kind in KINDS if kind != "nan_behind_mask")}
    more |= {"declared": (NO_NUMBER, CLAMP, BF16), "within": (3e-8, 2e-5)}

    bounds, delta = draw(low=(0.5, 0.9), high=(1.05, 5.0)), draw(delta=(1e-4, 3e-3, 0.05))
    clips = draw(eps_clip_low_high=(None, (0.1, 0.3)), dual_clip=(None, 3.0))
    of_plain = both(clips, draw(loss_agg_mode=("token-mean", "seq-mean-token-mean")))

    cases: list[tuple[str, Callable[[Random], dict[str, Any]], dict[str, Any]]] = [
        ("tis", bounds, {"level": "token", "mode": "clip"}),
        ("icepop", bounds, {"level": "token"}),
        ("seq_mask_tis", bounds, {"level": "seq"}),
    ]
    if new_names:
        cases += [
            ("flash_reinforce", delta, {"level": "seq", "gating": "binary_kl"}),
            ("dppo_like", both(delta, draw(gating=("binary_kl", "tv"))), {"level": "token"}),
        ]

    def thresholded(
        run: Callable[..., Any],
        fixed: dict[str, Any],
        given: Batch,
        low: float | None = None,
        high: float | None = None,
        delta: float | None = None,
        **config: Any,
    ) -> Any:
        return run(given, threshold=(low, high) if delta is None else (delta,), **fixed, **config)

    for name, settings, fixed in cases:
        known = more | {"declared": (NO_NUMBER, CLAMP, BF16, ROUNDED, EPS)} if settings is not bounds else more
        theirs = f"{LOSS}: PolicyLoss, {' '.join(fixed.values())}"
        yield preset(f"openrlhf.{name}", theirs, partial(thresholded, weights, fixed), settings, **known)
        drawn = both(settings, of_plain)
        yield recipe(f"openrlhf.{name}", theirs, partial(thresholded, loss, fixed), drawn, **known)
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
        over_all, level, mode = (config.pop(name) for name in ("over_all", "level", "mode"))
        threshold = (0.0, *config.pop("threshold"))[-2:]
        fields = {"level": level, "mode": mode, "gating": config.pop("gating"), "threshold": threshold}
        named = {f"is_correction_{name}": value for name, value in fields.items()}
        if not new_names:
            named = {
                "enable_vllm_is_correction": level != "off",
                "vllm_is_truncated_threshold": threshold,
                "vllm_is_correction_type": OLD_TYPES.get((level, mode), "tis"),
            }
        return called(replacement, SimpleNamespace(**sided(config), **named), given, over_all)

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

    yield Row(
        "drop-in",
        "openrlhf.PolicyLoss",
        f"{LOSS}: PolicyLoss.forward",
        replaced,
        original,
        of_module,
        **more | {"declared": (NO_NUMBER, CLAMP, BF16, ROUNDED, EPS, NOTHING)},
    )
    yield configuration(
        "openrlhf",
        f"{LOSS}: PolicyLoss; {UTILS}: compute_approx_kl",
        loss,
        lambda rng: config_of(rng, new_names),
        partial(hold, new_names=new_names),
        # Its KL is computed in float32, whatever comes.
        **more | {"declared": (NO_NUMBER, CLAMP, BF16, ROUNDED, EPS), "within": (2e-5, 2e-5)},
    )


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
