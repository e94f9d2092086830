"""The policy loss: value, statistics and gradient in one forward; backward only scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from rollout_corr import blocks, loss_metrics, objective
from rollout_corr.checked import number
from rollout_corr.layout import FLOATS_OR_INTEGERS, MASK_DTYPES, Batch, LogProbs, Reader, external_names, reader
from rollout_corr.measures import Named
from rollout_corr.objective import Operands
from rollout_corr.ops import Correction, corrected
from rollout_corr.spec import Spec
from rollout_corr.statistics import PendingMetrics, Statistics
from rollout_corr.surrogates import (
    DENOMINATORS,
    DPPO,
    DRO,
    GPG,
    KL,
    PPO,
    Objective,
    Score,
    SquaredLogRatio,
    Surrogate,
)

BACKENDS = ("auto", "torch")


@dataclass(frozen=True)
class PolicyLoss:
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

    def metrics(self, names: str = "native") -> dict[str, float]:
        """Named floats from one device-to-host copy; see docs/metrics.md."""
        return self.statistics.metrics(names)

    def metrics_async(self) -> PendingMetrics:
        """Start the copy to pinned memory and return at once; `.result()` waits for it, `.done()` does not."""
        return self.statistics.metrics_async()

    def warnings(self) -> list[str]:
        """What deserves a look, in plain words."""
        return self.statistics.warnings()


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
    reduction: str = "token_mean",
    denominator: str | float | Tensor = "original",
    max_length: float | None = None,
    external: Mapping[str, LogProbs] | None = None,
    backend: str = "auto",
    validate: bool = False,
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
            or a number or 0-d tensor that the caller has reduced over micro-batches and ranks. 0 divides nothing.
        max_length: The length that token_sum_norm divides by.
        external: Per-token statistics by name, for criteria with stat="external".
        backend: "auto" or "torch".
        validate: Also check `cu_seqlens` where that needs a device read, and that it covers all tokens.

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
    if spec is not None and not isinstance(spec, Spec):
        raise TypeError(f"spec: expected a Spec or None, got {type(spec).__name__}")
    counted, divisor = _denominator(denominator, reduction, given.read.first.device)
    wanted = Objective(surrogate, kl, regulariser, reduction, counted, max_length)
    bypass, base = _mode(wanted.surrogate, given)
    if (kl is None) != (ref_logp is None):
        missing, there = ("ref_logp", "kl") if ref_logp is None else ("kl", "ref_logp")
        raise ValueError(f"{missing}: expected one beside {there}, got None")
    if spec is None:
        weights, train_mask = _ready(given.read, correction, weights, train_mask)
        if weights is not None and bypass and not isinstance(surrogate, (Score, DPPO, GPG, DRO)):
            raise ValueError(
                f"weights: expected None in bypass mode, where {type(surrogate).__name__}'s own ratio new/rollout is "
                "the correction and a weight would correct twice; pass old_logp too, or weights through a Spec, which "
                "reports them"
            )
        found = None
    else:
        for name, ready in (("correction", correction), ("weights", weights), ("train_mask", train_mask)):
            if ready is not None:
                raise ValueError(f"spec: expected None beside ready {name}, or no {name}; got both")
        weights, train_mask, found = _corrected(given, spec, wanted.surrogate, bypass, external, backend)
        wanted = replace(wanted, nonfinite=spec.nonfinite)
    if bypass and weights is not None and isinstance(surrogate, (Score, DPPO)) and (spec is None or spec.weight):
        wanted = replace(wanted, weights_are_the_ratio=True)
        if isinstance(surrogate, Score) and (surrogate.lower, surrogate.upper) != (None, None):
            raise ValueError(
                "surrogate: expected Score() without bounds of its own where weights take the place of its ratio, got "
                f"{surrogate!r}"
            )
    return _finish(given, wanted, base, weights, train_mask, divisor, spec, found)


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


def _denominator(given: object, reduction: object, device: torch.device) -> tuple[str, Tensor | float | None]:
    """What the loss counts, and what the caller has counted."""
    if reduction == "sum" and given != "original":
        raise ValueError(
            f"denominator: expected the default with reduction='sum', which divides by nothing, got {given!r}; "
            "token_mean with this denominator is a sum over it"
        )
    if isinstance(given, str) and given in DENOMINATORS:
        return given, None
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
    read: Reader, correction: object, weights: LogProbs | None, train_mask: LogProbs | None
) -> tuple[Tensor | None, Tensor | None]:
    """Weights and training mask that the caller has, in the shape of the batch."""
    if correction is not None:
        if not isinstance(correction, Correction):
            raise TypeError(f"correction: expected what correct() gives, got {type(correction).__name__}")
        if weights is not None or train_mask is not None:
            raise ValueError("correction: expected None beside weights or train_mask, got both")
        weights, train_mask = correction.weights, correction.mask
    return read.optional("weights", weights, FLOATS_OR_INTEGERS), read.optional("train_mask", train_mask, MASK_DTYPES)


def _corrected(
    given: _Given,
    spec: Spec,
    surrogate: Surrogate,
    bypass: bool,
    external: Mapping[str, LogProbs] | None,
    backend: str,
) -> tuple[Tensor | None, Tensor | None, blocks.Result]:
    """Correct in the same call: what multiplies the loss, what trains, and what the user gets to see."""
    read, new, rollout = given.read, given.batch.train, given.rollout
    if rollout is None:
        rollout = read.tensor("rollout_logp", None)
    criteria, pairs = [], {}
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
    train = new if given.old is None else given.old
    batch = replace(given.batch, train=train, rollout=rollout, pairs=pairs)
    batch.external = read.external(external_names(spec), external)
    found = corrected(batch, run, backend)
    found.statistics = replace(found.statistics, spec=spec)
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
    spec: Spec | None,
    found: blocks.Result | None,
) -> PolicyLoss:
    batch, new = given.batch, given.read.first
    tensors = Tensors(given.advantages, base, weights, given.ref, train_mask)
    differentiable = torch.is_grad_enabled() and new.requires_grad
    traced = torch.compiler.is_compiling()
    if traced:
        # A compiler takes the derivative of what it traces itself.
        total, sums, maxima = run_traced(new, batch, tensors, wanted)
        gradient = None
    else:
        run = run_blocks if new.device.type == "cpu" else run_whole
        total, gradient, sums, maxima = run(batch, tensors, wanted, differentiable)
    if divisor is None:
        divisor = objective.divisor(sums, wanted)
    elif not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=torch.float64, device=new.device)
    divisor = torch.where(divisor == 0, 1.0, divisor)
    if wanted.max_length is not None:
        divisor = divisor * wanted.max_length
    value = (total / divisor).to(batch.dtype)
    if gradient is not None:
        value = _Differentiable.apply(new, value, gradient, divisor)
    statistics = Statistics(
        None,
        torch.stack([sums[name].double() for name in loss_metrics.sum_names(wanted)]),
        torch.stack([maxima[name].double() for name in loss_metrics.max_names()]),
        wanted,
    )
    if found is not None:
        statistics = found.statistics.join(statistics)
    handed = None if found is None or found.weights is None else batch.restore(found.weights)
    return PolicyLoss(value, _mask_back(batch, train_mask), handed, None if found is None else found.keep, statistics)


def _mask_back(batch: Batch, train_mask: Tensor | None) -> Any:
    """What trains, as the mask that was given; that very object where nothing was taken out."""
    if train_mask is not None:
        kept = train_mask != 0
        return batch.restore(kept if batch.mask is None else torch.where(kept, batch.mask, 0).to(batch.mask.dtype))
    return batch.restore(blocks.inside(batch)) if batch.given_mask is None else batch.given_mask


@dataclass
class Tensors:
    """What a loss needs besides new_logp and the mask, in the batch's shape; advantages may be per sequence."""

    advantages: Tensor
    base: Tensor | None
    weights: Tensor | None
    ref: Tensor | None
    trains: Tensor | None


