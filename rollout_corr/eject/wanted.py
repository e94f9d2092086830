"""What a file's `Settings` are for a Spec or a recipe, and what no file can say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..frameworks.shared.preset import RecipeEntry
from ..specs.correction import Spec
from ..specs.criterion import Criterion
from ..specs.loss import Loss
from ..specs.surrogates import GPG, GSPO, PPO, SAPO, Reinforce, Score

STATS = ("ratio", "k1", "k2", "k3", "abs")
SURROGATES: dict[type, str] = {
    PPO: "ppo", GSPO: "gspo", Score: "score", Reinforce: "reinforce", SAPO: "sapo", GPG: "gradient"
}  # fmt: skip
OF_SURROGATE = ("low", "high", "dual", "delta", "through", "lower", "upper", "outside", "positive", "negative", "clamp")


class CannotEject(ValueError):
    """A file cannot say it; the package can."""

    def __init__(self, what: Iterable[str]) -> None:
        super().__init__(f"no file to copy says {'; '.join(what)}. Install the package: pip install rollout-corr")


def _refuse(refused: dict[str, object]) -> None:
    """Raise for what is there, by its name."""
    if reasons := [what for what, is_there in refused.items() if is_there]:
        raise CannotEject(reasons)


def of_correction(spec: Spec) -> dict[str, Any]:
    """The values of `Settings` in correction.py."""
    weight = spec.weight
    refused: dict[str, object] = {"apply=False": not spec.apply, "turns": spec.turns}
    if weight is not None:
        refused |= {
            f"Weight.over={weight.over!r}": weight.over not in ("token", "sequence"),
            f"Weight.normalize={weight.normalize!r}": weight.normalize,
            "bounds of a Weight that the batch decides": weight.rules,
            "Weight.decay": weight.decay,
        }
    for criterion in spec.criteria:
        refused |= _beyond(criterion)
    _refuse(refused)
    values: dict[str, Any] = {"level": None, "lower": None, "upper": None}
    if weight is not None:
        values = {"level": weight.kind} | _fields(weight, ("lower", "upper", "outside", "token_clamp"))
    names = ("stat", "over", "reduce", "lower", "upper", "drop", "token_clamp")
    values["criteria"] = tuple(_fields(criterion, names) for criterion in spec.criteria)
    return values | _fields(spec, ("clamp", "sums_over", "rejected", "nonfinite"))


def _beyond(criterion: Criterion) -> dict[str, object]:
    label = criterion.label
    return {
        f"Criterion.stat={criterion.stat!r} of {label!r}": criterion.stat not in STATS,
        f"Criterion.over={criterion.over!r} of {label!r}": criterion.over not in ("token", "sequence"),
        f"Criterion.when={criterion.when!r} of {label!r}": criterion.when != "any",
        f"Criterion.drop={criterion.drop!r} of {label!r}": criterion.drop not in ("unit", "sequence"),
        f"Criterion.of={criterion.of!r} of {label!r}": criterion.of != "train/rollout",
        f"bounds of {label!r} that the batch decides": criterion.rules,
    }


def of_kernel(spec: Spec) -> dict[str, Any]:
    """The values of `Settings` in kernel.py."""
    values = of_correction(spec)
    refused: dict[str, object] = {
        f"{name}={values[name]!r} (with --kernel)": values[name] != plain
        for name, plain in (("rejected", "mask"), ("nonfinite", "reject"), ("token_clamp", None), ("level", "token"))
        if name in values
    }
    settings: dict[str, Any] = {name: values[name] for name in ("lower", "upper", "outside", "clamp") if name in values}
    for criterion in spec.criteria:
        kind = _of_kernel(criterion)
        twice = kind is not None and {f"{kind}_lower", f"{kind}_upper"} & settings.keys()
        refused[f"the criterion {criterion.label!r} (with --kernel)"] = kind is None or twice
        settings |= {f"{kind}_{side}": getattr(criterion, side) for side in ("lower", "upper")}
    _refuse(refused)
    return settings


def _of_kernel(criterion: Criterion) -> str | None:
    """The fields of kernel.py that a criterion is: a geometric mean, or a veto by a token."""
    unit = criterion.over, criterion.reduce, criterion.drop
    if criterion.stat != "ratio" or criterion.token_clamp is not None:
        return None
    if unit[:2] == ("sequence", "mean"):
        return "geometric"
    minimum = unit[:2] == ("sequence", "min") and criterion.upper is None
    maximum = unit[:2] == ("sequence", "max") and criterion.lower is None
    return "veto" if minimum or maximum or unit == ("token", None, "sequence") else None


def base_of(loss: Loss, needs: tuple[str, ...]) -> str | None:
    """The log-probs that new_logp is compared with; None: its own."""
    if loss.surrogate.of == "new/rollout" or "old_logp" not in needs:
        return "rollout_logp" if "rollout_logp" in needs else None
    return "old_logp"


def use_of_weights(loss: Loss, needs: tuple[str, ...]) -> str:
    """What the weights of a correction are for: they "multiply", "replace_ratio", or are "report"ed."""
    return loss.surrogate.traits.weights_in_bypass if base_of(loss, needs) == "rollout_logp" else "multiply"


def of_loss(spec: Spec | None, loss: Loss, entry: RecipeEntry, batch: object) -> dict[str, Any]:
    """The values of `Settings` in loss.py."""
    surrogate, kl, mean = loss.surrogate, loss.kl, loss.mean
    use = use_of_weights(loss, entry.needs)
    refused: dict[str, object] = {
        f"the surrogate {type(surrogate).__name__}": type(surrogate) not in SURROGATES,
        f"coef={surrogate.coef!r} of a surrogate": surrogate.coef != 1.0,
        "a ratio of turns": getattr(surrogate, "over", "sequence") != "sequence",
        "SAPO(gate='stopped')": getattr(surrogate, "gate", "differentiable") != "differentiable",
        "Score.level": getattr(surrogate, "level", "token") != "token",
        "a regularizer": loss.regularizer,
        "an entropy bonus": loss.entropy_bonus,
        "turns or groups of the Batch": batch,
        "new/rollout next to old_logp": base_of(loss, entry.needs) == "rollout_logp" and "old_logp" in entry.needs,
    }
    if kl is not None:
        refused |= {
            "a KL of rejected tokens too": kl.scope != "kept",
            "a KL with a mean of its own": kl.mean,
            "a KL that is swapped": kl.swapped,
            "a KL with a bound": kl.bound,
            "a KL with the gradient of another kind than k2": kl.gradient not in (None, kl.kind, "k2"),
        }
    if spec is not None:
        refused["rejected='zero' in bypass mode"] = use == "report" and spec.rejected != "mask"
    _refuse(refused)
    values: dict[str, Any] = {"surrogate": SURROGATES[type(surrogate)]}
    values |= _fields(surrogate, [name for name in OF_SURROGATE if hasattr(surrogate, name)])
    if use == "replace_ratio" and spec is not None and spec.weight is not None:
        values["weights"] = "replace"
    if kl is not None:
        values |= {"kl": kl.kind, "kl_coef": kl.coef, "kl_clamp": kl.log_clamp, "kl_most": kl.value_clamp,
                   "kl_factor": kl.weight, "kl_gradient": None if kl.gradient == kl.kind else kl.gradient}  # fmt: skip
    values |= {"mean": mean.of, "over": mean.over, "length": mean.length}
    return values | {"nonfinite": "reject" if spec is None else spec.nonfinite}


def _fields(of: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}
