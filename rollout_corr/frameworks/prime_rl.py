"""prime-rl's `trainer.loss`, for `policy_loss`: masks of the ratio of the policy being trained to the one that sampled.

Its loss is REINFORCE with a differentiable ratio. Rejected tokens are counted by its mean and, by `kl_tau`, anchored;
only its IcePop has no `kl_tau`. On 2026-08-27 (#3418) DPPO, the default until then, was removed, IPO became the
default, and `ipo_threshold` became `eps`. On 2026-09-18 (#3586) IPO's defaults became `eps` 0.3 and `kl_tau` 0; they
were 0.1 and 1e-3, which name for a run of an older prime-rl.
"""

from __future__ import annotations

from typing import Any

from ..specs.correction import Criterion, Spec
from ..specs.statistics import Stat
from ..specs.surrogates import Reinforce
from ..specs.validate import positive
from .shared.checking import Checks, roles
from .shared.preset import HIGH, LOW, PRESETS, RECIPES, masked, presets
from .shared.recipe import BYPASS, GLOBAL, Named, Recipe, anchor, named_recipe, of_presets
from .shared.settings import Given, NoEquivalent, Setting, given_in, refused, unchecked, warn_old, word


def _mask(stat: Stat, label: str, **more: Any) -> Spec:
    return masked(Criterion(stat, of="new/rollout", label=label, **more))


def _dppo(low: float, high: float) -> Spec:
    low = positive("dppo_mask_low", low, finite=False)
    high = positive("dppo_mask_high", high, finite=False)
    return _mask("prob_diff", "dppo", lower=-low, upper=high, when="outward")


presets("prime_rl", "prime-rl 559b447 (2026-08-21)")(
    dppo=(
        "0 for a token whose probability has moved with its advantage by more than dppo_mask_high, up, or _low, down.",
        _dppo,
        {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2},
        "prime-rl 559b447 (2026-08-21), gone since #3418",
    ),
    ipo=(
        "0 for a token whose probability has moved by more than eps.",
        lambda eps: _mask("tv", "ipo", upper=eps),
        {"eps": 0.3},
        "prime-rl #3586 (2026-09-18)",
    ),
    icepop=(
        "0 for a token whose ratio new/rollout is outside [ratio_low, ratio_high].",
        lambda low, high: _mask("ratio", "icepop", lower=low, upper=high),
        {"ratio_low": 0.2, "ratio_high": 5.0},
        "prime-rl #3526 (2026-09)",
    ),
    kpop=(
        "0 for a token whose binary KL between new and rollout exceeds kpop_threshold in either direction (KPop).",
        lambda threshold: _mask("binary_kl_symmetric", "kpop", upper=threshold, eps=1e-6),
        {"kpop_threshold": 0.1},
        "prime-rl #3283 (open)",
    ),
    ref_kl=(
        "0 for a token whose probability has fallen by more than threshold (its distillation loss).",
        lambda threshold: _mask("prob_diff", "ref_kl", lower=-positive("threshold", threshold, finite=False)),
        {"threshold": 0.2},
    ),
)

# The factor of the advantages, which leaves the anchor as it is.
SURROGATE = Named(lambda tau: Reinforce(coef=positive("adv_tau", tau)), adv_tau=1.0)
TAU = 1e-3
ANCHOR = anchor("all", kl_tau=TAU)
NOTE = f"its token weights are scale; {GLOBAL}"
DISTILLS = "the advantages are ref_logp - new_logp, detached"
of_presets("prime_rl", SURROGATE, BYPASS, NOTE, regularizer=ANCHOR)
IPO_NOTE = f"before #3586 (2026-09-18) eps was 0.1 and kl_tau 1e-3; {NOTE}"
named_recipe("prime_rl.ipo", SURROGATE, BYPASS, IPO_NOTE, spec="prime_rl.ipo", regularizer=anchor("all", kl_tau=0.0))
named_recipe("prime_rl.icepop", SURROGATE, BYPASS, NOTE, spec="prime_rl.icepop")
named_recipe("prime_rl.ref_kl", Reinforce(), BYPASS, DISTILLS, spec="prime_rl.ref_kl", regularizer=ANCHOR)

