"""NeMo RL: ClippedPGLossFn is constructed from its configuration and called, both as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import rollout_corr as rc
from conformance.batches import FINITE, PADDED, Batch
from conformance.declared import BF16, CLAMP, NONFINITE, Declared, beyond
from conformance.rows import Result, Row, both, configuration, draw, preset, recipe
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = None, "nemo_rl", "nemo-rl"

LOSS = "nemo_rl/algorithms/loss/loss_functions.py"
GRPO = "nemo_rl/algorithms/grpo.py"
MASKING = "compute_and_apply_seq_logprob_error_masking"
TYPES = {"tis": "tis", "icepop": "icepop", "seq_mask_tis": "seq-mask-tis"}

# What else the loss reports, and the native metric that it is.
REPORT = {
    "token_mult_prob_error": "ratio_error_mean",
    "gen_kl_error": "kl_rollout_train_k3",
    "policy_kl_error": "kl_train_rollout_k3",
    "js_divergence_error": "js_divergence",
    "sampling_importance_ratio": "weight_mean",
}

NO_NUMBER = Declared(
    "a non-finite token rejects its sequence here, itself there", "NeMo RL | weight 0 at that token", NONFINITE
)
CLAMPED = Declared("D beyond the clamp", "mean e^D - 1 - D, D clamped", beyond(20.0, "old", "rollout"))


def large_kl(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether k3 of the reference is beyond NeMo's clamp of 10 at a token."""
    k = (given.ref - given.new.detach()).double()[given.mask]
    return bool((k.exp() - 1.0 - k > 10.0).any())


LARGE_KL = Declared("a KL beyond its clamp", "NeMo RL's KL beyond `kl_output_clamp_value`", large_kl)


