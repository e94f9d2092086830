"""prime-rl's `trainer.loss`, of any generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_corr.frameworks.prime_rl.presets import RECIPES, dppo, icepop, ipo, kpop
from rollout_corr.frameworks.shared.preset import warn_once
from rollout_corr.frameworks.shared.recipe import Recipe
from rollout_corr.frameworks.shared.settings import settings_of
from rollout_corr.specs.correction import Spec
from rollout_corr.specs.validate import one_of

SPECS: dict[str, Callable[..., Spec]] = {"ipo": ipo, "icepop": icepop, "kpop": kpop, "default": dppo}
# The settings of each type beside `type`, `adv_tau` and, but for IcePop, `kl_tau`.
SETTINGS = {
    "ipo": ("eps",),
    "icepop": ("ratio_low", "ratio_high"),
    "kpop": ("kpop_threshold",),
    "default": ("dppo_mask_low", "dppo_mask_high"),
}
OLD = {"ipo_threshold": "eps"}
NAMES = (*OLD, *(name for names in SETTINGS.values() for name in names), "import_path", "kwargs")
KNOWN: dict[str, Any] = {"type": None, "adv_tau": 1.0, "kl_tau": None} | dict.fromkeys(NAMES)
# Keys of the configurations that hold `loss`.
WHOLE = ("trainer", "orchestrator", "inference", "model", "optim", "scheduler", "ckpt", "wandb", "data")


def read(config: object) -> Spec:
    """Read the block `loss`, the configuration of the trainer around it, or a whole one."""
    kind, given, _ = _settings(config)
    return SPECS[kind](**given)


def write(spec: Spec) -> dict[str, Any]:
    """Write the block `loss`, without the taus."""
    first = next(iter(spec.criteria), None)
    if first is None:
        raise ValueError("criteria=() has no setting: every loss of prime-rl masks")
    if first.stat == "ratio":
        return {"type": "icepop", "ratio_low": first.low, "ratio_high": first.high}
    if first.stat == "prob_diff" and first.low is not None and first.high is not None:
        return {"type": "default", "dppo_mask_low": -first.low, "dppo_mask_high": first.high}
    if first.stat == "binary_kl_symmetric":
        return {"type": "kpop", "kpop_threshold": first.high}
    return {"type": "ipo", "eps": first.high}


def recipe(config: object) -> Recipe:
    """Read the whole loss."""
    kind, given, taus = _settings(config)
    anchored = {} if taus["kl_tau"] is None else {"kl_tau": taus["kl_tau"]}
    return RECIPES["dppo" if kind == "default" else kind].build(**given, **anchored, adv_tau=taus["adv_tau"])


def _settings(config: object) -> tuple[str, dict[str, Any], dict[str, Any]]:
    found = settings_of(config, KNOWN, blocks=[("loss",), ("trainer", "loss")], whole=WHOLE)
    kind, taus = found.pop("type"), {name: found.pop(name) for name in ("adv_tau", "kl_tau")}
    given = {name: value for name, value in found.items() if value is not None}
    for old, name in OLD.items():
        if old in given:
            warn_once(("prime_rl", old), f"prime_rl: {old} is an old name; write {name} = {given[old]!r}")
            given.setdefault(name, given.pop(old))
    if kind is None:
        # Without a type prime-rl's loss is IPO, and was DPPO until these settings were removed.
        kind = "default" if any(name in given for name in SETTINGS["default"]) else "ipo"
    if kind == "custom":
        raise ValueError("type: 'custom' names a function of its own, which cannot be read")
    one_of("type", kind, SPECS)
    allowed = (*SETTINGS[kind], *(() if kind == "icepop" else ("kl_tau",)))
    for name in (*given, *(["kl_tau"] if taus["kl_tau"] is not None else [])):
        if name not in allowed:
            raise ValueError(f"{name}: no setting of type {kind!r}, which has {sorted(allowed)}")
    return kind, given, taus
