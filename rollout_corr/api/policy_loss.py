"""The policy loss: value, statistics and gradient in one forward; backward only scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rollout_corr.api.correct import Correction, Groups, chosen_backend, corrected, mask_back
from rollout_corr.backends import blocks, loss_blocks, loss_operators, operators
from rollout_corr.backends.batch import FLOATS_OR_INTEGERS, MASK_DTYPES, Batch, LogProbs, Reader, external_names, reader
from rollout_corr.metrics import loss as loss_metrics
from rollout_corr.metrics.statistics import Measured, Statistics
from rollout_corr.spec.correction import Spec
from rollout_corr.spec.loss import DENOMINATORS, KL, Denominator, LossReduction, Objective, SquaredLogRatio
from rollout_corr.spec.surrogate import Surrogate
from rollout_corr.spec.surrogates import DPPO, DRO, GPG, PPO, Score
from rollout_corr.spec.validate import number

LossBackendName = Literal["auto", "triton", "torch"]
BACKENDS: tuple[LossBackendName, ...] = get_args(LossBackendName)


@dataclass(frozen=True)
class PolicyLoss(Measured):
    """What `policy_loss` gives back.

    Attributes:
        value: 0-d, fp32 (fp64 where any log-prob is); the only one that has a gradient, to `new_logp`.
        mask: What trains: dtype and shape of the mask given.
        weights: The correction's weights where a Spec was given, else None; whether the surrogate is multiplied by them
            is the mode's business.
        keep: [S] bool, the correction's verdicts where a Spec was given, else None.
        statistics: Mergeable statistics on the device: the correction's where a Spec was given, then the loss's.
    """

    value: Tensor
    mask: Any
    weights: Any
    keep: Tensor | None
    statistics: Statistics


def policy_loss(
    new_logp: LogProbs,
    advantages: LogProbs,
    mask: LogProbs | None = None,
    *,
    old_logp: LogProbs | None = None,
    rollout_logp: LogProbs | None = None,
    correction: Correction | None = None,
    weights: LogProbs | None = None,
    train_mask: LogProbs | None = None,
    spec: Spec | None = None,
    cu_seqlens: Tensor | None = None,
    surrogate: Surrogate = PPO(),  # noqa: B008  (frozen)
    kl: KL | None = None,
    ref_logp: LogProbs | None = None,
    regulariser: SquaredLogRatio | None = None,
    reduction: LossReduction = "token_mean",
    denominator: Denominator | float | Tensor = "original",
    max_length: float | None = None,
    external: Mapping[str, LogProbs] | None = None,
    backend: LossBackendName = "auto",
    validate: bool = False,
    batch_group: Any = None,
    sequence_group: Any = None,
) -> PolicyLoss:
    """The policy loss of a batch, ready for `loss.value.backward()`.

    What the surrogate's ratio compares with says the mode. *Decoupled*: `old_logp` is given, the ratio is new/old, and
    weights enter once, as constants: from `correction`, from `weights`, or from a `spec` and `rollout_logp`. *Bypass*:
    only `rollout_logp` is given; the ratio is new/rollout and is itself the correction. There a Spec rejects, and its
    weight is reported; Score and DPPO take it in place of their ratio; GPG and DRO, which have none, are multiplied by
    it. *On-policy*: neither is given, and the ratio is 1 with a gradient. `Surrogate.of` overrules.

    Args:
        new_logp: Log-probs under the policy that trains, fp32, bf16, fp16 or fp64, in any layout of `correct`. The
            gradient goes to these alone.
        advantages: Per token (same layout) or per sequence ([S] or [S, 1]).
        mask: What was generated, non-zero is valid; None: every token. What stands elsewhere is never read.
        old_logp: Log-probs under the proximal policy, same layout.
        rollout_logp: Log-probs under the engine that sampled the tokens, same layout.
        correction: What `correct` gave: its weights, and its mask as `train_mask`.
        weights: Constants that multiply the surrogate, per token, same layout.
        train_mask: What trains, non-zero, same layout; a token outside `mask` does not train whatever this says.
        spec: Correct in the same call, from old/rollout, or from new/rollout in bypass mode. Criteria with
            of="new/rollout" and of="new/old" work here. Not beside ready weights.
        cu_seqlens: [S + 1] int32 or int64 offsets of packed sequences.
        surrogate: PPO, GSPO, Reinforce, Score, DPPO, SAPO, GMPO, GPG or DRO.
        kl: A penalty for leaving `ref_logp`, or None.
        ref_logp: Log-probs under the reference policy, same layout; needed by `kl`.
        regulariser: A squared log-ratio, or None.
        reduction: "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_norm" (its sum over
            `max_length`) or "sum".
        denominator: What the sum is divided by: the "original" tokens or sequences of `mask`, those "kept" in training,
            counted over the groups below, or a number or 0-d tensor that the caller has reduced over micro-batches and
            ranks. 0 divides nothing.
        max_length: The length that token_sum_norm divides by.
        external: Per-token statistics by name, for criteria with stat="external".
        backend: "auto", "triton" or "torch". An explicit choice never falls back.
        validate: Also check `cu_seqlens` where that needs a device read, and that it covers all tokens; with a
            `sequence_group`, that its ranks hold equally many sequences, which costs a collective more.
        batch_group: A torch.distributed group over whose ranks an "original" or "kept" denominator is counted, and the
            mean of a Spec's `normalize="batch"` taken: one all-reduce of a number each.
        sequence_group: A torch.distributed group over which the tokens of each sequence are split, as in `correct`. The
            value is this rank's share: the loss is the sum of all ranks' values, whose gradient every rank gets for its
            own tokens. See docs/ranks.md.

    Returns:
        A `PolicyLoss`. Its gradient exists already; backward multiplies. It is exactly 0 at every token that does not
        train.

    Raises:
        ValueError: A wrong shape, dtype, device, length or name, or arguments that exclude each other.
        TypeError: An argument of the wrong type.
    """
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {list(BACKENDS)} for policy_loss, got {backend!r}")
    given = _read(new_logp, advantages, mask, old_logp, rollout_logp, ref_logp, cu_seqlens, validate)
    groups = Groups(batch_group, sequence_group)
    groups.check(given.batch, new_logp, advantages, validate)
    if sequence_group is not None and backend == "triton":
        raise ValueError("backend: expected 'auto' or 'torch' for a loss beside a sequence_group, got 'triton'")
    chosen = chosen_backend(given.read.first, backend)
    if spec is not None and not isinstance(spec, Spec):
        raise TypeError(f"spec: expected a Spec or None, got {type(spec).__name__}")
    counted, divisor = _denominator(denominator, reduction, given.read.first.device)
    wanted = Objective(surrogate, kl, regulariser, reduction, counted, max_length)
    bypass, base = _mode(wanted.surrogate, given)
    if (kl is None) != (ref_logp is None):
        missing, there = ("ref_logp", "kl") if ref_logp is None else ("kl", "ref_logp")
        raise ValueError(f"{missing}: expected one beside {there}, got None")
    if spec is None:
        weights, train_mask = _ready(given, correction, weights, train_mask)
        if weights is not None and bypass and not isinstance(surrogate, (Score, DPPO, GPG, DRO)):
            raise ValueError(
                f"weights: expected None in bypass mode, where {type(surrogate).__name__}'s own ratio new/rollout is "
                "the correction and a weight would correct twice; pass train_mask alone, or old_logp too, or a "
                "Spec, which rejects and reports the weight"
            )
        found = None
    else:
        for name, ready in (("correction", correction), ("weights", weights), ("train_mask", train_mask)):
            if ready is not None:
                raise ValueError(f"spec: expected None beside ready {name}, or no {name}; got both")
        weights, train_mask, found = _corrected(given, spec, wanted.surrogate, bypass, external, backend, groups)
    weighted = bypass and weights is not None and (spec is None or spec.weight is not None)
    if weighted and isinstance(surrogate, Score) and (surrogate.lower, surrogate.upper) != (None, None):
        raise ValueError(
            "surrogate: expected Score() without bounds of its own where weights take the place of its ratio, got "
            f"{surrogate!r}"
        )
    if spec is not None or weighted:
        # Not by `dataclasses.replace`, which older compilers cannot follow.
        instead = weighted and isinstance(surrogate, (Score, DPPO))
        nonfinite = "reject" if spec is None else spec.nonfinite
        wanted = Objective(surrogate, kl, regulariser, reduction, counted, max_length, instead, nonfinite)
    return _finish(given, wanted, base, weights, train_mask, divisor, found, chosen, groups)


@dataclass
class _Given:
    """The arguments that are tensors, in the shape of the batch. `batch.train` is new_logp, detached."""

    read: Reader
    batch: Batch
    old: Tensor | None
    rollout: Tensor | None
    ref: Tensor | None
    advantages: Tensor


def _read(
    new_logp: LogProbs,
    advantages: LogProbs,
    mask: LogProbs | None,
    old_logp: LogProbs | None,
    rollout_logp: LogProbs | None,
    ref_logp: LogProbs | None,
    cu_seqlens: Tensor | None,
    validate: bool,
) -> _Given:
    read = reader("new_logp", new_logp, cu_seqlens, validate)
    old, rollout, ref = (
        read.optional(name, x)
        for name, x in (("old_logp", old_logp), ("rollout_logp", rollout_logp), ("ref_logp", ref_logp))
    )
    new, flat_mask = read.first.detach(), read.optional("mask", mask, MASK_DTYPES)
    # What stands beside new_logp is of the widest dtype, so that the batch computes in it.
    beside = new
    for x in (old, rollout, ref):
        if x is not None and x.element_size() > beside.element_size():
            beside = x
    batch = Batch(new, beside, flat_mask, read.offsets, read.count, read.restore, mask)
    if advantages is None:
        raise ValueError("advantages: expected one per token or per sequence, got None")
    batch.advantages, batch.per_sequence = read.advantages(advantages, batch.dtype)
    return _Given(read, batch, old, rollout, ref, batch.advantages)


def _denominator(given: object, reduction: object, device: torch.device) -> tuple[Denominator, Tensor | float | None]:
    """What the loss counts, and what the caller has counted."""
    if reduction == "sum" and given != "original":
        raise ValueError(
            f"denominator: expected the default with reduction='sum', which divides by nothing, got {given!r}; "
            "token_mean with this denominator is a sum over it"
        )
    if given == "original":
        return "original", None
    if given == "kept":
        return "kept", None
    if isinstance(given, Tensor):
        if given.numel() != 1 or given.dtype == torch.bool or given.is_complex():
            got = f"{str(given.dtype).removeprefix('torch.')} of shape {list(given.shape)}"
            raise ValueError(f"denominator: expected a tensor that holds one number, got {got}")
        return "original", given.detach().reshape(()).to(device=device, dtype=torch.float64, non_blocking=True)
    if isinstance(given, Real) and not isinstance(given, bool):
        value = number("denominator", given)
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"denominator: expected a finite number >= 0, got {value!r}")
        return "original", value
    raise ValueError(f"denominator: expected one of {list(DENOMINATORS)}, a number or a 0-d tensor, got {given!r}")


def _mode(surrogate: Surrogate, given: _Given) -> tuple[bool, Tensor | None]:
    """Whether this is bypass mode, and what the ratio compares new_logp with."""
    of = surrogate.of
    if of is None:
        of = "new/old" if given.old is not None else "new/rollout"
        return of == "new/rollout" and given.rollout is not None, given.old if of == "new/old" else given.rollout
    name, base = ("old_logp", given.old) if of == "new/old" else ("rollout_logp", given.rollout)
    if base is None:
        raise ValueError(f"{name}: expected log-probs for a surrogate with of={of!r}, got None")
    return of == "new/rollout", base


def _ready(
    given: _Given, correction: object, weights: LogProbs | None, train_mask: LogProbs | None
) -> tuple[Tensor | None, Tensor | None]:
    """Weights and training mask that the caller has, in the shape of the batch."""
    if correction is not None:
        if not isinstance(correction, Correction):
            raise TypeError(f"correction: expected what correct() gives, got {type(correction).__name__}")
        if weights is not None or train_mask is not None:
            raise ValueError("correction: expected None beside weights or train_mask, got both")
        weights, train_mask = correction.weights, correction.mask
    if train_mask is given.batch.given_mask:
        train_mask = None
    read = given.read
    return read.optional("weights", weights, FLOATS_OR_INTEGERS), read.optional("train_mask", train_mask, MASK_DTYPES)


def _corrected(
    given: _Given,
    spec: Spec,
    surrogate: Surrogate,
    bypass: bool,
    external: Mapping[str, LogProbs] | None,
    backend: str,
    groups: Groups,
) -> tuple[Tensor | None, Tensor | None, blocks.Result]:
    """Correct in the same call: what multiplies the loss, what trains, and what the user gets to see."""
    read, new, rollout = given.read, given.batch.train, given.rollout
    if rollout is None:
        rollout = read.tensor("rollout_logp", None)
    criteria, pairs = [], dict[str, tuple[Tensor, Tensor]]()
    for criterion in spec.criteria:
        if criterion.of == "new/old" and given.old is None:
            raise ValueError(f"old_logp: expected log-probs for criterion {criterion.label!r} of new/old, got None")
        if criterion.of == "new/rollout" and given.old is None:
            criterion = replace(criterion, of="train/rollout")
        if criterion.of != "train/rollout":
            pairs[criterion.of] = (new, rollout if criterion.of == "new/rollout" or given.old is None else given.old)
        criteria.append(criterion)
    own_ratio = bypass and not isinstance(surrogate, (Score, DPPO, GPG, DRO))
    # A surrogate that is not multiplied by weights needs the verdicts themselves.
    rejected = "both" if own_ratio and spec.rejected == "zero" else spec.rejected
    run = replace(spec, criteria=tuple(criteria), rejected=rejected)
    if backend == "triton" and (reason := operators.beyond_kernels(run)) is not None:
        raise ValueError(f"backend: expected 'auto' or 'torch', got 'triton': {reason}")
    train = new if given.old is None else given.old
    batch = given.batch.of(train, rollout, pairs)
    if all(criterion.when == "any" for criterion in criteria):
        batch.advantages = None
    batch.external = read.external(external_names(spec), external)
    found = corrected(batch, run, backend, groups)
    found.statistics = Statistics(spec, found.statistics.sums, found.statistics.maxima)
    weights, train_mask = found.weights, found.mask
    if own_ratio:
        weights = None if spec.rejected == "mask" or train_mask is None else (train_mask != 0).to(batch.dtype)
        if spec.rejected == "zero":
            found.mask = train_mask = None
    return weights, train_mask, found


# --- running it ---


def _finish(
    given: _Given,
    wanted: Objective,
    base: Tensor | None,
    weights: Tensor | None,
    train_mask: Tensor | None,
    divisor: Tensor | float | None,
    found: blocks.Result | None,
    backend: str,
    groups: Groups,
) -> PolicyLoss:
    batch, new = given.batch, given.read.first
    tensors = loss_blocks.Tensors(given.advantages, base, weights, given.ref, train_mask)
    differentiable = torch.is_grad_enabled() and new.requires_grad
    if divisor is not None and not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=torch.float64, device=new.device)
    if groups.sequence is not None:
        done = loss_blocks.run_split(batch, tensors, wanted, differentiable, divisor, groups.sequence)
    elif backend == "triton":
        done = loss_operators.run_fused(batch, tensors, wanted, differentiable, divisor)
    elif torch.compiler.is_compiling():
        # A compiler takes the derivative of what it traces itself.
        done = loss_blocks.run_traced(new, batch, tensors, wanted, divisor)
    else:
        run = loss_blocks.run_blocks if new.device.type == "cpu" else loss_blocks.run_whole
        done = run(batch, tensors, wanted, differentiable, divisor)
    if divisor is None and groups.batch is not None and wanted.reduction != "sum":
        done = loss_blocks.divided_by(done, groups.sum(loss_blocks.counted(done.statistics, wanted)), wanted)
    if not groups.first:
        done.statistics[: len(loss_metrics.OF_SEQUENCES)] = 0.0
    value = done.value
    if done.gradient is not None:
        value = loss_blocks.Differentiable.apply(new, value, done.gradient, done.inners, done.divisor, batch.offsets)
    sums = len(loss_metrics.sum_names(wanted))
    statistics = Statistics(None, done.statistics[:sums], done.statistics[sums:], wanted)
    if found is not None:
        statistics = found.statistics.join(statistics)
    if found is None:
        return PolicyLoss(value, mask_back(batch, _within(batch, train_mask)), None, None, statistics)
    handed = None if found.weights is None else batch.restore(found.weights)
    return PolicyLoss(value, mask_back(batch, found.mask), handed, found.keep, statistics)


def _within(batch: Batch, train_mask: Tensor | None) -> Tensor | None:
    """The mask given, with 0 where a ready training mask has it; None where there is none."""
    if train_mask is None:
        return None
    if batch.mask is None:
        return (train_mask != 0) & blocks.inside(batch)
    return torch.where(train_mask != 0, batch.mask, 0).to(batch.mask.dtype)
