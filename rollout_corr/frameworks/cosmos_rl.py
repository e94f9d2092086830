"""cosmos-rl: `[train.train_policy]` of type grpo, with `use_decoupled_loss` and `behav_imp_weight_cap`, or AIPO.

The weight is exp(D), and 0 above the cap. Means over sequences are over all rows. It divides by the tokens of the mask,
rejected ones too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ..specs.correction import Criterion, Spec, Weight
from ..specs.loss import Loss
from ..specs.ratio_losses import GSPO, PPO
from ..specs.surrogate import Surrogate
from ..specs.terms import KL, KLWeight, Mean
from ..specs.validate import number, one_of
from .shared.checking import Checks, Rule, without
from .shared.preset import PRESETS, is_off_policy, off_policy, presets
from .shared.recipe import BOTH, NO_LOWER_CLAMP, ROWS, TOKENS, Recipe, built_recipe
from .shared.settings import boolean, defaults_of, maybe, settings_of, words


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


def _surrogate(variant: str, low: float, high: float, dual: float, rho: float | None) -> Surrogate:
    make: Callable[..., Surrogate] = partial(GSPO, clamp=10.0) if variant == "gspo" else partial(PPO, clamp=20.0)
    if rho is not None:
        # The ratio, at most rho, whatever the sign of the advantage.
        return make(1.0, number("aipo_rho", rho) - 1.0, delta=rho)
    low, high = number("epsilon_low", low), number("epsilon_high", high)
    # A negative side is open.
    sides = 1.0 if low < 0.0 else low, float("inf") if high < 0.0 else high
    return make(*sides) if variant == "gspo" else make(*sides, dual)


def _loss(
    variant: str = "grpo",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    lower_bound_ratio: float = 3.0,
    aipo_rho: float | None = None,
    kl_beta: float = 0.0,
    unbiased_kl_estimate: bool = False,
    loss_type: str = "token-mean",
    unbiased_loss_max_tokens: float | None = None,
    use_decoupled_loss: bool = False,
    behav_imp_weight_cap: float | None = None,
    off_policy_masking_delta: float | None = None,
) -> Recipe:
    """`compute_loss` of its grpo_trainer; the arguments are its settings, with its defaults."""
    one_of("variant", variant, ("grpo", "dapo", "gspo"))
    surrogate = _surrogate(variant, epsilon_low, epsilon_high, lower_bound_ratio, aipo_rho)
    mean = MEANS[one_of("loss_type", loss_type, MEANS)]
    if loss_type == "seq-mean-token-mean" and unbiased_loss_max_tokens:
        mean = Mean("sequence_sum", over="rows", length=unbiased_loss_max_tokens)
    weighed: KLWeight | None = "ratio" if boolean("unbiased_kl_estimate", unbiased_kl_estimate) else None
    kl = KL("k3", kl_beta, weight=weighed, bound=10.0) if number("kl_beta", kl_beta) else None
    decoupled = boolean("use_decoupled_loss", use_decoupled_loss)
    spec = PRESETS["cosmos_rl.decoupled"].build(behav_imp_weight_cap=behav_imp_weight_cap) if decoupled else None
    if off_policy_masking_delta is not None:
        opsm = off_policy(off_policy_masking_delta, of="new/rollout" if decoupled else "new/old")
        spec = Spec(rejected="zero", nonfinite="propagate") if spec is None else spec
        spec = replace(spec, criteria=(*spec.criteria, opsm))
    return Recipe(spec, Loss(surrogate, mean, kl))


KNOWN = defaults_of(_loss)
TABLE = {name: value for name, value in KNOWN.items() if name != "variant"}
NOTE = "total, with balance_dp_token: tokens of all ranks"
built_recipe("cosmos_rl.grpo", partial(_loss, "grpo"), BOTH, NOTE, TABLE)
built_recipe("cosmos_rl.gspo", partial(_loss, "gspo"), BOTH, f"{NO_LOWER_CLAMP}; {NOTE}", TABLE)

# --- the configuration ---

BLOCKS = [("train_policy",), ("train", "train_policy")]
WHOLE = words("type trainer_type dataset reward_function temperature mini_batch mu_iterations allowed_outdated_steps")
PLACE = "train.train_policy"


def recipe(config: object) -> Recipe:
    """Read `[train.train_policy]`. With use_rollout_logprobs_for_loss the old log-probs are the rollout's."""
    return _loss(**settings_of(config, KNOWN, blocks=BLOCKS, whole=WHOLE))


def read(config: object) -> Spec:
    """Read the correction alone."""
    found = recipe(config).spec
    return Spec() if found is None else found


def write(spec: Spec) -> dict[str, Any]:
    """Write `use_decoupled_loss`, its cap and the off-policy mask."""
    opsm = next((c for c in spec.criteria if is_off_policy(c)), None)
    cap = next((c for c in spec.criteria if c is not opsm), None)
    return {
        "use_decoupled_loss": spec.weight is not None,
        "behav_imp_weight_cap": None if cap is None else cap.high,
        "off_policy_masking_delta": None if opsm is None else opsm.high,
    }


# --- mistakes ---

DECOUPLED, CAP, ALONE = (
    f"{PLACE}.{name}" for name in ("use_decoupled_loss", "behav_imp_weight_cap", "use_rollout_logprobs_for_loss")
)
SAMPLING = "rollout.sampling_config."
CHECKS = Checks(
    keys=(DECOUPLED, CAP, f"{PLACE}.off_policy_masking_delta"),
    context=(ALONE,),
    temperature=f"{SAMPLING}temperature",
    top_p=f"{SAMPLING}top_p",
    top_k=f"{SAMPLING}top_k",
    repetition_penalty=f"{SAMPLING}repetition_penalty",
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
