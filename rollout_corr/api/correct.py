"""The public calls, and the only place that chooses a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rollout_corr.backends import blocks, operators
from rollout_corr.backends.batch import Batch, LogProbs, read_batch
from rollout_corr.metrics import peers, schema
from rollout_corr.metrics.statistics import Measured, Statistics
from rollout_corr.spec.correction import Spec

if TYPE_CHECKING:
    from rollout_corr.backends import split_kernels

BackendName = Literal["auto", "triton", "torch", "compiled"]
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)

# A batch whose mean weight is not above this is left as it is: dividing by it would blow up what is left.
SMALLEST_MEAN = 1e-8


class Groups(NamedTuple):
    """The process groups of a call; None: this rank alone."""

    batch: Any = None
    sequence: Any = None

    def check(self, batch: Batch, leader: object, advantages: object, validate: bool) -> None:
        """Refuse what is no group, what ranks could read differently, and, when asked to, unequal numbers of sequences.

        Args:
            batch: What was read.
            leader, advantages: Log-probs and advantages as they came.
            validate: Compare the numbers of sequences.
        """
        if self.batch is None and self.sequence is None:
            return
        from rollout_corr.backends import split

        split.check_group("batch_group", self.batch)
        split.check_group("sequence_group", self.sequence)
        if self.sequence is not None:
            split.check_advantages(advantages, leader, batch.per_sequence, batch.offsets is not None)
            if validate:
                split.check_count(batch.count, self.sequence, batch.train.device)

    @property
    def first(self) -> bool:
        """Whether this rank is the one that adds what is known of whole sequences to the statistics."""
        if self.sequence is None:
            return True
        from rollout_corr.backends import split

        return split.is_first(self.sequence)

    def sum(self, totals: Tensor) -> Tensor:
        """Totals of the batch over `batch`, what a sequence group shares counting once."""
        if self.batch is None:
            return totals
        from rollout_corr.backends import split

        return split.sum_over(totals, self.batch, self.sequence)


class Begun(NamedTuple):
    """A correction under way."""

    finish: Callable[[], blocks.Result]
    done: Callable[[], bool]


class Backend(NamedTuple):
    """Which backend runs for a tensor, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Correction(Measured):
    """What `correct` gives back; nothing in it requires grad, and reading the tensors waits for nothing.

    Attributes:
        weights: Importance weights shaped like train_logp, fp32 (fp64 for fp64 log-probs), 0 at invalid tokens; None
            when the Spec has no weight and rejection edits only the mask, and in a dry run.
        mask: What trains: dtype and shape of the mask given.
        keep: [S] bool, False where a verdict fell on the whole sequence.
        statistics: Mergeable statistics on the device.
    """

    weights: Any
    mask: Any
    keep: Tensor
    statistics: Statistics


