"""What a variant of `correct`'s kernels is, and how its tensors lie in memory.

A variant is all that a compile key is made of: the Spec, the layout, the dtypes, how the tensors lie in memory, and
how long sequences are. Lengths and thresholds are in no key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout_corr.backends import operators
from rollout_corr.backends.batch import external_names
from rollout_corr.definition.tokens import compute_dtype
from rollout_corr.kernels.correct.plan import pairs_of
from rollout_corr.spec.correction import Spec

if TYPE_CHECKING:
    from rollout_corr.kernels.correct.launch import Given
    from rollout_corr.kernels.grid import Launch

# Mean lengths, one for each of `grid.SHAPES`.
LONGEST, LONG, MEDIUM, SHORT = 1 << 20, 4096, 512, 64

# On AMD it is part of a key whether a tensor is below 2 GiB. These make no difference elsewhere.
TOKENS, HUGE = 1 << 20, 1 << 31


def placed(x: Tensor, aligned: bool, unit: bool) -> Tensor:
    """The same values, lying in memory as a variant has them.

    Args:
        x: [N] or [B, T] of any dtype, on any device.
        aligned: Every row begins at a multiple of 16 bytes, or else one element behind.
        unit: Neighbours lie side by side, or else with one element between them.
    """
    first, step = (0 if aligned else 1), (1 if unit else 2)
    around = x.new_empty((*x.shape[:-1], first + step * x.shape[-1]))
    lying = around[..., first::step]
    lying.copy_(x)
    return lying


@dataclass(frozen=True)
class Variant:
    """One variant.

    Args:
        name: How a report calls it.
        spec: What is done.
        packed: Sequences by offsets, or the rows of [B, T].
        train: Dtype of the trainer's log-probs.
        rollout: Dtype of the engine's log-probs.
        mask: Dtype of the mask, None without one.
        offsets: Dtype of the offsets of a packed batch.
        advantages: "token", "sequence" or None.
        aligned: Log-probs and mask begin at a multiple of 16 bytes, and so do all their rows. Otherwise they begin one
            element behind, like a slice without the first token.
        unit: Neighbouring tokens lie side by side. Otherwise there is one element between them.
        length: Tokens of a sequence on average, which chooses the shape.
        tokens: Tokens of the batch that is compiled for.
        split: Sequences lie on several ranks.
    """

    name: str
    spec: Spec = Spec()  # noqa: RUF009  (frozen)
    packed: bool = True
    train: torch.dtype = torch.float32
    rollout: torch.dtype = torch.float32
    mask: torch.dtype | None = torch.bool
    offsets: torch.dtype = torch.int32
    advantages: str | None = None
    aligned: bool = True
    unit: bool = True
    length: int = LONG
    tokens: int = TOKENS
    split: bool = False

    @property
    def computes(self) -> torch.dtype:
        """The dtype that computes."""
        return compute_dtype(self.train, self.rollout)

    @property
    def wide_bytes(self) -> int:
        """Bytes a token that the compiler has to load 128 bits at a time; 0 where they do not lie well."""
        if not (self.train == self.rollout == torch.float32 and self.aligned and self.unit):
            return 0
        of_mask = 0 if self.mask is None else self.mask.itemsize
        return 4 + 4 + (of_mask if of_mask >= 4 else 0)

    def place(self, x: Tensor) -> Tensor:
        """The same values, lying in memory as this variant has its log-probs and its mask."""
        return placed(x, self.aligned, self.unit)

    def given(self, tokens: int, sequences: int, device: str | torch.device = "meta") -> Given:
        """A batch of this variant without values in it.

        Args:
            tokens: How many; of a padded batch as many as fit into rows of equal width.
            sequences: How many.
            device: Where. On "meta" it takes no memory.
        """
        from rollout_corr.kernels.correct.launch import Given

        shape = (tokens,) if self.packed else (sequences, tokens // sequences)

        def empty(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        advantages = None
        if self.advantages is not None:
            advantages = empty(self.computes, *(shape if self.advantages == "token" else (sequences,)))
        return Given(
            train=self.place(empty(self.train, *shape)),
            rollout=self.place(empty(self.rollout, *shape)),
            mask=None if self.mask is None else self.place(empty(self.mask, *shape)),
            offsets=empty(self.offsets, sequences + 1) if self.packed else None,
            advantages=advantages,
            per_sequence=self.advantages == "sequence",
            externals=[empty(torch.float32, *shape) for _ in external_names(self.spec)],
            new=empty(self.train, *shape) if pairs_of(self.spec) else None,
        )

    def launches(self, given: Given | None = None) -> tuple[Launch, ...]:
        """What `correct` would launch.

        Args:
            given: The batch; by default one on the meta device.
        """
        from rollout_corr.kernels.correct.launch import Wanted, prepare

        given = self.given(self.tokens, self.tokens // self.length) if given is None else given
        spec = self.spec
        writes_mask = operators.writes_mask(spec, given.mask, given.offsets)
        wanted = Wanted(spec.returns_weights, writes_mask, spec.edits_mask)
        return prepare(given, spec, wanted, split=self.split)[1]
