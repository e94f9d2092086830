"""ROLL: its correction as the pipeline applies it, and the loss functions of its two workers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from conformance.batches import Batch, without
from conformance.declared import CLAMP, PROPAGATES, Declared, where_ours_trains
from conformance.rows import Result, Row, both, configuration, draw, preset, recipe
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = None, "roll", "roll"

CORRECTION = "roll/utils/train_infer_corrections.py"
WORKER = "roll/pipeline/rlvr/actor_worker.py"
PG_WORKER = "roll/pipeline/rlvr/actor_pg_worker.py"
AGENTIC = "roll/pipeline/agentic/agentic_actor_worker.py"

TOKEN_MEAN = Declared(
    "its token-mean adds up filtered tokens too",
    "adds up masked and filtered tokens too",
    lambda given, settings: settings.get("loss_agg_mode") == "token-mean",
    shows=where_ours_trains,
)
DECLARED = (PROPAGATES, CLAMP, TOKEN_MEAN)
SPECIFIC = {
    "tis": ("tis_upper_bound",),
    "cispo": ("cispo_epsilon_low", "cispo_epsilon_high"),
    "kimi15": ("kimi15_tau",),
    "topr": ("topr_positive_weight", "topr_negative_weight"),
}

PIPELINE: dict[str, Any] = {"pg_clip": 0.2, "use_pg_clip_range": False, "pg_clip_low": 0.2, "pg_clip_high": 0.2}
PIPELINE |= {"dual_clip_loss": False, "importance_sampling": "token", "loss_agg_mode": "seq-mean-token-mean"}
PIPELINE |= {"use_kl_loss": False, "kl_loss_coef": 0.0, "rl_loss_coef": 1.0, "entropy_loss_coef": 0.0}
PIPELINE |= {"difficulty_loss_weight": False, "length_loss_weight": False, "enable_old_logprobs_recompute": True}
LOGGED = ("_pg_variant_logged", "_cispo_config_logged", "_kimi15_config_logged", "_topr_sample_logged")


def correction_config(weight: dict[str, Any] | None = None, *filters: dict[str, Any]) -> SimpleNamespace:
    """ROLL's TrainInferCorrectionConfig."""
    plain = {"enabled": True, "agg_type": "token", "ratio_enabled": True, "ratio_low": 0.8, "ratio_high": 1.2}
    plain |= {"diff_enabled": False, "diff_low": -0.2, "diff_high": 0.2}
    is_weight = {"enabled": weight is not None, "weight_type": "token", "upper_bound": 1.2, "detach": True}
    return SimpleNamespace(
        is_weight=SimpleNamespace(**is_weight | (weight or {})),
        filters=[SimpleNamespace(**plain | rule) for rule in filters],
    )


