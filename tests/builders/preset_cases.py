"""The Specs of presets whose framework's code cannot be had, written out by hand from its documents.

What the other presets do is recorded next to their frameworks' own functions: tests/conformance.
"""

from __future__ import annotations

from builders.config_cases import ratio
from rollout_corr.specs.correction import Criterion, Spec, Weight


def dppo(stat: str, lower: float | None, upper: float) -> Criterion:
    return Criterion(stat, lower=lower, upper=upper, when="outward", of="new/rollout", label="dppo")


EXPECTED = {
    "areal.kpop": Spec(Weight.token(), (Criterion("binary_kl_symmetric", upper=2, eps=1e-8),), "both"),
    "flash_rl.tis": Spec(Weight.token(upper=2)),
    "megatron.tis": Spec(Weight.token(upper=2)),
    "tunix.tis": Spec(Weight.token(upper=2, token_clamp=20)),
    "prime_rl.icepop": Spec(None, (ratio(0.2, 5, of="new/rollout", label="icepop"),), "zero"),
    "prime_rl.kpop": Spec(
        None, (Criterion("binary_kl_symmetric", upper=0.1, of="new/rollout", label="kpop", eps=1e-6),), "zero"
    ),
    "kimi.interval": Spec(None, (ratio(0.5, 2, of="new/rollout", label="interval"),), "zero"),
    "dppo.tv": Spec(None, (dppo("prob_diff", -0.15, 0.15),), "zero"),
    "dppo.kl": Spec(None, (dppo("binary_kl", None, 0.05),), "zero"),
    "minirl.mask": Spec(None, (ratio(0.8, 1.2, when="outward", of="new/old", label="clip"),), "zero"),
    "glm.icepop": Spec(Weight.token(), (ratio(0.5, 2),), "zero"),
}
