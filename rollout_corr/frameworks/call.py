"""What the recipes are built from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rollout_corr.spec.correction import Spec
from rollout_corr.spec.loss import KL, KLKind
from rollout_corr.spec.surrogate import Surrogate
from rollout_corr.spec.surrogates import PPO
from rollout_corr.spec.validate import one_of

SEQUENCES = "sequence_mean_token_mean"
DECOUPLED, BOTH, BYPASS = ("old_logp",), ("old_logp", "rollout_logp"), ("rollout_logp",)
GLOBAL = "pass the tokens of all ranks as the denominator"

# verl's words for it, which most have taken over.
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": SEQUENCES,
    "seq-mean-token-sum": "sequence_mean_token_sum",
}


class Call(NamedTuple):
    """One listed recipe.

    Attributes:
        build: Makes the arguments.
        needs: The log-probs that the call needs besides new_logp.
        note: What a user of the framework should know.
    """

    build: Callable[..., dict[str, Any]]
    needs: tuple[str, ...]
    note: str = ""


def step(
    surrogate: Surrogate,
    spec: Spec | None = None,
    reduction: str = "token_mean",
    denominator: str = "original",
    **more: Any,
) -> dict[str, Any]:
    """The arguments of `policy_loss`; a term that is None is left out."""
    made = {"surrogate": surrogate, "spec": spec, "reduction": reduction, "denominator": denominator}
    return made | {name: term for name, term in more.items() if term is not None}


def aggregation(key: str, mode: str, known: dict[str, str] = AGGREGATIONS) -> str:
    """A framework's word for a reduction, as ours."""
    return known[one_of(key, mode, known)]


def penalty(coef: float | None, kind: KLKind = "k3", **more: Any) -> KL | None:
    """The KL term, where there is one."""
    return KL(kind, coef, **more) if coef else None


def clip(low: float, high: float | None, dual: float | None = None, **more: Any) -> PPO:
    """PPO's clip; an upper side that is not set is as wide as the lower."""
    return PPO(low, low if high is None else high, dual, **more)


def fixed(surrogate: Surrogate, reduction: str = "token_mean") -> Callable[[], dict[str, Any]]:
    """A recipe without settings."""
    return lambda: step(surrogate, None, reduction)
