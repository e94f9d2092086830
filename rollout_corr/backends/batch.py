"""Layouts: packed, padded, jagged and lists become one view; results go back the way they came.

Every check reads metadata only (shape, dtype, device), except that `cu_seqlens` on the CPU is read, and any
`cu_seqlens` when `validate=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollout_corr.spec.correction import Spec

LogProbs = Tensor | Sequence[Tensor]

LOGP_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MASK_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
FLOATS_OR_INTEGERS = (*LOGP_DTYPES, torch.int64, torch.int32)

# Each framework returns the rollout engine's log-probs only when told to; a missing tensor is nearly always this.
ROLLOUT_SWITCHES = (
    "verl: actor_rollout_ref.rollout.calculate_log_probs=True; xtuner: RolloutConfig return_logprob=True; "
    "SkyRL: generator.sampling_params.logprobs=0; TRL: vllm_importance_sampling_correction=True; "
    "slime, miles: --use-tis or --get-mismatch-metrics; OpenRLHF: --algo.advantage.is_correction_level; "
    "NeMo RL: the generation worker's generation_logprobs; vLLM itself: SamplingParams(logprobs=0); "
    "SGLang itself: return_logprob=True"
)


@dataclass
class Batch:
    """The same batch whatever its layout: [N] with offsets, or [B, T] without."""

    train: Tensor
    rollout: Tensor
    mask: Tensor | None
    offsets: Tensor | None  # [S + 1]; None says that every row of [B, T] is a sequence
    count: int
    restore: Callable[[Tensor], LogProbs]
    given_mask: LogProbs | None
    advantages: Tensor | None = None
    per_sequence: bool = False
    external: dict[str, Tensor] = field(default_factory=dict)
    # Further pairs of log-probs that criteria compare: `Criterion.of` to numerator and denominator.
    pairs: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that computes."""
        return torch.promote_types(torch.promote_types(self.train.dtype, self.rollout.dtype), torch.float32)

    def of(self, train: Tensor, rollout: Tensor, pairs: dict[str, tuple[Tensor, Tensor]]) -> Batch:
        """The same tokens under other policies. Not by `dataclasses.replace`, which older compilers cannot follow."""
        given = self.mask, self.offsets, self.count, self.restore, self.given_mask
        return Batch(train, rollout, *given, self.advantages, self.per_sequence, self.external, pairs)


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)


def _tensor(
    name: str, x: object, dtypes: tuple[torch.dtype, ...], like: Tensor | None = None, leader: str = "train_logp"
) -> Tensor:
    if x is None and name == "rollout_logp":
        raise ValueError(
            "rollout_logp: expected the log-probs of the engine that sampled the tokens, got None. "
            f"Ask for them with {ROLLOUT_SWITCHES}"
        )
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if type(x).__name__ == "DTensor":
        raise TypeError(
            f"{name}: expected a plain tensor, got a DTensor; pass {name}.to_local(), and, if a mesh dimension splits "
            "sequences, its mesh.get_group(dimension) as sequence_group"
        )
    if x.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {x.layout}")
    if x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: expected a dtype among {names}, got {str(x.dtype).removeprefix('torch.')}")
    if like is not None:
        if x.device != like.device:
            raise ValueError(f"{name}: expected device {like.device} (of {leader}), got {x.device}")
        if x.shape != like.shape:
            raise ValueError(f"{name}: expected shape {_shape(like)} (of {leader}), got {_shape(x)}")
    return x