def rows(source: Source) -> Iterator[Row]:
    """Compare the preset, the recipes and the reader."""
    compute = source.cut(CORRECTION, "compute_train_infer_correction")
    agentic = source.cut(AGENTIC, "ActorWorker.loss_func")
    loss_func, weigh = (source.cut(WORKER, f"ActorWorker.{name}") for name in ("loss_func", "compute_sample_weights"))
    losses = ("vanilla_pg", "ppo", "tis", "topr", "cispo", "kimi15")
    methods = ("loss_func", *(f"_compute_{name}_loss" for name in losses))
    variants = {name: source.cut(PG_WORKER, f"ActorPGWorker.{name}") for name in (*methods, "_get_or_cache_config")}

    def correct(given: Batch, config: SimpleNamespace) -> tuple[Tensor, Tensor]:
        weights, keep, _ = compute(config, given.mask, given.old, given.rollout)
        return weights, given.mask.long() * keep.long()

    def by(level: str, upper_bound: float | None, bounds: dict[str, Any]) -> SimpleNamespace:
        weight = {"upper_bound": upper_bound, "weight_type": level}
        return correction_config(weight, {"agg_type": level, **bounds})

    def corrected(level: str, given: Batch, upper_bound: float | None, **bounds: Any) -> Result:
        weights, mask = correct(given, by(level, upper_bound, bounds))
        return {"weights": weights, "mask": mask}

    def loss(given: Batch, config: SimpleNamespace, actor: dict[str, Any] | None = None, **settings: Any) -> Tensor:
        weights, mask = correct(given, config)
        counts = {"response_mask": mask.sum().clamp(min=1)}, {"response_mask": mask.any(1).sum().clamp(min=1)}
        worker = SimpleNamespace(
            pipeline_config=SimpleNamespace(
                **{**PIPELINE, **settings}, train_infer_correction=config, actor_train=SimpleNamespace(**actor or {})
            ),
            strategy=SimpleNamespace(
                op_compute_log_probs=lambda logits, **more: logits,
                op_compute_entropy=lambda logits, **more: torch.zeros_like(logits),
            ),
            get_old_log_probs_with_cache=lambda data, log_probs: data.batch["old_log_probs"],
            _get_pg_metrics=lambda data, **more: {},
            _pg_config_cache={},
            **dict.fromkeys(LOGGED, True),
        )
        worker.compute_sample_weights = lambda data, mask: weigh(worker, data, mask)
        for name, function in variants.items():
            if name != "loss_func":
                setattr(worker, name, function.__get__(worker))
        data = SimpleNamespace(
            batch={
                "response_mask": pad(mask, (1, 0)),
                "ref_log_probs": given.ref,
                "old_log_probs": given.old,
                "infer_logprobs": given.rollout,
                "advantages": given.token_advantages,
                "input_ids": None,
                "train_infer_is_weight": weights,
                # The sign of the reward, as the recipe says.
                "scores": given.advantages,
            },
            meta_info={"batch_num_tokens": counts[0], "global_valid_samples": counts[1]},
            non_tensor_batch={},
        )
        chosen = loss_func if actor is None else variants["loss_func"]
        chosen = agentic if settings.get("ratio_type") == "segment" else chosen
        return chosen(worker, data, given.new)[0]

    # ROLL multiplies by its mask, adds 1e-8 to what it divides by, and raises on bf16.
    kinds = without("nan_behind_mask", "bf16")
    more: dict[str, Any] = {"declared": DECLARED, "kinds": kinds, "within": (3e-8, 2e-5)}

    def clipped(given: Batch, config: Any = None, **flags: Any) -> Tensor:
        return loss(given, config or correction_config(), use_pg_clip_range=flags["pg_clip_low"] is not None, **flags)

    def default(
        level: str, given: Batch, upper_bound: float | None, ratio_low: float, ratio_high: float, **flags: Any
    ) -> Tensor:
        config = by(level, upper_bound, {"ratio_low": ratio_low, "ratio_high": ratio_high})
        return clipped(given, config, **flags, **({"ratio_type": level} if level == "segment" else {}))

    shown = f"{WORKER}: ActorWorker.loss_func"
    for name, level, at in (("default", "token", shown), ("segment", "segment", f"{AGENTIC}: ActorWorker.loss_func")):
        place = f"{CORRECTION}: compute_train_infer_correction"
        yield preset(f"roll.{name}", place, partial(corrected, level), bounds, **more)
        yield recipe(f"roll.{name}", at, partial(default, level), default_settings, **more)

    def grpo(given: Batch, kl_loss_coef: float = 0.01, **flags: Any) -> Tensor:
        return clipped(given, use_kl_loss=True, kl_loss_coef=kl_loss_coef, **flags)

    yield recipe("roll.ppo", shown, clipped, clips, **more)
    yield recipe("roll.grpo", f"{shown}, use_kl_loss", grpo, with_kl, **more)

    def variant(name: str, given: Batch, **drawn: Any) -> Tensor:
        return loss(given, correction_config(), {"pg_variant": name, **drawn})

    for name in ("vanilla", "tis", "topr", "cispo", "kimi15"):
        drawn = draw(**dict.fromkeys(SPECIFIC.get(name, ()), (0.1, 0.3)))
        at = f"{PG_WORKER}: ActorPGWorker.loss_func, {name}"
        yield recipe(f"roll.{name}", at, partial(variant, name), drawn, **more)

    def configured(given: Batch, is_weight: Any, filters: Any, actor_train: Any, **flags: Any) -> Tensor:
        config = correction_config(is_weight, *filters)
        return loss(given, config, actor_train if actor_train["pg_variant"] else None, **flags)

    yield configuration(
        "roll", f"{WORKER}, {PG_WORKER}: loss_func, {CORRECTION}", configured, drawn_config, hold, **more
    )


# The arguments of the preset.
bounds = draw(upper_bound=(None, 1.05, 1.2), ratio_low=(0.5, 0.8), ratio_high=(1.1, 1.2, 2.0))


def clips(rng: Random) -> dict[str, Any]:
    """Draw the settings of the clipped loss."""
    ranged = rng.random() < 0.5
    return {
        "pg_clip": rng.choice((0.1, 0.2)),
        "pg_clip_low": 0.2 if ranged else None,
        "pg_clip_high": 0.28 if ranged else None,
        "dual_clip_loss": rng.random() < 0.5,
        "loss_agg_mode": rng.choice(("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")),
    }


default_settings = both(bounds, clips)
with_kl = both(clips, lambda rng: rng.choice(({}, {"kl_loss_coef": 0.1})))


def drawn_config(rng: Random) -> dict[str, Any]:
    """Draw a pipeline's settings."""
    segments = rng.random() < 0.3
    # Next to the ratio of segments a filter of tokens would cut them; the reader refuses it.
    levels = ("segment", "geometric", "sequence") if segments else ("token", "segment", "geometric", "sequence")
    rules = [
        {
            "agg_type": rng.choice(levels),
            "ratio_enabled": rng.random() < 0.7,
            "ratio_high": rng.choice((1.2, 2.0)),
            "diff_enabled": rng.random() < 0.5,
        }
        for _ in range(rng.choice((0, 1, 2)))
    ]
    weight = {"weight_type": rng.choice(levels), "upper_bound": rng.choice((None, 1.2))}
    return {
        "is_weight": weight if rng.random() < 0.7 else None,
        "filters": rules,
        "actor_train": {
            "pg_variant": None if segments else rng.choice((None, None, "ppo", "tis", "cispo", "kimi15", "vanilla"))
        },
        "ratio_type": "segment" if segments else "token",
        "importance_sampling": rng.choice(("token", "token", "seq")),
        "use_pg_clip_range": rng.random() < 0.5,
        "pg_clip_high": rng.choice((0.2, 0.28)),
        "dual_clip_loss": rng.random() < 0.5,
        "loss_agg_mode": rng.choice(("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")),
        "use_kl_loss": rng.random() < 0.5,
        "kl_loss_coef": 0.1,
    }


def hold(drawn: dict[str, Any]) -> object:
    """Put the settings into a pipeline's configuration."""
    config = correction_config(drawn["is_weight"], *drawn["filters"])
    rest = {key: value for key, value in drawn.items() if key not in ("is_weight", "filters")}
    return {**rest, "train_infer_correction": config, "exp_name": "x"}
