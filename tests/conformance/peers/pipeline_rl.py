"""PipelineRL: the losses of its step, cut out between the model's log-probs and the value that is handed back."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from conformance.batches import FINITE, Batch
from conformance.rows import Declared, Result, Row, loss_and_gradient
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = None, "pipelinerl", "PipelineRL"

STEP = "pipelinerl/finetune/rl/__init__.py"
SAMPLES = 16

CLAMP = Declared(
    "exponents beyond +-20",
    "presets.md",
    "the exponent is then clamped to +-20",
    lambda given, settings: bool(((given.new - given.rollout).abs() > 20.0)[given.mask].any()),
)


def rows(source: Source) -> Iterator[Row]:
    """Compare the recipes. The step asserts that everything is finite."""
    step = source.lines(STEP, "rl_step", "if config.group_normalization", 'if config.policy_loss != "gspo"')

    def theirs(given: Batch, name: str, drawn: dict[str, Any], tokens: Tensor) -> Tensor:
        count, width = given.mask.shape
        line = given.mask.reshape(1, -1)

        def flat(x: Tensor) -> Tensor:
            return x.reshape(1, -1).where(line, 0.0)

        ids = torch.arange(count).repeat_interleave(width)[None]
        kl = drawn.get("kl_coef", 0.0)
        found = step(
            config=SimpleNamespace(
                policy_loss=name,
                group_normalization=drawn["group_normalization"],
                batch_size=SAMPLES,
                overlong_filtering=False,
                use_advantages=True,
                relu_log_p_weights=False,
                entropy_bonus=0.0,
                final_entropy_bonus=0.0,
                kl_coef=kl,
                final_kl_coef=kl,
                clamp_log_ratio_ref_new_value=drawn.get("clamp_log_ratio_ref_new_value", 5.0),
                epsilon_low=drawn.get("epsilon_low", 0.02),
                epsilon_high=drawn["epsilon_high"],
            ),
            batch=SimpleNamespace(
                advantages=torch.cat((torch.zeros(1, 1, dtype=given.new.dtype), flat(given.token_advantages)), 1),
                # It leaves the first position out.
                segment_ids=torch.cat((ids[:, :1], ids), 1),
                sentinel=False,
            ),
            group_tokens=tokens.repeat_interleave(width)[None],
            overflow=None,
            new_logprobs=flat(given.new),
            ref_logprobs=flat(given.ref),
            old_logprobs=flat(given.rollout),
            rewards=None,
            masks_shifted=line,
            segments=[(i * width, (i + 1) * width) for i in range(count)],
            has_value_head=False,
            use_entropy_loss=False,
            entropy=None,
            current_step=0,
            max_step=1,
            seq_parallel_group=None,
        )
        value: Tensor = found["policy_loss_total"]
        return value

    def compared(name: str) -> Any:
        def run(given: Batch, drawn: dict[str, Any]) -> tuple[Result, Result]:
            mine, peer = given.trains(), given.trains()
            per_group = given.mask.sum(1).double().reshape(-1, given.group_size).mean(1).clamp(min=1.0)
            tokens = per_group.repeat_interleave(given.group_size)
            divided: dict[str, Any] = {"total": SAMPLES}
            if drawn["group_normalization"]:
                divided = {"scale": 1.0 / tokens}
            made = rc.recipe(f"pipeline_rl.{name}", **drawn)
            out = rc.policy_loss(
                mine.new,
                given.advantages,
                rc.Batch(mask=given.mask, **divided),
                made.loss,
                rollout_logp=given.rollout,
                ref_logp=None if made.loss.kl is None else given.ref,
                spec=made.spec,
            )
            expected = theirs(peer, name, drawn, tokens.to(given.new.dtype))
            return loss_and_gradient(out.value, mine), loss_and_gradient(expected, peer)

        return run

    for name in ("ppo", "reinforce", "gspo"):
        draw = drawn_for(name)
        place = f"{STEP}: rl_step, {name}"
        yield Row("recipe", f"pipeline_rl.{name}", place, compared(name), draw, declared=(CLAMP,), kinds=FINITE)


def drawn_for(name: str) -> Any:
    """Draw the settings of a loss."""

    def draw(rng: Random) -> dict[str, Any]:
        drawn: dict[str, Any] = {"epsilon_high": rng.choice((0.02, 0.2)), "group_normalization": rng.random() < 0.5}
        if name != "reinforce":
            drawn["epsilon_low"] = rng.choice((0.02, 0.2))
        if name != "gspo":
            drawn |= {"kl_coef": rng.choice((0.0, 0.1)), "clamp_log_ratio_ref_new_value": rng.choice((0.2, 5.0))}
        return drawn

    return draw
