"""`correct` and `correct_async`: weights, mask, keep and statistics from two log-probs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypedDict, overload

from torch import Tensor

from ..backends.batch import OpenBatch
from ..backends.choose import BACKENDS, BackendName, chosen_backend
from ..backends.given import Batch, Outputs, batch_given, state_of_masks
from ..backends.layouts import L, L_co, LogProbs, W_co, described
from ..backends.operators import beyond_kernels, of_double
from ..backends.ranks import THIS_RANK, Claims, claims_of
from ..backends.read import Given, check_mask, check_turns, measuring_turns, read_batch
from ..backends.run import mask_back, run_correction, start_correction
from ..metrics.statistics import HasStatistics, Statistics
from ..specs.checked import by_path, known_keywords
from ..specs.correction import Spec, no_spec
from ..specs.operands import CorrectResult
from ..specs.validate import shown

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, eq=False)
class Correction(HasStatistics, Generic[L_co, W_co]):
    """The result of `correct`; nothing in it requires grad, and reading the tensors waits for nothing.

    Its type names the layout and the weights: `Correction[Tensor, Tensor]` for tensors and a Spec,
    `Correction[list[Tensor], None]` for lists without a Spec. `Correction` alone is any of them.

    Attributes:
        weights: Importance weights in the layout of train_logp, fp32 (fp64 for fp64 log-probs), 0 at invalid tokens.
            None without a Spec, in a dry run, or if the Spec has no weight and rejection edits only the mask (the type
            does not tell the last two).
        mask: Non-zero at trained tokens: dtype and shape of the mask given.
        keep: [S] bool, False where a criterion rejected the whole sequence.
        statistics: Mergeable statistics on the device.
        keep_turns: [U] bool, False for a turn with a valid token where a criterion rejected all of it, or its sequence;
            None without `Batch.turns`.
        turns: [U + 1] offsets of these turns among the tokens, row after row; None without `Batch.turns`.
    """

    weights: W_co
    mask: L_co
    keep: Tensor
    statistics: Statistics
    keep_turns: Tensor | None = None
    turns: Tensor | None = None
    # The mask given, the one made of it, and their state: a loss with the same ones need not make it again.
    _masks: tuple[Any, Any, tuple[int, ...] | None] = None, None, None

    def __repr__(self) -> str:
        """Shapes and dtypes; nothing is read from the device."""
        names = ("weights", "mask", "keep", *(() if self.turns is None else ("keep_turns", "turns")))
        found = ", ".join(f"{name}={described(getattr(self, name))}" for name in names)
        return f"Correction({found}, device='{self.keep.device}')"


class CorrectOptions(TypedDict, total=False):
    """The arguments of `correct` that the type of its result does not depend on."""

    mask: LogProbs | None
    cu_seqlens: Tensor | None
    advantages: LogProbs | None
    out: Outputs | None
    backend: BackendName


@overload
def correct(
    train_logp: L,
    rollout_logp: LogProbs,
    batch: Batch | None = None,
    *,
    spec: Spec,
    **more: Unpack[CorrectOptions],
) -> Correction[L, L]: ...
@overload
def correct(
    train_logp: L, rollout_logp: LogProbs, batch: Batch | None = None, **more: Unpack[CorrectOptions]
) -> Correction[L, None]: ...
@known_keywords
def correct(
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    batch: Batch | None = None,
    *,
    mask: LogProbs | None = None,
    cu_seqlens: Tensor | None = None,
    spec: Spec = Spec(),  # noqa: B008  (frozen)
    advantages: LogProbs | None = None,
    out: Outputs | None = None,
    backend: BackendName = "auto",
) -> Correction:
    """Correct a rollout: weights, mask, keep and statistics from the two log-probs.

    The shapes alone tell the layout. Inputs are detached and never modified.

    Args:
        train_logp: Log-probs under the trainer's policy, fp32, bf16, fp16 or fp64: packed [N] or [1, N] with
            `cu_seqlens`; padded [B, T], left or right, each row a sequence; a jagged nested tensor; a list or
            tuple of 1-D tensors, one a sample.
        rollout_logp: Log-probs under the engine that sampled the tokens, same layout.
        batch: Everything else about the tokens, as `Batch`: mask, offsets, turns, versions, labels, groups, ranks.
        mask: Short for `Batch(mask=...)`: non-zero is valid, same layout; None: every token is valid.
        cu_seqlens: The offsets of packed sequences, short for `Batch(cu_seqlens=...)`: [S + 1] int32 or int64.
        spec: Weights, criteria and options; `Spec()` measures and changes nothing. Bounds that the batch decides are of
            this call, and of all ranks of `Ranks.batch`.
        advantages: Per token (same layout) or per sequence ([S] or [S, 1]); needed by criteria with `when`.
        out: Tensors to write the weights and the mask to, which the `Correction` then holds; every call overwrites
            them. Not for lists, nested tensors and inside torch.compile. See docs/batches.md.
        backend: "auto", "triton" or "torch". An explicit choice never falls back.

    Returns:
        A `Correction`. No host sync has happened for tensors on a device, unless the batch decides bounds over
            `Ranks.batch`.

    Raises:
        ValueError: A wrong shape, dtype, device, length or name; the message names the argument, the expected and
            the given value.
        TypeError: An argument of the wrong type.
    """
    tokens = batch_given(batch, mask, cu_seqlens)
    given = Given(train_logp, rollout_logp, tokens, spec_given(spec, tokens), advantages, backend, out)
    opened, run = read_request(given)
    return _given_back(opened, *run_correction(opened, run, backend, tokens.ranks), out)


def spec_given(spec: object, batch: Batch, wanted: str = "a Spec") -> Spec:
    """Refuse everything but a Spec; ranks that compare their calls hear of the error."""
    if isinstance(spec, Spec):
        return spec
    raise batch.told(no_spec(spec, wanted))


class PendingCorrection(Generic[L_co, W_co]):
    """A correction whose sequences are on their way to the other ranks.

    Args:
        done: Tells whether `complete` would return without waiting for another rank.
        complete: Waits, and gives the correction.
    """

    def __init__(self, done: Callable[[], bool], complete: Callable[[], Correction[L_co, W_co]]) -> None:
        self._done, self._complete = done, complete
        self._found: Correction[L_co, W_co] | None = None

    def done(self) -> bool:
        """True if `result` returns without waiting for another rank."""
        return self._found is not None or self._done()

    def result(self) -> Correction[L_co, W_co]:
        """Return the correction, the same object at every call."""
        if self._found is None:
            self._found = self._complete()
        return self._found


@overload
def correct_async(
    train_logp: L,
    rollout_logp: LogProbs,
    batch: Batch | None = None,
    *,
    spec: Spec,
    **more: Unpack[CorrectOptions],
) -> PendingCorrection[L, L]: ...
@overload
def correct_async(
    train_logp: L, rollout_logp: LogProbs, batch: Batch | None = None, **more: Unpack[CorrectOptions]
) -> PendingCorrection[L, None]: ...
@known_keywords
def correct_async(
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    batch: Batch | None = None,
    *,
    mask: LogProbs | None = None,
    cu_seqlens: Tensor | None = None,
    spec: Spec = Spec(),  # noqa: B008  (frozen)
    advantages: LogProbs | None = None,
    out: Outputs | None = None,
    backend: BackendName = "auto",
) -> PendingCorrection:
    """Start a correction and return while the ranks of `Ranks.sequence` exchange their sums.

    Args and errors as for `correct`. Without `Ranks.sequence` there is nothing to wait for. The inputs must not
    change before `result()`, which is to be called on every rank.
    """
    tokens = batch_given(batch, mask, cu_seqlens)
    given = Given(train_logp, rollout_logp, tokens, spec_given(spec, tokens), advantages, backend, out)
    opened, run = read_request(given)
    done, complete = start_correction(opened, run, backend, tokens.ranks)
    return PendingCorrection(done, lambda: _given_back(opened, *complete(), out))


def _given_back(batch: OpenBatch, found: CorrectResult, statistics: Statistics, out: Outputs | None) -> Correction:
    """Return a result in the caller's layout, in the very tensors that the caller gave."""
    weights: Any = None if out is None else out.weights
    mask: Any = None if out is None else out.mask
    if weights is None and found.weights is not None:
        weights = batch.restore(found.weights)
    if mask is None:
        mask = mask_back(batch, found.mask)
    masks = batch.given_mask, mask, state_of_masks(batch.given_mask, mask)
    return Correction(weights, mask, found.keep, statistics, found.keep_turns, batch.turns, masks)


