"""`Loss`: everything of a policy loss that is no tensor, and its description in words."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .checked import Checked, arguments_of, hash_once, keywords_meant, without_hash
from .surrogate import Surrogate, checked_surrogate
from .surrogates import DEFAULT_SURROGATE, SURROGATES
from .terms import KL, MEANT, TOKEN_MEAN, EntropyBonus, Mean, SquaredLogRatio
from .validate import shown, wrong_type


@keywords_meant(
    reduction="mean=rc.Mean(...)", loss_agg_mode="mean=rc.Mean(...)",
    denominator="mean=rc.Mean(..., over=...), or total= of the Batch",
    max_length="mean=rc.Mean('sequence_sum', length=...)", beta="kl=rc.KL('k3', coef)",
    clip_range="rc.Loss(rc.PPO(low, high))", spec="spec= of policy_loss",
)  # fmt: skip
@dataclass(frozen=True, repr=False)
class Loss(Checked):
    """Everything about a policy loss that is not a tensor: frozen, hashable, checked when it is made, plain data.

    Args:
        surrogate: PPO, GSPO, AveragePPO, Reinforce, Score, DPPO, SAPO, GMPO, GPG, DRO, TOPR, REC or VESPO; or ClipCov,
            KLCov or REAL, which see the whole batch first.
        mean: How the losses of tokens become one number.
        kl: A penalty for leaving `ref_logp`, or None.
        regularizer: A squared log-ratio, or None.
        entropy_bonus: A reward for entropy, or None. Its gradient goes to `Batch.entropy`, where that requires grad.

    Raises:
        TypeError: A value of the wrong type, named.
    """

    # By factories: torch.compile wraps no frozen value that is a default, in a Loss made inside of a compiled function.
    surrogate: Surrogate = field(default_factory=lambda: DEFAULT_SURROGATE)
    mean: Mean = field(default_factory=lambda: TOKEN_MEAN)
    kl: KL | None = None
    regularizer: SquaredLogRatio | None = None
    entropy_bonus: EntropyBonus | None = None

    def __post_init__(self) -> None:
        checked_surrogate(self.surrogate)
        if not isinstance(self.mean, Mean):
            hint = f"; write rc.{MEANT[self.mean]}" if isinstance(self.mean, str) and self.mean in MEANT else ""
            raise TypeError(f"Loss.mean: expected a Mean, got {type(self.mean).__name__} {shown(self.mean)}{hint}")
        for name, kind in _TERMS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise wrong_type(f"Loss.{name}", f"{kind.__name__}(...) or None", value)

    def __hash__(self) -> int:
        """The hash of the fields, found once: every call looks up by its Loss what was prepared for it."""
        return hash_once(self)

    def __getstate__(self) -> dict[str, Any]:
        """Without the hash, which another process may find otherwise."""
        return without_hash(self)

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain data; the surrogate's has its class under "name"."""
        plain = super().to_dict()
        if "surrogate" in plain:
            plain["surrogate"] = {"name": type(self.surrogate).__name__, **plain["surrogate"]}
        return plain

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Loss:
        """Build a Loss from plain data, the inverse of `to_dict`.

        Args:
            mapping: Keys are field names. `surrogate` is a mapping with the "name" of its class, such as "PPO", and its
                fields; `mean`, `kl`, `regularizer` and `entropy_bonus` are mappings of theirs.

        Raises:
            ValueError: An unknown key or a wrong value, named.
            TypeError: A value of the wrong type, named.
        """
        arguments = arguments_of(cls, mapping, "Loss")
        for name, kind in {"mean": Mean, **_TERMS}.items():
            if arguments.get(name) is not None:
                arguments[name] = kind(**_nested(kind, arguments[name], f"Loss.{name}"))
        if "surrogate" in arguments:
            arguments["surrogate"] = _surrogate(arguments["surrogate"])
        return cls(**arguments)

    def explain(self) -> str:
        """Describe in plain words what will happen, step by step."""
        return explain(self)


_TERMS: dict[str, type[KL | SquaredLogRatio | EntropyBonus]] = {
    "kl": KL,
    "regularizer": SquaredLogRatio,
    "entropy_bonus": EntropyBonus,
}


def _nested(kind: type, mapping: object, owner: str) -> dict[str, Any]:
    """The arguments of a term from a mapping, in which a KL may have a mean of its own."""
    if not isinstance(mapping, Mapping):
        raise wrong_type(owner, "a mapping", mapping)
    arguments = arguments_of(kind, mapping, owner)
    if isinstance(arguments.get("mean"), Mapping):
        arguments["mean"] = Mean(**arguments_of(Mean, arguments["mean"], f"{owner}.mean"))
    return arguments


def _surrogate(mapping: object) -> Surrogate:
    """The surrogate of plain data."""
    from .batch_losses import OF_BATCH

    kinds = {kind.__name__: kind for kind in (*SURROGATES, *OF_BATCH)}
    got = mapping.get("name") if isinstance(mapping, Mapping) else mapping
    if not isinstance(mapping, Mapping) or not isinstance(got, str) or got not in kinds:
        raise ValueError(f"Loss.surrogate: expected a mapping with a name among {list(kinds)}, got {shown(got)}")
    kind = kinds[mapping["name"]]
    of_fields = {name: value for name, value in mapping.items() if name != "name"}
    plain = {name: tuple(x) if isinstance(x, list) else x for name, x in of_fields.items()}
    return kind(**arguments_of(kind, plain, f"Loss.surrogate ({mapping['name']})"))


