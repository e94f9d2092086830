"""`warmup`: compile the kernels of a training loop before its first step, by running small batches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..backends import operators
from ..backends.choose import BackendName
from ..backends.given import Batch, Groups, KeptMass, Versions, batch_given
from ..backends.layouts import LogProbs
from ..backends.loss_operators import repeats
from ..backends.read import reader
from ..specs.checked import known_keywords
from ..specs.correction import Spec, no_spec
from ..specs.loss import Loss, no_loss
from ..specs.validate import shown
from .correct import correct
from .policy_loss import policy_loss


@known_keywords
def warmup(
    train_logp: Tensor,
    rollout_logp: Tensor,
    batch: Batch | None = None,
    *,
    spec: Spec | None = None,
    loss: Loss | None = None,
    advantages: Tensor | None = None,
    decoupled: bool = True,
    aligned: bool | None = None,
    mean_lengths: tuple[float, float] = (0.0, float("inf")),
    threads: int | None = None,
    progress: bool | None = None,
) -> int:
    """Compile the kernels of a training loop, before its first step and before a CUDA graph is captured.

    The tensors are an example of what the loop passes, of any size and with any values: only layout, dtypes and device
    are read. Small batches like it, of every shape of the kernels, are run and thrown away. A compilation depends on
    the structure of the Spec and of the loss, the layout and the dtypes; never on a number, a length or a count.

    Triton keeps on disk what it compiles: where processes share that folder, let one warm up before the others.

    Args:
        train_logp: Log-probs of the trainer, packed [N] with `Batch.cu_seqlens` or padded [B, T]; new_logp, old_logp
            and ref_logp have their dtype. Nothing is compiled where the backend would be torch.
        rollout_logp: Log-probs of the engine.
        batch: Everything else about the tokens, as the loop passes it. Ranks of `Ranks.sequence` exchange the sums of
            the small batches: all have to call.
        spec: The Spec of `correct` in the loop, or of `policy_loss` in bypass mode if a loss is given; None: the loop
            corrects nothing.
        loss: The Loss of `policy_loss`: it is compiled too, forward and backward. None: the loop does not call it.
        advantages: Per token or per sequence, as the loop passes them; a loss without them gets some per token.
        decoupled: Pass `old_logp` and the correction to the loss, and not `rollout_logp` and the Spec.
        aligned: True if all tensors begin at multiples of 16 bytes, as new ones do, and padded rows have a multiple of
            16 tokens; False if never; None: both can be.
        mean_lengths: The smallest and the largest mean length that sequences of a batch can have.
        threads: The number of threads that compile; None: as many as there are cores for this process.
        progress: Say on standard error what has been compiled, with a bar where rich is installed; None: if that is a
            terminal.

    Returns:
        The number of batches that were run: 0 where there is nothing to compile.
    """
    of = batch_given(batch, None, None)
    if spec is not None and not isinstance(spec, Spec):
        raise no_spec(spec, "a Spec or None")
    if loss is not None and not isinstance(loss, Loss):
        raise no_loss(loss)
    least, most = mean_lengths
    if not 0.0 <= least <= most:
        raise ValueError(
            f"mean_lengths: expected the smallest and the largest mean length, 0 or more, got {shown(mean_lengths)}"
        )
    read = reader("train_logp", train_logp, of)
    read.tensor("rollout_logp", rollout_logp)
    device = read.device
    if operators.why_not(device) is not None:
        return 0
    from ..kernels.grid import SHAPES

    lengths = [length for length, _ in SHAPES]
    shapes = [
        length
        for length, next_one in zip(lengths, [float("inf"), *lengths], strict=False)
        if length <= most and least < next_one
    ]
    skips = (0, 1) if aligned is None else (int(not aligned),)
    per_sequence = repeated = False
    if advantages is not None:
        found, per_sequence = read.per_token_or_sequence("advantages", advantages)
        repeated = repeats(found)
    loop = _Loop(train_logp, rollout_logp, of, spec, loss, advantages is not None, per_sequence, repeated, decoupled)
    batches = list(product(shapes, skips))
    if not operators.interprets():
        _compile(batches, loop.step, threads or len(os.sched_getaffinity(0)), progress)
    for one in batches:
        loop.step(*one)
    return len(batches)


@dataclass(frozen=True, eq=False)
class _Loop:
    """A training loop, by an example of its tensors.

    With `advantages` it passes some to `correct`: `per_sequence`, or per token, where `repeated` rows have one each.
    """

    train: Tensor
    rollout: Tensor
    batch: Batch
    spec: Spec | None
    loss: Loss | None
    advantages: bool
    per_sequence: bool
    repeated: bool
    decoupled: bool

    def step(self, length: int, skip: int) -> None:
        """Run a batch of two short sequences through a step of the loop: `correct`, then the loss and its backward.

        Every tensor begins `skip` tokens behind a multiple of 16 bytes.
        """
        width, device, packed = max(16, length), self.train.device, self.batch.cu_seqlens is not None
        shape = (2 * width,) if packed else (2, width)

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros((*shape[:-1], shape[-1] + skip), dtype=dtype, device=device)[..., skip:]

        # With `Ranks.sequence` [S] of a packed batch could be tokens.
        of_sequences = torch.zeros((2, 1) if packed else (2,), device=device)
        given = of_sequences if self.per_sequence else zeros(torch.float32)
        if self.repeated:
            given = of_sequences[:, None].expand(shape)
        train, rollout, batch = zeros(self.train.dtype), zeros(self.rollout.dtype), self._small(width, zeros)
        # A Spec or a loss beyond the kernels has none to compile; the interpreter is chosen by name alone.
        backend: BackendName = "auto" if device.type in operators.DEVICES else "triton"
        found = None
        if self.spec is not None and (self.decoupled or self.loss is None):
            passed = given if self.advantages else None
            found = correct(train, rollout, batch, spec=self.spec, advantages=passed, backend=backend)
        if self.loss is None or batch.ranks.sequence is not None:
            return  # The loss of split sequences runs on plain torch.
        out = policy_loss(
            train.detach().requires_grad_(),
            given,
            batch,
            self.loss,
            old_logp=train if self.decoupled else None,
            rollout_logp=rollout,
            ref_logp=None if self.loss.kl is None else train,
            correction=found,
            spec=None if self.decoupled else self.spec,
            backend=backend,
        )
        out.value.backward()

    def _small(self, width: int, zeros: Callable[[torch.dtype], Tensor]) -> Batch:
        """A batch of two sequences with what the loop's has."""
        batch, device = self.batch, self.train.device
        bounds = torch.tensor([0, width, 2 * width], device=device)
        packed, mask, mass = batch.cu_seqlens, batch.mask, batch.kept_mass
        found = Batch(
            mask=None if mask is None else zeros(_dtype(mask)),
            cu_seqlens=None if packed is None else bounds.to(packed.dtype),
            turns=None if batch.turns is None else bounds,
            entropy=None if batch.entropy is None else zeros(torch.float32),
            external=None if batch.external is None else dict.fromkeys(batch.external, zeros(torch.float32)),
            kept_mass=None if mass is None else KeptMass(zeros(_dtype(mass.log_mass)), mass.of),
            versions=None if batch.versions is None else self._versions(batch.versions.ids, zeros),
            groups=None if batch.groups is None else Groups(size=1),
            scale=None if batch.scale is None else zeros(torch.float32),
            ranks=batch.ranks,
        )
        return found

    def _versions(self, ids: LogProbs, zeros: Callable[[torch.dtype], Tensor]) -> Versions:
        """Versions of two sequences, or of their tokens."""
        of_tokens = not isinstance(ids, Tensor) or ids.shape == self.train.shape
        of_sequences = torch.zeros((2, 1), dtype=_dtype(ids), device=self.train.device)
        return Versions(zeros(_dtype(ids)) if of_tokens else of_sequences, 0)


def _dtype(x: LogProbs) -> torch.dtype:
    """The dtype of a tensor, or of the first of a list."""
    return x.dtype if isinstance(x, Tensor) else x[0].dtype


def _compile(
    batches: Sequence[tuple[int, int]], batch: Callable[[int, int], None], threads: int, progress: bool | None
) -> None:
    """Compile what batches launch, side by side, before they are run."""
    from ..kernels.launches import compiled_meanwhile

    with compiled_meanwhile(threads) as compilations:
        for one in batches:
            batch(*one)
        if sys.stderr.isatty() if progress is None else progress:
            _show(compilations)


def _show(compilations: Sequence[Future[Any]]) -> None:
    """Say on standard error how many compilations are done, until all are."""
    many, done = len(compilations), as_completed(compilations)
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        for i, one in enumerate(done, 1):
            sys.stderr.write(f"rollout_corr.warmup: {i} of {many} kernels compiled: {one.result().name}\n")
    else:
        for _ in track(done, f"compiling {many} kernels", total=many, console=Console(stderr=True)):
            pass
