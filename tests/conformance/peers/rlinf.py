"""RLinf: its losses, and the statements of its actor that make importance_sampling_fix and the KL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.batches import Batch, without
from conformance.declared import CLAMP, PROPAGATES, Declared
from conformance.rows import Result, Row, both, draw, preset, recipe
from conformance.sources import Source
from conformance.versions import CURRENT, interpolated

DISTRIBUTION, PACKAGE, CHECKOUT = None, "rlinf", "rlinf"

LOSSES = "rlinf/algorithms/losses.py"
ACTOR = "rlinf/workers/actor/megatron_actor_worker.py"

ROWS = Declared(
    "a sample without a token counts, and its mean is NaN",
    "counts samples without a token, so that seq-mean-token-mean is NaN",
    lambda given, settings: (
        settings.get("loss_agg_func", "token-mean") != "token-mean" and not bool(given.mask.any(1).all())
    ),
)
THRESHOLD = draw(threshold=(1.05, 2.0, 5.0))
CLIPS = draw(clip_ratio_low=(0.1, 0.2), clip_ratio_high=(0.2, 0.28), clip_ratio_c=(None, 3.0))
REDUCTIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
ACTORS = both(CLIPS, draw(loss_agg_func=REDUCTIONS, kl_beta=(0.0, 0.1)))
DECLARED = (PROPAGATES, CLAMP, ROWS)


def rows(source: Source) -> Iterator[Row]:
    """Compare the preset and the recipes."""
    decoupled_loss = source.cut(LOSSES, "compute_decoupled_ppo_actor_loss")
    actor_loss = source.cut(LOSSES, "compute_ppo_actor_loss")
    mean_of = source.cut("rlinf/utils/utils.py", "get_loss_agg_func")
    penalty = source.cut("rlinf/algorithms/utils.py", "kl_penalty")
    fix = source.lines(
        ACTOR,
        "MegatronActor.get_forward_step_func.forward_output_and_loss_func.loss_func",
        "rollout_logprobs = ",
        "advantages = advantages *",
    )

    def narrow(given: Batch) -> Batch:
        """RLinf asserts float32."""
        names = ("new", "old", "rollout", "ref", "advantages")
        return replace(given, **{name: getattr(given, name).float() for name in names})

    def decoupled(given: Batch, versions: Tensor | None, threshold: float, **clips: Any) -> Tensor:
        wide = narrow(given)
        by = (
            {"versions": versions, "current_version": CURRENT}
            if versions is not None
            else {"proximal_logprobs": wide.old}
        )
        return decoupled_loss(
            wide.new,
            wide.rollout,
            advantages=wide.token_advantages,
            loss_mask=wide.mask,
            behave_weight_threshold=threshold,
            loss_agg_func=lambda values, mask, ratio: mean_of("token-mean")(values, mask),
            **by,
            **clips,
        )[0]

    def weights(given: Batch, threshold: float) -> Result:
        """Where a loss of 1 a token, whose mean is a sum divided by the kept tokens, has a gradient and which."""
        wide = narrow(given)
        held: dict[str, Tensor] = {}

        def keep(values: Tensor, mask: Tensor, ratio: Any) -> Tensor:
            held.update(weights=-values, mask=mask)
            return values.sum()

        ones = replace(wide, advantages=torch.ones_like(wide.advantages)).token_advantages
        decoupled_loss(
            wide.old,
            wide.rollout,
            0.2,
            0.2,
            ones,
            proximal_logprobs=wide.old,
            loss_mask=wide.mask,
            behave_weight_threshold=threshold,
            loss_agg_func=keep,
        )
        return held

    def actor(given: Batch, loss_agg_func: str, kl_beta: float, cap: float | None = None, **clips: Any) -> Tensor:
        wide, mean = narrow(given), mean_of(loss_agg_func)
        advantages = wide.token_advantages
        if cap is not None:
            worker = SimpleNamespace(cfg=SimpleNamespace(algorithm=SimpleNamespace(importance_sampling_clip=cap)))
            batch = {"rollout_logprobs": wide.rollout, "recomputed_logprobs": wide.old}
            advantages = fix(self=worker, batch=batch, advantages=advantages)["advantages"]
        value: Tensor = actor_loss(
            wide.new,
            wide.old,
            advantages=advantages,
            loss_mask=wide.mask,
            loss_agg_func=lambda values, mask, ratio: mean(values, mask),
            **clips,
        )[0]
        if kl_beta > 0:
            value = value + kl_beta * mean(penalty(wide.new, wide.ref, "k3"), wide.mask)
        return value

    # RLinf multiplies by its mask; its losses assert float32, and bf16 is cast before.
    kinds = without("nan_behind_mask", "bf16")
    more: dict[str, Any] = {"declared": DECLARED, "kinds": kinds, "within": (2e-5, 2e-5)}
    shown = f"{LOSSES}: compute_decoupled_ppo_actor_loss"
    yield preset("rlinf.decoupled", shown, weights, THRESHOLD, **more)
    yield recipe("rlinf.decoupled", shown, partial(decoupled, versions=None), both(THRESHOLD, CLIPS), **more)
    named = "rlinf.decoupled", "rlinf.decoupled, old_logp by versions"
    yield interpolated(*named, shown, decoupled, both(THRESHOLD, CLIPS), **more)
    for name in ("actor", "ppo", "grpo"):
        yield recipe(f"rlinf.{name}", f"{LOSSES}: compute_ppo_actor_loss, kl_penalty", actor, ACTORS, **more)

    def fixed(given: Batch, importance_sampling_clip: float, **drawn: Any) -> Tensor:
        return actor(given, cap=importance_sampling_clip, **drawn)

    place = f"{ACTOR}: importance_sampling_fix, {LOSSES}: compute_ppo_actor_loss, kl_penalty"
    drawn = both(draw(importance_sampling_clip=(1.0, 2.0)), ACTORS)
    yield recipe("rlinf.importance_sampling_fix", place, fixed, drawn, **more)
