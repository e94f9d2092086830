"""PipelineRL: the losses of its step, cut out between the model's log-probs and the value that is handed back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from conformance.batches import FINITE, Batch
from conformance.declared import CLAMP
from conformance.rows import Row, loss_of, of_loss
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = None, "pipelinerl", "PipelineRL"

STEP = "pipelinerl/finetune/rl/__init__.py"
SAMPLES = 16


def rows(source: Source) -> Iterator[Row]:
    """Compare the recipes. The step asserts that everything is finite."""
    step = source.lines(STEP, "rl_step", "if config.group_normalization", 'if config.policy_loss != "gspo"')

    def theirs(name: str, given: Batch, **drawn: Any) -> Tensor:
        tokens = per_token(given).to(given.new.dtype)
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
        return found["policy_loss_total"]

    def ours(name: str, given: Batch, **drawn: Any) -> Tensor:
        made = rc.recipe(f"pipeline_rl.{name}", **drawn)
        divided = {"scale": 1.0 / per_token(given)} if drawn.get("group_normalization", False) else {"total": SAMPLES}
        reference = None if made.loss.kl is None else given.ref
        return loss_of(rc.Recipe(made.spec, made.loss, divided), given, rollout_logp=given.rollout, ref_logp=reference)

    for name in ("ppo", "reinforce", "gspo"):
        sides = of_loss(partial(ours, name)), of_loss(partial(theirs, name))
        place, declared = f"{STEP}: rl_step, {name}", (CLAMP,)
        yield Row("recipe", f"pipeline_rl.{name}", place, *sides, drawn_for(name), declared=declared, kinds=FINITE)


def per_token(given: Batch) -> Tensor:
    """[B]: the mean number of tokens of each row's group."""
    groups = given.mask.sum(1).double().reshape(-1, given.group_size).mean(1).clamp(min=1.0)
    return groups.repeat_interleave(given.group_size)


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
