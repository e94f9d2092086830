"""`warmup`: compile the kernels of a training loop before its first step, by running small batches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from itertools import product
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rollout_corr.api.correct import Renormalized, correct
from rollout_corr.api.policy_loss import policy_loss
from rollout_corr.backends import operators
from rollout_corr.backends.batch import external_names
from rollout_corr.specs.correction import Spec, no_spec
from rollout_corr.specs.criterion import ENTROPY
from rollout_corr.specs.surrogate import Traits
from rollout_corr.specs.validate import shown

LayoutName = Literal["packed", "padded"]
AdvantageUnit = Literal["token", "sequence"]


def warmup(
    device: torch.device | str,
    spec: Spec | None,
    *,
    loss: Mapping[str, Any] | None = None,
    decoupled: bool = True,
    layouts: Sequence[LayoutName] = ("packed", "padded"),
    logp_dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    mask_dtype: torch.dtype | None = torch.bool,
    cu_seqlens_dtype: torch.dtype = torch.int32,
    advantages: AdvantageUnit | None = None,
    sequence_group: Any = None,
    log_mass_dtype: torch.dtype | None = None,
    renormalized: Renormalized = "rollout",
    scale: bool = False,
    aligned: bool | None = None,
    mean_lengths: tuple[float, float] = (0.0, float("inf")),
    threads: int | None = None,
    progress: bool | None = None,
) -> int:
    """Compile the kernels of a training loop, before its first step and before a CUDA graph is captured.

    Small batches of every shape of the kernels, aligned and not, are run and thrown away. A compilation depends on the
    structure of the Spec and of the loss, the layout and the dtypes; never on a number, a length or a count.

    Triton keeps on disk what it compiles: where processes share that folder, let one warm up before the others.

    Args:
        device: Device of the loop's tensors. Nothing is compiled where the backend would be torch.
        spec: The Spec of `correct` in the loop; None for a loop that does not call it.
        loss: Arguments of `policy_loss` besides tensors, such as a recipe: it is compiled too, forward and backward.
            Where it brings no Spec, a decoupled one gets the correction of `spec`.
        decoupled: Pass `old_logp` to the loss, and not `rollout_logp` alone.
        layouts: Some of "packed" and "padded".
        logp_dtypes: Dtype of train_logp (and new_logp, old_logp, ref_logp), and of rollout_logp.
        mask_dtype: Dtype of the mask; None for calls without one.
        cu_seqlens_dtype: int32 or int64.
        advantages: "token", "sequence" or None, as the loop passes them; a loss without them gets "token".
        sequence_group: As the loop passes it. Its ranks exchange the sums of these batches: all have to call.
        log_mass_dtype: Dtype of log_mass; None for calls without one.
        renormalized: As the loop passes it beside log_mass.
        scale: The loop passes `scale` to the loss.
        aligned: True if all tensors begin at multiples of 16 bytes, as new ones do, and padded rows have a multiple of
            16 tokens; False if never; None: both can be.
        mean_lengths: The least and the largest mean length that sequences of a batch can have.
        threads: That compile side by side; None: as many as there are cores for this process.
        progress: Say on standard error what has been compiled, with a bar where rich is installed; None: if that is a
            terminal.

    Returns:
        The number of batches that were run: 0 where there is nothing to compile.
    """
    device = torch.device(device)
    if spec is not None and not isinstance(spec, Spec):
        raise no_spec(spec, "a Spec or None")
    if loss is not None and not isinstance(loss, Mapping):
        raise TypeError(f"loss: expected a mapping of arguments or None, got {type(loss).__name__}")
    for layout in layouts:
        if layout not in get_args(LayoutName):
            raise ValueError(f"layouts: expected some of {list(get_args(LayoutName))}, got {shown(layout)}")
    if advantages not in (None, *get_args(AdvantageUnit)):
        raise ValueError(f"advantages: expected 'token', 'sequence' or None, got {shown(advantages)}")
    least, most = mean_lengths
    if not 0.0 <= least <= most:
        raise ValueError(f"mean_lengths: expected the least and the largest, 0 or more, got {shown(mean_lengths)}")
    if operators.why_not(device) is not None:
        return 0
    from rollout_corr.kernels.grid import SHAPES

    lengths = [length for length, _ in SHAPES]
    shapes = [
        length
        for length, next_one in zip(lengths, [float("inf"), *lengths], strict=False)
        if length <= most and least < next_one
    ]
    skips = (0, 1) if aligned is None else (int(not aligned),)

    def batch(layout: LayoutName, length: int, skip: int) -> None:
        """Run one small batch through a step of the loop."""
        width = max(16, length)
        shape = (2 * width,) if layout == "packed" else (2, width)

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros((*shape[:-1], shape[-1] + skip), dtype=dtype, device=device)[..., skip:]

        offsets = torch.tensor([0, width, 2 * width], dtype=cu_seqlens_dtype, device=device)
        # Beside a sequence_group [S] of a packed batch could be tokens.
        of_sequences = torch.zeros((2, 1) if layout == "packed" else (2,), device=device)
        given = {None: None, "token": zeros(torch.float32), "sequence": of_sequences}
        options: dict[str, Any] = {
            "cu_seqlens": offsets if layout == "packed" else None,
            "sequence_group": sequence_group,
            # A Spec or a loss beyond the kernels has none to compile; the interpreter is chosen by name alone.
            "backend": "auto" if device.type in operators.DEVICES else "triton",
        }
        if log_mass_dtype is not None:
            options |= {"log_mass": zeros(log_mass_dtype), "renormalized": renormalized}
        logps = zeros(logp_dtypes[0]), zeros(logp_dtypes[1])
        mask = None if mask_dtype is None else zeros(mask_dtype)
        scales = {"scale": zeros(torch.float32)} if scale else {}
        of_loss = None if loss is None else {**loss, **scales}
        turns = torch.tensor([0, width, 2 * width], device=device)
        _step(spec, of_loss, decoupled, logps, mask, given[advantages], turns, options)

    batches = list(product(layouts, shapes, skips))
    if not operators.interprets():
        _compile(batches, batch, threads or len(os.sched_getaffinity(0)), progress)
    for one in batches:
        batch(*one)
    return len(batches)


def _compile(
    batches: Sequence[tuple[LayoutName, int, int]],
    batch: Callable[[LayoutName, int, int], None],
    threads: int,
    progress: bool | None,
) -> None:
    """Compile what batches launch, side by side, before they are run."""
    from rollout_corr.kernels.launches import compiled_beside

    with compiled_beside(threads) as compilations:
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


def _step(
    spec: Spec | None,
    loss: Mapping[str, Any] | None,
    decoupled: bool,
    log_probs: tuple[Tensor, Tensor],
    mask: Tensor | None,
    advantages: Tensor | None,
    turns: Tensor,
    options: dict[str, Any],
) -> None:
    """Run one step of a loop: `correct`, then the loss forward and backward.

    Args:
        spec: Of `correct`; None: it is not called.
        loss: Arguments of `policy_loss`; None: it is not called.
        decoupled: Pass `old_logp`.
        log_probs: train_logp and rollout_logp.
        mask: Of both calls.
        advantages: Of both calls.
        turns: Of both calls, for what is over them.
        options: Further arguments of both calls.
    """
    train, rollout = log_probs

    def beside(of: Spec) -> dict[str, Any]:
        """The tensors that a Spec reads beside log-probs."""
        named = {
            name: torch.zeros_like(train, dtype=torch.float32)
            for name in external_names(of)
            if name and name != ENTROPY
        }
        versions = {"versions": torch.zeros_like(train, dtype=torch.int64), "current_version": 0}
        groups: dict[str, Any] = {"group_size": 1} if of.needs_groups else {}
        groups |= {"entropy": torch.zeros_like(train, dtype=torch.float32)} if of.reads_entropy else {}
        groups |= {"turns": turns} if of.measures_turns else {}
        return {"external": named, **(versions if of.reads_versions else {}), **groups}

    arguments = dict(loss or {})
    if spec is not None:
        # A Spec with prefixes asks for it, of split sequences.
        order = "contiguous" if spec.has_prefixes and options["sequence_group"] is not None else None
        ordered = options | {"sequence_order": order}
        found = correct(train, rollout, mask=mask, spec=spec, advantages=advantages, **beside(spec), **ordered)
        if decoupled and arguments.get("spec") is None:
            arguments["correction"] = found
    if loss is None or options["sequence_group"] is not None:
        return  # The loss of split sequences runs on plain torch.
    if arguments.get("spec") is not None:
        arguments |= beside(arguments["spec"])
    if arguments.get("kl") is not None:
        arguments["ref_logp"] = train
    surrogate = arguments.get("surrogate")
    traits = getattr(surrogate, "traits", Traits())
    if traits.reads_entropy or arguments.get("entropy_bonus") is not None:
        arguments["entropy"] = torch.zeros_like(train, dtype=torch.float32)
    if traits.sees == "groups":
        arguments["group_size"] = 1
    if getattr(surrogate, "mean_unit", None) == "turn":
        arguments["turns"] = turns
    new = train.detach().requires_grad_()
    if advantages is None:
        advantages = torch.zeros_like(train, dtype=torch.float32)
    old = train if decoupled else None
    out = policy_loss(new, advantages, mask=mask, old_logp=old, rollout_logp=rollout, **arguments, **options)
    out.value.backward()
