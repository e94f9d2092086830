"""Arguments of callers besides log-probs: `Batch` and the records that it holds, `Factors`, `Outputs`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..definition.tokens import KeptMass as KeptMass
from ..specs.checked import keywords_meant
from ..specs.validate import boolean, number, shown
from .batch import CPU, STRIDED, SequenceGroups, is_followed
from .layouts import LogProbs, described
from .ranks import THIS_RANK
from .ranks import Ranks as Ranks

T = TypeVar("T", bound=Tensor | SequenceGroups | None)


@keywords_meant(label_names="names=", index="ids=")
@dataclass(frozen=True, eq=False)
class Labels:
    """Integer labels of sequences, turns or tokens, and their names.

    Attributes:
        ids: [S] or [S, 1] of sequences, [U] or [U, 1] of turns, or one for each token in the layout of the log-probs.
            None only under two names: "age", the ages of `versions`, and "advantage", the signs of `advantages`.
        names: The name of each label, in the order of the ids; or how many labels there are. For ages, a last name that
            ends in "+", such as "4+", covers all older tokens. Signs need none: they are "negative", "zero" and
            "positive".
    """

    ids: LogProbs | None = None
    names: Sequence[str] | int = ()


@keywords_meant(train_mask="mask=")
@dataclass(frozen=True, eq=False)
class Factors:
    """Weights and a training mask from elsewhere, in place of a `Correction`.

    Attributes:
        weights: Constants that multiply the surrogate's loss, per token; None: 1.
        mask: Non-zero at trained tokens, per token; a token outside the batch's mask never trains. None: all train.
    """

    weights: LogProbs | None = None
    mask: LogProbs | None = None


@dataclass(frozen=True, eq=False)
class Outputs:
    """Tensors that `correct` writes to, every element of them, and returns.

    Every call overwrites them, so clone a result that has to outlive the next call, or give it tensors of its own.

    Attributes:
        weights: Shaped like train_logp, contiguous, in the dtype of `Correction.weights`; None: a new tensor.
        mask: Shaped like train_logp, contiguous, in the dtype of the mask given, bool without one; None: a new tensor.
    """

    weights: Tensor | None = None
    mask: Tensor | None = None


@keywords_meant(max_turns="at_most=", turns="ids=")
@dataclass(frozen=True, eq=False)
class TurnIds:
    """Turns that ids or the runs of the mask make, with a bound on their number.

    Attributes:
        ids: An integer for each token, in the layout of the log-probs, or "runs".
        at_most: The largest number of turns. Pass it on a device: otherwise counting the turns costs a host sync.
            Surplus turns are empty; if there are more turns than this, the last one takes the rest.
    """

    ids: LogProbs | Literal["runs"]
    at_most: int


# Offsets, ids in the layout of the log-probs, the runs of the mask, or ids with a bound.
Turns = LogProbs | Literal["runs"] | TurnIds


class Versions(NamedTuple):
    """The versions of the policies that sampled, and the version that trains. A token's age is the difference.

    Attributes:
        ids: The version of the policy that sampled each token (same layout as the log-probs) or sequence ([S] or
            [S, 1]), any integer dtype.
        current: The version of the policy being trained.
    """

    ids: LogProbs
    current: int


@keywords_meant(group_index="index=", group_size="size=", group_count="count=", ids="index=")
@dataclass(frozen=True, eq=False)
class Groups:
    """The group of each sequence, such as the samples of one prompt: an index, or the size of groups of neighbors.

    Attributes:
        index: [S] or [S, 1] int32 or int64, the group of each sequence, from 0 on and in any order. A number outside of
            the range names no group: an error on the CPU, and left undivided or unbounded on a device.
        size: Instead of an index: this many neighbors form a group, all on one rank of `Ranks.batch`.
        count: The number of groups that an index can name, on all ranks of `Ranks.batch`, which needs it; None: as many
            as there are sequences.
    """

    index: Tensor | None = None
    size: int | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        for name, x in (("size", self.size), ("count", self.count)):
            if x is not None and (isinstance(x, bool) or not isinstance(x, int) or x < 1):
                raise ValueError(f"groups.{name}: expected an integer above 0 or None, got {shown(x)}")
        if self.size is None and self.index is None:
            raise ValueError("groups: expected index= or size=, got neither")
        if self.size is not None:
            for name in ("index", "count"):
                if getattr(self, name) is not None:
                    raise ValueError(f"groups.{name}: expected None with groups.size, got both")

    def claims(self) -> dict[str, str]:
        """The parts that have to be equal on all ranks, as text by name."""
        index = "None" if self.index is None else "given"
        return {"groups.index": index, "groups.size": str(self.size), "groups.count": str(self.count)}


@keywords_meant(
    max_turns="turns=rc.TurnIds(ids, at_most=...)", label_names="labels={name: rc.Labels(ids, names)}",
    log_mass="kept_mass=rc.KeptMass(log_mass)", renormalized='kept_mass=rc.KeptMass(log_mass, of="train")',
    current_version="versions=rc.Versions(ids, current)", group_index="groups=rc.Groups(index=...)",
    group_size="groups=rc.Groups(size=...)", group_count="groups=rc.Groups(index=..., count=...)",
    batch_group="ranks=rc.Ranks(batch=...)", sequence_group="ranks=rc.Ranks(sequence=...)", denominator="total=",
    attention_mask="mask=", response_mask="mask=", spec="spec= of the call", advantages="advantages= of the call",
)  # fmt: skip
@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Batch:
    """Everything about the tokens of a batch except their log-probs. Every call takes one and reads it once.

    A loop makes one and passes it to `correct`, `policy_loss` and `dump`. It holds the tensors as they are, and keeps
    what a call has read of offsets, turns and groups. A tensor that is written to afterwards is read again. Torch does
    not count writes through `x.data` or through NumPy: after one make a new Batch, as by `dataclasses.replace(batch)`.

    Args:
        mask: Non-zero is valid: same layout as the log-probs, any bool, integer or floating dtype. None: every token is
            valid. Values at invalid tokens never affect a result.
        cu_seqlens: [S + 1] int32 or int64 offsets of packed sequences, on the CPU or on the device. Tokens outside
            every interval belong to no sequence: weight 0, mask 0.
        turns: The turns of each sequence, for weights and criteria over turns and for their metrics: [U + 1] int32 or
            int64 offsets among the tokens (of [B, T] row after row), with every sequence's beginning among them; an
            integer id for each token, same layout, where neighbors of a sequence with equal ids are a turn; or "runs":
            each run of valid tokens, with the invalid ones after it, is a turn. A 1-D tensor in the shape of packed
            log-probs is ids. `TurnIds` bounds their number.
        entropy: The entropy of the distribution that each token was drawn from, in nats, same layout, any dtype of
            log-probs, as the heads that give log-probs return it: for metrics, criteria with stat="entropy", the
            entropy bonus of a loss, whose gradient goes there. Each call with it reports its metrics.
        labels: `Labels` by name, {"environment": rc.Labels(ids, ["math", "code"])}, for
            `out.metrics(by="environment")`. An id without a label is counted, and is not an error. "age"
            without ids makes labels of the ages of `versions`, "advantage" of the signs of the call's `advantages`.
        external: Per-token statistics by name, same layout; needed by criteria with stat="external".
        kept_mass: The mass that truncated sampling (top-k, top-p, min-p) kept, as `KeptMass`. None: sampling was not
            truncated, or both sides are over the same set.
        versions: The versions of the policies that sampled, as `Versions`: metrics report ages, criteria with
            stat="age" test them, `Weight.decay` uses them.
        groups: The groups of sequences, such as the samples of one prompt, as `Groups`: for a weight with
            normalize="group", a bound with within="group", and REAL.
        sequence_ids: [S] or [S, 1], int32 or int64: the number of each sequence, by which a surrogate draws its tokens
            (ClipCov), whatever the packing and the rank. Without, a sequence is known by its place in the call and the
            rank in `Ranks.batch`.
        scale: Factors of the whole loss, KL and regularizer included, per token (same layout) or per sequence ([S] or
            [S, 1]). They do not change the divisor, and `correct` does not read them. To divide each sequence or group
            by its own count, pass the reciprocal with Mean("sum"). A token whose factor is not finite is counted and
            adds nothing.
        total: What a loss is divided by, in place of the tokens or sequences that it counts itself: a number or a 0-d
            tensor that the caller has reduced over micro-batches and ranks. Each sequence's own mean stays over the
            tokens of `mask`, and a KL with a mean of its own counts for itself. By 0 nothing is divided.
        ranks: The process groups that the batch is spread over, as `Ranks`.
        validate: Also check `cu_seqlens` where that needs a device read, that it covers all tokens, and that no mask is
            NaN; and compare the calls of the ranks of each group: one small collective more, and an error on all ranks
            that names the rank.

    Raises:
        TypeError: An argument of the wrong type. Shapes, dtypes and devices are checked by the first call.
    """

    mask: LogProbs | None = None
    cu_seqlens: Tensor | None = None
    turns: Turns | None = None
    entropy: LogProbs | None = None
    labels: Mapping[str, Labels] | None = None
    external: Mapping[str, LogProbs] | None = None
    kept_mass: KeptMass | None = None
    versions: Versions | None = None
    groups: Groups | None = None
    sequence_ids: Tensor | None = None
    scale: LogProbs | None = None
    total: float | Tensor | None = None
    ranks: Ranks = THIS_RANK
    validate: bool = False
    _read: dict[str, _Read] | None = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name, alone in _TENSORS.items():
            _check_tensors(name, getattr(self, name), alone)
        for name, (kinds, write) in _RECORDS.items():
            if not isinstance(value := getattr(self, name), kinds):
                raise _no_record(name, value, write)
        if not isinstance(self.turns, (str, TurnIds)):
            _check_tensors("turns", self.turns)
        if self.external is not None:
            if not isinstance(self.external, Mapping):
                raise TypeError(f"external: expected a mapping of names to tensors, got {type(self.external).__name__}")
            for name, x in self.external.items():
                _check_tensors(f"external[{name!r}]", x)
        if self.labels is not None:
            _check_labels(self.labels)
        if self.total is not None and not isinstance(self.total, Tensor):
            number("total", self.total)
        boolean("validate", self.validate)

    def __repr__(self) -> str:
        """Shapes and dtypes of what it holds; nothing is read from a device."""
        words = []
        for name in _FIELDS:
            value = getattr(self, name)
            if value is None or value is False or (isinstance(value, Ranks) and not value.some()):
                continue
            plain = isinstance(value, (Tensor, list, tuple)) and not hasattr(value, "_fields")
            words.append(f"{name}={described(value) if plain else shown(value)}")
        return f"Batch({', '.join(words)})"

    def __getstate__(self) -> dict[str, Any]:
        """The fields. What was read belongs to these very tensors, and no copy of them."""
        return {**self.__dict__, "_read": {}}

    def told(self, error: Exception) -> Exception:
        """Return the error, after telling it to the ranks that compare their calls."""
        if self.validate:
            self.ranks.tell(error)
        return error

    def once(self, name: str, read: Callable[[], T], device: torch.device, key: Hashable, *tensors: object) -> T:
        """Return what `read` found before, unless the key changed or a tensor that it read was written to.

        On a GPU it is kept for the current stream, and while a graph is captured `read` is part of the graph.

        Args:
            name: What is read.
            read: Reads it.
            device: The device of the log-probs.
            key: Everything else that it depends on, such as shapes.
            *tensors: The tensors of this batch that it depends on; others than plain tensors count as changed.
        """
        kept = self._read
        if kept is None or is_followed():
            return read()
        place, state = _place_of(device), _state_of(tensors)
        if place is None or state is None:
            return read()
        of, known = (key, place, state), kept.get(name)
        if known is not None and known.of == of and (known.tensor is None or known.tensor._version == known.version):
            found: T = known.value
            return found
        # A tensor that is made in inference mode could not be saved for a backward pass.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
            value: T = _copied(read())
        tensor = _tensor_of(value)
        if tensor is None or type(tensor) is Tensor:
            kept[name] = _Read(of, value, tensor, 0 if tensor is None else tensor._version)
        return value


class _Read(NamedTuple):
    """A value that a call has read of a Batch, with what it depends on."""

    of: object  # what it depends on
    value: Any
    tensor: Tensor | None  # the tensor in it, or None. The caller gets it with a result, and can write to it too
    version: int  # how often the tensor had been written to


# Fields that are tensors, or lists of them unless they stand alone.
_TENSORS = {"mask": False, "cu_seqlens": True, "entropy": False, "sequence_ids": True, "scale": False}
# Fields that are records, and what to write for one.
_NONE = type(None)
_RECORDS: dict[str, tuple[tuple[type, ...], str]] = {
    "kept_mass": ((KeptMass, _NONE), 'rc.KeptMass(log_mass, of="rollout")'),
    "versions": ((Versions, _NONE), "rc.Versions(ids, current)"),
    "groups": ((Groups, _NONE), "rc.Groups(index=...) or rc.Groups(size=...)"),
    "ranks": ((Ranks,), "rc.Ranks(batch=...) or rc.Ranks(sequence=...)"),
}
_FIELDS = tuple(name for name in Batch.__dataclass_fields__ if not name.startswith("_"))
_DEFAULTS: dict[str, Any] = {**dict.fromkeys(_FIELDS), "ranks": THIS_RANK, "validate": False, "_read": None}


def _place_of(device: torch.device) -> int | None:
    """Tell streams of a GPU apart: work of another has perhaps not run yet; None while a graph is captured."""
    if device == CPU or device.type != "cuda":
        return 0
    return None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream


def _state_of(tensors: Sequence[object]) -> tuple[int, ...] | None:
    """Where each tensor lies and how often it was written to; None where that is not known."""
    found: list[int] = []
    for x in tensors:
        if type(x) is Tensor and x.layout is STRIDED and not x.is_inference():
            found += (x._version, x.data_ptr())
        elif x is not None and not isinstance(x, str):
            return None
    return tuple(found)


def state_of_masks(given: object, made: object) -> tuple[int, ...] | None:
    """Return the same of the mask of a batch and the one made of it, tensors or lists of them."""
    if given is None or is_followed():
        return None
    return _state_of([x for mask in (given, made) for x in (mask if isinstance(mask, (list, tuple)) else (mask,))])


def _tensor_of(value: Tensor | SequenceGroups | None) -> Tensor | None:
    return value.numbers if isinstance(value, SequenceGroups) else value


def _copied(value: Any) -> Any:
    """Copy what was checked on the host: a write that torch does not count shall not reach it."""
    x = _tensor_of(value)
    if x is None or x.device.type != "cpu":
        return value
    return value._replace(numbers=x.clone()) if isinstance(value, SequenceGroups) else x.clone()


def _check_tensors(name: str, given: object, alone: bool = False) -> None:
    """Refuse what is no tensor, nor a list of tensors unless it stands `alone`; None is left out."""
    if given is None or isinstance(given, Tensor):
        return
    got = type(given).__name__
    if isinstance(given, (list, tuple)):
        others = [x for x in given if not isinstance(x, Tensor)]
        if not others and not alone:
            return
        if others:
            got = f"{got} of {type(others[0]).__name__}; write torch.tensor(...)"
    raise TypeError(f"{name}: expected a tensor{'' if alone else ' or a list of tensors'}, got {got}")


def _no_record(name: str, given: object, write: str) -> TypeError:
    got = described(given) if isinstance(given, Tensor) else shown(given)
    return TypeError(f"{name}: expected {write}, got {type(given).__name__} {got}")


def _check_labels(labels: object) -> None:
    if not isinstance(labels, Mapping):
        raise TypeError(f"labels: expected a mapping of names to rc.Labels(ids, names), got {type(labels).__name__}")
    for name, value in labels.items():
        if not isinstance(value, Labels):
            raise _no_record(f"labels[{name!r}]", value, "rc.Labels(ids, names)")


def batch_given(batch: object, mask: LogProbs | None, cu_seqlens: Tensor | None) -> Batch:
    """The Batch of a call, made of the short forms where none is given."""
    if batch is None:
        return Batch(mask=mask, cu_seqlens=cu_seqlens) if torch.compiler.is_compiling() else _short(mask, cu_seqlens)
    if not isinstance(batch, Batch):
        raise _no_batch(batch)
    for name, x in (("mask", mask), ("cu_seqlens", cu_seqlens)):
        if x is not None:
            raise batch.told(ValueError(f"{name}: expected None with a Batch, got both; write rc.Batch({name}=...)"))
    return batch


def _short(mask: LogProbs | None, cu_seqlens: Tensor | None) -> Batch:
    """Make a Batch for one call, in a third of the time that its constructor takes; nothing of it is kept."""
    made = object.__new__(Batch)
    made.__dict__.update(_DEFAULTS, mask=mask, cu_seqlens=cu_seqlens)
    return made


def _no_batch(given: object) -> TypeError:
    """Make the error for what is no Batch, with what to write."""
    kind, hint = type(given).__name__, ""
    if isinstance(given, (Tensor, list, tuple)) and not hasattr(given, "_fields"):
        hint = "; a mask is mask=..., offsets are cu_seqlens=..., all else goes into batch=rc.Batch(...)"
    elif isinstance(given, Mapping):
        hint = f"; write rc.Batch({', '.join(f'{name}=...' for name in given)})"
    elif kind == "Recipe":
        hint = "; of a recipe pass loss=recipe.loss and spec=recipe.spec"
    elif kind in ("Spec", "Loss", "Correction"):
        hint = f"; write {kind.lower()}=..."
    return TypeError(f"batch: expected rc.Batch(mask=..., cu_seqlens=...) or None, got {kind}{hint}")