Run = tuple[Tensor, Tensor | None, Named, Named]


def run_blocks(batch: Batch, tensors: Tensors, wanted: Objective, differentiable: bool) -> Run:
    """Block by block, with compaction. CPU tensors only."""
    gradient = torch.zeros(batch.train.shape, dtype=batch.dtype) if differentiable else None
    totals, sums, maxima = [], [], []
    for piece in blocks.pieces(batch):

        def take(x: Tensor | None, piece: blocks.Piece = piece) -> Tensor | None:
            return None if x is None else piece.take(x).to(batch.dtype)

        operands = Operands(
            sequences=piece.sequences,
            n_valid=piece.n_valid,
            new=piece.take(batch.train).to(batch.dtype),
            base=take(tensors.base),
            advantages=piece.advantages(tensors.advantages).token,
            weights=take(tensors.weights),
            ref=take(tensors.ref),
            valid=None,
            trains=None if tensors.trains is None else piece.take(tensors.trains) != 0,
        )
        total, slope, more_sums, more_maxima = _with_gradient(operands, wanted, differentiable, look=True)
        if gradient is not None and slope is not None:
            piece.compaction.put(gradient[piece.slots], slope)
        totals.append(total)
        sums.append(more_sums)
        maxima.append(more_maxima)
    added = {name: torch.stack([part[name].double() for part in sums]).sum(0) for name in sums[0]}
    highest = {name: torch.stack([part[name].double() for part in maxima]).amax(0) for name in maxima[0]}
    return torch.stack(totals).sum(), gradient, added, highest


