"""Reading the tensors of a call: checked, detached, and in one of two shapes whatever their layout.

Every check reads metadata only (shape, dtype, device), except that `cu_seqlens` on the CPU is read, and any
`cu_seqlens` when `validate=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad

from ..definition.offsets import checked_offsets
from ..definition.sequences import Packed
from ..definition.tokens import KeptMass
from ..metrics.labels import Labeled
from ..specs.correction import Spec
from ..specs.criterion import AGE
from ..specs.operands import CorrectOperands, LossOperands, compute_dtype
from .layouts import Layout, LogProbs, dtype_of, name_of, shape_of

if TYPE_CHECKING:
    from .known_bounds import KnownBounds

CPU, STRIDED = torch.device("cpu"), torch.strided
LOGP_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MASK_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
)  # fmt: skip
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
OFFSETS = (torch.int64, torch.int32)
FLOATS_OR_INTEGERS = (*LOGP_DTYPES, *OFFSETS)

# The switch of each framework that makes it return the rollout engine's log-probs. A missing `rollout_logp` nearly
# always means that it is off, so the error names it.
ROLLOUT_SWITCHES = {
    "verl": "actor_rollout_ref.rollout.calculate_log_probs=True",
    "xtuner": "RolloutConfig return_logprob=True",
    "SkyRL": "generator.sampling_params.logprobs=0",
    "TRL": "vllm_importance_sampling_correction=True",
    "slime, miles": "--use-tis or --get-mismatch-metrics",
    "OpenRLHF": "--algo.advantage.is_correction_level",
    "NeMo RL": "the generation worker's generation_logprobs",
    "vLLM itself": "SamplingParams(logprobs=0)",
    "SGLang itself": "return_logprob=True",
}


class SequenceGroups(NamedTuple):
    """The group of each sequence of a batch."""

    numbers: Tensor  # [S] int64; outside 0 .. total - 1 they name no group
    total: int
    whole: bool  # every group lies in this call, so nothing of it is on another rank of `Ranks.batch`

    def placed(self) -> Tensor:
        """[S] int64: the numbers, and `total` for those that name no group."""
        from ..definition.normalize import placed

        return placed(self.numbers, self.total)


def as_it_is(x: Tensor) -> LogProbs:
    """Give a result back in the batch's own shape."""
    return x


def mass_of(log_mass: Tensor | None, of_other: bool) -> KeptMass | None:
    """The kept mass of a record: taken from the first of two log-probs, or from the other one."""
    return None if log_mass is None else KeptMass(log_mass, "train" if of_other else "rollout")


@dataclass(eq=False, repr=False, kw_only=True)
class OpenBatch(CorrectOperands):
    """A batch that was read: the tensors that kernels take, detached, and what only the rest of a correction needs."""

    restore: Callable[[Tensor], LogProbs] = as_it_is  # gives a result of this shape back in the caller's layout
    given_mask: LogProbs | None = None
    entropy: Tensor | None = None
    weights_out: Tensor | None = None  # where the caller wants them; None: in a new tensor
    mask_out: Tensor | None = None
    labels: tuple[Labeled, ...] = ()
    groups: SequenceGroups | None = None
    bounds: KnownBounds | None = None  # those found for this batch, or None
    _ages: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that computes."""
        return compute_dtype(self.train.dtype, self.rollout.dtype)

    @property
    def mass(self) -> KeptMass | None:
        """The mass that truncated sampling kept."""
        return mass_of(self.log_mass, self.mass_of_rollout)

    def ages(self) -> Tensor:
        """The age of every token in the dtype that computes, made of the versions where it is first asked for."""
        assert self.versions is not None
        if self._ages is None:
            ages = self.versions.ages().to(self.dtype)  # float32 holds them up to 2^24
            self._ages = per_token(ages, self.versions.per_sequence, self.train.shape, self.offsets)
        return self._ages

    def external_of(self, spec: Spec) -> dict[str, Tensor]:
        """The tensors that the criteria of a Spec read besides log-probs, by name; ages are made where they are not."""
        given = iter(self.externals)
        made = () if self.versions is None else (AGE,)
        return {name: self.ages() if name in made else next(given) for name in external_names(spec)}

    def pairs(self, spec: Spec) -> dict[str, tuple[Tensor, Tensor]]:
        """Numerator and denominator of every D but the correction's own, by `Criterion.of`."""
        if self.new is None:
            return {}
        every = {"new/rollout": (self.new, self.rollout), "new/old": (self.new, self.train)}
        return {c.of: every[c.of] for c in spec.criteria if c.of in every}


