"""Drop-in for verl 0.9: the functions of `verl.trainer.ppo.rollout_corr_helper` and the driver's debug metrics.

verl corrects inside Ray actors, and each of them has to call `install()`: docs/integrations.md has the hook, and the
table of verl's mistakes, each with its switch. Arguments, results and metric keys of the functions are verl's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...api.correct import correct
from ...backends.choose import BackendName
from ...backends.given import Batch, Ranks
from ...metrics import peers
from ...metrics.statistics import PendingMetrics
from ...specs.choices import NONFINITE, Nonfinite, Scheme
from ...specs.correction import Criterion, Spec
from ..shared.dropin import LOGGER, DropIn, DumpPath, Installed, Logged, Target, require_tensor
from ..shared.settings import cached_spec, defaults_of, reporting
from . import metrics as report
from . import options

HELPER = "verl.trainer.ppo.rollout_corr_helper"
# What `rc.spec("verl...")` reports too.
REPORT: tuple[Scheme, ...] = ("native", "verl")

DROP_IN = DropIn(
    "verl",
    checked=("0.9.0", "0.9.1"),
    switches={
        "k1_bounds": options.K1_BOUNDS,
        "empty_rows": ("verl", "skip"),
        "empty_batch": ("zeros", "raise"),
        "nonfinite": NONFINITE,
    },
    not_covered={
        "the policy losses (install(losses=True))": "verl.trainer.ppo.core_algos",
        "the policy losses geo_mean, clip_cov and kl_cov": None,
        "the samples that the replay buffer of verl.trainer.ppo.v1 leaves out as stale": None,
    },
)

HOW = "set actor_rollout_ref.rollout.calculate_log_probs=True, so that the engine returns its log-probs"

installed, uninstall = DROP_IN.installed, DROP_IN.uninstall

Threshold = options.Threshold | None


@DROP_IN.documents
def install(
    *,
    spec: Spec | None = None,
    losses: bool = False,
    k1_bounds: str = "verl",
    empty_rows: str = "verl",
    empty_batch: str = "zeros",
    nonfinite: str = "reject",
    metrics: Logged = "dashboard",
    backend: BackendName = "auto",
    warnings: bool = True,
    dump: DumpPath = None,
    every: int = 100,
) -> Installed:
    """Replace verl's functions, in this process and wherever they have been imported by name.

    A module of verl that has not been imported yet is left alone until it is. A second call with the same switches does
    nothing; with others it replaces what the first installed.

    Args:
        spec: A correction of its own, in place of `rollout_is`, `rollout_rs` and their thresholds in
            `algorithm.rollout_correction`, which has to be there. Its metrics are logged too, under "rollout_corr/".
        losses: Replace verl's policy losses too. See `losses`.
        k1_bounds: "verl" compares -log r with [log lower, log upper], as verl does; "ratio" keeps ratios within
            [lower, upper], as its documentation says (verl#6377).
        empty_rows: "verl" counts rows without a valid token in every metric that is a mean over rows, as verl does;
            "skip" leaves them out (verl#7771).
        empty_batch: A batch without a valid token gives "zeros" as its metrics, or "raise" raises as verl does.
        nonfinite: A token whose log-ratio is NaN or infinite: "reject" its sequence, "neutral" reads the ratio as 1,
            "propagate" lets it become NaN, as verl does.
    """
    if not isinstance(losses, bool):
        raise TypeError(f"losses: expected True or False, got {type(losses).__name__} {losses!r}")
    targets = TARGETS
    if losses:
        from . import losses as verl_losses

        targets = (*targets, *verl_losses.TARGETS)
    switches = {"k1_bounds": k1_bounds, "empty_rows": empty_rows, "empty_batch": empty_batch, "nonfinite": nonfinite}
    return DROP_IN.install(targets, dump, every, warnings, spec=spec, metrics=metrics, backend=backend, **switches)


# --- verl's functions ---


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: Threshold = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: Threshold = None,
    **switches: Any,
) -> tuple[Any, Tensor, dict[str, float]]:
    """Return weights, mask and metrics of a batch as verl's function of this name does, with the switches of `install`.

    Tensors are [B, T], also [T], one sequence; `token_ids` of that shape are for the dump. With a threshold of None
    there are no weights. A DataProto holds "rollout_is_weights", of the dtype that log-probs and mask promote to; the
    mask, in its own dtype, is the very mask given where nothing can be rejected.
    """
    require_tensor("rollout_log_prob", rollout_log_prob, HOW)
    for name, x in (("rollout_log_prob", rollout_log_prob), ("response_mask", response_mask)):
        if x.shape != old_log_prob.shape:
            raise ValueError(f"{name}: expected shape {[*old_log_prob.shape]} (of old_log_prob), got {[*x.shape]}")
    spec, token_ids = switches.get("spec"), switches.get("token_ids")
    if spec is None:
        settings = rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold
        spec = _spec_of(*_of(switches), *settings)
        _say(spec, rollout_is, rollout_is_threshold, rollout_rs, rollout_rs_threshold)
    else:
        DROP_IN.say_spec(spec)
        spec = reporting(spec, "verl")
    weights, mask, metrics = _corrected(old_log_prob, rollout_log_prob, response_mask, spec, switches, token_ids)
    return proto(weights), mask, metrics


def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: Threshold = 2.0,
    rollout_is_batch_normalize: bool = False,
    **switches: Any,
) -> tuple[Tensor, dict[str, float]]:
    """Return the weights alone, from log-ratios, and their metrics without a prefix."""
    spec = _spec_of(*_of(switches), rollout_is, rollout_is_threshold, rollout_is_batch_normalize)
    if spec.weight is None:
        raise ValueError(f"rollout_is: expected 'token' or 'sequence' with a threshold, got {rollout_is!r}")
    weights, _, metrics = _corrected(log_ratio, None, response_mask, spec, switches)
    assert weights is not None
    return weights, _without_prefix(metrics, "rollout_is_")


def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: Threshold = None,
    **switches: Any,
) -> tuple[Tensor, dict[str, float]]:
    """Return the mask alone, from log-ratios, and the metrics of rejection without a prefix."""
    if rollout_rs is None:
        raise ValueError(f"rollout_rs: expected at least one of {sorted(options.RS_OPTIONS)}, got None")
    spec = _spec_of(*_of(switches), None, None, False, rollout_rs, rollout_rs_threshold)
    _, mask, metrics = _corrected(log_ratio, None, response_mask, spec, switches)
    return mask, _without_prefix(metrics, "rollout_rs_")


def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor, **switches: Any
) -> dict[str, float]:
    """Return perplexities and divergences without a prefix; without `rollout_log_prob` only those of the trainer."""
    spec = _spec_of(*_of(switches))
    found = _without_prefix(_corrected(old_log_prob, rollout_log_prob, response_mask, spec, switches)[2], "")
    return found if rollout_log_prob is not None else {key: found[key] for key in ("training_ppl", "training_log_ppl")}


def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, **switches: Any
) -> dict[str, float]:
    """Return perplexities and divergences under verl's prefix."""
    found = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask, **switches)
    return {f"{report.PREFIX}{key}": value for key, value in found.items()}


OF_DEBUGGING = (
    *(f"training/rollout_probs_diff_{name}" for name in ("valid", "max", "mean", "std")),
    "training/rollout_actor_probs_pearson_corr",
)


def calculate_debug_metrics(data: Any, **switches: Any) -> dict[str, float]:
    """Compare the two probabilities of the sampled tokens: maximum, mean and spread of the difference, and correlation.

    `data` is a DataProto with "old_log_probs" and "rollout_log_probs" [B, T], "responses" [B, R], and as a mask
    "response_mask" or "attention_mask", whose last R columns count. Without a valid token "..._valid" of verl's
    five keys is 0 and the others are NaN, as in verl. All are computed in float64.
    """
    DROP_IN.compared("verl did not call its correction in the last step: is algorithm.rollout_correction missing?")
    batch = data.batch
    old, rollout = batch["old_log_probs"], batch["rollout_log_probs"]
    name = next((name for name in ("response_mask", "attention_mask") if name in batch), None)
    if name is None:
        LOGGER.warning("rollout-corr: no mask among %s, so every token counts", sorted(batch.keys()))
    mask = torch.ones_like(old) if name is None else batch[name]
    mask = mask[:, -batch["responses"].size(1) :] != 0
    p, q = (z[mask].to(torch.promote_types(z.dtype, torch.float32)).exp().double() for z in (old, rollout))
    apart, metrics = (p - q).abs(), dict.fromkeys(OF_DEBUGGING, math.nan) | {OF_DEBUGGING[0]: int(p.numel() > 0)}
    if p.numel():
        found = [apart.max(), apart.mean()]
        # Torch warns of the spread of one number.
        found += [apart.std(), torch.corrcoef(torch.stack([p, q]))[0, 1].clamp(-1.0, 1.0)] if p.numel() > 1 else []
        metrics |= zip(OF_DEBUGGING[1:], torch.stack(found).tolist(), strict=False)
    return metrics


# A configuration that lacks a setting is read as this; it also says how the corrected batch is used.
DEFAULTS = defaults_of(compute_rollout_correction_and_rejection_mask)
KNOWN = (*DEFAULTS, "bypass_mode", "loss_type")


def compute_rollout_correction_and_add_to_batch(
    batch: Any, rollout_corr_config: Mapping[str, Any], **switches: Any
) -> tuple[Any, dict[str, float]]:
    """Correct a DataProto: its "response_mask" is replaced, "rollout_is_weights" added where there are weights.

    The configuration is anything with `.get`; it is read, never changed.
    """
    if "rollout_log_probs" not in batch.batch.keys():  # noqa: SIM118  # a TensorDict has no `in` of its own
        raise KeyError(f"rollout_log_probs: expected among {sorted(batch.batch.keys())}; {HOW}")
    DROP_IN.name_unknown(rollout_corr_config, KNOWN)
    settings: dict[str, Any] = {name: rollout_corr_config.get(name, default) for name, default in DEFAULTS.items()}
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=batch.batch["old_log_probs"],
        rollout_log_prob=batch.batch["rollout_log_probs"],
        response_mask=batch.batch["response_mask"],
        **settings | switches,
        token_ids=batch.batch["responses"] if "responses" in batch.batch.keys() else None,  # noqa: SIM118 - as above
    )
    batch.batch["response_mask"] = mask
    return batch if weights is None else batch.union(weights), metrics


