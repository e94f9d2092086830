"""xtuner: the correction replaced where the workers start.

    install /path/to/rollout-corr, and xtuner from its source at b934f46
    (the 0.2.0 of package indexes has no rollout_is)
    python xtuner_hook.py

This script asks xtuner's own object about a pack, before and after `install()`, and compares; then it switches on what
only ours has.
"""

from __future__ import annotations

import torch

try:
    from xtuner.v1.rl import rollout_is
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: install /path/to/rollout-corr, and xtuner from its source at b934f46") from None

from rollout_corr.frameworks.xtuner import install
from rollout_corr.testing import example_batch

# Pairs are (upper, lower).
FIELDS = {
    "rollout_is_level": "token",
    "rollout_is_mode": "both",
    "rollout_is_threshold": (1.2, 0.8),
    "rollout_is_mask_threshold": (1.1, 0.9),
    "rollout_is_veto_threshold": (20.0, 1e-4),
}


def main() -> None:
    batch = example_batch(sequences=16, median_length=200, mismatch=0.5, catastrophic=1e-3)
    given = (batch.train_logp[None], batch.rollout_logp[None], batch.lengths, batch.mask[None])

    made = rollout_is.RolloutImportanceSampling(**FIELDS)
    theirs = made.compute_rollout_importance_weights_and_metrics(*given)
    install()
    ours = made.compute_rollout_importance_weights_and_metrics(*given)
    kept = float(ours[1].sum() / batch.mask.sum())
    print("masks equal:", torch.equal(theirs[1], ours[1]), f"{kept:.3f} of tokens kept")
    print(f"largest difference of a weight: {float((theirs[0] - ours[0]).abs().max()):.0e}")
    metrics, our_metrics = theirs[2] | theirs[3], ours[2] | ours[3]
    print("names of metrics equal:", metrics.keys() == our_metrics.keys(), len(metrics))
    for key in ("mismatch/mismatch_kl", "mismatch/mismatch_k3_kl", "mismatch/rollout_is_eff_sample_size"):
        print(f"{key}: xtuner {float(metrics[key]):.6f}, rollout-corr {our_metrics[key]:.6f}")

    # xtuner takes a pack as one sequence here.
    install(mismatch_over="sequence")
    key = "mismatch/mismatch_training_ppl"
    value = made.compute_rollout_importance_weights_and_metrics(*given)[2][key]
    print(f"{key}: of the pack {our_metrics[key]:.4f}, mean over its sequences {value:.4f}")


if __name__ == "__main__":
    main()
