"""TRL: the statements of GRPOTrainer that make the ratio and the loss, and its off-policy mask."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from conformance import trl_packed
from conformance.batches import KINDS, Batch
from conformance.rows import BF16, Declared, Row, Settings, configuration, loss_and_gradient, preset, recipe
from conformance.sources import Source
from rollout_corr.frameworks.trl import asynchronous, dropin

DISTRIBUTION, PACKAGE, CHECKOUT = "trl", "trl", "trl"

TRAINER = "trl/trainer/grpo_trainer.py"
DISTILLS = "trl/experimental/iw_opd/iw_opd_trainer.py"
ASYNC = "trl/experimental/async_grpo/async_grpo_trainer.py"
GENERATE, COMPUTE = "GRPOTrainer._generate_and_score_completions", "GRPOTrainer._compute_loss"
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LOSSES = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo", "sapo", "cispo", "vespo")
# TRL pads with zeros, and multiplies by the mask.
PADDED = tuple(kind for kind in KINDS if kind != "nan_behind_mask")


def nonfinite(given: Batch, settings: dict[str, Any]) -> bool:
    return given.kind in ("infinite", "nan_in_front")


def beyond_the_clamp(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether the log-ratio of a token or of a sequence lies beyond +-20."""
    d = (given.old - given.rollout).double().where(given.mask, 0.0)
    return bool((d.abs() > 20.0).any() or (d.sum(1).abs() > 20.0).any())


