"""slime's and miles's flags: `--use-tis` with its functions, the loss, and mis.yaml, the example of MIS; presets.

MIS edits the mask and leaves the weights. slime divides a sample's sum by its original tokens, and the sum of the
samples by their number, those without a token too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from ...specs import validate
from ...specs.choices import Normalize, Of
from ...specs.correction import Criterion, Spec, Weight
from ...specs.loss import Loss
from ...specs.surrogate import Surrogate
from ...specs.surrogates import GSPO
from ...specs.terms import KL, KLKind, KLWeight
from ..shared.preset import HIGH, LEVELS, LOW, Alternatives, gated, masked, off_policy, presets, truncated
from ..shared.recipe import (
    BOTH,
    DECOUPLED,
    ROWS,
    TOKENS,
    Named,
    Recipe,
    around_one,
    clip,
    named_recipe,
    of_presets,
    penalty,
)
from ..shared.settings import Given, NoEquivalent, cached_spec, given_in, maybe, only, refused, unchecked, word, words

# --- presets ---


def tis(tis_clip: float | None, tis_clip_low: float | None) -> Spec:
    """Return slime's TIS."""
    return truncated(tis_clip, tis_clip_low)


def icepop(tis_clip: float | None, tis_clip_low: float | None) -> Spec:
    """Return slime's IcePop."""
    return gated(Criterion("ratio", lower=tis_clip_low, upper=tis_clip))


def _token_mis(
    level: str, tis_upper: float, rs_lower: float, rs_upper: float, veto: float | None, normalizes: bool = False
) -> Spec:
    """Token TIS; what is outside the rs bounds masked, and the sequence of a token below the veto."""
    weight = Weight.token(lower=0.0, upper=tis_upper, normalize="batch" if normalizes else None)
    rejection = Criterion("ratio", *LEVELS[level], lower=rs_lower, upper=rs_upper)
    return Spec(weight=weight, criteria=(rejection, *_veto(veto)))


def _veto(threshold: float | None) -> tuple[Criterion, ...]:
    return () if threshold is None else (Criterion("ratio", lower=threshold, drop="sequence", label="veto"),)


def _opsm(delta: float, of: Of = "new/old") -> Criterion:
    return off_policy(delta, of=of, drop="token", label="opsm")


TIS = {"tis_clip": maybe(2.0), "tis_clip_low": maybe(0.0)}
RS: dict[str, Any] = {"tis_upper_bound": 2.0, "rs_lower_bound": 0.5, "rs_upper_bound": 2.0}
RS["rs_veto_threshold"] = maybe(1e-4)
presets("slime", "slime 624b824 (2026-08-21)")(
    tis=("w = exp(D) clamped to [tis_clip_low, tis_clip].", tis, TIS),
    icepop=("w = exp(D) inside [tis_clip_low, tis_clip], else 0.", icepop, TIS),
    mis=(
        "mis.yaml: token TIS divided by the batch mean; tokens outside the rs bounds masked; "
        "a token below 1e-4 vetoes.",
        partial(_token_mis, "token"),
        RS | {"tis_batch_normalize": True},
    ),
    mis_geo=(
        'MIS with rs_level "geometric": token TIS; a sequence whose exp(mean D) is outside the rs bounds masked; veto.',
        partial(_token_mis, "geometric"),
        RS | {"rs_lower_bound": 0.9999, "rs_upper_bound": 1.0001},
    ),
    opsm=(
        "0 for the tokens with A < 0 of a sequence whose mean(old - new) exceeds delta (`--use-opsm`).",
        lambda delta: masked(_opsm(delta)),
        {"delta": 1e-4},
    ),
)

# --- losses ---

CLIP: dict[str, Any] = {"eps_clip": 0.2, "eps_clip_high": None, "eps_clip_c": None}
WITH_KL = "without use_tis; kl_loss_coef means kl_loss_type low_var_kl"
of_presets("slime", Named(clip, **CLIP), BOTH, mean=ROWS)
named_recipe("slime.ppo", Named(clip, **CLIP), DECOUPLED, "without use_tis", mean=ROWS)
named_recipe(
    "slime.grpo", Named(clip, **CLIP), DECOUPLED, WITH_KL, kl=penalty(value_clamp=10.0, kl_loss_coef=0.0), mean=ROWS
)

# --- the flags ---

