"""Layouts of log-probs: packed, padded, jagged and lists, each read as one plain tensor and given back as it came.

A layout is recognized by the first argument of a call, checks it, opens every further argument to the same shape, and
gives results back. Every check reads metadata only, except that offsets on the CPU are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

LogProbs = Tensor | Sequence[Tensor]

# The layout of the first argument of a call, which results are given back in.
L = TypeVar("L", bound=LogProbs)

# A result is generic over that layout, and over weights in it or None. Annotated without the two it may have any, which
# Python itself can say from 3.13 on.
if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault

    L_co = WithDefault("L_co", bound=LogProbs, covariant=True, default=LogProbs)
    W_co = WithDefault("W_co", bound=LogProbs | None, covariant=True, default=L_co | None)
else:
    L_co, W_co = TypeVar("L_co", covariant=True), TypeVar("W_co", covariant=True)


def shape_of(x: Tensor) -> list[int]:
    """The shape as messages show it."""
    return list(x.shape)


def name_of(dtype: torch.dtype | None) -> str:
    """A dtype as messages show it: without "torch."."""
    return str(dtype).removeprefix("torch.")


def dtype_of(x: Tensor) -> str:
    """The dtype of a tensor as messages show it."""
    return name_of(x.dtype)


def described(x: object) -> str:
    """Dtype and shape of a tensor in any layout, from metadata alone: "float32[3, 8]", "list of 3 float32"."""
    if isinstance(x, (list, tuple)):
        return f"list of {len(x)}" + (f" {dtype_of(x[0])}" if x else "")
    if not isinstance(x, Tensor):
        return repr(x)
    return f"{dtype_of(x)}[{x.shape[0]}, ragged]" if x.is_nested else f"{dtype_of(x)}{shape_of(x)}"


def _got(x: object) -> str:
    return f"got shape {shape_of(x)}" if isinstance(x, Tensor) else f"got {type(x).__name__}"


class Layout:
    """The layout of the arguments of one call; constructing it checks the first of them, called `leader`."""

    offsets: Tensor | None = None
    plain = True

    def open(self, name: str, x: object) -> object:
        """Return an argument as one tensor; an object that has no layout is left to `checked_tensor` to refuse."""
        return x

    def give_back(self, x: Tensor) -> Any:
        """Return a result as the caller's layout has it."""
        return x


class PaddedLayout(Layout):
    """[B, T], each row a sequence."""

    def __init__(self, logp: Tensor, cu_seqlens: Tensor | None) -> None:
        if cu_seqlens is not None:
            raise ValueError(
                f"cu_seqlens: expected None with padded log-probs of shape {shape_of(logp)} (each row is a "
                f"sequence), {_got(cu_seqlens)}"
            )


class PackedLayout(Layout):
    """[N] or [1, N] with the offsets of its sequences."""

    def __init__(self, logp: Tensor, cu_seqlens: Tensor | None) -> None:
        if cu_seqlens is None:
            raise ValueError(
                "cu_seqlens: expected the offsets of the packed sequences for 1-D log-probs of shape "
                f"{shape_of(logp)}, got None"
            )
        self.offsets = cu_seqlens
        self._shape = logp.shape

    def give_back(self, x: Tensor) -> LogProbs:
        return x if len(self._shape) == 1 else x.view(self._shape)


class JaggedLayout(Layout):
    """A nested tensor [S, ragged] of layout torch.jagged."""

    offsets: Tensor
    plain = False

    def __init__(self, leader: str, logp: Any, cu_seqlens: Tensor | None) -> None:
        if logp.layout != torch.jagged:
            raise ValueError(f"{leader}: expected a nested tensor of layout torch.jagged, got {logp.layout}")
        if cu_seqlens is not None:
            raise ValueError(f"cu_seqlens: expected None with a nested tensor (its rows say it), {_got(cu_seqlens)}")
        if logp.dim() != 2 or logp.lengths() is not None:
            raise ValueError(
                f"{leader}: expected a contiguous jagged tensor [S, ragged], got {logp.dim()} dimensions"
                f"{'' if logp.lengths() is None else ' and holes between its rows (call .contiguous())'}"
            )
        self._leader, self._logp = leader, logp
        self.offsets = logp.offsets()

    def open(self, name: str, x: object) -> object:
        if not isinstance(x, Tensor):
            return x
        leader, logp, offsets = self._leader, self._logp, self.offsets
        if not x.is_nested:
            raise ValueError(f"{name}: expected a jagged nested tensor like {leader}, got shape {shape_of(x)}")
        if x.size(0) != logp.size(0) or x.values().shape != logp.values().shape:
            raise ValueError(
                f"{name}: expected {logp.size(0)} rows and {logp.values().shape[0]} tokens (of "
                f"{leader}), got {x.size(0)} and {x.values().shape[0]}"
            )
        theirs: Tensor = getattr(x, "offsets")()  # noqa: B009  (the stubs of Tensor do not know it)
        if theirs is not offsets and theirs.device.type == "cpu" and not torch.equal(theirs, offsets.cpu()):
            got, wanted = (o.diff().tolist()[:8] for o in (theirs, offsets))
            raise ValueError(f"{name}: expected rows of lengths {wanted} (of {leader}), got {got}")
        return x.values()

    def give_back(self, x: Tensor) -> LogProbs:
        return torch.nested.nested_tensor_from_jagged(x, self.offsets)


