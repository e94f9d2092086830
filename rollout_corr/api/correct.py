"""`correct` and `correct_async`: weights, mask, keep and statistics from two log-probs."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from rollout_corr.api.outputs import Outputs, take_outputs
from rollout_corr.backends.batch import Batch, Result, check_validate
from rollout_corr.backends.choose import BACKENDS, BackendName, chosen_backend
from rollout_corr.backends.groups import Claims, Groups, claims_of
from rollout_corr.backends.layouts import LogProbs, described
from rollout_corr.backends.operators import beyond_kernels
from rollout_corr.backends.read import Given, read_batch
from rollout_corr.backends.run import mask_back, run_correction, start_correction
from rollout_corr.backends.sequence_groups import groups_given
from rollout_corr.backends.staleness import versions_given
from rollout_corr.backends.turns import check_turns, measuring_turns
from rollout_corr.metrics.statistics import HasStatistics, Statistics
from rollout_corr.specs.checked import by_path
from rollout_corr.specs.choices import SequenceOrder
from rollout_corr.specs.correction import Spec, no_spec
from rollout_corr.specs.validate import shown

if TYPE_CHECKING:
    from rollout_corr.backends.bounds_of_batch import Thresholds

P = ParamSpec("P")
R = TypeVar("R")

Renormalized = Literal["rollout", "train"]
# Offsets, ids in the layout of the log-probs, or the runs of the mask.
Turns = LogProbs | Literal["runs"]


@dataclass(frozen=True, eq=False)
class Correction(HasStatistics):
    """The result of `correct`; nothing in it requires grad, and reading the tensors waits for nothing.

    Attributes:
        weights: Importance weights shaped like train_logp, fp32 (fp64 for fp64 log-probs), 0 at invalid tokens; None
            when the Spec has no weight and rejection edits only the mask, and in a dry run.
        mask: Non-zero at tokens that train: dtype and shape of the mask given.
        keep: [S] bool, False where a criterion rejected the whole sequence.
        statistics: Mergeable statistics on the device.
        keep_turns: [U] bool, False for a turn with a valid token where a criterion rejected all of it, or its sequence;
            None without `turns`.
        turns: [U + 1] offsets of these turns among the tokens, row after row; None without `turns`.
    """

    weights: Any
    mask: Any
    keep: Tensor
    statistics: Statistics
    keep_turns: Tensor | None = None
    turns: Tensor | None = None

    def __repr__(self) -> str:
        """Shapes and dtypes; nothing is read from the device."""
        names = ("weights", "mask", "keep", *(() if self.turns is None else ("keep_turns", "turns")))
        found = ", ".join(f"{name}={described(getattr(self, name))}" for name in names)
        return f"Correction({found}, device='{self.keep.device}')"


def _by_position(call: Callable[..., Any], name: str) -> tuple[int, str]:
    """The place of the mask among the parameters of a call, and the warning for one that is passed by position."""
    names = list(inspect.signature(call).parameters)
    first = names.index("mask")
    before = ", ".join(names[:first])
    return first, f"{name}: pass the mask by keyword, mask=...; from 0.2.0 on only {before} are taken by position"


def mask_by_keyword(call: Callable[P, R]) -> Callable[P, R]:
    """Let a call warn about a mask by position: swapped with a tensor before it, nothing would notice."""
    first, message = _by_position(call, call.__name__)

    @functools.wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > first and not torch.compiler.is_compiling():
            warnings.warn(message, FutureWarning, stacklevel=2)
        return call(*args, **kwargs)

    return called


def given_by(
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    mask: LogProbs | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    spec: Spec = Spec(),  # noqa: B008  (frozen)
    advantages: LogProbs | None = None,
    external: Mapping[str, LogProbs] | None = None,
    log_mass: LogProbs | None = None,
    renormalized: Renormalized = "rollout",
    turns: Turns | None = None,
    max_turns: int | None = None,
    entropy: LogProbs | None = None,
    versions: LogProbs | None = None,
    current_version: int | None = None,
    labels: Mapping[str, Tensor] | None = None,
    label_names: Mapping[str, Sequence[str] | int] | None = None,
    group_index: Tensor | None = None,
    group_size: int | None = None,
    group_count: int | None = None,
    backend: BackendName = "auto",
    validate: bool = False,
    batch_group: Any = None,
    sequence_group: Any = None,
    sequence_order: SequenceOrder | None = None,
    out: Outputs | None = None,
    thresholds: Thresholds | None = None,
) -> Given:
    """Bundle the arguments of `correct`: what travels together becomes one record."""
    return Given(
        train_logp,
        rollout_logp,
        mask,
        cu_seqlens,
        spec=spec,
        advantages=advantages,
        external=external,
        log_mass=log_mass,
        renormalized=renormalized,
        turns=turns,
        max_turns=max_turns,
        entropy=entropy,
        versions=versions_given(versions, current_version),
        labels=labels,
        label_names=label_names,
        grouping=groups_given(group_index, group_size, group_count),
        backend=backend,
        validate=validate,
        ranks=Groups(batch_group, sequence_group, sequence_order),
        out=out,
        thresholds=thresholds,
    )


def _takes(bundle: Callable[P, Given]) -> Callable[[Callable[[Given], R]], Callable[P, R]]:
    """Let a public call take the arguments that `bundle` makes one record of, its mask by keyword."""

    def decorate(call: Callable[[Given], R]) -> Callable[P, R]:
        first, message = _by_position(bundle, call.__name__)

        @functools.wraps(call)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > first and not torch.compiler.is_compiling():
                warnings.warn(message, FutureWarning, stacklevel=2)
            return call(bundle(*args, **kwargs))

        signature = inspect.signature(bundle).replace(return_annotation=call.__annotations__["return"])
        called.__signature__ = signature  # type: ignore[attr-defined]
        return called

    return decorate


@_takes(given_by)
def correct(given: Given) -> Correction:
    """Correct a rollout: weights, mask, keep and statistics from the two log-probs.

    The shapes alone tell the layout. Inputs are detached and never modified.

    Args:
        train_logp: Log-probs under the trainer's policy, fp32, bf16, fp16 or fp64: packed [N] or [1, N] with
            `cu_seqlens`; padded [B, T], left or right, each row a sequence; a jagged nested tensor; a list of 1-D
            tensors, one a sample.
        rollout_logp: Log-probs under the engine that sampled the tokens, same layout.
        mask: Non-zero is valid, same layout, any bool, integer or floating dtype. None: every token is valid.
            A value at an invalid token is never read into a result. Pass it by keyword.
        cu_seqlens: [S + 1] int32 or int64 offsets, on the CPU or on the device. Tokens outside every interval belong
            to no sequence: weight 0, mask 0.
        spec: Weights, criteria and options. `Spec()` measures and changes nothing.
        advantages: Per token (same layout) or per sequence ([S] or [S, 1]); needed by criteria with `when`.
        external: Per-token statistics by name, same layout; needed by criteria with stat="external".
        log_mass: The log of the probability mass that truncated sampling (top-k, top-p, min-p) kept, at most 0, same
            layout, any dtype of log-probs: D = train_logp - log_mass - rollout_logp. None: sampling was not truncated,
            or both sides are over the same set.
        renormalized: The side whose log-probs are over the kept set already: "rollout", an engine that returns
            log p - log_mass, or "train", a trainer that replays the kept set: D = train_logp - (rollout_logp -
            log_mass). See docs/troubleshooting.md.
        turns: The turns of each sequence, for weights and criteria over turns and for their metrics: [U + 1] int32 or
            int64 offsets among the tokens (of [B, T] row after row), with every sequence's beginning among them; an
            integer id for each token, same layout, where neighbours of a sequence with equal ids are a turn; or "runs":
            each run of valid tokens, with the invalid ones behind it, is a turn. A 1-D tensor in the shape of packed
            log-probs is ids.
        max_turns: A bound on the turns that ids or "runs" make, for a device: without it their number is read, which
            waits. Turns that are not there are empty; where there are more, the last one has the rest.
        entropy: The entropy of the distribution that each token was drawn from, in nats, same layout, any dtype of
            log-probs, as the heads that give log-probs return it: metrics report it and the KL over it, criteria with
            stat="entropy" test it.
        versions: The version of the policy that sampled each token (same layout) or sequence ([S] or [S, 1]), any
            integer dtype. A token's age is current_version - version: metrics report it, criteria with stat="age" test
            it, `Weight.decay` uses it.
        current_version: The version of the policy that trains.
        labels: Integers that sequences ([S] or [S, 1]), turns ([U] or [U, 1]) or tokens (same layout) are told apart
            by, by name: {"environment": ids}. Their metrics come by `out.metrics(by="environment")`; those of tokens
            alone for labels of turns and tokens. An id that names no label is counted, and no error.
        label_names: For each of `labels` the names of its labels, in the order of the ids, or how many there are.
            "age", where it is none of `labels`, makes labels of the ages of `versions`, the last of which is of all
            older ones too if its name ends in "+".
        group_index: [S] or [S, 1] int32 or int64, the group of each sequence, such as the samples of one prompt, from 0
            on and in any order: for a weight with normalize="group" or a bound with within="group". A number outside of
            the range names no group: an error on the CPU, and left undivided or unbounded on a device.
        group_size: Instead of an index: so many neighbours are a group, none of which is on another rank of
            `batch_group`.
        group_count: The number of groups that an index can name, on all ranks of `batch_group`, which needs it; None:
            as many as there are sequences.
        backend: "auto", "triton" or "torch". An explicit choice never falls back.
        validate: Also check `cu_seqlens` where that needs a device read, and that it covers all tokens; and compare the
            calls of the ranks of each group: one small collective more, and an error on all ranks that names the rank.
        batch_group: A torch.distributed group over which `normalize="batch"` takes its mean, and "group" those of
            groups whose sequences lie on several ranks: one all-reduce.
        sequence_group: A torch.distributed group over which the tokens of each sequence are split, in any way. All its
            ranks pass the same sequences in the same order, each with the tokens that it holds, perhaps none, and
            all results are those of the whole sequences: one all-reduce. Statistics are complete when they are reduced
            over the ranks. See docs/ranks.md.
        sequence_order: The tokens of a sequence that this rank, r-th of R in the group, holds: "contiguous", the r-th
            of R stretches, or "zigzag", the r-th of 2 R of equal lengths and then the r-th from the end. Needed by
            prefixes alone, which take an all-reduce more, and with drop="rest" two; those come before this returns.
        out: Tensors to write the weights and the mask to, which the `Correction` then holds; every call overwrites
            them. Not for lists, nested tensors and inside torch.compile. See docs/batches.md.
        thresholds: The bounds that several calls decided together, from `threshold_statistics`; None: for a Spec whose
            bounds the batch decides this call is the batch.

    Returns:
        A `Correction`. No host sync has happened for tensors on a device.

    Raises:
        ValueError: A wrong shape, dtype, device, length or name; the message names the argument, the expected and
            the given value.
        TypeError: An argument of the wrong type.
    """
    batch, spec = read_request(given)
    return _given_back(batch, run_correction(batch, spec, given.backend, given.ranks), given.out)


class PendingCorrection:
    """A correction whose sequences are on their way to the other ranks.

    Args:
        done: Tells whether `complete` would return without waiting for another rank.
        complete: Waits, and gives the correction.
    """

    def __init__(self, done: Callable[[], bool], complete: Callable[[], Correction]) -> None:
        self._done, self._complete = done, complete
        self._found: Correction | None = None

    def done(self) -> bool:
        """True if `result` returns without waiting for another rank."""
        return self._found is not None or self._done()

    def result(self) -> Correction:
        """Give the correction, the same object at every call."""
        if self._found is None:
            self._found = self._complete()
        return self._found


@_takes(given_by)
def correct_async(given: Given) -> PendingCorrection:
    """Start a correction and return while the ranks of `sequence_group` exchange their sums.

    Args and errors are those of `correct`. Without a `sequence_group` there is nothing to wait for. The inputs must not
    change before `result()`, which is to be called on every rank.
    """
    batch, spec = read_request(given)
    done, complete = start_correction(batch, spec, given.backend, given.ranks)
    return PendingCorrection(done, lambda: _given_back(batch, complete(), given.out))


def _given_back(batch: Batch, found: Result, out: Outputs | None) -> Correction:
    """Give a result in the caller's layout, in the very tensors that the caller gave."""
    weights: Any = None if out is None else out.weights
    mask: Any = None if out is None else out.mask
    if weights is None and found.weights is not None:
        weights = batch.restore(found.weights)
    if mask is None:
        mask = mask_back(batch, found.mask)
    more = found.keep_turns, batch.turns
    return Correction(weights, mask, found.keep, found.statistics, *more)