TARGETS: tuple[Target, ...] = (
    Target(HELPER, "compute_rollout_correction_and_rejection_mask", compute_rollout_correction_and_rejection_mask),
    Target(HELPER, "compute_rollout_correction_and_add_to_batch", compute_rollout_correction_and_add_to_batch),
    Target(HELPER, "compute_rollout_correction_weights", compute_rollout_correction_weights),
    Target(HELPER, "compute_rollout_rejection_mask", compute_rollout_rejection_mask),
    Target(HELPER, "compute_offpolicy_metrics", compute_offpolicy_metrics),
    Target(HELPER, "compute_rollout_corr_metrics_from_logprobs", compute_rollout_corr_metrics_from_logprobs),
    Target("verl.utils.debug.metrics", "calculate_debug_metrics", calculate_debug_metrics),
)


# --- how they are computed ---


@cached_spec
def _spec_of(
    k1_bounds: str,
    nonfinite: Nonfinite,
    rollout_is: str | None = None,
    rollout_is_threshold: Any = None,
    normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: Any = None,
) -> Spec:
    weight = None
    criteria: tuple[Criterion, ...] = ()
    if isinstance(rollout_is_threshold, bool):
        raise TypeError(
            f"rollout_is_threshold: expected a number or 'lower_upper', not a boolean, got {rollout_is_threshold}"
        )
    if rollout_is is not None and rollout_is_threshold is not None:
        weight = options.weight(rollout_is, rollout_is_threshold, normalize)
    if rollout_rs is not None:
        criteria = options.criteria(rollout_rs, rollout_rs_threshold, k1_bounds)
    return Spec(weight=weight, criteria=criteria, nonfinite=nonfinite, report=REPORT)