def _joined(samples: list[Tensor]) -> Tensor:
    """Concatenate. Autocast would change dtypes, and cannot on the CPU with float16."""
    kind = samples[0].device.type
    if not torch.is_autocast_enabled(kind):
        return torch.cat(samples)
    with torch.autocast(kind, enabled=False):
        return torch.cat(samples)


class ListLayout(Layout):
    """A list or tuple of 1-D tensors, one a sample; opening one copies it."""

    plain = False

    def __init__(self, leader: str, logp: Any, cu_seqlens: Tensor | None) -> None:
        if cu_seqlens is not None:
            raise ValueError(f"cu_seqlens: expected None with a list of samples, each a sequence, {_got(cu_seqlens)}")
        for i, sample in enumerate(logp):
            if not isinstance(sample, Tensor) or sample.dim() != 1:
                got = f"shape {shape_of(sample)}" if isinstance(sample, Tensor) else type(sample).__name__
                raise ValueError(f"{leader}[{i}]: expected a 1-D tensor, got {got}")
        self._leader, self._kind = leader, tuple if isinstance(logp, tuple) else list
        self._lengths = [sample.shape[0] for sample in logp]
        self.offsets = torch.tensor([0, *self._lengths], dtype=torch.int64, device="cpu").cumsum(0)

    def open(self, name: str, x: object) -> object:
        leader, lengths = self._leader, self._lengths
        if x is None:
            return x
        if not isinstance(x, (list, tuple)):
            raise TypeError(f"{name}: expected a list of 1-D tensors like {leader}, got {type(x).__name__}")
        got = [item.shape[0] if isinstance(item, Tensor) and item.dim() == 1 else None for item in x]
        if got != lengths:
            raise ValueError(f"{name}: expected a list of 1-D tensors of lengths {lengths} (of {leader}), got {got}")
        for i, item in enumerate(x):
            if (item.dtype, item.device) != (x[0].dtype, x[0].device):
                wanted = f"{dtype_of(x[0])} on {x[0].device} (of {name}[0])"
                raise ValueError(f"{name}[{i}]: expected {wanted}, got {dtype_of(item)} on {item.device}")
        return _joined(list(x)) if x else torch.zeros(0, dtype=torch.float32, device="cpu")

    def give_back(self, x: Tensor) -> LogProbs:
        return self._kind(x.split(self._lengths))


def layout_of(leader: str, logp: object, cu_seqlens: Tensor | None) -> Layout:
    """Recognize the layout of the log-probs called `leader`."""
    if isinstance(logp, (list, tuple)):
        return ListLayout(leader, logp, cu_seqlens)
    if not isinstance(logp, Tensor):
        raise TypeError(f"{leader}: expected a tensor, got {type(logp).__name__}")
    if logp.is_nested:
        return JaggedLayout(leader, logp, cu_seqlens)
    # [1, N] without offsets is a padded sequence.
    if logp.dim() == 1 or (logp.dim() == 2 and logp.shape[0] == 1 and cu_seqlens is not None):
        return PackedLayout(logp, cu_seqlens)
    if logp.dim() == 2:
        return PaddedLayout(logp, cu_seqlens)
    logits = ""
    if logp.dim() == 3:
        logits = (
            "; of logits [B, T, vocabulary] pass the sampled tokens' log-probs: "
            "logits.log_softmax(-1).gather(-1, token_ids[..., None]).squeeze(-1)"
        )
    raise ValueError(f"{leader}: expected shape [N], [1, N] or [B, T], got {shape_of(logp)}{logits}")