def read_request(given: Given) -> tuple[Batch, Spec]:
    """Check all arguments of `correct`, which says what they are: the batch, and the Spec that runs."""
    groups, backend = given.ranks, given.backend
    groups.check()
    check_validate(given.validate)
    claimed = None
    try:
        spec = _checked_spec(given.spec, backend)
        if given.turns is not None or given.max_turns is not None or spec.measures_turns:
            check_turns(spec, given.turns, given.max_turns)
            spec = measuring_turns(spec)
        if backend == "triton":
            reason = beyond_kernels(spec)
            if reason is not None:
                raise ValueError(f"backend: expected 'auto' or 'torch', got 'triton': {reason}")
        batch = read_batch(given)
        if backend == "triton" and batch.labels and groups.sequence is not None:
            raise ValueError("backend: expected 'auto' or 'torch' beside labels and a sequence_group, got 'triton'")
        if given.out is not None:
            take_outputs(given.out, batch, given.train_logp, spec)
        if given.validate and groups.some():
            claimed = _claims(batch, spec, given)
    except (TypeError, ValueError) as error:
        if given.validate:
            groups.tell(error)
        raise
    if claimed is not None:
        groups.compare(claimed)
    return batch, spec


def _checked_spec(spec: object, backend: object) -> Spec:
    """Refuse what is no Spec for `correct`, and no backend."""
    if not isinstance(spec, Spec):
        raise no_spec(spec)
    for criterion in spec.criteria:
        if criterion.of != "train/rollout":
            raise ValueError(
                f"spec: criterion {criterion.label!r} compares {criterion.of}, which exists only inside policy_loss; "
                "correct() knows train/rollout"
            )
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {list(BACKENDS)}, got {shown(backend)}")
    return spec


def _claims(batch: Batch, spec: Spec, given: Given) -> Claims:
    """The call as other ranks compare it."""
    logps: dict[str, Tensor | None] = {"train_logp": batch.train, "rollout_logp": batch.rollout}
    backend = chosen_backend(batch.train, given.backend)
    fixed = by_path("Spec", spec) | {"backend": backend, "sequence_order": str(given.ranks.order)}
    if batch.mass is not None:
        logps["log_mass"] = batch.mass.log
        fixed["renormalized"] = "train" if batch.mass.from_rollout else "rollout"
    if batch.entropy is not None:
        logps["entropy"] = batch.entropy
    if given.versions is not None:
        fixed["current_version"] = str(given.versions.current)
    if given.grouping is not None:
        fixed |= given.grouping.claims()
    if batch.labels:
        fixed["labels"] = str([one.labels for one in batch.labels])
    return claims_of("correct", batch, logps, fixed)
