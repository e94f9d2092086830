"""TRL: the statements of GRPOTrainer that make the ratio and the loss, and its off-policy mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from conformance import trl_packed
from conformance.batches import PADDED, Batch, without
from conformance.declared import BF16, CLAMP, NONFINITE, PROPAGATES, Declared, among, where_ours_trains
from conformance.rows import (
    Result,
    Row,
    Settings,
    both,
    configuration,
    draw,
    loss_of,
    of_loss,
    preset,
    recipe,
)
from conformance.sources import Source
from rollout_corr.frameworks.trl import asynchronous, dropin

DISTRIBUTION, PACKAGE, CHECKOUT = "trl", "trl", "trl"

TRAINER = "trl/trainer/grpo_trainer.py"
DISTILLS = "trl/experimental/iw_opd/iw_opd_trainer.py"
ASYNC = "trl/experimental/async_grpo/async_grpo_trainer.py"
GEOMETRIC = "trl/experimental/gmpo/gmpo_trainer.py"
GENERATE, COMPUTE = "GRPOTrainer._generate_and_score_completions", "GRPOTrainer._compute_loss"
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LOSSES = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo", "sapo", "cispo", "vespo")


def sequence_level(settings: dict[str, Any]) -> bool:
    return bool(settings.get("importance_sampling_level") == "sequence")


def weighed_kl(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether a sequence's ratio multiplies the KL."""
    return bool(sequence_level(settings) and settings.get("beta") and settings.get("use_bias_correction_kl", True))


def faint(theirs: Any, ours: Any, given: Batch) -> bool:
    """Tell whether a gradient differs by the weight 1e-8 alone, or only at tokens that have none here."""
    near = isinstance(theirs, Tensor) and torch.allclose(ours.double(), theirs.double(), rtol=0.0, atol=1e-7)
    return near or where_ours_trains(theirs, ours, given)