def is_plain(
    x: object, dtypes: tuple[torch.dtype, ...], shape: torch.Size | None = None, device: torch.device | None = None
) -> TypeGuard[Tensor]:
    """Test for what nearly every call passes: a plain tensor of one of the dtypes, of a shape and on a device."""
    return (
        type(x) is Tensor
        and x.dtype in dtypes
        and x.layout is STRIDED
        and (shape is None or (x.shape == shape and x.device == device))
        and not is_batchedtensor(x)
    )


def checked_tensor(
    name: str, x: object, dtypes: tuple[torch.dtype, ...], like: Tensor | None = None, leader: str = "train_logp"
) -> Tensor:
    """Refuse everything but a plain tensor of one of the dtypes, on the device and of the shape of another."""
    shape, device = (None, None) if like is None else (like.shape, like.device)
    if not torch.compiler.is_compiling() and is_plain(x, dtypes, shape, device):
        return x  # below, one by one, is what can be wrong
    if x is None and name == "rollout_logp":
        switches = "; ".join(f"{framework}: {switch}" for framework, switch in ROLLOUT_SWITCHES.items())
        raise ValueError(
            "rollout_logp: expected the log-probs of the engine that sampled the tokens, got None. "
            f"Ask for them with {switches}"
        )
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        _refuse_wrapper(name, type(x))
    if not torch.compiler.is_compiling() and is_batchedtensor(x):
        raise TypeError(
            f"{name}: expected a plain tensor, got one inside torch.func.vmap; call correct and policy_loss outside of "
            "it, with all sequences in one batch"
        )
    if x.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor, got layout {x.layout}")
    if x.dtype not in dtypes:
        names = ", ".join(map(name_of, dtypes))
        mask = ""
        if name == "rollout_logp" and not (x.is_floating_point() or x.is_complex()):
            mask = "; is it the mask? Write mask=..., after train_logp and rollout_logp"
        raise ValueError(f"{name}: expected a dtype among {names}, got {dtype_of(x)}{mask}")
    if like is not None:
        if x.device != like.device:
            raise ValueError(f"{name}: expected device {like.device} (of {leader}), got {x.device}")
        if x.shape != like.shape:
            raise ValueError(f"{name}: expected shape {shape_of(like)} (of {leader}), got {shape_of(x)}")
    return x


# Subclasses that are all of a tensor: those of the compilers, and the result of a collective that is still under way.
TRANSPARENT = ("FakeTensor", "FunctionalTensor", "AsyncCollectiveTensor")


def _refuse_wrapper(name: str, kind: type[Tensor]) -> None:
    """Refuse a subclass that holds other tensors, because a result would lose what it knows about them."""
    if kind.__name__ == "DTensor":
        raise TypeError(
            f"{name}: expected a plain tensor, got a DTensor; pass {name}.to_local(), and, if a mesh dimension splits "
            "sequences, its mesh.get_group(dimension) as rc.Ranks(sequence=...)"
        )
    if kind.__name__ == "MaskedTensor":
        raise TypeError(
            f"{name}: expected a plain tensor, got a MaskedTensor; pass its get_data(), and its get_mask() as mask"
        )
    if kind.__name__ not in TRANSPARENT and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        got = f"a {kind.__name__}, a subclass that computes in its own way"
        raise TypeError(f"{name}: expected a plain tensor, got {got}; pass the plain tensor that it stands for")