# --- the configuration ---

# The preset of each type. Its settings are the type's, without `adv_tau` and, except for IcePop, `kl_tau`.
TYPES = {"ipo": "ipo", "icepop": "icepop", "kpop": "kpop", "default": "dppo"}
OF_TYPE = {kind: PRESETS[f"prime_rl.{preset}"].table for kind, preset in TYPES.items()}
OLD = {"ipo_threshold": "eps"}
TABLE: dict[str, Any] = {
    "type": word(None, (*TYPES, "custom")),
    "adv_tau": Setting(1.0, positive),
    "kl_tau": None,
    "ipo_threshold": None,
    **dict.fromkeys((name for table in OF_TYPE.values() for name in table), None),
    **dict.fromkeys(("import_path", "kwargs"), unchecked(None)),
}
# Keys of the configurations that hold `loss`.
WHOLE = ("trainer", "orchestrator", "inference", "model", "optim", "scheduler", "ckpt", "wandb", "data")


def settings(config: object) -> Given:
    """Find the block `loss`, in the configuration of the trainer around it or in a whole one."""
    found = given_in(config, TABLE, blocks=[("loss",), ("trainer", "loss")], whole=WHOLE).without_null()
    for old, name in OLD.items():
        if old in found.given:
            # Who has the old name had the old factor too.
            tau, value = found.given.get("kl_tau", TAU), found[old]
            warn_old("prime_rl", [old], f"write {name} = {value!r} and kl_tau = {tau!r}")
            found = found.but(**{name: found.given.get(name, value), "kl_tau": tau})
    return found


def read(given: Given) -> Spec:
    """Read the block `loss`."""
    preset = PRESETS[f"prime_rl.{TYPES[_type(given)]}"]
    return preset.of(preset.settings | {name: given[name] for name in preset.table if name in given.given})


# Where what is written stands in a configuration.
PLACE = "loss"


WRITTEN = (
    (
        {"type": "ipo", "eps": LOW},
        {"type": "icepop", "ratio_low": LOW, "ratio_high": HIGH},
        {"type": "kpop", "kpop_threshold": LOW},
        {"type": "default", "dppo_mask_low": LOW, "dppo_mask_high": LOW},
    ),
)


def recipe(given: Given) -> Recipe:
    """Read the whole loss."""
    found = RECIPES[f"prime_rl.{TYPES[_type(given)]}"]
    return found.make(Given(found.table, given.given))


def _type(given: Given) -> str:
    """The type of the loss, with its settings alone."""
    kind: str | None = given["type"]
    if kind is None:
        # Without a type prime-rl's loss is IPO, and was DPPO until these settings were removed.
        kind = "default" if any(name in given.given for name in OF_TYPE["default"]) else "ipo"
    if kind == "custom":
        raise refused("type", "'custom' names a function of its own, which cannot be read", NoEquivalent)
    allowed = [*OF_TYPE[kind], *(() if kind == "icepop" else ("kl_tau",))]
    for name in given.given:
        if OLD.get(name, name) not in (*allowed, "type", "adv_tau"):
            raise refused(name, f"no setting of type {kind!r}, which has {sorted(allowed)}")
    return kind


# --- mistakes ---

SAMPLING = "orchestrator.train.sampling."
CHECKS = Checks(
    keys=tuple(f"trainer.loss.{name}" for name in TABLE if name != "type"),
    alike=("import_path",),
    launchers=r"(?m)^\[\[?orchestrator\b|^orchestrator\.",
    uses_logprobs=lambda run: True,
    roles=roles(
        f"{SAMPLING}extra_body.",
        "top_p top_k min_p",
        temperature=f"{SAMPLING}temperature",
        mode="inference.vllm.logprobs_mode",
    ),
)