def far_from_the_engine(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether the log-ratio of a token of new_logp to the engine lies beyond +-20."""
    d = (given.new.detach() - given.rollout).double().where(given.mask, 0.0)
    return bool((d.abs() > 20.0).any())


def sequence_level(settings: dict[str, Any]) -> bool:
    return bool(settings.get("importance_sampling_level") == "sequence")


def weighed_kl(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether a sequence's ratio multiplies the KL."""
    return bool(sequence_level(settings) and settings.get("beta") and settings.get("use_bias_correction_kl", True))


def tokenwise(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether the tokens of a sequence have losses of their own."""
    corrected = settings.get("vllm_importance_sampling_correction", True)
    weights = corrected and settings.get("vllm_importance_sampling_mode", "sequence_mask").startswith("token")
    return bool(not sequence_level(settings) or settings.get("beta") or weights)


DECLARED = (
    Declared("not finite", "presets.md", "NaN: ratio 1. Infinite: the largest float", nonfinite),
    BF16,
    Declared("safety clamp", "presets.md", "Here the exponent is then clamped to +-20", beyond_the_clamp),
    Declared("the KL's ratio", "losses.md", "weighed by the ratio of the sequence", weighed_kl),
)
# Of the versions before 1.16.0.
PADDED_LUSPO = Declared(
    "luspo over padding", "losses.md", "luspo before 1.16.0 averages tokens over padding", tokenwise
)

MASKED_VESPO = Declared(
    "vespo of masked sequences",
    "losses.md",
    "a weight of 0 enters its ratio as 1e-8",
    # Beside a KL such a weight is rounded away, in an order that autograd chooses.
    lambda given, settings: bool(
        settings.get("off_policy_mask_threshold") is not None
        or (settings.get("beta") and settings["vllm_importance_sampling_mode"] == "token_mask")
    ),
)


def bounds(rng: Random) -> dict[str, Any]:
    """Draw the bounds of a preset."""
    return {"clip_max": rng.choice((1.05, 3.0)), "clip_min": rng.choice((None, None, 0.9))}


def settings_of(loss_type: str, levels: tuple[str, ...]) -> Callable[[Random], dict[str, Any]]:
    """Draw the settings of a recipe."""

    def draw(rng: Random) -> dict[str, Any]:
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

    return draw


def gamma_weights_of(source: Source) -> Callable[..., Tensor]:
    """Return VESPO's weights, without the gradient that TRL's decorator, which a cut leaves out, keeps from them."""
    weights: Callable[..., Tensor] = torch.no_grad()(source.cut(TRAINER, "GRPOTrainer.get_gamma_weights"))
    return weights


class Trainer:
    """GRPOTrainer's own statements, cut out of a version of TRL."""

    def __init__(self, source: Source) -> None:
        first, last = "per_token_logps_diff = ", "if self.vllm_importance_sampling_mode in"
        self._ratio = source.lines(TRAINER, GENERATE, first, last)
        self._loss = source.lines(TRAINER, COMPUTE, "advantages = inputs", 'if self.loss_type in ["grpo", "sapo"]')
        self.gamma_weights = gamma_weights_of(source)
        self.off_policy_mask = source.cut(TRAINER, "GRPOTrainer.get_off_policy_mask")

    def ratio(self, given: Batch, mode: str, clip_max: float | None = 3.0, clip_min: float | None = None) -> Tensor:
        """Return the ratio: [B, T], or [B, 1] in the sequence modes."""
        trainer = SimpleNamespace(
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_max=clip_max,
            vllm_importance_sampling_clip_min=clip_min,
        )
        made = self._ratio(
            self=trainer,
            old_per_token_logps=given.old,
            sampling_per_token_logps=given.rollout,
            mask=given.mask.to(torch.int64),
        )
        ratio: Tensor = made["vllm_importance_sampling_ratio"]
        return ratio

    def loss(self, given: Batch, loss_type: str, **config: Any) -> Tensor:
        """Return the loss of a configuration; settings that are not given are TRL's defaults."""
        corrected = config.get("vllm_importance_sampling_correction", True)
        mode = config.get("vllm_importance_sampling_mode", "sequence_mask")
        epsilon, high = config.get("epsilon", 0.2), config.get("epsilon_high")
        args = SimpleNamespace(
            use_bias_correction_kl=config.get("use_bias_correction_kl", True),
            delta=config.get("delta"),
            sapo_temperature_pos=config.get("sapo_temperature_pos", 1.0),
            sapo_temperature_neg=config.get("sapo_temperature_neg", 1.05),
            steps_per_generation=1,
            vespo_k_pos=config.get("vespo_k_pos", 2.0),
            vespo_lambda_pos=config.get("vespo_lambda_pos", 3.0),
            vespo_k_neg=config.get("vespo_k_neg", 3.0),
            vespo_lambda_neg=config.get("vespo_lambda_neg", 2.0),
        )
        trainer = SimpleNamespace(
            args=args,
            loss_type=loss_type,
            epsilon_low=epsilon,
            epsilon_high=epsilon if high is None else high,
            beta=config.get("beta", 0.0),
            importance_sampling_level=config.get("importance_sampling_level", "token"),
            max_completion_length=config.get("max_completion_length", 512),
            off_policy_mask_threshold=config.get("off_policy_mask_threshold"),
            get_off_policy_mask=self.off_policy_mask,
            get_gamma_weights=self.gamma_weights,
            use_vllm=True,
            vllm_importance_sampling_correction=corrected,
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
        }
        if corrected:
            clips = {name: config[name] for name in ("clip_max", "clip_min") if name in config}
            inputs["importance_sampling_ratio"] = self.ratio(given, mode, **clips)
        made = self._loss(
            self=trainer,
            inputs=inputs,
            per_token_logps=given.new,
            entropies=None,
            entropy_mask=None,
            mask=given.mask.to(torch.int64),
        )
        value: Tensor = made["loss"]
        return value


def rows(source: Source) -> Iterator[Row]:
    """Compare presets, recipes, functions of the drop-in and configurations."""
    trainer = Trainer(source)
    more: dict[str, Any] = {"declared": DECLARED, "kinds": PADDED}
    for name in ("default", *MODES):
        mode = "sequence_mask" if name == "default" else name
        yield preset(
            f"trl.{name}",
            f"{TRAINER}: {mode}",
            lambda given, mode=mode, **clips: {"weights": trainer.ratio(given, mode, **clips).expand_as(given.old)},
            bounds,
            **more,
        )
    yield _opsm(trainer, more)
    averages = "(per_token_loss * mask.sum(1, keepdim=True)).mean()" in (source.root / TRAINER).read_text()
    for loss_type in LOSSES:
        own = dict(more)
        if loss_type == "sapo":
            # torch.where makes the two temperatures float32.
            own["within"] = (3e-7, 2e-5)
        if loss_type == "vespo":
            own["declared"] = (*DECLARED, MASKED_VESPO)
        if loss_type == "luspo" and averages:
            own["declared"] = (*DECLARED, PADDED_LUSPO)
        name = f"{TRAINER}: _compute_loss, {loss_type}"
        draw = settings_of(loss_type, ("token", "sequence"))
        yield recipe(f"trl.{loss_type}", name, partial(trainer.loss, loss_type=loss_type), draw, **own)
        yield _configuration(trainer, loss_type, name, draw, own)
    yield from _functions(trainer, more)
    yield _asynchronous(source)
    if source.has(DISTILLS, "IWOPDTrainer._compute_iw_opd_loss"):
        yield _distillation(source)
    yield _packed(source)


def _asynchronous(source: Source) -> Row:
    """Compare the loss of AsyncGRPOTrainer, whose rows are packed: only tokens that train, one after another."""
    body = source.lines(ASYNC, "AsyncGRPOTrainer.compute_loss", "log_ratio = ", "loss = loss / self.current_gradient")

    def loss(given: Batch, epsilon: float, epsilon_high: float | None) -> Tensor:
        trainer = SimpleNamespace(
            epsilon_low=epsilon,
            epsilon_high=epsilon if epsilon_high is None else epsilon_high,
            accelerator=SimpleNamespace(num_processes=1),
            current_gradient_accumulation_steps=1,
        )
        made = body(
            self=trainer,
            inputs={"global_n_tokens": given.mask.sum()[None]},
            log_probs=given.new[given.mask],
            old_log_probs=given.rollout[given.mask],
            advantages=given.token_advantages[given.mask],
            completion_mask=torch.ones_like(given.new[given.mask]),
        )
        value: Tensor = made["loss"]
        return value

    def draw(rng: Random) -> dict[str, Any]:
        return {"epsilon": rng.choice((0.2, 0.05)), "epsilon_high": rng.choice((None, 0.28))}

    known = Declared("not finite", "presets.md", "Most frameworks let the NaN through into the loss", nonfinite)
    far = Declared("safety clamp", "presets.md", "Here the exponent is then clamped to +-20", far_from_the_engine)
    return recipe("trl.async_grpo", f"{ASYNC}: compute_loss", loss, draw, declared=(known, BF16, far))


def _distillation(source: Source) -> Row:
    """Compare IW-OPD: the teacher is the reference, and weights of early tokens multiply its advantages."""
    body = source.lines(
        DISTILLS, "IWOPDTrainer._compute_iw_opd_loss", "safe_teacher_logprobs = ", "loss = torch.where(valid_mask"
    )

    def both(given: Batch, drawn: dict[str, Any]) -> tuple[Any, Any]:
        mine, peer = given.trains(), given.trains()
        advantages = mine.ref - mine.rollout
        weights = rc.early_token_weights(advantages, mask=mine.mask, gamma=drawn["gamma"])
        made = rc.policy_loss(mine.new, advantages * weights, loss=rc.recipe("trl.iw_opd").loss, mask=mine.mask)
        found = body(
            self=SimpleNamespace(iw_opd_gamma=drawn["gamma"], iw_opd_epsilon=1e-8),
            student_actual_logprobs=peer.new,
            teacher_actual_logprobs=peer.ref,
            rollout_logprobs=peer.rollout,
            valid_mask=peer.mask,
        )
        theirs = found["loss"].sum() / peer.mask.sum().clamp_min(1)
        return loss_and_gradient(made.value, mine), loss_and_gradient(theirs, peer)

    known = Declared("not finite", "presets.md", "Most frameworks let the NaN through into the loss", nonfinite)
    place = f"{DISTILLS}: _compute_iw_opd_loss"

    def draw(rng: Random) -> dict[str, Any]:
        return {"gamma": rng.choice((0.5, 1.0))}

    return Row("recipe", "trl.iw_opd", place, both, draw, declared=(known, BF16))


def _packed(source: Source) -> Row:
    """Call `compute_loss` as it is, and as the drop-in has it: what the collator makes of a batch is read by both."""
    # Of metrics, which stay TRL's.
    original = source.cut(ASYNC, "AsyncGRPOTrainer.compute_loss", nanmin=torch.min, nanmax=torch.max)
    replacement = asynchronous.replaced(original)
    layout = trl_packed.in_terms if source.has("trl/experimental/async_grpo/packing.py") else trl_packed.in_a_row

    def both(given: Batch, drawn: dict[str, Any]) -> tuple[Any, Any]:
        peer, mine = given.trains(), given.trains()
        found = []
        for function, side in ((replacement, mine), (original, peer)):
            inputs, model = layout(side)
            found.append(loss_and_gradient(function(trl_packed.trainer(**drawn), model, inputs), side))
        return found[0], found[1]

    def draw(rng: Random) -> dict[str, Any]:
        epsilon = rng.choice((0.2, 0.05))
        return {
            "epsilon_low": epsilon,
            "epsilon_high": rng.choice((epsilon, 0.28)),
            "current_gradient_accumulation_steps": rng.choice((1, 4)),
            "aux_loss_enabled": rng.random() < 0.5,
        }

    clamped = Declared("safety clamp", "presets.md", "Here the exponent is then clamped to +-20", far_from_the_engine)
    known = Declared("not finite", "integrations.md", "a token without a finite log-prob", nonfinite)
    # TRL has no row without a token that trains: it cannot count the completions of one.
    kinds = tuple(kind for kind in PADDED if kind != "all_masked")
    theirs = f"{ASYNC}: compute_loss"
    return Row("drop-in", "trl: AsyncGRPOTrainer", theirs, both, draw, declared=(known, BF16, clamped), kinds=kinds)


def _opsm(trainer: Trainer, more: dict[str, Any]) -> Row:
    def both(given: Batch, drawn: dict[str, Any]) -> tuple[Any, Any]:
        bounds = {name: drawn[name] for name in ("clip_max", "clip_min")}
        peer, mine = given.trains(), given.trains()
        theirs = trainer.loss(peer, "grpo", off_policy_mask_threshold=drawn["delta"], **bounds)
        loss, spec = rc.recipe("trl.grpo").loss, rc.spec("trl.opsm", **drawn)
        policies = {"old_logp": given.old, "rollout_logp": given.rollout}
        out = rc.policy_loss(mine.new, given.advantages, loss=loss, mask=given.mask, spec=spec, **policies)
        return loss_and_gradient(out.value, mine), loss_and_gradient(theirs, peer)

    def draw(rng: Random) -> dict[str, Any]:
        return {"delta": rng.choice((0.001, 0.1)), **bounds(rng)}

    return Row("preset", "trl.opsm", f"{TRAINER}: get_off_policy_mask, _compute_loss", both, draw, **more)


def _configuration(trainer: Trainer, loss_type: str, name: str, draw: Settings, more: dict[str, Any]) -> Row:
    clips = {"clip_max": "vllm_importance_sampling_clip_max", "clip_min": "vllm_importance_sampling_clip_min"}

    def whole(rng: Random) -> dict[str, Any]:
        # TRL refuses VESPO with its default mode.
        always = ("vllm_importance_sampling_mode",) if loss_type == "vespo" else ()
        drawn = {key: value for key, value in draw(rng).items() if key in always or rng.random() < 0.8}
        drawn["held"] = rng.choice((dict, partial(dict, num_generations=8), Namespace, SimpleNamespace))
        return {"loss_type": loss_type, **drawn}

    def hold(drawn: dict[str, Any]) -> object:
        return drawn["held"](**{clips.get(key, key): drawn[key] for key in drawn if key != "held"})

    def theirs(given: Batch, held: object, **config: Any) -> Tensor:
        return trainer.loss(given, **config)

    return configuration("trl", name, theirs, whole, hold, **more)


def _functions(trainer: Trainer, more: dict[str, Any]) -> Iterator[Row]:
    """Call the drop-in's functions beside TRL's with the same arguments; what stands behind the mask counts too."""

    def ratios(given: Batch, drawn: dict[str, Any]) -> tuple[Any, Any]:
        theirs = trainer.ratio(given, drawn["mode"], drawn["clip_max"], drawn["clip_min"])
        ours = dropin.importance_sampling_ratio(given.old, given.rollout, given.mask, **drawn)
        return {"ratio": ours}, {"ratio": theirs}

    def masks(given: Batch, drawn: dict[str, Any]) -> tuple[Any, Any]:
        mask = given.mask.to(torch.int64)
        arguments = given.advantages[:, None], given.new, given.rollout, mask, drawn["off_policy_threshold"]
        return {"mask": dropin.get_off_policy_mask(*arguments)}, {"mask": trainer.off_policy_mask(*arguments)}

    def draw(rng: Random) -> dict[str, Any]:
        return {"mode": rng.choice(MODES), **bounds(rng)}

    def threshold(rng: Random) -> dict[str, Any]:
        return {"off_policy_threshold": rng.choice((0.001, 0.1, 1.0))}

    yield Row("drop-in", "trl: importance_sampling_ratio", f"{TRAINER}: {GENERATE}", ratios, draw, **more)
    yield Row("drop-in", "trl: get_off_policy_mask", f"{TRAINER}: get_off_policy_mask", masks, threshold, **more)
