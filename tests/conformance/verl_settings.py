"""Settings of verl's correction, presets and losses, drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from conformance.rows import both, draw
from rollout_corr.frameworks.verl import losses
from rollout_corr.frameworks.verl.options import RS_OPTIONS

MODES = tuple(losses.MEANS)
# binary_kl is of verl's pull request 6800.
RS_BOUNDS = {"k1": ("0.8_1.3", "0.999_1.001", "2.0"), "k2": ("0.05", "1e-4"), "k3": ("0.04", "1e-4")}


def correction(rng: Random) -> dict[str, Any]:
    """Draw the settings of verl's correction."""
    known = [option for option in sorted(RS_OPTIONS) if option[-2:] in RS_BOUNDS]
    options = rng.sample(known, rng.choice((0, 0, 1, 2, 3)))
    return {
        "rollout_is": rng.choice((None, "token", "sequence")),
        "rollout_is_threshold": rng.choice((1.05, 2.0, "0.5_2.0", "0.2_5.0")),
        "rollout_is_batch_normalize": rng.random() < 0.3,
        "rollout_rs": ",".join(options) or None,
        "rollout_rs_threshold": ",".join(rng.choice(RS_BOUNDS[option[-2:]]) for option in options) or None,
    }


def of_preset(settings: dict[str, Any]) -> Callable[[Random], dict[str, Any]]:
    """Draw the arguments of a preset."""

    def draw(rng: Random) -> dict[str, Any]:
        found = {}
        for name, default in settings.items():
            if name == "lower":
                found[name] = rng.choice((0.5, 0.9))
            elif name in ("upper", "is_threshold"):
                found[name] = rng.choice((1.05, 2.0, default))
            elif name == "rs_threshold":
                values = ("0.9_1.2", "0.999_1.001") if isinstance(default, str) else (0.01, 0.0001)
                found[name] = rng.choice(values)
        return found

    return draw


# The settings of a clipped loss.
clips = draw(clip_ratio_low=(0.02, 0.2), clip_ratio_high=(0.05, 0.28))
clips_and_c = both(clips, draw(clip_ratio_c=(1.1, 3.0)))
OF_LOSS = {
    "vanilla": clips_and_c,
    "dppo_tv": clips_and_c,
    "dppo_kl": clips_and_c,
    "gspo": clips,
    "cispo": clips,
    "geo_mean": clips,
    "sapo": draw(tau_pos=(0.5, 1.0), tau_neg=(1.05, 2.0)),
    "gpg": draw(),
    "dro": draw(dro_beta=(0.1, 1.0)),
    "reinforce": draw(),
}


def micro_batch(name: str) -> Callable[[Random], dict[str, Any]]:
    """Draw what a drop-in's loss gets: its settings, an average, counts of all ranks or none, weights or none."""
    counts = {"dp_size": 2, "batch_num_tokens": 77, "global_batch_size": 9, "loss_scale_factor": 50}
    return both(OF_LOSS[name], draw(mode=MODES, info=({}, counts), weighted=(True, False)))
