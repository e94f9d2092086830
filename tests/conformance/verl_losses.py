"""verl: its policy losses, alone and in its whole loss under a configuration.

clip_cov draws by `torch.randperm`, which no other library repeats. Here its draw is replaced by the order in which this
package draws, so the rest can be compared: which tokens may be drawn, how many are, and the loss with its gradient.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from conformance.batches import KINDS, Batch
from conformance.declared import BF16, CLAMP, LEFT_OUT, NO_LOWER_CLAMP, Declared, among
from conformance.parsed import find, parsed
from conformance.rows import Result, Row, both, configuration, draw, loss_and_gradient, recipe
from conformance.rows import Settings as Drawn
from conformance.sources import Source
from conformance.verl_parts import Data, Metric, Settings, Stranger, actor
from rollout_corr.backends.sees_batch import uniform
from rollout_corr.frameworks.verl import losses

LOSSES = "verl/trainer/ppo/core_algos.py"
PPO_LOSS = "verl/workers/utils/losses.py"
HELPER, MAIN = "verl/trainer/ppo/rollout_corr_helper.py", "compute_rollout_correction_and_rejection_mask"
GIVEN = {"ActorConfig": Settings, "AlgoConfig": Stranger}
MODES = tuple(losses.MEANS)
# verl averages counts in float32.
COUNTED = (1e-7, 2e-5)

EMPTY = Declared("no token: NaN there", "a batch without a token (verl", among("all_masked"))
# The mean of what verl has clamped to +-20.
FAR_KL = Declared("ppo_kl beyond +-20", "Its `ppo_kl` does not clamp log-ratios", CLAMP.when, ("actor/ppo_kl",))
DECLARED = (BF16, LEFT_OUT, EMPTY, FAR_KL)
# gspo, and losses of verl that have no clamp.
OWN = {"gspo": (NO_LOWER_CLAMP,), "geo_mean": (CLAMP,)}
CUT = Declared(
    "shares of tokens that dppo clips",
    "dppo's `pg_clipfrac` counts tokens whose advantage is 0, and its `pg_clipfrac_lower` only what was not dropped",
    lambda given, settings: bool(
        (given.advantages == 0).any() | ((given.new - given.old).exp() > settings["clip_ratio_c"])[given.mask].any()
    ),
    keys=("actor/pg_clipfrac", "actor/pg_clipfrac_lower"),
)


def ties(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether the last token chosen has about the covariance of the first that is not."""
    a, x = given.token_advantages[given.mask], given.new[given.mask]
    found = ((a - a.mean()) * (x - x.mean())).sort(descending=True).values.double()
    count = max(1, int(len(found) * settings["kl_cov_ratio"]))
    # Where all advantages are equal the covariances are what rounding leaves of their mean.
    return count < len(found) and bool((found[count - 1] - found[count]).abs() <= 1e-6 * a.abs().max() * x.abs().max())


TIED = Declared("covariances that tie", "takes all tied tokens", ties)

# The settings of a clipped loss, and of the others.
CLIPS = draw(clip_ratio_low=(0.02, 0.2), clip_ratio_high=(0.05, 0.28))
CLIPS_AND_C = both(CLIPS, draw(clip_ratio_c=(1.1, 3.0)))
OF_LOSS = {
    **dict.fromkeys(("vanilla", "dppo_tv", "dppo_kl"), CLIPS_AND_C),
    **dict.fromkeys(("gspo", "cispo", "geo_mean"), CLIPS),
    "sapo": draw(tau_pos=(0.5, 1.0), tau_neg=(1.05, 2.0)),
    "gpg": draw(),
    "dro": draw(dro_beta=(0.1, 1.0)),
    "reinforce": draw(),
}
# With some settings clip_cov draws every token that it may.
OF_COV = {
    "clip_cov": both(
        CLIPS, draw(clip_cov_ratio=(0.0002, 0.05, 0.3, 1.0), clip_cov_lb=(0.1, 1.0), clip_cov_ub=(2.0, 5.0))
    ),
    "kl_cov": draw(kl_cov_ratio=(0.0002, 0.05, 0.3), ppo_kl_coef=(0.1, 1.0)),
}


