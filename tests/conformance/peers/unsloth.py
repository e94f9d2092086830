"""unsloth-zoo: grpo_compute_loss, called as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from conformance.batches import PADDED, Batch
from conformance.declared import BF16, Declared
from conformance.peers import trl
from conformance.rows import Row, configuration, preset, recipe
from conformance.sources import RECORDED, Source, found

DISTRIBUTION, PACKAGE, CHECKOUT = "unsloth-zoo", "unsloth_zoo", "unsloth-zoo"

FILE = "unsloth_zoo/rl_replacements.py"
GEOMETRIC = ("geometric_truncate", "geometric_mask")


def large_kl(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether k3, or its product with the ratio, exceeds 10."""
    k = (given.ref - given.new).double().where(given.mask, 0.0)
    k3 = torch.expm1(k) - k
    ratio = (given.new - given.old).double().where(given.mask, 0.0).exp()
    return settings.get("beta") != 0.0 and bool((k3.maximum(k3 * ratio) > 10.0).any())


DECLARED = (
    trl.NO_NUMBER,
    BF16,
    trl.CLAMP,
    Declared(
        "the KL's ratio",
        "weighted by the ratio of the sequence",
        lambda given, settings: trl.weighed_kl(given, {"beta": 0.001, **settings}),
    ),
    Declared("a large KL", "its product with the ratio exceeds 10", large_kl),
)
# Of the versions before 2026.10.
NO_TOKEN = Declared("a batch without a token", "0 / 0 is NaN", lambda given, settings: not bool(given.mask.any()))
OLD = {"luspo": (trl.PADDED_LUSPO,), **dict.fromkeys(("dapo", "cispo", "vespo"), (NO_TOKEN,))}


def keep(
    advantages: Tensor, per_token_logps: Tensor, mask: Tensor, off_policy_threshold: float, **sampling: Tensor
) -> Tensor:
    """Stand in for TRL's get_off_policy_mask, which unsloth-zoo takes from the TRL that is installed."""
    (base,) = sampling.values()
    gap = torch.nan_to_num((base - per_token_logps.detach()) * mask, nan=0.0)
    mean = gap.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1.0)
    return ((mean <= off_policy_threshold) | (advantages >= 0)).to(mask.dtype)


def rows(source: Source) -> Iterator[Row]:
    """Compare presets, recipes and the reader."""
    compute: Callable[..., Any] = source.cut(FILE, "grpo_compute_loss")
    modes = trl.MODES + (GEOMETRIC if source.says(FILE, "geometric_mask") else ())
    # Before 2026.10 a KL was never weighed, and the mask compared with the old policy.
    new = source.says(FILE, "use_bias_correction_kl")

    # unsloth-zoo takes this function from the TRL that is installed.
    trls = [] if source.kind == RECORDED else found("trl", trl.DISTRIBUTION, trl.PACKAGE, trl.CHECKOUT)
    vespo = source.fact("TRL is there", lambda: bool(trls)) and source.says(FILE, '"vespo"')
    gamma_weights = trl.gamma_weights_of(trls[0]) if trls else None

    def run(given: Batch, loss_type: str, **config: Any) -> tuple[Any, ...]:
        corrected = config.pop("vllm_importance_sampling_correction", False)
        if config.get("epsilon_high") is None:
            config["epsilon_high"] = 0.28 if loss_type == "dapo" else config.get("epsilon", 0.2)
        config["epsilon_low"] = config.pop("epsilon", 0.2)
        config.setdefault("use_bias_correction_kl", True)
        config = trl.by_long_names(config)
        return tuple(
            compute(
                given.ref,
                given.new,
                given.old,
                given.rollout if corrected or new else None,
                torch.zeros(given.mask.shape, dtype=torch.int64),
                given.mask.to(torch.int64),
                config.pop("beta", 0.001),
                given.advantages,
                loss_type=loss_type,
                use_vllm=True,
                vllm_importance_sampling_correction=corrected,
                num_items_in_batch=given.mask.sum(),
                max_completion_length=config.pop("max_completion_length", 256),
                get_off_policy_mask=keep,
                get_gamma_weights=gamma_weights,
                **config,
            )
        )

    def loss(given: Batch, **config: Any) -> Tensor:
        return run(given, **config)[0]

    def weights(given: Batch, mode: str, **clips: Any) -> dict[str, Tensor]:
        asked = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": mode}
        return {"weights": run(given, "grpo", beta=0.0, **asked, **clips)[4]}

    more: dict[str, Any] = {"declared": DECLARED, "kinds": PADDED}
    for name in ("default", *modes):
        mode = "sequence_mask" if name == "default" else name
        yield preset(f"unsloth.{name}", f"{FILE}: {mode}", partial(weights, mode=mode), trl.bounds, **more)

    def settings(loss_type: str, rng: Random) -> dict[str, Any]:
        drawn = trl.settings_of(loss_type, ("token", "sequence"))(rng)
        drawn |= {"loss_type": loss_type, "beta": rng.choice((0.0, 0.001, 0.04))}
        if loss_type != "vespo":
            drawn["vllm_importance_sampling_mode"] = rng.choice(modes)
        if not new:
            drawn |= {"use_bias_correction_kl": False, "off_policy_mask_threshold": None}
        return drawn

    def of_recipe(loss_type: str, rng: Random) -> dict[str, Any]:
        return {key: value for key, value in settings(loss_type, rng).items() if key != "loss_type"}

    for loss_type in trl.LOSSES if vespo else trl.LOSSES[:-1]:
        known = (trl.MASKED_VESPO,) if loss_type == "vespo" else ()
        own = more | {"declared": (*DECLARED, *known, *(() if new else OLD.get(loss_type, ())))}
        if loss_type == "sapo":
            # torch.where makes the two temperatures float32.
            own["within"] = (1e-7, 2e-5)
        name = f"{FILE}: grpo_compute_loss, {loss_type}"
        draw = partial(of_recipe, loss_type)
        yield recipe(f"unsloth.{loss_type}", name, partial(loss, loss_type=loss_type), draw, **own)
        # All are given: what is left out is TRL's, which differs from the defaults of the function.
        yield configuration("unsloth", name, loss, partial(settings, loss_type), trl.by_long_names, **own)