class Model:
    """Stand-in for pydantic's BaseModel as a configuration: fields are set, the others keep their defaults."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Take the options of a model."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)


def rows(source: Source) -> Iterator[Row]:
    """Compare presets, recipes and the reader."""
    loss_class = source.cut(LOSS, "ClippedPGLossFn", BaseModel=Model)
    config_class = source.cut(LOSS, "ClippedPGLossConfig", BaseModel=Model)
    weigh = source.lines(LOSS, "ClippedPGLossFn.__call__", "_is_filter_metrics: dict", "if self.use_importance")
    mask_samples = source.cut(GRPO, MASKING)

    def data(given: Batch, threshold: float | None = None) -> dict[str, Tensor]:
        def wide(x: Tensor) -> Tensor:
            return pad(x, (1, 0))

        dtype = given.new.dtype
        made = {
            "token_mask": wide(given.mask.to(dtype)),
            "sample_mask": given.mask.any(1).to(dtype),
            "advantages": wide(given.token_advantages),
            "prev_logprobs": wide(given.old),
            "generation_logprobs": wide(given.rollout),
            "reference_policy_logprobs": wide(given.ref),
        }
        with redirect_stdout(StringIO()):
            mask_samples(made, torch.zeros(len(given.mask)), threshold)
        return made

    def weights(given: Batch, **config: Any) -> Result:
        made = data(given)
        found = weigh(
            self=loss_class(config_class(use_importance_sampling_correction=True, **config)),
            prev_logprobs=given.old,
            generation_logprobs=given.rollout,
            mask=given.mask,
            token_mask=given.mask,
            sample_mask=made["sample_mask"],
            global_valid_seqs=given.mask.any(1).sum(),
            global_valid_toks=given.mask.sum(),
            # NeMo#3751, whose objective is in loss/clipped_pg.py, asks before.
            need_importance_weights=True,
        )
        return {"weights": found["importance_weights_to_use"].expand_as(given.old)}

    def masked(given: Batch, threshold: float) -> Result:
        return {"mask": given.mask & data(given, threshold)["sample_mask"].bool()[:, None]}

    def loss(given: Batch, seq_logprob_error_threshold: float | None = None, **config: Any) -> Tensor:
        if config.get("force_on_policy_ratio"):
            # NeMo allows it only where no update lies between the two passes, so that they agree.
            given = replace(given, old=given.new.detach())
        made = data(given, seq_logprob_error_threshold)
        samples = made["sample_mask"]
        tokens = (made["token_mask"][:, 1:] * samples[:, None]).sum()
        config = {"reference_policy_kl_penalty": 0.0, "use_importance_sampling_correction": True} | config
        value, _ = loss_class(config_class(**config))(given.new, made, samples.sum(), tokens)
        return value

    bounds = draw(ratio=(1.05, 2.0), ratio_min=(0.5, 0.9))
    averages = draw(token_level_loss=(True, False))
    penalties = draw(ratio_clip_c=(None, 3.0), reference_policy_kl_penalty=(0.0, 0.1))
    of_loss = both(averages, penalties)

    def truncated(kind: str, ratio: float, ratio_min: float | None) -> dict[str, Any]:
        return {
            "truncated_importance_sampling_type": kind,
            "truncated_importance_sampling_ratio": ratio,
            "truncated_importance_sampling_ratio_min": ratio_min,
        }

    def without_penalty(rng: Random) -> dict[str, Any]:
        return {key: value for key, value in of_loss(rng).items() if key != "reference_policy_kl_penalty" or value}

    # NeMo multiplies by its masks, so what stands behind them is finite; and it adds 1e-8 to what it divides by.
    more: dict[str, Any] = {"declared": (NO_NUMBER, BF16, CLAMP, LARGE_KL), "kinds": PADDED, "within": (3e-8, 2e-5)}

    def by(run: Any, kind: str, given: Batch, ratio: float, ratio_min: float, **config: Any) -> Any:
        return run(given, **truncated(kind, ratio, ratio_min), **config)

    place = f"{LOSS}: ClippedPGLossFn"
    for ours, kind in TYPES.items():
        yield preset(f"nemo.{ours}", f"{place}, {kind}", partial(by, weights, kind), bounds, **more)
        yield recipe(f"nemo.{ours}", f"{place}, {kind}", partial(by, loss, kind), both(bounds, of_loss), **more)
    sequences = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    yield preset("nemo.gspo_is", f"{place}, sequence level", partial(weights, **sequences), **more)
    yield recipe("nemo.gspo_is", f"{place}, sequence level", partial(loss, **sequences), penalties, **more)
    plain = partial(loss, use_importance_sampling_correction=False)
    yield recipe("nemo.ppo", place, plain, of_loss, **more)
    # The KL that it has without being asked, which is ClippedPGLossConfig's.
    yield recipe("nemo.grpo", place, partial(plain, reference_policy_kl_penalty=0.01), without_penalty, **more)
    drawn = draw(ratio_clip_max=(0.2, 4.0), reference_policy_kl_penalty=(0.0, 0.1))
    yield recipe("nemo.cispo", f"{place}, use_cispo", partial(plain, use_cispo=True), drawn, **more)

    threshold = draw(threshold=(1.01, 1.1, 2.0))

    def mult_err(given: Batch, threshold: float, **config: Any) -> Tensor:
        return plain(given, seq_logprob_error_threshold=threshold, **config)

    yield preset("nemo.mult_err", f"{GRPO}: {MASKING}", masked, threshold, **more)
    yield recipe("nemo.mult_err", f"{GRPO}: {MASKING}", mult_err, both(threshold, of_loss), **more)

    def reported(given: Batch, settings: dict[str, Any]) -> Result:
        config = truncated("tis", **settings) | {"use_importance_sampling_correction": True}
        run = loss_class(config_class(reference_policy_kl_penalty=0.0, **config))
        made = data(given)
        _, found = run(given.new, made, made["sample_mask"].sum(), given.mask.sum())
        return {name: found[name] for name in REPORT}

    def ours(given: Batch, settings: dict[str, Any]) -> Result:
        spec = replace(rc.spec("nemo.tis", **settings), detail="full")
        found = rc.correct(given.old, given.rollout, mask=given.mask, spec=spec).metrics()
        return {name: found[native] for name, native in REPORT.items()}

    name, at = f"nemo {', '.join(REPORT.values())}", f"{LOSS}: {', '.join(REPORT)}"
    kinds = tuple(kind for kind in FINITE if kind not in ("nan_behind_mask", "all_masked"))
    yield Row("report", name, at, ours, reported, bounds, (CLAMPED,), kinds, within=(3e-8, 2e-5))

    def hold(config: dict[str, Any]) -> dict[str, Any]:
        block = dict(config)
        masking = {"seq_logprob_error_threshold": block.pop("seq_logprob_error_threshold")}
        return {"loss_fn": block, "grpo": masking, "policy": {}}

    def old(given: Batch, config: dict[str, Any]) -> Tensor:
        return given.new.detach() if config["force_on_policy_ratio"] else given.old

    yield configuration("nemo", f"{LOSS}: ClippedPGLossConfig, ClippedPGLossFn", loss, config_of, hold, old, **more)


def config_of(rng: Random) -> dict[str, Any]:
    """Draw a configuration that NeMo takes."""
    config: dict[str, Any] = {
        "ratio_clip_min": rng.choice((0.1, 0.2)),
        "ratio_clip_max": rng.choice((0.2, 0.28)),
        "reference_policy_kl_penalty": rng.choice((0.0, 0.01, 0.1)),
        "use_kl_in_reward": rng.random() < 0.2,
        "use_importance_sampling_correction": rng.random() < 0.7,
        "token_level_loss": rng.random() < 0.5,
        "seq_logprob_error_threshold": rng.choice((None, None, 1.1, 2.0)),
        "force_on_policy_ratio": False,
    }
    way = rng.choice(("ppo", "gspo", "cispo", "plain", "forced"))
    if way == "gspo":
        config |= {"sequence_level_importance_ratios": True, "token_level_loss": False}
    elif way == "cispo":
        config |= {"use_cispo": True, "token_level_loss": True}
    elif way != "ppo":
        config["disable_ppo_ratio" if way == "plain" else "force_on_policy_ratio"] = True
    if way != "cispo":
        config["ratio_clip_c"] = rng.choice((None, 3.0))
    if config["use_importance_sampling_correction"]:
        kinds = [None, "tis", "icepop"]
        if way != "gspo" and config["seq_logprob_error_threshold"] is None:
            kinds.append("seq-mask-tis")
        kind = rng.choice(kinds)
        if kind is not None:
            config["truncated_importance_sampling_type"] = kind
            config["truncated_importance_sampling_ratio"] = rng.choice((1.05, 2.0))
            least = rng.choice((0.5, 0.9, None) if kind == "tis" else (0.5, 0.9))
            config["truncated_importance_sampling_ratio_min"] = least
    return config
