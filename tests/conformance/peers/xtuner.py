"""xtuner: its correction and its GRPO loss, called as they are on packed sequences."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import rollout_corr as rc
from conformance.batches import Batch
from conformance.declared import BF16, REJECTS, Declared, among
from conformance.rows import Result, Row, both, configuration, draw, preset, recipe, report, spec_of
from conformance.sources import Source
from conformance.versions import CURRENT, staleness
from rollout_corr.frameworks.xtuner import dropin

DISTRIBUTION, PACKAGE, CHECKOUT = None, "xtuner/v1/rl", "xtuner"

CORRECTION = "xtuner/v1/rl/rollout_is.py"
GRPO = "xtuner/v1/rl/loss/grpo_loss.py"
BASE = "xtuner/v1/rl/loss/base_loss.py"
LOSSES = "xtuner/v1/rl/loss/loss_fn.py"
DATA, UTILS = "xtuner/v1/data_proto/rl_data.py", "xtuner/v1/data_proto/utils.py"
PRODUCE = "xtuner/v1/rl/agent_loop_manager/produce_utils.py"
METHOD = "compute_rollout_importance_weights_and_metrics"
IGNORED = -100
# Its means add 1e-8 to what they divide by, and the weights of its loss are in float32.
WITHIN = (2e-7, 2e-5)


PADDING = Declared(
    "NaN behind the mask",
    "one NaN, even at a masked token, is NaN in the weight and then in the loss",
    among("nan_behind_mask"),
)
OWN_MASK = Declared(
    "the report in mode mask with a mask threshold of its own",
    "so its report uses the mask's bounds",
    lambda given, settings: (
        settings["rollout_is_mode"] == "mask"
        and settings["rollout_is_mask_threshold"] not in (None, settings["rollout_is_threshold"])
    ),
)
DECLARED = (BF16, REJECTS, PADDING)


def correction(rng: Random) -> dict[str, Any]:
    """Draw a RolloutImportanceSampling; its pairs are (upper, lower)."""
    return {
        "rollout_is_level": rng.choice(("token", "sequence", "geometric")),
        "rollout_is_mode": rng.choice(("truncate", "mask", "both")),
        "rollout_is_threshold": rng.choice((None, (5.0, 0.5), (1.05, 0.9), (5.0, 0.0))),
        "rollout_is_mask_threshold": rng.choice((None, (2.0, 0.7), (1.02, 0.98))),
        "rollout_is_veto_threshold": rng.choice((None, (20.0, 0.0), (1.5, 0.6))),
    }


def of_preset(rng: Random) -> dict[str, Any]:
    """Draw the arguments of a preset."""
    drawn = correction(rng)
    found = {name: drawn[f"rollout_is_{name}"] for name in ("threshold", "mask_threshold", "veto_threshold")}
    return found | {"threshold": found["threshold"] or (5.0, 0.5)}


# The settings of the clipped loss.
clips = draw(cliprange_low=(0.02, 0.2), cliprange_high=(0.05, 0.28), clip_ratio_c=(1.1, 3.0))


def loss_config(rng: Random) -> dict[str, Any]:
    """Draw a GRPOLossConfig."""
    return {
        "policy_loss_cfg": clips(rng) | {"loss_type": "vanilla"},
        "use_kl_loss": rng.random() < 0.5,
        "kl_loss_coef": 0.1,
        "kl_loss_type": rng.choice(("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")),
        "rollout_is": correction(rng),
    }


def packed(x: Tensor) -> Tensor:
    """Lay rows one behind the other, padding included."""
    return x.reshape(1, -1)


def rows(source: Source) -> Iterator[Row]:
    """Compare everything that xtuner has."""
    method = source.cut(CORRECTION, f"RolloutImportanceSampling.{METHOD}")

    def call(drawn: dict[str, Any], *given: Any) -> Any:
        return method(SimpleNamespace(**dropin.FIELDS | drawn), *given)

    def arguments(given: Batch) -> tuple[Tensor, Tensor, list[int], Tensor]:
        lengths = [given.mask.shape[1]] * len(given.mask)
        return packed(given.old), packed(given.rollout), lengths, packed(given.mask)

    def corrected(given: Batch, drawn: dict[str, Any]) -> Result:
        weights, mask, _, _ = call(drawn, *arguments(given))
        return {"mask": mask, "weights": weights}

    def metrics(given: Batch, drawn: dict[str, Any]) -> Result:
        # Its float32 spreads are differences of squares.
        old, rollout, lengths, mask = arguments(given)
        _, _, mismatch, importance = call(drawn, old.double(), rollout.double(), lengths, mask)
        return {**mismatch, **importance}

    quiet = SimpleNamespace(warning=lambda *said: None)
    held: dict[str, Tensor] = {}
    functions = {
        "correct": source.cut(BASE, "BaseRLLossContext.compute_rollout_is"),
        "build": source.cut(GRPO, "GRPOLossContext.build_batches", logger=quiet),
        "loss": source.cut(GRPO, "GRPOLossContext.loss_fn", gather_logprobs=lambda logits, labels: held["new"]),
        "vanilla": source.cut(LOSSES, "pg_loss_fn"),
    }

    def loss(given: Batch, **drawn: Any) -> Tensor:
        settings = drawn["rollout_is"]
        correct = SimpleNamespace(**{METHOD: lambda **named: call(settings, *named.values())})
        config = SimpleNamespace(**drawn | {"ignore_idx": IGNORED, "rollout_is": correct})
        labels = torch.ones_like(packed(given.mask), dtype=torch.int64).where(packed(given.mask), IGNORED)
        tensors = SimpleNamespace(
            shifted_labels=labels,
            rollout_logprobs=packed(given.rollout),
            old_logprobs=packed(given.old),
            ref_logprobs=packed(given.ref),
            advantages=packed(given.token_advantages),
            is_weights=None,
        )
        context = SimpleNamespace(loss_cfg=config, loss_kwargs=tensors, policy_loss_fn=functions["vanilla"])
        functions["correct"](context, None, arguments(given)[2])
        functions["build"]([context])
        held["new"] = packed(given.new)
        nothing = torch.zeros(1, 1)
        return functions["loss"](context, nothing, nothing, None, tensors)[0]

    def penalized(given: Batch, settings: dict[str, Any], kl_loss_coef: float = 0.0, **clips: Any) -> Tensor:
        more = {"use_kl_loss": bool(kl_loss_coef), "kl_loss_coef": kl_loss_coef, "kl_loss_type": "low_var_kl"}
        return loss(given, policy_loss_cfg=clips, rollout_is=settings, **more)

    with_kl = both(clips, draw(kl_loss_coef=(0.0, 0.1)))
    place, more = f"{CORRECTION}: {METHOD}", {"declared": DECLARED, "within": WITHIN}
    for name, drawn in (("ppo", clips), ("grpo", with_kl)):
        yield recipe(f"xtuner.{name}", f"{GRPO}: GRPOLossContext", partial(penalized, settings={}), drawn, **more)
    yield of_staleness(source)

    def settings(least: float, bounds: dict[str, Any]) -> dict[str, Any]:
        named = {f"rollout_is_{key}": value for key, value in ({"threshold": (5.0, least)} | bounds).items()}
        return {"rollout_is_level": "token", "rollout_is_mode": "both"} | named

    def weigh(least: float, given: Batch, **bounds: Any) -> Result:
        return corrected(given, settings(least, bounds))

    def lose(least: float, given: Batch, **drawn: Any) -> Tensor:
        bounds = {key: drawn.pop(key) for key in ("threshold", "mask_threshold", "veto_threshold")}
        return penalized(given, settings(least, bounds), **drawn)

    for name, least in (("reasoning", 0.5), ("agentic", 0.0)):
        yield preset(f"xtuner.{name}", place, partial(weigh, least), of_preset, **more)
        run, drawn = partial(lose, least), both(of_preset, with_kl)
        yield recipe(f"xtuner.{name}", f"{GRPO}: GRPOLossContext", run, drawn, **more)

    def replaced(given: Batch, drawn: dict[str, Any]) -> Result:
        with patch.object(dropin.DROP_IN, "say", lambda *said: None):
            method = getattr(dropin, METHOD)
            weights, mask, mismatch, importance = method(SimpleNamespace(**drawn), *arguments(given))
        return {"mask": mask, "weights": weights, **mismatch, **importance}

    def original(given: Batch, drawn: dict[str, Any]) -> Result:
        return {**corrected(given, drawn), **metrics(given, drawn)}

    known = more | {"declared": (*DECLARED, OWN_MASK)}
    yield report("xtuner", place, partial(rc.spec, "xtuner"), metrics, correction, **known)
    yield spec_of("xtuner", place, corrected, correction, **more)
    yield Row("drop-in", f"xtuner.{METHOD}", place, replaced, original, correction, **more)
    yield configuration("xtuner", f"{GRPO}: GRPOLossContext", loss, loss_config, **more)


def of_staleness(source: Source) -> Row:
    """Compare the preset of ages with the replay buffer's: sequences that expire, then tokens that are masked."""
    counted = source.cut(UTILS, "calculate_seq_staleness")
    effective = source.cut(DATA, "_calculate_effective_response_mask", calculate_seq_staleness=counted)
    threshold = source.cut(PRODUCE, "calculate_stale_threshold")

    def run(given: Batch, versions: Tensor, **drawn: Any) -> Tensor:
        of_tokens, syncs = drawn["max_token_staleness"], drawn["sync_weights_interval"]
        kept = given.mask.clone()
        for row, mask in enumerate(given.mask):
            steps = versions[row][mask].tolist()
            if steps and counted(min(steps), CURRENT) >= threshold(drawn["max_staleness"], syncs):
                kept[row] = False
            elif steps and of_tokens is not None:
                state = SimpleNamespace(response_ids=steps, response_model_steps=steps, response_mask=None)
                limits = {"current_train_step": CURRENT, "token_stale_threshold": threshold(of_tokens, syncs)}
                kept[row, mask] = torch.tensor(effective(state, **limits)).bool()
        return kept

    settings = draw(max_staleness=(0, 1, 3), max_token_staleness=(None, 0, 1), sync_weights_interval=(1, 2))
    buffer = "xtuner/v1/rl/replay_buffer.py: _apply_staleness_lifecycle (restated)"
    place = f"{DATA}: _calculate_effective_response_mask, {buffer}"
    return staleness("xtuner.staleness", place, run, settings)
