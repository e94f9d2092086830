"""labs-molt: PolicyLoss is constructed and called, compute_approx_kl and agg_loss make its KL, all as they are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.batches import Batch
from conformance.declared import CLAMP, NONFINITE, Declared
from conformance.rows import Result, Row, both, configuration, draw, preset, recipe
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = None, "molt", "molt"

LOSS, UTILS = "molt/models/loss.py", "molt/models/utils.py"

NO_NUMBER = Declared(
    "a non-finite token", "molt | NaN: D = 0. Infinite: D = +-30. The ratio new/old likewise", NONFINITE
)
SUMMED = Declared(
    "gradients added in bf16",
    "molt's KL next to its policy loss, bf16 log-probs",
    lambda given, settings: given.kind == "bf16" and settings["kl"]["use_loss"],
)


def rows(source: Source) -> Iterator[Row]:
    """Compare presets, recipes and the reader."""
    # The registry is filled by decorators of functions that nothing else names.
    loss_class = source.cut(LOSS, "PolicyLoss", get_policy_loss=lambda name: source.cut(LOSS, f"{name}_policy_loss"))
    approximate, aggregate = source.cut(UTILS, "compute_approx_kl"), source.cut(LOSS, "agg_loss")
    weigh = source.lines(LOSS, "PolicyLoss.forward", "vllm_kl = None", "if self.is_correction")

    def made(level: str = "off", mode: str = "mask", threshold: Any = (0.5, 5.0), **config: Any) -> Any:
        return loss_class(
            is_correction_level=level, is_correction_mode=mode, is_correction_threshold=threshold, **config
        )

    def loss(
        given: Batch,
        eps_clip_low_high: tuple[float, float] | None = None,
        kl: dict[str, Any] | None = None,
        **config: Any,
    ) -> Tensor:
        low, high = eps_clip_low_high or (0.2, 0.2)
        run = made(clip_eps_low=low, clip_eps_high=high, **config)
        tokens = given.mask.sum()
        value = run(
            given.new,
            given.old,
            given.token_advantages,
            given.mask,
            rollout_log_probs=given.rollout,
            batch_num_tokens=tokens,
        )[0]
        if kl is not None and kl["use_loss"]:
            found = approximate(given.new, given.ref, kl_estimator=kl["estimator"])
            value = value + kl["init_coef"] * aggregate(found, given.mask, "token-mean", batch_num_tokens=tokens)
        return value

    def weights(given: Batch, **config: Any) -> Result:
        found = weigh(
            self=made(**config),
            log_ratio_limit=30.0,
            old_log_probs=given.old,
            rollout_log_probs=given.rollout,
            action_mask=given.mask,
            loss=torch.ones_like(given.old),
        )
        return {"weights": found["loss"]}

    def thresholded(run: Any, level: str, given: Batch, low: float, high: float, **config: Any) -> Any:
        return run(given, level=level, threshold=(low, high), **config)

    bounds = draw(low=(0.5, 0.9), high=(1.05, 5.0))
    with_mode = both(bounds, draw(mode=("mask", "clip", "trunc")))
    without_dual = draw(eps_clip_low_high=((0.2, 0.2), (0.1, 0.3)))
    clips = both(without_dual, draw(dual_clip=(None, 3.0)))

    # molt computes in float32, whatever comes.
    more: dict[str, Any] = {"declared": (NO_NUMBER,), "within": (2e-5, 2e-5)}
    for level, settings in (("token", with_mode), ("seq", bounds), ("geo", bounds)):
        theirs = f"{LOSS}: PolicyLoss, {level}"
        yield preset(f"molt.{level}", theirs, partial(thresholded, weights, level), settings, **more)
        yield recipe(f"molt.{level}", theirs, partial(thresholded, loss, level), both(settings, clips), **more)
    for name in ("ppo", "grpo"):
        yield recipe(f"molt.{name}", f"{LOSS}: PolicyLoss, ppo", loss, clips, **more)
    beyond_30 = more | {"declared": (NO_NUMBER, CLAMP)}
    yield recipe("molt.gspo", f"{LOSS}: PolicyLoss, gspo", partial(loss, loss_mode="gspo"), without_dual, **beyond_30)
    ceiling = draw(eps_clip_low_high=((0.2, 1.05), (0.2, 1.2)))
    yield recipe("molt.cispo", f"{LOSS}: PolicyLoss, cispo", partial(loss, loss_mode="cispo"), ceiling, **more)
    yield configuration(
        "molt",
        f"{LOSS}: PolicyLoss; {UTILS}: compute_approx_kl",
        loss,
        config_of,
        hold,
        **more | {"declared": (NO_NUMBER, SUMMED, CLAMP)},
    )


def config_of(rng: Random) -> dict[str, Any]:
    """Draw a configuration that molt takes."""
    level = rng.choice(("off", "token", "seq", "geo"))
    loss_mode = rng.choice(("ppo", "gspo", "cispo"))
    return {
        "eps_clip_low_high": (0.2, 1.2) if loss_mode == "cispo" else rng.choice((None, (0.1, 0.3))),
        "dual_clip": rng.choice((None, 3.0)) if loss_mode == "ppo" else None,
        "loss_mode": loss_mode,
        "level": level,
        "mode": rng.choice(("mask", "clip", "trunc")) if level == "token" else "mask",
        "threshold": (0.5, rng.choice((1.05, 5.0))),
        "kl": {
            "use_loss": rng.random() < 0.5,
            "init_coef": rng.choice((0.01, 0.1)),
            "estimator": rng.choice(("k1", "k2", "k3")),
        },
    }


def hold(config: dict[str, Any]) -> SimpleNamespace:
    """Put a configuration into the nested namespace that molt makes of its flags."""
    actor = {name: config[name] for name in ("eps_clip_low_high", "dual_clip", "loss_mode")}
    advantage = {f"is_correction_{name}": config[name] for name in ("level", "mode", "threshold")}
    algo = SimpleNamespace(
        advantage=SimpleNamespace(**advantage, estimator="rloo"), kl=SimpleNamespace(**config["kl"], target=None)
    )
    return SimpleNamespace(actor=SimpleNamespace(**actor, adam=SimpleNamespace(lr=1e-6)), algo=algo, ckpt="./ckpt")