def tokenwise(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether the tokens of a sequence have losses of their own."""
    corrected = settings.get("vllm_importance_sampling_correction", True)
    weights = corrected and settings.get("vllm_importance_sampling_mode", "sequence_mask").startswith("token")
    return bool(not sequence_level(settings) or settings.get("beta") or weights)


NO_NUMBER = Declared("not finite", "NaN: ratio 1. Infinite: the largest float", NONFINITE)
DECLARED = (NO_NUMBER, BF16, CLAMP, Declared("the KL's ratio", "weighted by the ratio of the sequence", weighed_kl))
# Of the versions before 1.16.0.
PADDED_LUSPO = Declared("luspo over padding", "averages tokens over padding", tokenwise)

MASKED_VESPO = Declared(
    "vespo of masked sequences",
    "the weight has a floor of 1e-8 in its ratio",
    # Next to a KL such a weight is rounded away, in an order that autograd chooses.
    lambda given, settings: bool(
        settings.get("off_policy_mask_threshold") is not None
        or (settings.get("beta") and settings["vllm_importance_sampling_mode"] == "token_mask")
    ),
    shows=faint,
)


# TRL's defaults.
DEFAULTS: dict[str, Any] = {"beta": 0.0, "epsilon": 0.2, "epsilon_high": None, "delta": None}
DEFAULTS |= {"importance_sampling_level": "token", "use_bias_correction_kl": True, "max_completion_length": 512}
DEFAULTS |= {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask"}
DEFAULTS |= {"off_policy_mask_threshold": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
DEFAULTS |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}


def by_long_names(drawn: dict[str, Any]) -> dict[str, Any]:
    """Put settings under the names that users write."""
    return {f"vllm_importance_sampling_{key}" if key.startswith("clip_") else key: drawn[key] for key in drawn}


# The bounds of a preset.
bounds = draw(clip_max=(1.05, 3.0), clip_min=(None, None, 0.9))


def settings_of(loss_type: str, levels: tuple[str, ...]) -> Callable[[Random], dict[str, Any]]:
    """Draw the settings of a recipe."""

    def made(rng: Random) -> dict[str, Any]:
        drawn: dict[str, Any] = {
            "epsilon_high": rng.choice((0.28, 2.0)) if loss_type == "cispo" else rng.choice((None, 0.28)),
            "vllm_importance_sampling_correction": rng.random() < 0.8,
            "vllm_importance_sampling_mode": rng.choice(MODES),
            "off_policy_mask_threshold": rng.choice((None, None, 0.001, 0.1)),
            "beta": rng.choice((0.0, 0.04)),
            "use_bias_correction_kl": rng.random() < 0.7,
            **bounds(rng),
        }
        if loss_type == "sapo":
            drawn |= {"sapo_temperature_pos": rng.choice((1.0, 2.0)), "sapo_temperature_neg": rng.choice((1.05, 2.0))}
        elif loss_type == "vespo":
            drawn["vllm_importance_sampling_mode"] = rng.choice(MODES[:2])
            drawn |= {"vespo_k_pos": rng.choice((1.0, 2.0)), "vespo_lambda_pos": rng.choice((0.0, 3.0))}
            drawn |= {"vespo_k_neg": rng.choice((1.0, 3.0)), "vespo_lambda_neg": rng.choice((1.0, 2.0))}
        elif loss_type != "cispo":
            drawn |= {"epsilon": rng.choice((0.2, 0.05)), "delta": rng.choice((None, 1.5))}
            drawn["importance_sampling_level"] = rng.choice(levels)
        if loss_type == "dr_grpo":
            drawn["max_completion_length"] = rng.choice((16, 256))
        return drawn

    return made


def gamma_weights_of(source: Source) -> Callable[..., Tensor]:
    """Return VESPO's weights, without the gradient that TRL's decorator, which a cut leaves out, keeps from them."""
    return torch.no_grad()(source.cut(TRAINER, "GRPOTrainer.get_gamma_weights"))


def loss_by(statements: Callable[..., dict[str, Any]], given: Batch, ratio: Tensor | None, **settings: Any) -> Tensor:
    """Run the statements of a trainer that make its loss, of settings that are the trainer's and its arguments'."""
    epsilon, high = settings.pop("epsilon"), settings.pop("epsilon_high")
    trainer = SimpleNamespace(
        **settings,
        args=SimpleNamespace(**settings, steps_per_generation=1),
        epsilon_low=epsilon,
        epsilon_high=epsilon if high is None else high,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(num_processes=1),
    )
    inputs = {
        "advantages": given.advantages,
        "old_per_token_logps": given.old,
        "sampling_per_token_logps": given.rollout,
        "ref_per_token_logps": given.ref,
        "num_items_in_batch": given.mask.sum(),
        "importance_sampling_ratio": ratio,
    }
    tokens = {"per_token_logps": given.new, "entropies": None, "entropy_mask": None, "mask": given.mask.long()}
    return statements(self=trainer, inputs=inputs, **tokens)["loss"]


class Trainer:
    """GRPOTrainer's own statements, cut out of a version of TRL."""

    def __init__(self, source: Source) -> None:
        first, last = "per_token_logps_diff = ", "if self.vllm_importance_sampling_mode in"
        self._ratio = source.lines(TRAINER, GENERATE, first, last)
        self._loss = source.lines(TRAINER, COMPUTE, "advantages = inputs", 'if self.loss_type in ["grpo", "sapo"]')
        self.off_policy_mask = source.cut(TRAINER, "GRPOTrainer.get_off_policy_mask")
        self.methods = {"get_off_policy_mask": self.off_policy_mask, "get_gamma_weights": gamma_weights_of(source)}

    def ratio(self, given: Batch, mode: str, clip_max: float | None = 3.0, clip_min: float | None = None) -> Tensor:
        """Return the ratio: [B, T], or [B, 1] in the sequence modes."""
        named = {"mode": mode, "clip_max": clip_max, "clip_min": clip_min}
        made = self._ratio(
            self=SimpleNamespace(**{f"vllm_importance_sampling_{name}": value for name, value in named.items()}),
            old_per_token_logps=given.old,
            sampling_per_token_logps=given.rollout,
            mask=given.mask.long(),
        )
        return made["vllm_importance_sampling_ratio"]

    def loss(self, given: Batch, loss_type: str, **config: Any) -> Tensor:
        """Return the loss of a configuration; settings that are not given are TRL's defaults."""
        settings, ratio = DEFAULTS | config, None
        clips = {name: settings.pop(name) for name in ("clip_max", "clip_min") if name in settings}
        if settings["vllm_importance_sampling_correction"]:
            ratio = self.ratio(given, settings["vllm_importance_sampling_mode"], **clips)
        return loss_by(self._loss, given, ratio, loss_type=loss_type, use_vllm=True, **self.methods, **settings)


def rows(source: Source) -> Iterator[Row]:
    """Compare presets, recipes, functions of the drop-in and configurations."""
    trainer = Trainer(source)
    more: dict[str, Any] = {"declared": DECLARED, "kinds": PADDED}

    def weights(mode: str, given: Batch, **clips: Any) -> Result:
        return {"weights": trainer.ratio(given, mode, **clips).expand_as(given.old)}

    for name in ("default", *MODES):
        mode = "sequence_mask" if name == "default" else name
        yield preset(f"trl.{name}", f"{TRAINER}: {mode}", partial(weights, mode), bounds, **more)
    yield _opsm(trainer, more)
    averages = source.says(TRAINER, "(per_token_loss * mask.sum(1, keepdim=True)).mean()")
    known = {"vespo": MASKED_VESPO} | ({"luspo": PADDED_LUSPO} if averages else {})
    for loss_type in LOSSES:
        own = more | {"declared": (*DECLARED, *([known[loss_type]] if loss_type in known else []))}
        if loss_type == "sapo":
            # torch.where makes the two temperatures float32.
            own["within"] = (3e-7, 2e-5)
        name, drawn = f"{TRAINER}: _compute_loss, {loss_type}", settings_of(loss_type, ("token", "sequence"))
        yield recipe(f"trl.{loss_type}", name, partial(trainer.loss, loss_type=loss_type), drawn, **own)
        yield _configuration(trainer, loss_type, name, drawn, own)
    yield from _functions(trainer, more)
    yield _asynchronous(source)
    if source.has(GEOMETRIC, "GMPOTrainer._compute_loss"):
        yield _geometric(source)
    if source.has(DISTILLS, "IWOPDTrainer._compute_iw_opd_loss"):
        yield _distillation(source)
    yield _packed(source)


def _asynchronous(source: Source) -> Row:
    """Compare the loss of AsyncGRPOTrainer, whose rows are packed: only trained tokens, one after another."""
    body = source.lines(ASYNC, "AsyncGRPOTrainer.compute_loss", "log_ratio = ", "loss = loss / self.current_gradient")

    def loss(given: Batch, epsilon: float, epsilon_high: float | None) -> Tensor:
        sides = {"epsilon_low": epsilon, "epsilon_high": epsilon if epsilon_high is None else epsilon_high}
        ranks = {"accelerator": SimpleNamespace(num_processes=1), "current_gradient_accumulation_steps": 1}
        made = body(
            self=SimpleNamespace(**sides, **ranks),
            inputs={"global_n_tokens": given.mask.sum()[None]},
            log_probs=given.new[given.mask],
            old_log_probs=given.rollout[given.mask],
            advantages=given.token_advantages[given.mask],
            completion_mask=torch.ones_like(given.new[given.mask]),
        )
        return made["loss"]

    drawn, declared = draw(epsilon=(0.2, 0.05), epsilon_high=(None, 0.28)), (PROPAGATES, BF16, CLAMP)
    return recipe("trl.async_grpo", f"{ASYNC}: compute_loss", loss, drawn, declared=declared)


def _geometric(source: Source) -> Row:
    """Compare the loss of the experimental GMPOTrainer, which leaves the ratio of vLLM out."""
    body = source.lines(GEOMETRIC, "GMPOTrainer._compute_loss", "log_ratio = ", "loss = per_sequence_loss.mean()")

    def loss(given: Batch, epsilon: float, epsilon_high: float | None, beta: float) -> Tensor:
        sides = {"epsilon_low": epsilon, "epsilon_high": epsilon if epsilon_high is None else epsilon_high}
        made = body(
            self=SimpleNamespace(beta=beta, model=SimpleNamespace(training=True), **sides),
            inputs={"ref_per_token_logps": given.ref},
            per_token_logps=given.new,
            old_per_token_logps=given.old,
            advantages=given.advantages,
            entropy_mask=None,
            mask=given.mask.to(torch.int64),
        )
        return made["loss"]

    drawn = draw(epsilon=(0.4, 0.05), epsilon_high=(None, 0.1), beta=(0.0, 0.04))
    says = "the geometric mean of no ratios is 1, so it adds"
    empty = Declared("a completion without a token", says, among("all_masked", "empty_rows"))
    declared = (PROPAGATES, BF16, CLAMP, empty)
    return recipe("trl.gmpo", f"{GEOMETRIC}: _compute_loss", loss, drawn, declared=declared, kinds=PADDED)


def _distillation(source: Source) -> Row:
    """Compare IW-OPD: the teacher is the reference, and weights of early tokens multiply its advantages."""
    body = source.lines(
        DISTILLS, "IWOPDTrainer._compute_iw_opd_loss", "safe_teacher_logprobs = ", "loss = torch.where(valid_mask"
    )

    def ours(given: Batch, gamma: float) -> Tensor:
        advantages = given.ref - given.rollout
        weights = rc.early_token_weights(advantages, mask=given.mask, gamma=gamma)
        return loss_of(rc.recipe("trl.iw_opd"), replace(given, advantages=advantages * weights))

    def theirs(given: Batch, gamma: float) -> Tensor:
        found = body(
            self=SimpleNamespace(iw_opd_gamma=gamma, iw_opd_epsilon=1e-8),
            student_actual_logprobs=given.new,
            teacher_actual_logprobs=given.ref,
            rollout_logprobs=given.rollout,
            valid_mask=given.mask,
        )
        return found["loss"].sum() / given.mask.sum().clamp_min(1)

    place, declared = f"{DISTILLS}: _compute_iw_opd_loss", (PROPAGATES, BF16)
    drawn = draw(gamma=(0.5, 1.0))
    return Row("recipe", "trl.iw_opd", place, of_loss(ours), of_loss(theirs), drawn, declared=declared)


def _packed(source: Source) -> Row:
    """Call `compute_loss` as it is, and as the drop-in has it: what the collator makes of a batch is read by both."""
    original = source.cut(ASYNC, "AsyncGRPOTrainer.compute_loss", nanmin=torch.min, nanmax=torch.max)
    # Its metrics, which stay TRL's, are not the matter: a call of the model is what is needed of TRL's method.
    replacement = asynchronous.replaced(lambda trainer, model, *more: model())
    layout = trl_packed.in_terms if source.has("trl/experimental/async_grpo/packing.py") else trl_packed.in_a_row

    def run(function: Callable[..., Tensor], given: Batch, **drawn: Any) -> Tensor:
        inputs, model = layout(given)
        return function(trl_packed.trainer(**drawn), model, inputs)

    def drawn(rng: Random) -> dict[str, Any]:
        epsilon = rng.choice((0.2, 0.05))
        return {
            "epsilon_low": epsilon,
            "epsilon_high": rng.choice((epsilon, 0.28)),
            "current_gradient_accumulation_steps": rng.choice((1, 4)),
            "aux_loss_enabled": rng.random() < 0.5,
        }

    known = Declared("not finite", "a token without a finite log-prob", NONFINITE)
    # TRL has no row without a token that trains: it cannot count the completions of one.
    kinds = without("nan_behind_mask", "all_masked")
    declared = (known, BF16, CLAMP)
    sides = of_loss(partial(run, replacement)), of_loss(partial(run, original))
    place = f"{ASYNC}: compute_loss"
    return Row("drop-in", "trl: AsyncGRPOTrainer", place, *sides, drawn, declared=declared, kinds=kinds)


def _opsm(trainer: Trainer, more: dict[str, Any]) -> Row:
    def ours(given: Batch, **drawn: Any) -> Tensor:
        made = rc.Recipe(rc.spec("trl.opsm", **drawn), rc.recipe("trl.grpo").loss)
        return loss_of(made, given, old_logp=given.old, rollout_logp=given.rollout)

    def theirs(given: Batch, delta: float, **clips: Any) -> Tensor:
        return trainer.loss(given, "grpo", off_policy_mask_threshold=delta, **clips)

    sides, drawn = (of_loss(ours), of_loss(theirs)), both(draw(delta=(0.001, 0.1)), bounds)
    return Row("preset", "trl.opsm", f"{TRAINER}: get_off_policy_mask, _compute_loss", *sides, drawn, **more)


def _configuration(trainer: Trainer, loss_type: str, name: str, settings: Settings, more: dict[str, Any]) -> Row:
    def whole(rng: Random) -> dict[str, Any]:
        # TRL refuses VESPO with its default mode.
        always = ("vllm_importance_sampling_mode",) if loss_type == "vespo" else ()
        drawn = {key: value for key, value in settings(rng).items() if key in always or rng.random() < 0.8}
        return {"loss_type": loss_type, **drawn}

    return configuration("trl", name, trainer.loss, whole, by_long_names, **more)


def _functions(trainer: Trainer, more: dict[str, Any]) -> Iterator[Row]:
    """Call the drop-in's functions next to TRL's with the same arguments; what stands behind the mask counts too."""

    def ratio(given: Batch, drawn: dict[str, Any]) -> Result:
        return {"ratio": dropin.importance_sampling_ratio(given.old, given.rollout, given.mask, **drawn)}

    def their_ratio(given: Batch, drawn: dict[str, Any]) -> Result:
        return {"ratio": trainer.ratio(given, **drawn)}

    def kept(function: Callable[..., Tensor], given: Batch, drawn: dict[str, Any]) -> Result:
        arguments = given.advantages[:, None], given.new, given.rollout, given.mask.to(torch.int64)
        return {"kept": function(*arguments, drawn["off_policy_threshold"]).bool()}

    sides, drawn = (ratio, their_ratio), both(draw(mode=MODES), bounds)
    yield Row("drop-in", "trl: importance_sampling_ratio", f"{TRAINER}: {GENERATE}", *sides, drawn, **more)
    sides = [partial(kept, function) for function in (dropin.get_off_policy_mask, trainer.off_policy_mask)]
    drawn = draw(off_policy_threshold=(0.001, 0.1, 1.0))
    yield Row("drop-in", "trl: get_off_policy_mask", f"{TRAINER}: get_off_policy_mask", *sides, drawn, **more)