def is_followed() -> bool:
    """Tell whether more than autograd's backward follows tensors: a compiler, torch.func, forward-mode derivatives."""
    if torch.compiler.is_compiling() or peek_interpreter_stack() is not None:
        return True
    return forward_ad._current_level >= 0


@dataclass(eq=False, repr=False)
class Reader:
    """Reads the arguments of one call in the layout of the first of them."""

    leader: str  # the name of the first argument
    first: Tensor  # [N] or [B, T], not detached: it may require grad
    shape: torch.Size  # that it came in: [1, N] for some [N]
    device: torch.device
    offsets: Tensor | None  # [S + 1], or None when every row of [B, T] is a sequence
    count: int  # s
    layout: Layout  # opens arguments and gives results back
    quick: bool  # arguments are tensors in the shape of the first; only those with a history need to be detached
    mask: Tensor | None = None  # where `read_mask` has read one

    def read_mask(self, given: LogProbs | None) -> None:
        """Read the mask of the call."""
        self.mask = self.optional("mask", given, MASK_DTYPES)

    def tensor(self, name: str, x: object, dtypes: tuple[torch.dtype, ...] = LOGP_DTYPES) -> Tensor:
        """Read another argument, detached, in the shape of the first."""
        if self.quick and is_plain(x, dtypes, self.shape, self.device):
            return x.detach() if x.requires_grad else x
        return self.with_history(name, x, dtypes).detach()

    def with_history(self, name: str, x: object, dtypes: tuple[torch.dtype, ...] = LOGP_DTYPES) -> Tensor:
        """Read another argument in the shape of the first."""
        first = self.first
        like = first if first.dim() == len(self.shape) else first.view(self.shape)
        found = checked_tensor(name, self.layout.open(name, x), dtypes, like, self.leader)
        return found if like is first else found.reshape(first.shape)

    def detached(self, x: Tensor) -> Tensor:
        """Return a tensor that was read already without its history."""
        return x if self.quick and not x.requires_grad else x.detach()

    def extra(self, name: str, x: object) -> Tensor:
        """Read an argument that may be [N] where the log-probs are [1, N], or the other way round."""
        flat = self.in_one_row(self.layout.open(name, x))
        return checked_tensor(name, flat, FLOATS_OR_INTEGERS, self.first, self.leader).detach()

    def in_one_row(self, x: object) -> object:
        """Flatten [1, N] to [N] where the log-probs are packed."""
        packed = isinstance(x, Tensor) and self.offsets is not None and x.dim() == 2 and x.shape[0] == 1
        return x.reshape(-1) if packed and isinstance(x, Tensor) else x

    def optional(self, name: str, x: object, dtypes: tuple[torch.dtype, ...] = LOGP_DTYPES) -> Tensor | None:
        """Read another argument in the shape of the first, or None."""
        return None if x is None else self.tensor(name, x, dtypes)

    def per_token_or_sequence(
        self, name: str, given: object, dtypes: tuple[torch.dtype, ...] = FLOATS_OR_INTEGERS
    ) -> tuple[Tensor, bool]:
        """Read an argument that is per token or per sequence, and whether it is per sequence, [S]."""
        if self.quick and is_plain(given, dtypes, self.shape, self.device):
            return self.detached(given), False
        if isinstance(given, Tensor) and not given.is_nested and self._is_per_sequence(given):
            if given.device != self.first.device:
                raise ValueError(f"{name}: expected device {self.first.device}, got {given.device}")
            return self.detached(checked_tensor(name, given.reshape(-1), dtypes)), True
        flat = self.in_one_row(self.layout.open(name, given))
        if isinstance(flat, Tensor) and flat.shape != self.first.shape:
            raise ValueError(
                f"{name}: expected shape {shape_of(self.first)} (per token), [{self.count}] or "
                f"[{self.count}, 1] (per sequence), got {shape_of(flat)}"
            )
        if isinstance(given, (list, tuple)) and not given and isinstance(flat, Tensor) and flat.dtype not in dtypes:
            # A list without a sample has no dtype.
            flat = flat.to(dtypes[0])
        return self.detached(checked_tensor(name, flat, dtypes, self.first, self.leader)), False

    def external(self, name: str, external: Mapping[str, LogProbs] | None) -> Tensor:
        """An external statistic by its name."""
        if external is None or name not in external:
            given = sorted(external or {})
            raise ValueError(f"external: expected a tensor under the name {name!r}, got {given}")
        return self.extra(f"external[{name!r}]", external[name])

    def _is_per_sequence(self, x: Tensor) -> bool:
        # As many tokens as sequences: a plain tensor is per token where the log-probs are plain tensors.
        if self.layout.plain and x.shape in (self.first.shape, self.shape):
            return False
        return tuple(x.shape) in ((self.count,), (self.count, 1))


