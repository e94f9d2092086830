"""cosmos-rl: `[train.train_policy]` of type grpo, with `use_decoupled_loss` and `behav_imp_weight_cap`, or AIPO.

The weight is exp(D), and 0 above the cap. Means over sequences are over all rows. It divides by the tokens of the mask,
rejected ones too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..specs.correction import Criterion, Spec, Weight
from ..specs.loss import Loss
from ..specs.surrogate import Surrogate
from ..specs.surrogates import GSPO, PPO
from ..specs.terms import KL, KLWeight, Mean
from .shared.checking import Checks, Rule, roles, without
from .shared.preset import HIGH, off_policy, presets
from .shared.recipe import BOTH, NO_LOWER_CLAMP, ROWS, TOKENS, Recipe, add_recipe
from .shared.settings import Given, Setting, at_least, given_in, maybe, or_null, word, words


def _decoupled(cap: float | None) -> Spec:
    gates = () if cap is None else (Criterion("ratio", upper=cap),)
    return Spec(Weight.token(), gates, "zero", nonfinite="propagate")


presets("cosmos_rl", "cosmos-rl 89f2e5b (2026-07-31)")(
    decoupled=(
        "w = exp(D), and 0 above behav_imp_weight_cap, which has no default there; 5 is AReaL's.",
        _decoupled,
        {"behav_imp_weight_cap": maybe(5.0)},
    )
)

MEANS = {
    "token-mean": TOKENS,
    "seq-mean-token-mean": ROWS,
    "seq-mean-token-sum": Mean("sequence_sum", over="rows"),
    "token-sum": Mean("sum"),
}


LOSS: dict[str, Any] = {
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "lower_bound_ratio": maybe(3.0),
    "aipo_rho": Setting(None, or_null(at_least(1.0))),
    "kl_beta": 0.0,
    "unbiased_kl_estimate": False,
    "loss_type": word("token-mean", MEANS),
    "unbiased_loss_max_tokens": None,
    "use_decoupled_loss": False,
    "behav_imp_weight_cap": None,
    "off_policy_masking_delta": None,
}


def _loss(variant: str, given: Given) -> Recipe:
    decoupled, cap, delta, loss_type = (given[name] for name in (*CORRECTION, "loss_type"))
    spec = _decoupled(cap) if decoupled else None
    if delta is not None:
        opsm = off_policy(delta, of="new/rollout" if decoupled else "new/old")
        spec = Spec(rejected="zero", nonfinite="propagate") if spec is None else spec
        spec = replace(spec, criteria=(*spec.criteria, opsm))
    mean, longest = MEANS[loss_type], given["unbiased_loss_max_tokens"]
    if loss_type == "seq-mean-token-mean" and longest:
        mean = Mean("sequence_sum", over="rows", length=longest)
    weighed: KLWeight | None = "ratio" if given["unbiased_kl_estimate"] else None
    kl = KL("k3", given["kl_beta"], weight=weighed, bound=10.0) if given["kl_beta"] else None
    return Recipe(spec, Loss(_surrogate(variant, given), mean, kl))


def _surrogate(variant: str, given: Given) -> Surrogate:
    whole, rho = variant == "gspo", given["aipo_rho"]
    make: Callable[..., Surrogate] = partial(GSPO, clamp=10.0) if whole else partial(PPO, clamp=20.0)
    if rho is not None:
        # The ratio, at most rho, whatever the sign of the advantage.
        return make(1.0, rho - 1.0, delta=rho)
    low, high = given["epsilon_low"], given["epsilon_high"]
    # A negative side is open.
    sides = 1.0 if low < 0.0 else low, math.inf if high < 0.0 else high
    return make(*sides) if whole else make(*sides, given["lower_bound_ratio"])


CORRECTION = ("use_decoupled_loss", "behav_imp_weight_cap", "off_policy_masking_delta")
NOTE = "total, with balance_dp_token: tokens of all ranks"
for _variant, _note in (("grpo", NOTE), ("gspo", f"{NO_LOWER_CLAMP}; {NOTE}")):
    add_recipe(f"cosmos_rl.{_variant}", partial(_loss, _variant), LOSS, BOTH, _note)

# --- the configuration ---

TABLE = LOSS | {"variant": word("grpo", ("grpo", "dapo", "gspo"))}
BLOCKS = [("train_policy",), ("train", "train_policy")]
WHOLE = words("type trainer_type dataset reward_function temperature mini_batch mu_iterations allowed_outdated_steps")
PLACE = "train.train_policy"
settings = partial(given_in, rows=TABLE, blocks=BLOCKS, whole=WHOLE)


def recipe(given: Given) -> Recipe:
    """Read `[train.train_policy]`. With use_rollout_logprobs_for_loss the old log-probs are the rollout's."""
    return _loss(given["variant"], given)


def read(given: Given) -> Spec:
    """Read the correction alone."""
    return recipe(given).spec or Spec()


WRITTEN = (
    ({"use_decoupled_loss": False}, {"use_decoupled_loss": True, "behav_imp_weight_cap": (None, HIGH)}),
    ({"off_policy_masking_delta": (None, HIGH)},),
)

# --- mistakes ---

DECOUPLED, CAP, ALONE = (
    f"{PLACE}.{name}" for name in ("use_decoupled_loss", "behav_imp_weight_cap", "use_rollout_logprobs_for_loss")
)
CHECKS = Checks(
    keys=(DECOUPLED, CAP, f"{PLACE}.off_policy_masking_delta"),
    context=(ALONE,),
    roles=roles("rollout.sampling_config.", "temperature top_p top_k repetition_penalty"),
    bounds={"criteria": (CAP,)},
    rules=(
        *without(DECOUPLED, CAP),
        Rule(
            ALONE,
            lambda run: run.on(ALONE) and run.on(DECOUPLED),
            "cosmos-rl refuses it together with use_decoupled_loss",
            "leave one of them out",
        ),
    ),
)