def no_loss(value: object) -> TypeError:
    """Make the error for what is no Loss, with what to write."""
    kind, hint = type(value).__name__, ""
    if isinstance(value, Surrogate):
        hint = f"; write rc.Loss({value!r})"
    elif kind == "Spec":
        hint = "; a Spec is spec=..."
    elif hasattr(value, "spec") and hasattr(value, "loss"):
        hint = "; of a recipe pass its .loss, and its .spec as spec="
    elif isinstance(value, Mapping):
        hint = "; rc.Loss.from_dict makes one of plain data"
    return TypeError(f"loss: expected a rollout_corr.Loss, got {kind}{hint}")


# --- in words ---

_MEANS = {
    "token": "The losses of tokens are added up and divided by the number of {over} tokens",
    "sequence": "The loss of a sequence is the mean over its {own} tokens; these are added up and divided by the "
    "number of {over} sequences",
    "sequence_sum": "The loss of a sequence is the sum over its tokens; these are added up and divided by the number "
    "of {over} sequences",
    "sum": "The losses of tokens are added up and not divided",
}
_OVER = {"original": "valid", "kept": "kept", "rows": "all"}
_KINDS = {"k1": "k", "k2": "k^2 / 2", "k3": "e^-k - 1 + k", "abs": "|k|"}
_FACTORS = {
    "ratio": "the ratio",
    "weights": "the weight of the token",
}
# By `Surrogate.of`, and by what weights are for in bypass mode.
_RATIOS = {
    None: "new/old where old_logp is given (decoupled mode), else new/rollout (bypass mode), else new/new, which is 1 "
    "with a gradient",
    "new/old": "new/old",
    "new/rollout": "new/rollout",
}
_WEIGHTS: dict[str, str] = {
    "multiply": "The weights of a correction multiply it.",
    "replace_ratio": "The weights of a correction multiply it; in bypass mode they take the place of the ratio.",
    "report": "The weights of a correction multiply it; in bypass mode the ratio corrects, and they are only reported.",
}
# Of calls of one mode.
_WEIGHTS_OF: dict[str, str] = {
    "multiply": "The weights of the correction multiply it.",
    "replace_ratio": "The weights of the correction take the place of the ratio.",
    "report": "The ratio corrects; the weights of the correction are only reported.",
}
_SCOPES = {"kept": "trained tokens", "all": "valid tokens, rejected ones too"}


def explain(loss: Loss, base: str | None = None, weighs: bool = True) -> str:
    """The steps of a Loss, numbered: of all calls, or of those that compare new_logp with `base`.

    That is "old", "rollout" or "new". Without `weighs` there are no weights of a correction.
    """
    surrogate, mean = loss.surrogate, loss.mean
    use = "multiply" if surrogate.of == "new/old" else surrogate.traits.weights_in_bypass
    if base is None:
        ratio, weights = _RATIOS[surrogate.of], _WEIGHTS[use]
    else:
        ratio = f"r = {surrogate.of or f'new/{base}'}"
        ratio += ", which is 1 with a gradient" if ratio.endswith("new/new") else ""
        formula = inspect.cleandoc(type(surrogate).__doc__ or "").partition("\n\n")[0]
        ratio, weights = f"{ratio}. {formula.removesuffix('.')}", _WEIGHTS_OF[use if base == "rollout" else "multiply"]
    steps = [f"The loss of a token that trains is {surrogate!r}, of the ratio {ratio}."]
    if weighs:
        steps.append(weights)
    if loss.kl is not None:
        steps.append(_penalty(loss.kl))
    if loss.regularizer is not None:
        steps.append(
            f"{loss.regularizer.coef:g} times the squared log-ratio is added, at {_SCOPES[loss.regularizer.scope]}."
        )
    own = "kept" if mean.over == "kept" else "valid"
    line = _MEANS[mean.of].format(over=_OVER[mean.over], own=own)
    if mean.unit is not None:
        line += ", or by `Batch.total` where it is given"
    if mean.length is not None:
        line += f", and by the length {mean.length:g}"
    steps.append(f"{line}.")
    if loss.entropy_bonus is not None:
        bonus = loss.entropy_bonus
        steps.append(f"Minus {bonus.coef:g} times the entropy, reduced the same way, over {_SCOPES[bonus.scope]}.")
    return "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1))


def _penalty(kl: KL) -> str:
    kind = f"{kl.kind} ({_KINDS[kl.kind]})"
    k = "ref_logp - new_logp" if kl.swapped else "new_logp - ref_logp"
    line = f"{kl.coef:g} times {kind} of k = {k} is added, at {_SCOPES[kl.scope]}"
    if kl.gradient is not None and kl.gradient != kl.kind:
        line += f", with the gradient of {kl.gradient}"
    if kl.weight is not None:
        line += f", times {_FACTORS[kl.weight]}"
    if kl.mean is not None:
        line += f", with a mean of its own, {kl.mean!r}"
    return f"{line}."