# Where the tokens of a batch lie: `first`, whose shape and device all have, `mask`, `offsets` and `count`.
Laid = CorrectOperands | LossOperands | Reader


def external_names(spec: Spec) -> list[str]:
    """Names of the tensors that criteria read apart from log-probs, AGE and ENTROPY included: each once, in order."""
    return list(dict.fromkeys([c.tensor_name for c in spec.criteria if c.tensor_name is not None]))


def read_offsets(cu_seqlens: object, train: Tensor, validate: bool, leader: str = "train_logp") -> Tensor:
    """Check `cu_seqlens`; where it could be read it comes back as int64 and within the batch, else unchanged."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected an int32 or int64 tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in OFFSETS:
        raise ValueError(f"cu_seqlens: expected dtype int32 or int64, got {dtype_of(cu_seqlens)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: expected shape [sequences + 1], got {shape_of(cu_seqlens)}")
    device = cu_seqlens.device
    if device != CPU and device != train.device:
        raise ValueError(f"cu_seqlens: expected the CPU or {train.device} (of {leader}), got {device}")
    if (device != CPU and not validate) or torch.compiler.is_compiling():
        return cu_seqlens.detach()
    tokens = train.numel()
    offsets = checked_offsets(cu_seqlens.detach(), tokens)
    if validate and (int(offsets[0]) != 0 or int(offsets[-1]) != tokens):
        got = f"{int(offsets[0])} to {int(offsets[-1])}"
        raise ValueError(f"cu_seqlens: expected to start at 0 and end at {tokens} tokens, got {got}")
    return offsets


def per_token(x: Tensor, per_sequence: bool, shape: torch.Size, offsets: Tensor | None) -> Tensor:
    """Return for every token the value of its sequence, where x is [S]; slots in no sequence get any sequence's."""
    if not per_sequence:
        return x
    if offsets is None:
        return x[:, None].expand(shape)
    return Packed(offsets.to(x.device, torch.int64), shape[0]).spread(x)


def fitting(offsets: Tensor, laid: Laid) -> Tensor:
    """Offsets on the device of the tokens, in int64; where they could not be read and checked they are made to fit."""
    offsets = offsets.to(laid.first.device, torch.int64)
    checked = offsets.device.type == "cpu" and not torch.compiler.is_compiling()
    return offsets if checked else offsets.clamp(0, laid.first.numel()).cummax(0).values


def slots_outside(laid: Laid) -> tuple[int, int]:
    """The slots before the first and after the last sequence of a packed batch whose offsets are on the CPU."""
    if laid.offsets is None:
        return 0, 0
    # Both offsets in one step.
    ends = laid.offsets[:: max(1, laid.count)].tolist()
    return ends[0], laid.first.numel() - ends[-1]