def backend_for(tensor: Tensor) -> Backend:
    """Say which backend `backend="auto"` takes for this tensor, and why.

    Args:
        tensor: Any tensor on the device in question.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor: expected a tensor, got {type(tensor).__name__}")
    where = tensor.device.type
    if where not in operators.DEVICES:
        return Backend("torch", f"tensors on {where} run on the plain-torch reference")
    reason = operators.why_not(tensor.device)
    if reason is not None:
        return Backend("torch", reason)
    return Backend("triton", f"tensors on {where} run on the Triton kernels")


def correct(
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    mask: LogProbs | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    spec: Spec = Spec(),  # noqa: B008  (frozen)
    advantages: LogProbs | None = None,
    external: Mapping[str, LogProbs] | None = None,
    backend: BackendName = "auto",
    validate: bool = False,
    batch_group: Any = None,
    sequence_group: Any = None,
) -> Correction:
    """Correct a rollout: weights, mask, verdicts and statistics from the two log-probs.

    The layout is told by the shapes alone. Inputs are detached and never modified.

    Args:
        train_logp: Log-probs under the trainer's policy, fp32, bf16, fp16 or fp64: packed [N] or [1, N] with
            `cu_seqlens`; padded [B, T], left or right, each row a sequence; a jagged nested tensor; a list of 1-D
            tensors, one a sample.
        rollout_logp: Log-probs under the engine that sampled the tokens, same layout.
        mask: Non-zero is valid, same layout, any bool, integer or floating dtype. None: every token is valid.
            Whatever stands at an invalid token is never read into a result.
        cu_seqlens: [S + 1] int32 or int64 offsets, on the CPU or on the device. Tokens outside every interval belong
            to no sequence: weight 0, mask 0.
        spec: What to do. `Spec()` measures and changes nothing.
        advantages: Per token (same layout) or per sequence ([S] or [S, 1]); needed by criteria with `when`.
        external: Per-token statistics by name, same layout; needed by criteria with stat="external".
        backend: "auto", "triton", "torch", or "compiled": the reference under torch.compile, on the CPU, several times
            as fast as "torch" after some seconds of compilation per Spec. An explicit choice never falls back.
        validate: Also check `cu_seqlens` where that needs a device read, and that it covers all tokens; with a
            `sequence_group`, that its ranks hold equally many sequences, which costs a collective more.
        batch_group: A torch.distributed group over which `normalize="batch"` takes its mean.
        sequence_group: A torch.distributed group over which the tokens of each sequence are split, in any way. All its
            ranks pass the same sequences in the same order, each with the tokens that lie there, perhaps none, and
            all results are those of the whole sequences: one all-reduce. Statistics are complete when they are reduced
            over the ranks. See docs/ranks.md.

    Returns:
        A `Correction`. No host sync has happened for tensors on a device.

    Raises:
        ValueError: A wrong shape, dtype, device, length or name; the message names the argument, what was expected
            and what came.
        TypeError: An argument of the wrong type.
    """
    groups = Groups(batch_group, sequence_group)
    return _begin(
        train_logp, rollout_logp, mask, cu_seqlens, spec, advantages, external, backend, validate, groups
    ).result()


class PendingCorrection:
    """A correction whose sequences are on their way to the other ranks."""

    def __init__(self, finish: Callable[[], Correction], done: Callable[[], bool]) -> None:
        self._finish, self._done = finish, done
        self._found: Correction | None = None

    def done(self) -> bool:
        """Whether `result` would return without waiting for another rank."""
        return self._found is not None or self._done()

    def result(self) -> Correction:
        """The correction; the same at every call."""
        if self._found is None:
            self._found = self._finish()
        return self._found


def correct_async(
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    mask: LogProbs | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    spec: Spec = Spec(),  # noqa: B008  (frozen)
    advantages: LogProbs | None = None,
    external: Mapping[str, LogProbs] | None = None,
    backend: BackendName = "auto",
    validate: bool = False,
    batch_group: Any = None,
    sequence_group: Any = None,
) -> PendingCorrection:
    """Begin what `correct` does and return while the ranks of `sequence_group` exchange their sums.

    Args and errors are those of `correct`. Without a `sequence_group` there is nothing to wait for. The inputs must not
    change before `result()`, which is to be called on every rank.
    """
    groups = Groups(batch_group, sequence_group)
    return _begin(train_logp, rollout_logp, mask, cu_seqlens, spec, advantages, external, backend, validate, groups)


def _begin(
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    mask: LogProbs | None,
    cu_seqlens: Tensor | None,
    spec: Spec,
    advantages: LogProbs | None,
    external: Mapping[str, LogProbs] | None,
    backend: str,
    validate: bool,
    groups: Groups,
) -> PendingCorrection:
    if not isinstance(spec, Spec):
        raise TypeError(f"spec: expected a Spec, got {type(spec).__name__}")
    for criterion in spec.criteria:
        if criterion.of != "train/rollout":
            raise ValueError(
                f"spec: criterion {criterion.label!r} compares {criterion.of}, which exists only inside policy_loss; "
                "correct() knows train/rollout"
            )
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {list(BACKENDS)}, got {backend!r}")
    batch = read_batch(train_logp, rollout_logp, mask, cu_seqlens, spec, advantages, external, validate)
    groups.check(batch, train_logp, advantages, validate)
    pending = begin(batch, spec, backend, groups)

    def finish() -> Correction:
        result = pending.finish()
        return Correction(
            weights=None if result.weights is None else batch.restore(result.weights),
            mask=mask_back(batch, result.mask),
            keep=result.keep,
            statistics=result.statistics,
        )

    return PendingCorrection(finish, pending.done)


def chosen_backend(tensor: Tensor, backend: str) -> str:
    """The backend that runs for a tensor, or why it cannot be the one that was asked for."""
    chosen = backend_for(tensor).name if backend == "auto" else backend
    if chosen == "triton" and (reason := operators.why_not(tensor.device)) is not None:
        raise ValueError(f"backend: expected 'auto' or 'torch' for {tensor.device} tensors, got 'triton': {reason}")
    if chosen == "compiled" and tensor.device.type != "cpu":
        raise ValueError(f"backend: 'compiled' runs on CPU tensors, got tensors on {tensor.device}")
    return chosen


def corrected(batch: Batch, spec: Spec, backend: str, groups: Groups = Groups()) -> blocks.Result:  # noqa: B008  (frozen)
    """The correction of a batch that has been read, in the batch's own shape."""
    return begin(batch, spec, backend, groups).finish()


