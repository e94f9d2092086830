"""ms-swift: the statements of GRPOTrainer that make the loss, and its methods that make weights and masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

from torch import Tensor

import rollout_corr as rc
from conformance.batches import PADDED, Batch
from conformance.declared import BF16, CLAMP, NONFINITE, PROPAGATES, Declared
from conformance.rows import Row, both, configuration, draw, loss_of, of_loss, preset, recipe
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = "ms-swift", "swift", "ms-swift"

TRAINER = "swift/rlhf_trainers/grpo_trainer.py"
COMPUTE = "GRPOTrainer._compute_loss_and_metrics"
METHODS = ("_apply_rollout_importance_sampling", "_compute_sequence_level_ratios", "_compute_off_policy_sequence_mask")
FIPO = "_compute_fipo_influence"
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
# ms-swift's defaults; those of FIPO have other names here.
DEFAULTS: dict[str, Any] = {"loss_type": "grpo", "beta": 0.04, "kl_in_reward": False, "max_completion_length": 512}
DEFAULTS |= {"rollout_importance_sampling_mode": None, "rollout_importance_sampling_threshold": 2.0}
DEFAULTS |= {"off_policy_sequence_mask_delta": None, "importance_sampling_level": "token", "delta": None}
DEFAULTS |= {"epsilon": 0.2, "epsilon_high": None, "tau_pos": 1.0, "tau_neg": 1.05}
DEFAULTS |= {"real_tau": 0.5, "num_generations": 8, "half_life": 32.0, "high_only": True, "safety": None}

DECLARED = (
    PROPAGATES,
    BF16,
    CLAMP,
    Declared(
        "a batch without a token",
        "0 / 0 is NaN",
        lambda given, settings: (
            (settings.get("loss_type") in ("dapo", "cispo") or "half_life" in settings) and not bool(given.mask.any())
        ),
    ),
)


EMPTY = Declared(
    "a sequence without a token next to others of its group",
    "counts among the sequences with A <= 0, with a score of 0",
    lambda given, settings: bool((~given.mask.any(1)).any()),
)


class Trainer:
    """GRPOTrainer's own statements, cut out of a version of ms-swift."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._kl = source.lines(TRAINER, COMPUTE, "per_token_kl = None", "if self.beta != 0.0")
        self._loss = source.lines(TRAINER, COMPUTE, "log_ratio = ", "if self.loss_type in ['grpo'")

    def made(self, **config: Any) -> Any:
        """Make a trainer of its arguments."""
        settings = DEFAULTS | config
        epsilon, high = settings["epsilon"], settings["epsilon_high"]
        settings["epsilon_high"] = epsilon if high is None else high
        has_fipo = self.source.has(TRAINER, f"GRPOTrainer.{FIPO}")
        return self.source.instance(
            TRAINER,
            "GRPOTrainer",
            (*METHODS, FIPO) if has_fipo else METHODS,
            **settings,
            args=SimpleNamespace(**settings),
            epsilon_low=epsilon,
            fipo_gamma=2 ** (-1 / settings["half_life"]),
            fipo_clip_range=0.2,
            fipo_clip_high_only=settings["high_only"],
            fipo_safety_threshold=settings["safety"],
            accelerator=SimpleNamespace(num_processes=1),
            _has_teacher=False,
            _undo_gradient_accumulation_scaling=lambda loss: loss,
        )

    def loss(self, given: Batch, **config: Any) -> Tensor:
        """Return the loss of a configuration."""
        trainer, weights = self.made(**config), None
        if config.get("rollout_importance_sampling_mode") is not None:
            weights = trainer._apply_rollout_importance_sampling(given.old - given.rollout, given.mask)
        batch = SimpleNamespace(
            rollout_per_token_logps=given.rollout, ref_per_token_logps=given.ref, num_items_in_batch=given.mask.sum()
        )
        kl = self._kl(self=trainer, per_token_logps=given.new, grpo_batch=batch)
        made = self._loss(
            self=trainer,
            per_token_logps=given.new,
            old_per_token_logps=given.old,
            completion_mask=given.mask,
            advantages=given.token_advantages,
            grpo_batch=batch,
            rollout_is_weights=weights,
            entropy_mask=None,
            per_token_kl=kl["per_token_kl"],
        )
        return made["loss"]


def settings_of_a_loss(rng: Random) -> dict[str, Any]:
    """Draw what all losses have in common."""
    loss_type = rng.choice(LOSSES)
    drawn = {"loss_type": loss_type, "beta": rng.choice((0.0, 0.04)), "epsilon": rng.choice((0.2, 0.05))}
    drawn["epsilon_high"] = rng.choice((0.28, 2.0)) if loss_type == "cispo" else rng.choice((None, 0.28))
    if loss_type == "sapo":
        drawn |= {"tau_pos": rng.choice((1.0, 2.0)), "tau_neg": rng.choice((1.05, 2.0))}
    elif loss_type != "cispo":
        drawn["importance_sampling_level"] = rng.choice(("token", "sequence", "sequence_token"))
    if loss_type == "dr_grpo":
        drawn["max_completion_length"] = rng.choice((16, 512))
    return drawn


