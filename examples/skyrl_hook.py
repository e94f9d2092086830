"""SkyRL: its correction replaced in every Ray worker, or one of our losses chosen from its registry.

    pip install /path/to/rollout-corr "skyrl[skyrl-train]==0.3.0"      (Python 3.12)
    python skyrl_hook.py

A training script either gives Ray a hook, and keeps its configuration,

    ray.init(runtime_env={"worker_process_setup_hook": "rollout_corr.frameworks.skyrl.install"})

or registers our losses, which is SkyRL's own way to extend it, and names one: trainer.algorithm.policy_loss_type

    from rollout_corr.frameworks.skyrl import losses as skyrl_losses
    skyrl_losses.register()          # and then policy_loss_type=rollout_corr_regular

This script does both to a micro-batch and compares with SkyRL's own functions.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

try:
    from skyrl.backends.skyrl_train.utils import off_policy_correction_utils, ppo_utils
except ModuleNotFoundError as missing:
    raise SystemExit(f'{missing}: pip install /path/to/rollout-corr "skyrl[skyrl-train]==0.3.0"') from None

from rollout_corr.frameworks.skyrl import dropin, losses
from rollout_corr.testing import example_batch, pad

# As much of `trainer.algorithm` as the loss reads.
CORRECTION = dropin.FIELDS | {
    "tis_ratio_type": "token",
    "token_tis_ratio_clip_high": 1.2,
    "sequence_mask_metric": "geometric",
    "geo_mask_low": 0.97,
    "geo_mask_high": 1.03,
}
ALGORITHM = SimpleNamespace(
    policy_loss_type="regular",
    eps_clip_low=0.2,
    eps_clip_high=0.28,
    off_policy_correction=SimpleNamespace(**CORRECTION),
)


def compare(name, theirs, ours):
    print(f"{name}: SkyRL {theirs:.6f}, rollout-corr {ours:.6f}")


def main() -> None:
    packed = example_batch(sequences=32, median_length=100, mismatch=0.5, catastrophic=1e-3)
    old, rollout, mask = (pad(x, packed.lengths) for x in (packed.train_logp, packed.rollout_logp, packed.mask.float()))
    advantages = torch.where(torch.arange(len(old)) % 2 == 0, 1.0, -1.0)[:, None].expand_as(old) / mask.sum()

    # The function that SkyRL's losses call in every micro-batch, before and after.
    loss = torch.ones_like(old)
    given = (loss, old, rollout, mask, ALGORITHM.off_policy_correction)
    theirs, their_mask, metrics = off_policy_correction_utils.apply_off_policy_correction(*given)
    print(dropin.install().why)
    ours, our_mask, our_metrics = off_policy_correction_utils.apply_off_policy_correction(*given)
    dropin.uninstall()
    print("masks equal:", torch.equal(their_mask, our_mask), f"{float(our_mask.sum() / mask.sum()):.3f} of tokens kept")
    # Where the mask is 0, SkyRL's weight is the ratio of whatever stands there, and ours is 0.
    print(f"largest difference of a weight: {float(((theirs - ours) * our_mask).abs().max()):.0e}")
    print("names of metrics equal:", metrics.keys() == our_metrics.keys(), len(metrics))
    for key in ("is_ratio_mean", "tis_token_clip_high_ratio", "geo_sequence_mask_masked_ratio"):
        compare(key, metrics[key], our_metrics[key])

    # SkyRL's registry: the loss with its gradient, by name.
    losses.register()
    slopes = []
    for name in ("regular", "rollout_corr_regular"):
        new = (old + 0.1 * torch.sin(torch.arange(old.shape[1]))).requires_grad_()
        value, _ = ppo_utils.PolicyLossRegistry.get(name)(new, old, advantages, ALGORITHM, mask, rollout)
        value.backward()
        assert new.grad is not None
        slopes.append(new.grad)
        print(f"{name}: {value.item():.6f}")
    apart = float((slopes[0] - slopes[1]).abs().max() / slopes[0].abs().max())
    print(f"largest difference of a slope: {apart:.0e} of the largest")


if __name__ == "__main__":
    main()