def begin(batch: Batch, spec: Spec, backend: str, groups: Groups) -> Begun:
    """The same, as far as it goes without other ranks."""
    chosen = chosen_backend(batch.train, backend)
    if groups.sequence is not None and chosen == "compiled":
        raise ValueError("backend: expected 'auto', 'torch' or 'triton' beside a sequence_group, got 'compiled'")
    peers.load(spec)
    with torch.no_grad():
        if groups.sequence is None:
            result = _normalized(_run(batch, spec, chosen), spec, groups)
            return Begun(lambda: result, lambda: True)
        started = _started(batch, spec, chosen, groups.sequence)

    def finish() -> blocks.Result:
        with torch.no_grad():
            result = _normalized(started.finish(), spec, groups)
            if not groups.first:
                result.statistics = result.statistics.of_tokens()
            return result

    return Begun(finish, started.done)


def _started(batch: Batch, spec: Spec, backend: str, group: Any) -> blocks.Started | split_kernels.Started:
    if backend == "triton" and operators.beyond_kernels(spec) is None:
        from rollout_corr.backends import split_kernels

        return split_kernels.Started(batch, spec, group)
    return blocks.Started(batch, spec, group)


def _normalized(result: blocks.Result, spec: Spec, groups: Groups) -> blocks.Result:
    weights = result.weights
    if weights is not None and spec.weight is not None and spec.weight.normalize == "batch":
        mean = _batch_mean(result.statistics, spec, groups).to(weights.dtype)
        if spec.nonfinite == "propagate":
            # A NaN mean poisons the weights, but not the 0 at invalid tokens.
            weights = torch.where(weights == 0, weights, weights / mean)
        else:
            weights.div_(mean)
        result.weights = weights
    return result


def _run(batch: Batch, spec: Spec, backend: str) -> blocks.Result:
    if operators.beyond_kernels(spec) and (batch.train.device.type != "cpu" or torch.compiler.is_compiling()):
        return blocks.run_whole(batch, spec)
    if backend == "compiled":
        from rollout_corr.backends.compiled import run_compiled

        return run_compiled(batch, spec)
    if backend == "triton" or (batch.train.device.type == "cpu" and torch.compiler.is_compiling()):
        return operators.run_fused(batch, spec)
    if batch.train.device.type == "cpu":
        return blocks.run_blocks(batch, spec)
    return blocks.run_whole(batch, spec)


def mask_back(batch: Batch, edited: Tensor | None) -> Any:
    """The mask handed back in the caller's layout; the very object that was given where nothing was edited."""
    if edited is not None:
        return batch.restore(edited)
    if batch.given_mask is not None:
        return batch.given_mask
    return batch.restore(blocks.inside(batch))


def _batch_mean(statistics: Statistics, spec: Spec, groups: Groups) -> Tensor:
    """0-d: the mean weight of the batch, or 1 where it is too small to divide by."""
    names = schema.sum_names(spec)
    level = "" if spec.weight is not None and spec.weight.level == "token" else "sequence_"
    units = "tokens_measured" if not level else "sequences_measured"
    pair = torch.stack([statistics.sums[names.index(name)] for name in (f"{level}weight", units)])
    pair = groups.sum(pair)
    mean = 1.0 + pair[0] / pair[1].clamp(min=1.0)
    return torch.where(mean <= SMALLEST_MEAN, 1.0, mean)