def read_request(given: Given) -> tuple[OpenBatch, Spec]:
    """Check all arguments of `correct`, which says what they are: the batch, and the Spec that runs."""
    ranks, backend, validate = given.batch.ranks, given.backend, given.batch.validate
    if ranks is not THIS_RANK:
        ranks.check()
    claimed, spec = None, given.spec
    assert spec is not None
    try:
        _check(spec, backend)
        if given.batch.turns is not None or spec.measures_turns:
            check_turns(spec, given.batch.turns)
            spec = measuring_turns(spec)
        if backend == "triton":
            reason = beyond_kernels(spec)
            if reason is not None:
                raise ValueError(f"backend: expected 'auto' or 'torch', got 'triton': {reason}")
        batch = read_batch(given)
        if (reason := of_double(backend, batch.dtype)) is not None:
            raise ValueError(f"backend: expected 'auto' or 'torch', got 'triton': {reason}")
        if backend == "triton" and batch.labels and ranks.sequence is not None:
            raise ValueError("backend: expected 'auto' or 'torch' for labels with ranks.sequence, got 'triton'")
        if given.out is not None:
            from .outputs import take_outputs

            batch = take_outputs(given.out, batch, given.batch, given.train_logp, spec)
        if validate:
            check_mask(batch)
            if ranks.some():
                claimed = _claims(batch, spec, given)
    except (TypeError, ValueError) as error:
        if validate:
            ranks.tell(error)
        raise
    if claimed is not None:
        ranks.compare(claimed)
    return batch, spec


def _check(spec: Spec, backend: object) -> None:
    """Refuse a Spec that is for `policy_loss` alone, and what is no backend."""
    for criterion in spec.criteria:
        if criterion.of != "train/rollout":
            raise ValueError(
                f"spec: criterion {criterion.label!r} compares {criterion.of}, which exists only inside policy_loss; "
                "correct() knows train/rollout"
            )
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {list(BACKENDS)}, got {shown(backend)}")


def _claims(batch: OpenBatch, spec: Spec, given: Given) -> Claims:
    """The call as other ranks compare it."""
    logps: dict[str, Tensor | None] = {"train_logp": batch.train, "rollout_logp": batch.rollout}
    backend = chosen_backend(batch.train, given.backend)
    of = given.batch
    fixed = by_path("Spec", spec) | {"backend": backend}
    if (mass := batch.mass) is not None:
        logps["kept_mass"] = mass.log_mass
        fixed["kept_mass.of"] = mass.of
    if batch.entropy is not None:
        logps["entropy"] = batch.entropy
    if of.versions is not None:
        fixed["versions.current"] = str(of.versions.current)
    if of.groups is not None:
        fixed |= of.groups.claims()
    if batch.labels:
        fixed["labels"] = str([one.labels for one in batch.labels])
    return claims_of("correct", batch, logps, fixed)