def _of(switches: Mapping[str, Any]) -> tuple[str, Nonfinite]:
    """Return the switches that change the Spec."""
    return switches.get("k1_bounds", "verl"), switches.get("nonfinite", "reject")


def _say(spec: Spec, rollout_is: Any, is_threshold: Any, rollout_rs: Any, rs_threshold: Any) -> None:
    """Log once how the batch is corrected, or why it is not."""
    done = [] if spec.weight is None else [f"rollout_is {rollout_is!r} with threshold {is_threshold!r}"]
    if spec.criteria:
        done.append(f"rollout_rs {rollout_rs!r} with threshold {rs_threshold!r}")
    if done:
        DROP_IN.say(True, " and ".join(done))
    elif rollout_is is not None:
        DROP_IN.say(False, f"metrics only: rollout_is is {rollout_is!r}, but rollout_is_threshold is None")
    else:
        DROP_IN.say(False, "metrics only: neither rollout_is nor rollout_rs is set")


def _corrected(
    old: Tensor,
    rollout: Tensor | None,
    mask: Tensor,
    spec: Spec,
    switches: Mapping[str, Any],
    token_ids: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Return weights, mask and metrics of log-probs, which are looked at for warnings and dumps, or of log-ratios.

    Tensors of other shapes than [B, T] are read as rows of their last dimension, over which verl sums.
    """
    given = old, torch.zeros_like(old) if rollout is None else rollout, mask
    rows = [x if x.dim() == 2 else x.reshape(-1, x.shape[-1]) for x in given]
    group = world() if spec.weight is not None and spec.weight.normalize is not None else None
    of = Batch(mask=rows[2], ranks=Ranks(batch=group))
    out = correct(rows[0], rows[1], of, spec=spec, backend=switches.get("backend", "auto"))
    pending = out.statistics.metrics_async()
    metrics = _metrics(pending, spec, switches)
    if rollout is not None:
        ids = None if token_ids is None else token_ids.reshape(-1, token_ids.shape[-1])
        DROP_IN.seen(pending, *rows, token_ids=ids)
    if group is not None:
        factor = report.PREFIX + "rollout_is_batch_norm_factor"
        metrics[factor] = out.statistics.all_reduce(group).metrics("verl")[factor]
    weights = out.weights
    if weights is not None:
        dtype = torch.promote_types(torch.promote_types(old.dtype, given[1].dtype), mask.dtype)
        weights = weights.to(dtype).reshape(old.shape)
    return weights, mask if out.mask is rows[2] else out.mask.reshape(mask.shape), metrics


def _metrics(pending: PendingMetrics, spec: Spec, switches: Mapping[str, Any]) -> dict[str, float]:
    """Compute verl's metrics from one copy to the host; the switches that depend on values apply afterwards."""
    values = pending.values()
    if not values["tokens"] and switches.get("empty_batch") == "raise":
        raise ValueError("response_mask must contain at least one valid token (1).")
    if switches.get("empty_rows") == "skip":
        values["verl/rows"] = values["sequences_measured"]
    names = switches.get("metrics", "dashboard")
    native = {} if switches.get("spec") is None else pending.result(names, prefix=report.PREFIX)
    return native | peers.read(report.formulas(spec), values)


def world() -> Any:
    """Return the default process group, over which verl takes the mean of the weights, or None."""
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _without_prefix(metrics: Mapping[str, float], start: str) -> dict[str, float]:
    """Return the metrics whose names begin with `start`, without verl's prefix."""
    names = {key.removeprefix(report.PREFIX): value for key, value in metrics.items()}
    return {name: value for name, value in names.items() if name.startswith(start)}


def proto(weights: Tensor | None) -> Any:
    """Return a DataProto that holds the weights, or None."""
    if weights is None:
        return None
    from verl.protocol import DataProto

    return DataProto.from_dict(tensors={"rollout_is_weights": weights})
