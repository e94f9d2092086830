"""open-instruct: the statements of a training step between the log-probs and the loss, and its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from conformance.batches import Batch
from conformance.declared import BF16, CLAMP, NONFINITE, Declared
from conformance.rows import Result, Row, both, configuration, draw, preset, recipe
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = None, "open_instruct", "open-instruct"

UTILS, STEP = "open_instruct/grpo_utils.py", "open_instruct/grpo_fast.py"

NO_NUMBER = Declared("a non-finite token", "open-instruct | NaN becomes a sentinel", NONFINITE)
NAMES = {
    "mask_lower": "rho_mask_lower_bound",
    "mask_upper": "rho_mask_upper_bound",
    "clamp_upper": "rho_clamp_upper_bound",
}
MASKED: dict[str, dict[str, Any]] = {
    "icepop": {},
    "seq": {"rho_mask_sequence_level": True},
    "vaco": {"rho_mask_tv_divergence": True},
}


def rows(source: Source) -> Iterator[Row]:
    """Compare presets, recipes and the reader."""
    step = source.lines(
        STEP, "PolicyTrainerRayProcess.step", "local_logprobs_BT = grpo_utils.mask_logprobs", "loss = masked_mean"
    )
    cut = partial(source.cut, UTILS)
    correct, masked, config_class = cut("compute_rho_correction"), cut("mask_logprobs"), cut("GRPOExperimentConfig")

    def loss(given: Batch, **config: Any) -> Tensor:
        args = config_class(**{"beta": 0.0, "save_freq": 200} | config)
        constant = args.loss_denominator
        found = step(
            self=SimpleNamespace(args=args, local_metrics={}),
            local_logprobs_BT=given.new,
            response_mask_BT=given.mask,
            data_BT=SimpleNamespace(
                vllm_logprobs=[pad(given.rollout, (1, 0))], advantages=[pad(given.token_advantages, (1, 0))]
            ),
            old_logprobs_BT=[masked(given.rollout if args.use_vllm_logprobs else given.old, given.mask)],
            ref_logprobs_BT=[masked(given.ref, given.mask)],
            rho_histograms={},
            i=0,
            epoch_idx=0,
            num_mini_batches=2,
            loss_denominator=float(given.mask.sum() if constant == "token" else constant),
        )
        return found["loss"]

    def weights(given: Batch, **config: Any) -> Result:
        old, rollout = masked(given.old, given.mask), masked(given.rollout, given.mask)
        return {"weights": correct(old, rollout, given.mask, given.token_advantages, config_class(**config)).weights}

    def by_its_names(run: Any, fixed: dict[str, Any], given: Batch, **drawn: Any) -> Any:
        # A bound of 0 is off there.
        return run(
            given, **{NAMES.get(name, name): 0.0 if value is None else value for name, value in drawn.items()}, **fixed
        )

    clamps = draw(clamp_upper=(1.05, 2.0, None))
    bounds = both(clamps, draw(mask_lower=(0.5, 0.9), mask_upper=(1.05, 2.0)))

    of_loss = draw(clip_higher=(0.2, 0.272), beta=(0.0, 0.05), kl_estimator=(0, 1, 2, 3))

    more: dict[str, Any] = {"declared": (NO_NUMBER, BF16, CLAMP)}
    both_losses = f"{UTILS}: compute_rho_correction, compute_grpo_loss"
    for name, fixed in {"default": {}, **MASKED}.items():
        drawn = bounds if name in MASKED else clamps
        weigh, lose = (partial(by_its_names, run, fixed) for run in (weights, loss))
        yield preset(f"open_instruct.{name}", f"{UTILS}: compute_rho_correction", weigh, drawn, **more)
        yield recipe(f"open_instruct.{name}", both_losses, lose, both(drawn, of_loss), **more)

    def some(rng: Random) -> dict[str, Any]:
        return {key: value for key, value in of_loss(rng).items() if key != "beta" or rng.random() < 0.5}

    for name, coefficient in (("ppo", 0.0), ("grpo", 0.05)):
        plain = partial(loss, use_rho_correction=False, beta=coefficient)
        yield recipe(f"open_instruct.{name}", f"{UTILS}: compute_grpo_loss", plain, some, **more)
    cispo = partial(by_its_names, loss, {"loss_fn": "cispo"})
    yield recipe("open_instruct.cispo", both_losses, cispo, both(clamps, of_loss), **more)
    place = f"{UTILS}: GRPOExperimentConfig; {STEP}: step"
    yield configuration("open_instruct", place, loss, config_of, **more)


def config_of(rng: Random) -> dict[str, Any]:
    """Draw a configuration that open-instruct takes."""
    used = rng.random() < 0.8
    return {
        "use_rho_correction": used,
        "use_vllm_logprobs": not used and rng.random() < 0.5,
        "rho_clamp_lower_bound": rng.choice((0.0, 0.5)),
        "rho_clamp_upper_bound": rng.choice((0.0, 1.05, 2.0)),
        "rho_mask_lower_bound": rng.choice((0.0, 0.9)),
        "rho_mask_upper_bound": rng.choice((0.0, 1.05)),
        "rho_mask_sequence_level": rng.random() < 0.5,
        "rho_mask_tv_divergence": rng.random() < 0.5,
        "clip_lower": rng.choice((0.1, 0.2)),
        "clip_higher": rng.choice((0.2, 0.272)),
        "loss_fn": rng.choice(("dapo", "cispo")),
        "loss_denominator": rng.choice(("token", "512", 64.0)),
        "kl_estimator": rng.randrange(4),
        "load_ref_policy": True,
        "beta": rng.choice((0.0, 0.05)),
    }