@dataclass
class Reader:
    """How the arguments of one call are read: its layout, as the first of them tells it.

    Attributes:
        leader: Name of that argument.
        first: Its tensor, [N] or [B, T], not detached: it may require grad.
        shape: The shape that it came in: [1, N] for some [N].
        offsets: [S + 1], or None when every row of [B, T] is a sequence.
        count: S.
        flatten: Takes any argument of the layout to the shape of `first`.
        restore: Takes a result of that shape back to the layout.
        plain: The layout is that of one plain tensor: neither jagged nor a list.
    """

    leader: str
    first: Tensor
    shape: torch.Size
    offsets: Tensor | None
    count: int
    flatten: Callable[[str, object], object]
    restore: Callable[[Tensor], LogProbs]
    plain: bool

    def tensor(self, name: str, x: object, dtypes: tuple[torch.dtype, ...] = LOGP_DTYPES) -> Tensor:
        """Another argument in the shape of the first, checked and detached."""
        like = self.first if self.first.shape == self.shape else self.first.view(self.shape)
        return _tensor(name, self.flatten(name, x), dtypes, like, self.leader).detach().reshape(self.first.shape)

    def extra(self, name: str, x: object) -> Tensor:
        """An argument that may also be [N] beside [1, N], or the other way round."""
        flat = self._in_one_row(self.flatten(name, x))
        return _tensor(name, flat, FLOATS_OR_INTEGERS, self.first, self.leader).detach()

    def _in_one_row(self, x: object) -> object:
        packed = isinstance(x, Tensor) and self.offsets is not None and x.dim() == 2 and x.shape[0] == 1
        return x.reshape(-1) if packed and isinstance(x, Tensor) else x

    def optional(self, name: str, x: object, dtypes: tuple[torch.dtype, ...] = LOGP_DTYPES) -> Tensor | None:
        """The same, or None for None."""
        return None if x is None else self.tensor(name, x, dtypes)

    def advantages(self, given: object, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Advantages, and whether they are per sequence, [S], rather than per token."""
        found, per_sequence = self.per_token_or_sequence("advantages", given)
        return found.to(dtype) if per_sequence else found, per_sequence

    def per_token_or_sequence(self, name: str, given: object) -> tuple[Tensor, bool]:
        """An argument that is per token, or per sequence, [S], and whether it is per sequence."""
        if isinstance(given, Tensor) and not given.is_nested and self._is_per_sequence(given):
            if given.device != self.first.device:
                raise ValueError(f"{name}: expected device {self.first.device}, got {given.device}")
            return _tensor(name, given.reshape(-1), FLOATS_OR_INTEGERS).detach(), True
        flat = self._in_one_row(self.flatten(name, given))
        if isinstance(flat, Tensor) and flat.shape != self.first.shape:
            raise ValueError(
                f"{name}: expected shape {_shape(self.first)} (per token), [{self.count}] or "
                f"[{self.count}, 1] (per sequence), got {_shape(flat)}"
            )
        return _tensor(name, flat, FLOATS_OR_INTEGERS, self.first, self.leader).detach(), False

    def external(self, wanted: Iterable[str | None], external: Mapping[str, LogProbs] | None) -> dict[str, Tensor]:
        """The external statistics that are wanted, by name."""
        if external is not None and not isinstance(external, Mapping):
            raise TypeError(f"external: expected a mapping of names to tensors, got {type(external).__name__}")
        found = {}
        for name in sorted(name for name in set(wanted) if name is not None):
            if external is None or name not in external:
                given = sorted(external or {})
                raise ValueError(f"external: expected a tensor under the name {name!r}, got {given}")
            found[name] = self.extra(f"external[{name!r}]", external[name])
        return found

    def _is_per_sequence(self, x: Tensor) -> bool:
        # As many tokens as sequences: a plain tensor beside plain ones is per token.
        if self.plain and x.shape in (self.first.shape, self.shape):
            return False
        return tuple(x.shape) in ((self.count,), (self.count, 1))


def reader(leader: str, logp: LogProbs, cu_seqlens: Tensor | None, validate: bool) -> Reader:
    """Tell the layout from the log-probs called `leader`, and check them and the offsets."""
    if not isinstance(validate, bool):
        raise TypeError(f"validate: expected True or False, got {type(validate).__name__} {validate!r}")
    flatten, restore, offsets = _opener(leader, logp, cu_seqlens)
    first = _tensor(leader, flatten(leader, logp), LOGP_DTYPES)
    shape = first.shape
    if first.dim() == 1 and offsets is None:
        raise ValueError(
            f"cu_seqlens: expected the offsets of the packed sequences for 1-D log-probs of shape {_shape(first)}, "
            "got None"
        )
    if offsets is not None:
        offsets = checked_offsets(offsets, first, validate, leader)
        if first.dim() == 2:
            restore = _reshaped(restore, shape)
            first = first.reshape(-1)
    count = first.shape[0] if offsets is None else offsets.shape[0] - 1
    plain = isinstance(logp, Tensor) and not logp.is_nested
    return Reader(leader, first, shape, offsets, count, flatten, restore, plain)


def read_batch(
    train_logp: LogProbs,
    rollout_logp: LogProbs,
    mask: LogProbs | None,
    cu_seqlens: Tensor | None,
    spec: Spec,
    advantages: LogProbs | None,
    external: Mapping[str, LogProbs] | None,
    validate: bool,
) -> Batch:
    """Check every argument and bring it into one of the two shapes. Copies nothing, except for a list."""
    read = reader("train_logp", train_logp, cu_seqlens, validate)
    rollout = read.tensor("rollout_logp", rollout_logp)
    flat_mask = read.optional("mask", mask, MASK_DTYPES)
    batch = Batch(read.first.detach(), rollout, flat_mask, read.offsets, read.count, read.restore, mask)
    batch.external = read.external(external_names(spec), external)
    needy = [criterion for criterion in spec.criteria if criterion.when != "any"]
    if needy and advantages is None:
        raise ValueError(f"advantages: expected a tensor for the criterion with when={needy[0].when!r}, got None")
    if advantages is not None:
        batch.advantages, batch.per_sequence = read.advantages(advantages, batch.dtype)
    return batch


def external_names(spec: Spec) -> list[str]:
    """Names of the external tensors, each once, in the order in which the criteria name them."""
    return list(dict.fromkeys(c.name for c in spec.criteria if c.name is not None))


def _reshaped(restore: Callable[[Tensor], LogProbs], shape: torch.Size) -> Callable[[Tensor], LogProbs]:
    return lambda x: restore(x.view(shape))


def _ragged(x: Tensor) -> Any:
    """A jagged nested tensor, whose methods the type stubs of Tensor do not know."""
    return x


def _opener(
    leader: str, logp: LogProbs, cu_seqlens: Tensor | None
) -> tuple[Callable[[str, object], object], Callable[[Tensor], LogProbs], Tensor | None]:
    """How to read an argument of this layout, how to give a result back, and the offsets if the layout knows them."""
    if isinstance(logp, Tensor) and logp.is_nested:
        if logp.layout != torch.jagged:
            raise ValueError(f"{leader}: expected a nested tensor of layout torch.jagged, got {logp.layout}")
        if cu_seqlens is not None:
            raise ValueError(f"cu_seqlens: expected None with a nested tensor (its rows say it), {_got(cu_seqlens)}")
        if logp.dim() != 2 or _ragged(logp).lengths() is not None:
            raise ValueError(
                f"{leader}: expected a contiguous jagged tensor [S, ragged], got {logp.dim()} dimensions"
                f"{'' if _ragged(logp).lengths() is None else ' and holes between its rows (call .contiguous())'}"
            )
        offsets = _ragged(logp).offsets()

        def values(name: str, x: object) -> object:
            if not isinstance(x, Tensor):
                return x
            if not x.is_nested:
                raise ValueError(f"{name}: expected a jagged nested tensor like {leader}, got shape {_shape(x)}")
            if x.size(0) != logp.size(0) or x.values().shape != logp.values().shape:
                raise ValueError(
                    f"{name}: expected {logp.size(0)} rows and {logp.values().shape[0]} tokens (of "
                    f"{leader}), got {x.size(0)} and {x.values().shape[0]}"
                )
            theirs = _ragged(x).offsets()
            if theirs is not offsets and theirs.device.type == "cpu" and not torch.equal(theirs, offsets.cpu()):
                got, wanted = (o.diff().tolist()[:8] for o in (theirs, offsets))
                raise ValueError(f"{name}: expected rows of lengths {wanted} (of {leader}), got {got}")
            return x.values()

        return values, lambda x: torch.nested.nested_tensor_from_jagged(x, offsets), offsets
    if isinstance(logp, (list, tuple)):
        return _list_opener(leader, logp, cu_seqlens)
    if isinstance(logp, Tensor):
        packed = logp.dim() == 1 or (logp.dim() == 2 and logp.shape[0] == 1)
        if logp.dim() not in (1, 2):
            raise ValueError(f"{leader}: expected shape [N], [1, N] or [B, T], got {_shape(logp)}")
        if cu_seqlens is not None and not packed:
            raise ValueError(
                f"cu_seqlens: expected None with padded log-probs of shape {_shape(logp)} (each row is a "
                f"sequence), {_got(cu_seqlens)}"
            )
    return lambda name, x: x, lambda x: x, cu_seqlens


def _list_opener(
    leader: str, samples: Sequence[Tensor], cu_seqlens: Tensor | None
) -> tuple[Callable[[str, object], object], Callable[[Tensor], LogProbs], Tensor | None]:
    if cu_seqlens is not None:
        raise ValueError(f"cu_seqlens: expected None with a list of samples, each a sequence, {_got(cu_seqlens)}")
    for i, sample in enumerate(samples):
        if not isinstance(sample, Tensor) or sample.dim() != 1:
            got = f"shape {_shape(sample)}" if isinstance(sample, Tensor) else type(sample).__name__
            raise ValueError(f"{leader}[{i}]: expected a 1-D tensor, got {got}")
    lengths = [sample.shape[0] for sample in samples]
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)

    def joined(name: str, x: object) -> object:
        if not isinstance(x, (list, tuple)):
            return x if x is None else _refuse_list(name, leader, x)
        got = [item.shape[0] if isinstance(item, Tensor) and item.dim() == 1 else None for item in x]
        if got != lengths:
            raise ValueError(f"{name}: expected a list of 1-D tensors of lengths {lengths} (of {leader}), got {got}")
        for i, item in enumerate(x):
            if (item.dtype, item.device) != (x[0].dtype, x[0].device):
                wanted = f"{str(x[0].dtype).removeprefix('torch.')} on {x[0].device} (of {name}[0])"
                raise ValueError(
                    f"{name}[{i}]: expected {wanted}, got {str(item.dtype).removeprefix('torch.')} on {item.device}"
                )
        return torch.cat(list(x)) if x else torch.zeros(0)

    return joined, lambda x: list(x.split(lengths)), offsets


def _got(x: object) -> str:
    return f"got shape {_shape(x)}" if isinstance(x, Tensor) else f"got {type(x).__name__}"


def _refuse_list(name: str, leader: str, x: object) -> object:
    raise TypeError(f"{name}: expected a list of 1-D tensors like {leader}, got {type(x).__name__}")


def checked_offsets(cu_seqlens: object, train: Tensor, validate: bool, leader: str = "train_logp") -> Tensor:
    """`cu_seqlens` as it may be used: int64 and sorted within the batch where it could be read, else as it came."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected an int32 or int64 tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = str(cu_seqlens.dtype).removeprefix("torch.")
        raise ValueError(f"cu_seqlens: expected dtype int32 or int64, got {got}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: expected shape [sequences + 1], got {_shape(cu_seqlens)}")
    if cu_seqlens.device.type != "cpu" and cu_seqlens.device != train.device:
        raise ValueError(f"cu_seqlens: expected the CPU or {train.device} (of {leader}), got {cu_seqlens.device}")
    if (cu_seqlens.device.type != "cpu" and not validate) or torch.compiler.is_compiling():
        return cu_seqlens.detach()
    tokens = train.numel()
    offsets = cu_seqlens.detach().to(torch.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    falls = (offsets.diff() < 0).nonzero()
    if falls.numel():
        i = int(falls[0])
        pair = f"cu_seqlens[{i}]={int(offsets[i])} > cu_seqlens[{i + 1}]={int(offsets[i + 1])}"
        raise ValueError(f"cu_seqlens: expected offsets that do not decrease, got {pair}")
    if first < 0 or last > tokens:
        raise ValueError(f"cu_seqlens: expected offsets within [0, {tokens}] tokens, got {first} to {last}")
    if validate and (first != 0 or last != tokens):
        raise ValueError(f"cu_seqlens: expected to start at 0 and end at {tokens} tokens, got {first} to {last}")
    return offsets