MODES = ("truncate", "clip", "mask")
KLS: dict[str, tuple[KLKind, float | None]] = {
    "k1": ("k1", None),
    "k2": ("k2", None),
    "k3": ("k3", None),
    "low_var_kl": ("k3", 10.0),
}
FLAGS: dict[str, Any] = CLIP | {
    "loss_type": only("policy_loss", "expected 'policy_loss'"),
    "advantage_estimator": "grpo",
    "use_tis": False,
    # Numbers: no flag is null.
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "custom_tis_function_path": unchecked(None),
    "custom_pg_loss_reducer_function_path": only(None, "a function of its own cannot be read"),
    "get_mismatch_metrics": False,
    "use_opsm": False,
    "opsm_delta": 1e-4,
    "use_rollout_logprobs": False,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": word("k1", KLS),
    "use_unbiased_kl": False,
    "calculate_per_token_loss": False,
}
# As mis.yaml is shipped; `--custom-config-path` puts them among the flags.
MIS: dict[str, Any] = {
    "use_rs": True,
    "tis_level": "token",
    "rs_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": maybe(0.5),
    "tis_upper_bound": 2.0,
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": maybe(1e-4),
    "tis_batch_normalize": True,
}
# Flags that show that all of them are given.
WHOLE = words("hf_checkpoint num_rollout rollout_batch_size n_samples_per_prompt global_batch_size lr kl_coef")
# The last part of `--custom-tis-function-path`: the framework's names, and those of rollout_corr.frameworks.slime.
FUNCTIONS = {
    "vanilla_tis_function": "tis",
    "icepop_function": "icepop",
    "compute_mis_weights_with_cp": "mis",
    "compute_mis_weights_fsdp": "mis",
    "tis": "tis",
    "icepop": "icepop",
    "mis": "mis",
}
CLIPPED = ("grpo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
settings = partial(given_in, rows=FLAGS | MIS, whole=WHOLE)


def written(icepop: str, mis: str) -> Alternatives:
    """Return the flags that can be written, with the paths of two functions; those of mis.yaml go with the second."""
    levels, path = tuple(LEVELS), "custom_tis_function_path"
    clips = {"use_tis": True, path: (None, icepop), "tis_clip_low": LOW, "tis_clip": HIGH}
    weight = {"use_tis": True, path: mis, "tis_level": levels, "tis_batch_normalize": (False, True)}
    modes = {"tis_mode": "truncate"}, {"tis_mode": ("clip", "mask"), "tis_lower_bound": LOW}
    tests = {"use_rs": True, "rs_level": levels, "rs_lower_bound": LOW, "rs_upper_bound": HIGH}
    of_mis = (
        weight | {"tis_upper_bound": HIGH} | mode | test
        for mode in modes
        for test in ({"use_rs": False}, tests | {"rs_veto_threshold": (None, LOW)})
    )
    opsm = {"use_opsm": True, "opsm_delta": HIGH, "use_rollout_logprobs": (False, True)}
    return ({"use_tis": False}, clips, *of_mis), ({"use_opsm": False}, opsm)


# With slime's own functions and its examples, of slime 624b824.
WRITTEN = written(
    icepop="slime.backends.megatron_utils.loss.icepop_function",
    mis="examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
)


def read(given: Given) -> Spec:
    """Read the flags: `args`, a mapping of some of them, or the content of mis.yaml."""
    used, measured, bypass, opsm = (
        given[name] for name in ("use_tis", "get_mismatch_metrics", "use_rollout_logprobs", "use_opsm")
    )
    function, spec = _function(given), Spec()
    if function == "mis":
        mis = mis_settings(SimpleNamespace(**{name: given[name] for name in ("use_tis", *MIS)}))
        spec = spec if mis is None else mis_spec(mis)
    elif used or measured:
        spec = {"tis": tis, "icepop": icepop}[function](given["tis_clip"], given["tis_clip_low"])
    if bypass and spec.acts:
        why = "the ratio is then the correction itself; further weights are refused"
        raise refused("use_rollout_logprobs", why)
    if opsm:
        criterion = _opsm(given["opsm_delta"], "new/rollout" if bypass else "new/old")
        rejected = spec.rejected if spec.criteria else "zero"
        spec = replace(spec, criteria=(*spec.criteria, criterion), rejected=rejected)
    return spec


def _function(given: Given) -> str:
    """The function that corrects, by its name here."""
    key = "custom_tis_function_path"
    path, alone = given[key], key not in given.given and any(name in given.given for name in MIS)
    last = ("mis" if alone else "tis") if path is None else str(path).replace(":", ".").rpartition(".")[2]
    if last not in FUNCTIONS:
        raise refused(key, f"expected one that ends in {sorted(FUNCTIONS)}, got {path!r}", NoEquivalent)
    return FUNCTIONS[last]


def recipe(given: Given) -> Recipe:
    """Read the whole loss but its entropy bonus.

    With `use_rollout_logprobs` pass `rollout_logp` alone; where no log-probs are recomputed, `new_logp.detach()` as
    `old_logp`.
    """
    return loss_of(given, (*CLIPPED, "gspo", "cispo"))


def loss_of(given: Given, estimators: Iterable[str]) -> Recipe:
    """Read the whole loss of a framework that has these estimators of advantages."""
    spec = read(given)
    estimator = validate.one_of("advantage_estimator", given["advantage_estimator"], estimators)
    kl = _kl(given)
    if kl is not None and given["use_opsm"] and spec.rejected == "mask" and len(spec.criteria) > 1:
        raise refused("use_opsm", "leaves the KL as it is, and mis.yaml's rejection does not; no Spec does both")
    mean = TOKENS if given["calculate_per_token_loss"] else ROWS
    return Recipe(spec if spec.acts else None, Loss(_surrogate(estimator, given), mean, kl))


def _surrogate(estimator: str, given: Given) -> Surrogate:
    low, high, dual = (given[name] for name in CLIP)
    high = low if high is None else high
    if estimator == "cispo":
        return around_one(min(validate.not_negative("eps_clip", low), 1.0), high)
    return GSPO(low, high, dual) if estimator == "gspo" else clip(low, high, dual)


def _kl(given: Given) -> KL | None:
    if not given["use_kl_loss"]:
        return None
    coefficient, (kind, value_clamp) = given["kl_loss_coef"], KLS[given["kl_loss_type"]]
    weight: KLWeight | None = "ratio" if given["use_unbiased_kl"] else None
    return KL(kind, coefficient, value_clamp=value_clamp, weight=weight) if coefficient else None


# --- the settings of mis.yaml ---


class MisSettings(NamedTuple):
    """Settings of mis.yaml, checked, with defaults filled in."""

    tis_level: str
    tis_mode: str
    tis_lower: float
    tis_upper: float
    rs_level: str | None
    rs_lower: float
    rs_upper: float
    veto: float | None
    normalize: bool


def mis_settings(args: Any) -> MisSettings | None:
    """The settings, or None where weights are off."""
    if not args.use_tis:
        return None
    validate.one_of("tis_level", args.tis_level, LEVELS)
    validate.one_of("tis_mode", args.tis_mode, MODES)
    tis_upper = validate.positive("tis_upper_bound", args.tis_upper_bound, finite=False)
    tis_lower = 1.0 / tis_upper if args.tis_lower_bound is None else args.tis_lower_bound
    return MisSettings(
        tis_level=args.tis_level,
        tis_mode=args.tis_mode,
        tis_lower=tis_lower,
        tis_upper=tis_upper,
        rs_level=validate.one_of("rs_level", args.rs_level, LEVELS) if args.use_rs else None,
        rs_lower=tis_lower if args.rs_lower_bound is None else args.rs_lower_bound,
        rs_upper=tis_upper if args.rs_upper_bound is None else args.rs_upper_bound,
        veto=args.rs_veto_threshold if args.use_rs else None,
        normalize=bool(args.tis_batch_normalize),
    )


@cached_spec
def mis_spec(settings: MisSettings) -> Spec:
    """Build the Spec of settings of mis.yaml."""
    bounds = {"truncate": (0.0, settings.tis_upper), "clip": (settings.tis_lower, settings.tis_upper)}
    lower, upper = bounds.get(settings.tis_mode, (None, None))
    normalize: Normalize | None = "batch" if settings.normalize else None
    weight = Weight(*LEVELS[settings.tis_level], lower=lower, upper=upper, normalize=normalize)
    tested = []
    if settings.tis_mode == "mask":
        tested.append(("tis_mask", settings.tis_level, settings.tis_lower, settings.tis_upper))
    if settings.rs_level is not None:
        tested.append(("rs", settings.rs_level, settings.rs_lower, settings.rs_upper))
    criteria = [
        Criterion("ratio", *LEVELS[level], lower=low, upper=high, label=label) for label, level, low, high in tested
    ]
    return Spec(weight=weight, criteria=(*criteria, *_veto(settings.veto)))
