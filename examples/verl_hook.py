r"""verl: its trainers correct with rollout-corr, without a changed line. Shown on a batch, in a Ray worker.

    pip install /path/to/rollout-corr verl==0.9.1
    python verl_hook.py

A training run gets the hook on its command line, and its configuration stays as it is:

    python3 -m verl.trainer.main_ppo ... \
        +ray_kwargs.ray_init.runtime_env.worker_process_setup_hook=rollout_corr.frameworks.verl.install

This script gives the same hook to ray.init, calls verl's own function in a worker, and calls it here, where nothing is
replaced: both say the same.
"""

from __future__ import annotations

try:
    import ray
    from verl import DataProto
    from verl.trainer.config.algorithm import RolloutCorrectionConfig
    from verl.trainer.ppo import rollout_corr_helper
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: pip install /path/to/rollout-corr verl==0.9.1") from None

from rollout_corr.frameworks.verl import dropin
from rollout_corr.testing import example_batch, pad

HOOK = "rollout_corr.frameworks.verl.install"


def corrected():
    """Call the function that verl's trainers call once a step, and return what it is in this process."""
    batch = example_batch(sequences=64, median_length=200, mismatch=0.5, catastrophic=1e-3)
    columns = (batch.train_logp, batch.rollout_logp, batch.mask.long())
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    data = {name: pad(column, batch.lengths) for name, column in zip(names, columns, strict=True)}
    config = RolloutCorrectionConfig.decoupled_geo_rs_token_tis(is_threshold=1.5, rs_threshold="0.95_1.05")
    data, metrics = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(DataProto.from_dict(data), config)
    return data.batch["rollout_is_weights"], data.batch["response_mask"], metrics, dropin.installed().why


def main() -> None:
    weights, mask, metrics, why = corrected()
    print("here:  ", why)
    ray.init(num_cpus=1, include_dashboard=False, runtime_env={"worker_process_setup_hook": HOOK})
    our_weights, our_mask, our_metrics, why = ray.get(ray.remote(corrected).remote())
    ray.shutdown()
    print("worker:", why)

    print("masks equal:", bool((mask == our_mask).all()))
    print(f"largest difference of a weight: {float((weights - our_weights).abs().max()):.0e}")
    print("names of metrics equal:", metrics.keys() == our_metrics.keys(), len(metrics))
    for name in ("kl", "k3_kl", "rollout_is_eff_sample_size", "rollout_rs_masked_fraction"):
        key = f"rollout_corr/{name}"
        print(f"{key}: verl {metrics[key]:.6f}, rollout-corr {our_metrics[key]:.6f}")


if __name__ == "__main__":
    main()
