"""cosmos-rl: `compute_loss` of its grpo_trainer is called as it is, on packed tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from conformance.batches import Batch, without
from conformance.declared import BF16, CLAMP, NO_LOWER_CLAMP, PROPAGATES, Declared
from conformance.rows import Row, both, configuration, draw, preset, recipe
from conformance.sources import Source
from rollout_corr.frameworks.cosmos_rl import TABLE
from rollout_corr.frameworks.shared.settings import default_of

DISTRIBUTION, PACKAGE, CHECKOUT = None, "cosmos_rl", "cosmos-rl"

LOSS = "cosmos_rl/policy/trainer/llm_trainer/grpo_trainer.py"
# Its off-policy mask reads the first token of each row.
FILLED = without("empty_rows", "all_masked")


def cut(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether the product of ratio and k3 exceeds 10."""
    k = (given.ref - given.new.detach()).double().clamp(-20.0, 20.0)
    weighed = (given.new.detach() - given.old).double().exp() * (k.exp() - k - 1.0)
    on = settings.get("unbiased_kl_estimate") and settings.get("kl_beta")
    return bool(on and (weighed[given.mask] > 10.0).any())


def spoiled(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether the running sum of the off-policy mask meets a log-prob that is not finite."""
    return settings.get("off_policy_masking_delta") is not None and not given.finite


SPOILED = Declared("a running sum", "which such a token spoils", spoiled)
DEFAULTS = {name: default_of(row) for name, row in TABLE.items()}
CUT = Declared("the KL beyond 10", "the product is cut at 10", cut)


def rows(source: Source) -> Iterator[Row]:
    """Compare the preset, the recipes and the reader."""
    compute_loss = source.cut(LOSS, "compute_loss")

    def loss(given: Batch, variant: str = "grpo", use_decoupled_loss: bool = False, **config: Any) -> Tensor:
        policy = SimpleNamespace(**DEFAULTS | {"balance_dp_token": False, "variant": variant, **config})
        lengths = given.mask.sum(1)
        rollout = given.rollout.double()
        value, _, _ = compute_loss(
            given.new[given.mask],
            given.old[given.mask],
            given.ref[given.mask],
            given.token_advantages[given.mask],
            torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            SimpleNamespace(train=SimpleNamespace(train_policy=policy)),
            given.mask,
            rollout_per_token_logps=[row[at].tolist() for row, at in zip(rollout, given.mask, strict=True)]
            if use_decoupled_loss
            else None,
        )
        return value

    def weights(given: Batch, behav_imp_weight_cap: float) -> Any:
        # The ratio new/old is 1 and the advantage -1, so that a token's loss is its weight.
        found = weigh(
            rollout_per_token_logps=given.rollout,
            old_per_token_logps=given.old,
            per_token_loss=torch.ones_like(given.old),
            config=SimpleNamespace(
                train=SimpleNamespace(train_policy=SimpleNamespace(behav_imp_weight_cap=behav_imp_weight_cap))
            ),
        )
        return {"weights": found["per_token_loss"]}

    weigh = source.lines(
        LOSS, "compute_loss", "if rollout_per_token_logps is not None:\n        # Compute", "if rollout"
    )
    place = f"{LOSS}: compute_loss"
    more: dict[str, Any] = {"declared": (PROPAGATES, SPOILED, BF16, CUT, CLAMP, NO_LOWER_CLAMP), "kinds": FILLED}
    yield preset("cosmos_rl.decoupled", place, weights, draw(behav_imp_weight_cap=(1.05, 5.0)), **more)
    of_ppo = both(DRAWN, draw(lower_bound_ratio=(1.5, 3.0)))
    yield recipe("cosmos_rl.grpo", place, loss, of_ppo, **more)
    yield recipe("cosmos_rl.gspo", place, partial(loss, variant="gspo"), DRAWN, **more)
    yield configuration("cosmos_rl", place, loss, drawn_config, hold, **more)


DRAWN = draw(
    epsilon_low=(0.2, 0.05),
    epsilon_high=(0.28, 0.1, -1.0),
    aipo_rho=(None, None, 1.1, 4.0),
    kl_beta=(0.0, 0.01),
    unbiased_kl_estimate=(False, True),
    loss_type=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum"),
    unbiased_loss_max_tokens=(None, 64),
    use_decoupled_loss=(False, True, True),
    behav_imp_weight_cap=(None, 1.05, 5.0),
    off_policy_masking_delta=(None, None, 0.001, 0.1),
)


def drawn_config(rng: Random) -> dict[str, Any]:
    """Draw a table `train_policy`, without some of its settings."""
    drawn = {name: value for name, value in DRAWN(rng).items() if rng.random() < 0.8}
    return {"variant": rng.choice(("grpo", "dapo", "gspo")), **drawn}


def hold(drawn: dict[str, Any]) -> Any:
    """Put the settings where they stand in a configuration."""
    return {"train": {"train_policy": {"type": "grpo", "mini_batch": 2, **drawn}}, "policy": {}}