def _operands(new: Tensor, batch: Batch, tensors: Tensors) -> Operands:
    sequences, valid, n_valid = blocks.whole(batch)

    def cast(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(batch.dtype)

    return Operands(
        sequences=sequences,
        n_valid=n_valid,
        new=new.to(batch.dtype),
        base=cast(tensors.base),
        advantages=blocks.whole_advantages(batch, tensors.advantages, sequences).token.to(batch.dtype),
        weights=cast(tensors.weights),
        ref=cast(tensors.ref),
        valid=valid,
        trains=None if tensors.trains is None else tensors.trains != 0,
    )


def run_whole(batch: Batch, tensors: Tensors, wanted: Objective, differentiable: bool) -> Run:
    """All sequences at once, without compaction: no host sync, on any device."""
    return _with_gradient(_operands(batch.train, batch, tensors), wanted, differentiable, look=False)


def run_traced(new: Tensor, batch: Batch, tensors: Tensors, wanted: Objective) -> tuple[Tensor, Named, Named]:
    """The same for a compiler, which wants the graph to new_logp and nothing of autograd's."""
    return objective.evaluate(_operands(new, batch, tensors), wanted)


def _with_gradient(operands: Operands, wanted: Objective, differentiable: bool, look: bool) -> Run:
    """The definition, and autograd of it."""
    if not differentiable:
        with torch.no_grad():
            total, sums, maxima = objective.evaluate(operands, wanted, look)
        return total, None, sums, maxima
    with torch.enable_grad():
        # A copy of nothing: a leaf of its own, so that what the caller holds is not touched.
        operands.new = operands.new.detach().requires_grad_()
        total, sums, maxima = objective.evaluate(operands, wanted, look)
        if not total.requires_grad:
            # There was nothing to sum over.
            return total, torch.zeros_like(operands.new), sums, maxima
        (gradient,) = torch.autograd.grad(total, operands.new)
    return total.detach(), gradient, sums, maxima


class _Differentiable(torch.autograd.Function):
    """A value whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, new: Tensor, value: Tensor, gradient: Tensor, divisor: Tensor) -> Tensor:
        """Give the value a gradient.

        Args:
            ctx: Autograd's.
            new: new_logp in the batch's shape.
            value: 0-d.
            gradient: d(value * divisor) / d(new).
            divisor: 0-d.
        """
        ctx.save_for_backward(gradient, divisor)
        ctx.dtype = new.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Scale the gradient."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "policy_loss: expected a backward pass without create_graph=True; its gradient is made in the forward "
                "pass and has no derivative of its own"
            )
        gradient, divisor = ctx.saved_tensors
        scale = (grad_outputs[0].double() / divisor).to(gradient.dtype)
        return (gradient * scale).to(ctx.dtype), None, None, None