def micro_batch(name: str) -> Drawn:
    """Draw what a drop-in's loss gets: its settings, an average, counts of all ranks or none, weights or none."""
    counts = {"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 9, "loss_scale_factor": 50}
    return both(OF_LOSS[name], draw(mode=MODES, info=({}, counts), weighted=(True, False)))


def rows(source: Source, correct: Any, correction: Drawn, icepop: Declared) -> Iterator[Row]:
    """Compare recipes, replaced losses and the whole configuration; `correct` is verl's, `correction` draws for it."""
    theirs = {name: source.cut(LOSSES, f"compute_policy_loss_{name}", **GIVEN) for name in OF_LOSS}
    averages = source.fact("gspo reads loss_agg_mode", lambda: reads(source, "gspo", "loss_agg_mode"))
    assert source.version not in losses.AVERAGING or averages
    functions = losses.FUNCTIONS | {"gspo": losses.gspo(averages)}
    for name, settings in OF_LOSS.items():
        place, own = f"{LOSSES}: compute_policy_loss_{name}", OWN.get(name, ())
        if name not in ("vanilla", "reinforce"):
            mode = "seq-mean-token-mean" if name in ("gspo", "sapo") else "token-mean"
            run = partial(alone, theirs[name], mode)
            yield recipe(f"verl.{name}", place, run, settings, declared=(*DECLARED, *own))
        if name in losses.FUNCTIONS:
            more: dict[str, Any] = {"declared": (*DECLARED, *([CUT] if "dppo" in name else own)), "within": COUNTED}
            sides = partial(registered, functions[name]), partial(registered, theirs[name])
            yield Row("drop-in", f"verl.losses.{name}", place, *sides, micro_batch(name), **more)
    for name, settings in OF_COV.items():
        run = partial(in_our_order, source.cut(LOSSES, f"compute_policy_loss_{name}", **GIVEN))
        declared = (*DECLARED, CLAMP, *([TIED] if name == "kl_cov" else []))
        yield recipe(f"verl.{name}", f"{LOSSES}: compute_policy_loss_{name}", run, settings, declared=declared)
    bypass = source.cut(LOSSES, "compute_policy_loss_bypass_mode", **GIVEN, **{MAIN: correct})
    yield from of_the_whole(source, theirs | {"bypass_mode": bypass}, correct, correction, icepop, averages)


def alone(function: Any, mode: str, batch: Batch, dro_beta: float | None = None, **settings: Any) -> Tensor:
    """Call one of verl's losses."""
    config = actor(policy_loss=Settings(dro_beta=dro_beta), **settings)
    value: Tensor = function(batch.old, batch.new, batch.token_advantages, batch.mask, mode, config)[0]
    return value


def registered(function: Any, batch: Batch, settings: dict[str, Any]) -> Result:
    """Call a loss as verl's workers do, for its value, gradient and metrics."""
    mode, info, weighted = (settings.pop(key) for key in ("mode", "info", "weighted"))
    policy = Settings(dro_beta=settings.pop("dro_beta", None))
    config = actor(policy_loss=policy, global_batch_info=info, **settings)
    weights = (batch.old - batch.rollout).exp().clamp(max=2.0) if weighted else None
    own = batch.trains()
    value, metrics = function(own.old, own.new, own.token_advantages, own.mask, mode, config, weights)
    return {**loss_and_gradient(value, own), **metrics}


def in_our_order(
    function: Any, batch: Batch, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, **of_loss: float
) -> Tensor:
    """Call clip_cov or kl_cov, with this package's order for the random one."""
    clips = {"clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high}
    arguments = (batch.old, batch.new, batch.token_advantages, batch.mask, "token-mean")

    def order(n: int) -> Tensor:
        # Of the places that verl's function has found.
        places = sys._getframe(1).f_locals["top_k_idx"]
        numbers = uniform(0, torch.arange(len(batch.mask))[:, None], batch.mask.long().cumsum(1))
        return numbers[places[:, 0], places[:, 1]].argsort()

    with patch.object(torch, "randperm", order):
        value: Tensor = function(*arguments, actor(policy_loss=Settings(**of_loss), **clips))[0]
    return value


def reads(source: Source, name: str, parameter: str) -> bool:
    """Tell whether the code of one of verl's losses reads its parameter."""
    function = find(parsed(source.root / LOSSES).tree, f"compute_policy_loss_{name}")
    assert function is not None
    names = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return any(node.id == parameter for node in names)


def of_the_whole(
    source: Source, functions: dict[str, Any], correct: Any, correction: Drawn, icepop: Declared, averages: bool
) -> Iterator[Row]:
    """Compare verl's `ppo_loss` after its correction, under a whole configuration."""
    ppo_loss = source.cut(
        PPO_LOSS,
        "ppo_loss",
        no_padding_2_padding=lambda x, data: x,
        get_policy_loss_fn=lambda mode: functions[mode],
        Metric=Metric,
        AggregationType=Metric,
        TensorDict=Data,
    )

    def whole(given: Batch, actor_rollout_ref: dict[str, Any], algorithm: dict[str, Any]) -> Tensor:
        block = dict(algorithm["rollout_correction"])
        bypass, loss_type = block.pop("bypass_mode"), block.pop("loss_type")
        settings = dict(actor_rollout_ref["actor"])
        policy = Settings(**settings.pop("policy_loss"))
        data = Data(
            response_mask=given.mask,
            old_log_probs=given.rollout if bypass else given.old,
            advantages=given.token_advantages,
            ref_log_prob=given.ref,
            dp_size=1,
            batch_num_tokens=given.mask.sum(),
            global_batch_size=len(given.mask),
        )
        try:
            if bypass:
                policy.loss_mode = "bypass_mode"
                policy.rollout_correction = Settings(**block, loss_type=loss_type)
            elif given.mask.any():
                held, data["response_mask"], _ = correct(given.old, given.rollout, given.mask, **block)
                if held is not None:
                    data["rollout_is_weights"] = held.batch["rollout_is_weights"]
            value: Tensor = ppo_loss(actor(**settings | {"policy_loss": policy}), {"log_probs": given.new}, data)[0]
        except ZeroDivisionError:
            return given.new.sum() * math.nan
        return value

    uncorrected = dict.fromkeys(("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold"))
    uncorrected |= {"rollout_is_batch_normalize": False, "bypass_mode": False, "loss_type": "ppo_clip"}

    def examples(given: Batch, **settings: Any) -> Tensor:
        settings |= {"kl_loss_type": "low_var_kl", "use_kl_loss": "kl_loss_coef" in settings}
        settings |= {"loss_agg_mode": "token-mean", "loss_scale_factor": None, "policy_loss": {"loss_mode": "vanilla"}}
        return whole(given, {"actor": settings}, {"rollout_correction": uncorrected})

    # verl's correction raises without a valid token.
    some = tuple(kind for kind in KINDS if kind != "all_masked")
    with_kl = both(CLIPS_AND_C, draw(kl_loss_coef=(0.001, 0.1)))
    for name, shown, drawn in (("ppo", "ppo_loss", CLIPS_AND_C), ("grpo", "ppo_loss, use_kl_loss", with_kl)):
        yield recipe(f"verl.{name}", f"{PPO_LOSS}: {shown}", examples, drawn, declared=DECLARED, kinds=some)

    def of_mode(mode: str, known: Declared) -> Declared:
        def when(given: Batch, settings: dict[str, Any]) -> bool:
            chosen = settings["actor_rollout_ref"]["actor"]["policy_loss"]["loss_mode"]
            return bool(chosen == mode and known.when(given, settings))

        return replace(known, when=when)

    whole_icepop = replace(icepop, when=lambda given, s: icepop.when(given, s["algorithm"]["rollout_correction"]))
    yield configuration(
        "verl",
        f"{PPO_LOSS}: ppo_loss, {HELPER}: {MAIN}",
        whole,
        partial(whole_configuration, correction, averages),
        old=lambda batch, settings: None if settings["algorithm"]["rollout_correction"]["bypass_mode"] else batch.old,
        declared=(*DECLARED, whole_icepop, *(of_mode(mode, known) for mode, (known,) in OWN.items())),
        kinds=some,
        within=COUNTED,
    )


def whole_configuration(correction: Drawn, gspo_averages: bool, rng: Random) -> dict[str, Any]:
    """Draw as much of a whole configuration as makes the loss; `gspo_averages`: GSPO obeys `loss_agg_mode`."""
    mode = rng.choice(("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "geo_mean", "dro", "cispo"))
    block = correction(rng) | {"rollout_is_batch_normalize": False, "bypass_mode": rng.random() < 0.3}
    block["loss_type"] = rng.choice(("ppo_clip", "reinforce"))
    if mode == "geo_mean" and not block["bypass_mode"]:
        block["rollout_is"] = None
    average = rng.choice(MODES)
    if mode == "gspo" and not gspo_averages:
        average = "seq-mean-token-mean"
    if "token" in str(block["rollout_rs"]) and (
        average == "seq-mean-token-mean" or (mode in ("sapo", "geo_mean") and not block["bypass_mode"])
    ):
        # A mean over what a row has left over a count of all rows is refused.
        block |= {"rollout_rs": None, "rollout_rs_threshold": None}
    actor = {
        **CLIPS_AND_C(rng),
        "tau_pos": rng.choice((0.5, 1.0)),
        "loss_agg_mode": average,
        "loss_scale_factor": 50,
        "use_kl_loss": rng.random() < 0.5,
        "kl_loss_coef": 0.1,
        "kl_loss_type": rng.choice(("kl", "abs", "k2", "mse+", "low_var_kl", "k1+", "k3+")),
        "policy_loss": {"loss_mode": mode, "dro_beta": rng.choice((0.1, 1.0))},
    }
    if mode in ("sapo", "geo_mean"):
        # A length divides no KL loss of its own.
        actor["use_kl_loss"] &= average != "seq-mean-token-sum-norm"
    return {"actor_rollout_ref": {"actor": actor}, "algorithm": {"rollout_correction": block}}
