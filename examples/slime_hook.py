"""slime and miles: what to name as `--custom-tis-function-path`, a function of ours or one of your own with any Spec.

    pip install /path/to/rollout-corr
    python slime_hook.py

slime is not needed to try it: this finds the functions as slime does, by their paths, and hands over what slime hands
over. A training run gets one of

    --use-tis --custom-tis-function-path rollout_corr.frameworks.slime.tis --tis-clip 2.0
    --use-tis --custom-tis-function-path rollout_corr.frameworks.slime.mis --custom-config-path mis.yaml
    --use-tis --custom-tis-function-path slime_hook.geometric

The last needs this file on the PYTHONPATH of the training processes.
"""

from __future__ import annotations

from argparse import Namespace
from pkgutil import resolve_name

import torch

import rollout_corr as rc
from rollout_corr.testing import example_batch

SPEC = rc.Spec(
    weight=rc.Weight.token(upper=2.0),
    criteria=(rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.95, upper=1.05),),
)


def geometric(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    """The loss, the masks, and metrics with a value for each token. `mis` knows context parallelism, this does not."""
    out = rc.correct(list(train_log_probs), list(rollout_log_probs), mask=list(loss_masks), spec=SPEC)
    rejected = (torch.cat(list(loss_masks)) != torch.cat(out.mask)).float()
    return pg_loss * torch.cat(out.weights), out.mask, {"rejected": rejected}


# What slime reads from its command line and from mis.yaml.
ARGS = Namespace(
    use_tis=True,
    tis_clip=2.0,
    tis_clip_low=0.0,
    tis_mode="truncate",
    tis_level="token",
    tis_lower_bound=0.5,
    tis_upper_bound=2.0,
    tis_batch_normalize=False,
    use_rs=True,
    rs_level="geometric",
    rs_lower_bound=0.95,
    rs_upper_bound=1.05,
    rs_veto_threshold=1e-4,
)


def main() -> None:
    batch = example_batch(sequences=32, median_length=200, mismatch=0.5, catastrophic=1e-3)
    lengths = batch.lengths.tolist()
    loss = torch.linspace(-1.0, 1.0, sum(lengths))
    samples = {
        "pg_loss": loss,
        "train_log_probs": batch.train_logp.split(lengths),
        "rollout_log_probs": batch.rollout_logp.split(lengths),
        "loss_masks": [mask.int() for mask in batch.mask.split(lengths)],
        "total_lengths": lengths,
        "response_lengths": lengths,
    }
    # What slime's built-in function multiplies by. The three below truncate likewise, and the last two also reject.
    weights = (batch.train_logp - batch.rollout_logp).exp().clamp(ARGS.tis_clip_low, ARGS.tis_clip)
    shown = {
        "rollout_corr.frameworks.slime.tis": "tis_clipfrac",
        "rollout_corr.frameworks.slime.mis": "mis_is_ratio_mean_final",
        "slime_hook.geometric": "rejected",
    }
    for path, key in shown.items():
        corrected, masks, metrics = resolve_name(path)(ARGS, **samples)
        apart = float((corrected - loss * weights)[batch.mask].abs().max())
        kept = sum(bool(mask.any()) for mask in masks)
        print(f"{path}: off the truncated ratio by at most {apart:.0e}, {kept} of {len(masks)} samples kept")
        print(f"  {key}: {float(metrics[key][batch.mask].mean()):.4f} per token")


if __name__ == "__main__":
    main()
