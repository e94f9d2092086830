"""Trinity-RFT: the policy loss functions that it registers, called as they are, without their KL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from torch import Tensor

from conformance.batches import PADDED, Batch
from conformance.declared import BF16, CLAMP, PROPAGATES
from conformance.rows import Row, Settings, draw, recipe
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = "trinity-rft", "trinity", "trinity-rft"

FOLDER = "trinity/algorithm/policy_loss_fn"
DECLARED = (PROPAGATES, BF16, CLAMP)


def rows(source: Source) -> Iterator[Row]:
    """Compare recipes."""

    def function(name: str, kind: str) -> Callable[..., Tensor]:
        cut = source.cut(f"{FOLDER}/{name}_policy_loss.py", f"{kind}LossFn")
        # The mode of the whole algorithm takes the place of the function's own.
        fixed = {"loss_agg_mode": "token-mean"} if name == "gspo" else {}

        def loss(given: Batch, kl_coef: float = 0.0, **settings: Any) -> Tensor:
            old, mask = given.rollout.where(given.mask, 0.0), given.mask
            new = given.new.where(mask, 0.0)
            return cut(**settings, **fixed)(
                logprob=new, old_logprob=old, action_mask=mask, advantages=given.token_advantages
            )[0]

        return loss

    # It multiplies by its mask, and adds 1e-8 to what it divides by.
    more: dict[str, Any] = {"declared": DECLARED, "kinds": PADDED, "within": (3e-8, 2e-5)}

    def draw_rec(rng: Random) -> dict[str, Any]:
        mode = rng.choice(("none", "one-side", "two-side", "ring", "gspo-one-side"))
        of_ratio = "gspo_importance_sampling" if mode == "gspo-one-side" else "importance_sampling"
        return {
            "clip_mode": mode,
            "weight": rng.choice(("none", of_ratio)),
            "regularizer": rng.choice(("none", "k2")),
            "regularizer_coef": rng.choice((0.1, 1.0)),
            "epsilon_low": rng.choice((0.2, 0.05)),
            "epsilon_high": rng.choice((0.2, 0.05)),
            "epsilon_low_prime": rng.choice((0.4, 0.1)),
            "epsilon_high_prime": rng.choice((0.4, 0.1)),
            "kl_coef": 0.0,
        }

    ranges = draw(clip_range_low=(0.1, 0.3), clip_range_high=(0.1, 0.3), kl_coef=0.0)
    draws: dict[str, tuple[str, Settings]] = {
        "sapo": ("SAPOPolicy", draw(tau_pos=(1.0, 0.5), tau_neg=(1.0, 2.0), kl_coef=0.0)),
        "topr": ("TOPRPolicy", draw(advantage_threshold=(0.0, 0.3), kl_coef=0.0)),
        "opmd": ("OPMDPolicy", draw(tau=(0.5, 1.0), kl_coef=0.0)),
        "rec": ("RECPolicy", draw_rec),
        "ppo": ("PPOPolicy", ranges),
        "cispo": ("CISPOPolicy", ranges),
        "gspo": ("GSPO", ranges),
        "importance_sampling": ("ImportanceSampling", draw()),
    }
    for name, (kind, drawn) in draws.items():
        yield recipe(f"trinity.{name}", f"{FOLDER}/{name}_policy_loss.py", function(name, kind), drawn, **more)