def weights(trainer: Trainer, mode: str, given: Batch, threshold: float) -> dict[str, Tensor]:
    """Return the weights of a mode."""
    made = trainer.made(rollout_importance_sampling_mode=mode, rollout_importance_sampling_threshold=threshold)
    return {"weights": made._apply_rollout_importance_sampling(given.old - given.rollout, given.mask)}


# The bound of a mode.
THRESHOLD = draw(threshold=(1.05, 2.0))


def rows(source: Source) -> Iterator[Row]:
    """Compare presets, recipes and the reader."""
    trainer = Trainer(source)
    more: dict[str, Any] = {"declared": DECLARED, "kinds": PADDED}
    name = f"{TRAINER}: _compute_loss_and_metrics"

    def corrected(mode: str, given: Batch, threshold: float = 2.0, **config: Any) -> Tensor:
        modes = {"rollout_importance_sampling_mode": mode, "rollout_importance_sampling_threshold": threshold}
        return trainer.loss(given, **modes, **config)

    for mode in MODES:
        own = f"{TRAINER}: _apply_rollout_importance_sampling"
        yield preset(f"swift.{mode}", own, partial(weights, trainer, mode), THRESHOLD, **more)
        yield recipe(f"swift.{mode}", name, partial(corrected, mode), both(settings_of_a_loss, THRESHOLD), **more)
    yield recipe("swift.grpo", name, trainer.loss, _with_or_without_beta, **more)

    def off_policy(given: Batch, delta: float, **config: Any) -> Tensor:
        return corrected("token_truncate", given, off_policy_sequence_mask_delta=delta, **config)

    deltas = both(settings_of_a_loss, draw(delta=(0.001, 0.1)))
    yield recipe("swift.opsm", f"{TRAINER}: _compute_off_policy_sequence_mask", off_policy, deltas, **more)
    if source.has(TRAINER, f"GRPOTrainer.{FIPO}"):
        sides = of_loss(_fipo), of_loss(partial(trainer.loss, loss_type="fipo", beta=0.0))
        yield Row("recipe", "swift.fipo", f"{TRAINER}: {FIPO}", *sides, FIPO_SETTINGS, **more)
    # A score that is no number reaches every sequence of its group.
    declared = (replace(PROPAGATES, when=NONFINITE), *DECLARED, EMPTY)
    drawn = draw(real_tau=(0.5, 0.05), beta=(0.0, 0.04), groups=(1, 2))
    sides = of_loss(_real), of_loss(lambda given, **s: trainer.loss(given, loss_type="real", **_in_groups(given, **s)))
    yield Row("recipe", "swift.real", f"{name}, loss_type real", *sides, drawn, declared, PADDED)

    yield configuration("swift", name, trainer.loss, _configuration, **more)


FIPO_SETTINGS = draw(delta=(None, 1.5), half_life=(2.0, 32.0), safety=(None, 1.1, 4.0), high_only=(True, False))


def _fipo(given: Batch, high_only: bool, **settings: Any) -> Tensor:
    bounds = {"lower": 1.0 if high_only else 0.8, "upper": 1.2}
    batch, loss = rc.Batch(mask=given.mask), rc.recipe("swift.fipo", delta=settings.get("delta")).loss
    weights = rc.future_kl_weights(given.new, given.old, batch, advantages=given.advantages, **settings, **bounds)
    factors = rc.Factors(weights)
    return rc.policy_loss(given.new, given.advantages, batch, loss, old_logp=given.old, correction=factors).value


def _in_groups(given: Batch, groups: int, **settings: Any) -> dict[str, Any]:
    return {**settings, "num_generations": len(given.mask) // groups}


def _real(given: Batch, **drawn: Any) -> Tensor:
    made = rc.recipe("swift.real", **_in_groups(given, **drawn))
    return loss_of(made, given, old_logp=given.old, ref_logp=None if made.loss.kl is None else given.ref)


def _with_or_without_beta(rng: Random) -> dict[str, Any]:
    drawn = settings_of_a_loss(rng)
    return {key: value for key, value in drawn.items() if key != "beta" or rng.random() < 0.5}


def _configuration(rng: Random) -> dict[str, Any]:
    drawn = settings_of_a_loss(rng)
    mode = rng.choice((None, *MODES))
    drawn |= {"rollout_importance_sampling_mode": mode, "delta": rng.choice((None, 1.5))}
    drawn["rollout_importance_sampling_threshold"] = rng.choice((1.05, 2.0))
    drawn["off_policy_sequence_mask_delta"] = rng.choice((None, 0.001, 0.1))
    kept = {key: value for key, value in drawn.items() if key == "loss_type" or rng.random() < 0.8}
    if kept.get("loss_type") == "bnpo" and str(kept.get("rollout_importance_sampling_mode")).endswith("_mask"):
        kept.pop("off_policy_sequence_mask_delta", None)
    return kept
