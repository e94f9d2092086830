"""Whole calls: what `policy_loss` is given in a framework's training step, as a dict of its arguments.

Named after the framework, then after its loss or after the preset whose Spec it runs. The log-probs, advantages and
mask are the caller's; so is a denominator reduced over micro-batches and ranks. docs/losses.md is made from this table.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from rollout_corr.presets import registry
from rollout_corr.spec import Spec
from rollout_corr.surrogates import (
    DPPO,
    DRO,
    GMPO,
    GPG,
    GSPO,
    KL,
    PPO,
    SAPO,
    Reinforce,
    Score,
    SquaredLogRatio,
    Surrogate,
)

SEQUENCES = "sequence_mean_token_mean"


class Call(NamedTuple):
    """One listed recipe.

    Attributes:
        build: Makes the arguments.
        needs: The log-probs that the call needs besides new_logp.
        note: What a user of the framework should know.
    """

    build: Callable[..., dict[str, Any]]
    needs: tuple[str, ...]
    note: str


def _step(
    surrogate: Surrogate,
    spec: Spec | None = None,
    reduction: str = "token_mean",
    denominator: str = "original",
    **more: Any,
) -> dict[str, Any]:
    return {"surrogate": surrogate, "spec": spec, "reduction": reduction, "denominator": denominator} | more


def _penalty(coef: float, **more: Any) -> dict[str, Any]:
    """The KL term, where there is one."""
    return {"kl": KL("k3", coef, **more)} if coef else {}


# --- verl ---


def _verl(
    preset: str,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    kl_loss_coef: float = 0.0,
    **arguments: Any,
) -> dict[str, Any]:
    """`loss_mode=vanilla`; bypass with REINFORCE: -w A log pi, and without a weight -A log pi."""
    spec = registry.preset(preset, **arguments)
    surrogate: Surrogate = PPO(clip_ratio_low, clip_ratio_high, dual=clip_ratio_c)
    if preset.startswith("verl.bypass_pg"):
        surrogate = GPG() if spec.weight is None else Score()
    return _step(surrogate, spec, **_penalty(kl_loss_coef, value_clamp=10.0))


def _verl_cispo(clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> dict[str, Any]:
    return _step(Score(1.0 - clip_ratio_low, 1.0 + clip_ratio_high))


def _verl_gspo(clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> dict[str, Any]:
    return _step(GSPO(clip_ratio_low, clip_ratio_high, through="token", clamp=10.0), reduction=SEQUENCES)


def _verl_geo_mean(clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> dict[str, Any]:
    return _step(GMPO(clip_ratio_low, clip_ratio_high), reduction=SEQUENCES)


def _verl_sapo(tau_pos: float = 1.0, tau_neg: float = 1.05) -> dict[str, Any]:
    return _step(SAPO(tau_pos, tau_neg), reduction=SEQUENCES)


def _verl_dppo(
    divergence: str, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0
) -> dict[str, Any]:
    return _step(DPPO(divergence, clip_ratio_low, clip_ratio_high, clip_ratio_c))


# --- SkyRL ---


def _skyrl(preset: str, eps_clip_low: float = 0.2, eps_clip_high: float = 0.2, **arguments: Any) -> dict[str, Any]:
    return _step(PPO(eps_clip_low, eps_clip_high), registry.preset(preset, **arguments))


def _skyrl_regular(eps_clip_low: float = 0.2, eps_clip_high: float = 0.2) -> dict[str, Any]:
    return _step(PPO(eps_clip_low, eps_clip_high))


def _skyrl_dual_clip(
    eps_clip_low: float = 0.2, eps_clip_high: float = 0.2, clip_ratio_c: float = 3.0
) -> dict[str, Any]:
    return _step(PPO(eps_clip_low, eps_clip_high, dual=clip_ratio_c))


def _skyrl_cispo(cispo_eps_clip_low: float = 1.0, cispo_eps_clip_high: float = 4.0) -> dict[str, Any]:
    return _step(Score(1.0 - cispo_eps_clip_low, 1.0 + cispo_eps_clip_high))


def _skyrl_gspo(eps_clip_low: float = 0.2, eps_clip_high: float = 0.2) -> dict[str, Any]:
    return _step(GSPO(eps_clip_low, eps_clip_high, through="token", clamp=10.0))


def _skyrl_rollout_is(eps_clip_low: float = 0.2, eps_clip_high: float = 0.2) -> dict[str, Any]:
    return _step(Score(1.0 - eps_clip_low, 1.0 + eps_clip_high, "zero", of="new/rollout"))


def _skyrl_dppo(delta_low: float = 0.2, delta_high: float = 0.2) -> dict[str, Any]:
    spec = registry.preset("prime_rl.default", dppo_mask_low=delta_low, dppo_mask_high=delta_high)
    return _step(Reinforce(of="new/rollout"), spec)


# --- the others ---


def _xtuner(
    preset: str,
    cliprange_low: float = 0.2,
    cliprange_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    kl_loss_coef: float = 0.0,
    **arguments: Any,
) -> dict[str, Any]:
    surrogate = PPO(cliprange_low, cliprange_high, dual=clip_ratio_c)
    spec = registry.preset(preset, **arguments)
    return _step(surrogate, spec, denominator="kept", **_penalty(kl_loss_coef, value_clamp=10.0))


TRL_REDUCTIONS = {
    "grpo": SEQUENCES,
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "token_sum_norm",
    "luspo": "sequence_mean_token_sum",
    "sapo": SEQUENCES,
    "cispo": "token_mean",
}


def _trl(
    loss_type: str,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    importance_sampling_level: str = "token",
    max_completion_length: float = 256.0,
    vllm_importance_sampling_mode: str = "sequence_mask",
    off_policy_mask_threshold: float | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    high = epsilon if epsilon_high is None else epsilon_high
    surrogate: Surrogate = PPO(epsilon, high, delta=delta)
    if loss_type == "cispo":
        surrogate = Score(upper=epsilon_high or 5.0)
    elif loss_type == "sapo":
        surrogate = SAPO()
    elif importance_sampling_level == "sequence":
        surrogate = GSPO(epsilon, high, delta=delta)
    more = _penalty(beta, weight="ratio" if use_bias_correction_kl else None)
    if loss_type == "dr_grpo":
        more["max_length"] = max_completion_length
    preset = f"trl.{vllm_importance_sampling_mode}"
    if off_policy_mask_threshold is not None:
        preset, arguments = "trl.opsm", arguments | {"delta": off_policy_mask_threshold}
    return _step(surrogate, registry.preset(preset, **arguments), TRL_REDUCTIONS[loss_type], **more)


def _clipped(
    preset: str,
    reduction: str = "token_mean",
    denominator: str = "original",
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """PPO's clip with the preset's weight, as most frameworks have it."""
    surrogate = PPO(eps_clip, eps_clip if eps_clip_high is None else eps_clip_high)
    return _step(surrogate, registry.preset(preset, **arguments), reduction, denominator)


def _nemo_gspo(ratio_clip_min: float = 0.2, ratio_clip_max: float = 0.2) -> dict[str, Any]:
    return _step(GSPO(ratio_clip_min, ratio_clip_max), registry.preset("nemo.gspo_is"))


def _swift(preset: str, beta: float = 0.0, epsilon: float = 0.2, **arguments: Any) -> dict[str, Any]:
    penalty = _penalty(beta, weight="weights")
    denominator = "kept" if preset == "swift.opsm" else "original"
    return _step(PPO(epsilon, epsilon), registry.preset(preset, **arguments), SEQUENCES, denominator, **penalty)


def _prime_rl(preset: str, kl_tau: float = 1e-3, **arguments: Any) -> dict[str, Any]:
    return _step(Reinforce(), registry.preset(preset, **arguments), regulariser=SquaredLogRatio(kl_tau, "all"))


def _slime_opsm(eps_clip: float = 0.2, delta: float = 1e-4) -> dict[str, Any]:
    return _step(PPO(eps_clip, eps_clip), registry.preset("slime.opsm", delta=delta), SEQUENCES)


def _dppo(divergence: str, delta: float, clip_ratio_c: float = 20.0) -> dict[str, Any]:
    return _step(DPPO(divergence, delta, delta, clip_ratio_c, of="new/rollout"))


def _minirl(clip_low: float = 0.2, clip_high: float = 0.2, clip_ratio_c: float = 20.0) -> dict[str, Any]:
    spec = registry.preset("minirl.mask", clip_low=clip_low, clip_high=clip_high)
    return _step(Score(upper=clip_ratio_c, of="new/rollout"), spec)


def _fixed(surrogate: Surrogate, reduction: str = "token_mean") -> Callable[[], dict[str, Any]]:
    return lambda: _step(surrogate, None, reduction)


DECOUPLED, BOTH, BYPASS = ("old_logp",), ("old_logp", "rollout_logp"), ("rollout_logp",)
GLOBAL = "pass the tokens of all ranks as the denominator"


@lru_cache(maxsize=1)
def _calls() -> dict[str, Call]:
    found: dict[str, Call] = {}
    for name in registry.names():
        framework = name.partition(".")[0]
        if framework == "verl":
            needs = BYPASS if name.startswith("verl.bypass") else BOTH
            found[name] = Call(partial(_verl, name), needs, "counts before rejection, as its engines do")
        elif framework == "skyrl":
            found[name] = Call(partial(_skyrl, name), BOTH, "its KL loss is a mean over rows: a call of its own")
        elif framework == "xtuner":
            found[name] = Call(partial(_xtuner, name), BOTH, GLOBAL + ", after rejection")
        elif framework == "swift":
            found[name] = Call(partial(_swift, name), BOTH, "weights multiply the KL term too")
        elif framework == "prime_rl":
            found[name] = Call(partial(_prime_rl, name), BYPASS, GLOBAL)
        elif framework in ("openrlhf", "areal", "nemo", "open_instruct"):
            found[name] = Call(partial(_clipped, name), BOTH, GLOBAL)
        elif framework == "rlinf":
            found[name] = Call(partial(_clipped, name, denominator="kept"), BOTH, "")
        elif framework == "roll" or (framework == "slime" and name != "slime.opsm"):
            found[name] = Call(partial(_clipped, name, SEQUENCES), BOTH, "")
    for mode, divergence in (("dppo_tv", "tv"), ("dppo_kl", "kl")):
        note = "clip_ratio_c is ActorConfig's 3.0; the function's own 20.0 never gets there"
        found[f"verl.{mode}"] = Call(partial(_verl_dppo, divergence), DECOUPLED, note)
    found |= {
        "verl.cispo": Call(_verl_cispo, DECOUPLED, ""),
        "verl.gspo": Call(_verl_gspo, DECOUPLED, "its log-ratio has no lower clamp, ours -10"),
        "verl.geo_mean": Call(_verl_geo_mean, DECOUPLED, "its mean is over all rows, ours over non-empty ones"),
        "verl.sapo": Call(_verl_sapo, DECOUPLED, ""),
        "verl.gpg": Call(_fixed(GPG()), (), ""),
        "verl.dro": Call(lambda dro_beta=0.1: _step(DRO(dro_beta)), DECOUPLED, "dro_beta has no default in verl"),
        "skyrl.regular": Call(_skyrl_regular, DECOUPLED, ""),
        "skyrl.dual_clip": Call(_skyrl_dual_clip, DECOUPLED, ""),
        "skyrl.cispo": Call(_skyrl_cispo, DECOUPLED, 'cispo_anchor: Score(of="new/rollout")'),
        "skyrl.gspo": Call(_skyrl_gspo, DECOUPLED, "its log-ratio has no lower clamp, ours -10"),
        "skyrl.sapo": Call(_fixed(SAPO()), DECOUPLED, ""),
        "skyrl.rollout_is": Call(_skyrl_rollout_is, BYPASS, "its bounds exclude their ends, ours include them"),
        "skyrl.dppo": Call(_skyrl_dppo, BYPASS, ""),
        "nemo.gspo_is": Call(_nemo_gspo, BOTH, GLOBAL),
        "nemo.mult_err": Call(
            partial(_clipped, "nemo.mult_err", denominator="kept"), BOTH, "samples are masked before they are counted"
        ),
        "slime.opsm": Call(_slime_opsm, BOTH, ""),
        "tinker.importance_sampling": Call(_fixed(Reinforce(), "sum"), BYPASS, ""),
        "tinker.ppo": Call(_fixed(PPO(0.2, 0.2), "sum"), BYPASS, ""),
        "tinker.cispo": Call(_fixed(Score(0.0, 4.0), "sum"), BYPASS, ""),
        "torchforge.default": Call(_fixed(Score(0.1, 10.0)), BYPASS, ""),
        "art.default": Call(_fixed(Score(0.0, 5.0)), DECOUPLED, ""),
        "dppo.tv": Call(partial(_dppo, "tv", delta=0.15), BYPASS, ""),
        "dppo.kl": Call(partial(_dppo, "kl", delta=0.05), BYPASS, ""),
        "minirl.default": Call(_minirl, BOTH, "the ratio is new/rollout, the mask is of new/old"),
    }
    for loss_type in TRL_REDUCTIONS:
        note = "max_completion_length is the trainer's" if loss_type == "dr_grpo" else ""
        note = GLOBAL if loss_type in ("dapo", "cispo") else note
        found[f"trl.{loss_type}"] = Call(partial(_trl, loss_type), BOTH, note)
    return dict(sorted(found.items()))


def recipe_names() -> list[str]:
    """Every recipe as "framework.recipe", sorted."""
    return list(_calls())


def recipe(name: str, /, **arguments: Any) -> dict[str, Any]:
    """What a framework's training step gives `policy_loss`.

    `rc.policy_loss(new_logp, advantages, mask, old_logp=..., rollout_logp=..., **rc.recipe("trl.dapo"))`. Which
    log-probs a recipe needs and what it computes is in docs/losses.md.

    Args:
        name: "framework.recipe", one of `recipe_names()`.
        **arguments: The framework's own settings, by its names; where the recipe runs a preset, the preset's too.

    Returns:
        Keyword arguments: surrogate, spec, reduction, denominator, and kl, regulariser or max_length where there are.

    Raises:
        ValueError: An unknown name (with the closest ones) or a wrong value.
        TypeError: An argument that the recipe does not take, or a value of the wrong type.
    """
    if not isinstance(name, str):
        raise TypeError(f"recipe: expected a name such as 'verl.gspo', got {type(name).__name__} {name!r}")
    if name not in _calls():
        close = difflib.get_close_matches(name, _calls(), n=3)
        hint = f", did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"recipe: unknown name {name!r}{hint}; rollout_corr.recipe_names() lists them all")
    try:
        return _calls()[name].build(**arguments)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        message = f"recipe {name}({given}): {error}"
        raise (TypeError if isinstance(error, TypeError) else ValueError)(message) from error


BEGIN = "<!-- made by `python -m rollout_corr.recipes`; a test compares them -->"
END = "<!-- end of what is made -->"


def _preset_of(spec: Spec, name: str) -> str:
    """The preset whose Spec a recipe runs, its namesake if there is one."""
    same = [found for found, entry in registry.RECIPES.items() if entry.build() == spec]
    return name if name in same else same[0]


def table() -> str:
    """Every recipe: what it computes, over what, and what it needs."""
    from rollout_corr.presets.table import expression

    lines, framework = [BEGIN], ""
    for name, call in _calls().items():
        made = call.build()
        if name.partition(".")[0] != framework:
            framework = name.partition(".")[0]
            lines += ["", f"### {framework}", ""]
            lines += ["| recipe | log-probs | loss of a token | preset | reduction | divided by | note |"]
            lines += ["|---|---|---|---|---|---|---|"]
        surrogate, spec = made["surrogate"], made["spec"]
        beside = "".join(f"; `{expression(made[term])}`" for term in ("kl", "regulariser") if term in made)
        cells = (
            f"`{name}`",
            ", ".join(f"`{needed}`" for needed in call.needs) or "-",
            f"{surrogate.explain()}{beside}".replace("|", "\\|"),
            "-" if spec is None else f"`{_preset_of(spec, name)}`",
            made["reduction"],
            "nothing" if made["reduction"] == "sum" else made["denominator"],
            call.note or "-",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", END, ""])


if __name__ == "__main__":
    sys.stdout.write(table())
