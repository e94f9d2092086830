"""Compiled kernels on hard batches, compared as the tests of Triton's interpreter compare; for a process without it."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

import rollout_corr as rc
from builders.batches import Laid, lay_out, one_thread, random_sequences, spoil
from builders.kernel_cases import (
    as_declared,
    assert_like_reference,
    check,
    shaped,
    unchecked,
)
from builders.kernel_file import LENGTHS, batch_of, differing
from builders.loss_kernel_cases import compare_with_reference, tensors_of
from builders.rounding import assert_near
from builders.step_cases import compare_step, step_batch
from builders.turns import loss_of, offsets_of, random_turns
from lab.aot.file_variants import FILE_VARIANTS, launches_of
from lab.aot.loss_variants import LOSS_VARIANTS
from lab.aot.step_variants import STEP_VARIANTS
from lab.aot.variant import LONGEST, Variant
from lab.aot.variants import SPLIT_VARIANTS, TURN_VARIANTS, VARIANTS
from lab.ptx.counts import filled, variant_of
from lab.ptx.machine import FoundWrong
from lab.ptx.session import Session, compile_ptx, compiled
from rollout_corr.eject import kernel
from rollout_corr.kernels.correct import launch
from rollout_corr.kernels.grid import Shape, cut_for
from rollout_corr.kernels.launches import Launch


def shape_of(variant) -> Shape:
    """The shape that a launch of this variant has, but for shorter tiles, so that short batches have many."""
    return replace(cut_for(variant.length, 1, 4, True, True).shape, tile=256, least=0)


def lengths_for(shape: Shape) -> tuple[int, ...]:
    """Empty and one-token sequences, many in a tile, a tile less and more one token, one over several programs, a tail.

    Together more than two programs, so that there are tiles without an end in them: all but 3 % of the compiled
    instructions are executed.
    """
    tile = shape.tile
    hard = (5, 1, tile // 4, 0, 1, 1, tile - 1, 3, tile + 1, 0, 2 * tile + tile // 3, 2, 17)
    # More sequences than two programs over sequences have, so that they need one another's results.
    return (*hard, 4 * tile + 9, *(4 * (tile // 2,)), *(1, 2) * 32)


def laid_out(variant: Variant, sequences) -> Laid:
    """Sequences in the layout and with the dtypes that a variant declares: other dtypes are other kernels."""
    laid = lay_out(sequences, "packed_gaps" if variant.packed else "padded_left", variant.train, variant.mask)
    laid.cu_seqlens = laid.cu_seqlens.to(variant.offsets) if variant.packed else None
    if variant.advantages:
        laid.advantages = laid.advantages.to(torch.promote_types(variant.train, torch.float32))
    return laid


def run_correct(name: str, seed: int = 0, **settings) -> Session:
    """A variant of `correct`: its own layout, dtypes and strides, in its own shape."""
    variant = VARIANTS[name]
    shape = shape_of(variant)
    sequences, spec, others = as_declared(name, lengths=lengths_for(shape))
    layout = "packed_gaps" if variant.packed else "padded_left"
    with one_thread(), shaped(((0, shape),)), compiled(seed=seed, **settings) as session:
        check(sequences, spec, layout, "cpu", place=variant.place, **others)
    return session


def run_split(name: str, seed: int = 0, **settings) -> Session:
    """A variant of split sequences, all of them on one rank: four launches, with sums by sequence in the middle."""
    variant, split = SPLIT_VARIANTS[name], partial(launch.prepare, split=True)
    with mock.patch.dict(VARIANTS, {name: variant}), mock.patch.object(launch, "prepare", split):
        session = run_correct(name, seed, **settings)
    assert any(done.kernel.name == "gather_kernel" for _, done in session.executed)
    return session


def laid_batch_of(variant: Variant, number: int, spoiled: bool = True) -> tuple[Laid, dict[str, torch.Tensor]]:
    """A random batch in the layout of a variant, and its turns if it has any, as `Laid.correct` takes them."""
    sequences = random_sequences(number, lengths_for(shape_of(variant)), scale=0.1, advantages=variant.advantages)
    laid = laid_out(variant, spoil(sequences, number) if spoiled else sequences)
    turns = offsets_of(laid, random_turns(sequences, number)).to(variant.offsets) if variant.turns else None
    return laid, {} if turns is None else {"turns": turns}


def run_both(
    variant: Variant, laid: Laid, seed: int, settings: dict, **given
) -> tuple[Session, rc.Correction, rc.Correction]:
    """Run the compiled kernels in a variant's own shape, and plain torch; of split sequences all on one rank."""
    reference = laid.correct(variant.spec, **given)
    patched = mock.patch.object(launch, "prepare", partial(launch.prepare, split=variant.split))
    shapes = ((0, shape_of(variant)),)
    with patched, one_thread(), unchecked(), shaped(shapes), compiled(seed=seed, **settings) as session:
        out = laid.correct(variant.spec, backend="triton", **given)
    return session, out, reference


def run_turns(name: str, seed: int = 0, **settings) -> Session:
    """A variant with turns, against plain torch."""
    variant = TURN_VARIANTS[name]
    laid, given = laid_batch_of(variant, list(TURN_VARIANTS).index(name))
    session, out, reference = run_both(variant, laid, seed, settings, **given)
    assert {True, False} == set(reference.keep_turns.tolist())
    assert_like_reference(out, reference, name)
    assert out.keep_turns.equal(reference.keep_turns)
    return session


def run_loss(name: str, seed: int = 0, **settings) -> Session:
    """A variant of `policy_loss`, forward and backward."""
    variant, number = LOSS_VARIANTS[name], list(LOSS_VARIANTS).index(name)
    shape = shape_of(variant)
    lengths = lengths_for(shape)
    with one_thread(), shaped(((0, shape),)):
        given = tensors_of(variant, number, lengths, width=max(lengths) + 6)
        with compiled(seed=seed, **settings) as session:
            compare_with_reference(given, variant.objective, "cpu", f"{name} {number}", variant.differentiable)
    return session


def run_step(name: str, seed: int = 0, **settings) -> Session:
    """A variant of a whole step in one pass, forward and backward, against a correction and a loss on plain torch."""
    variant, number = STEP_VARIANTS[name], list(STEP_VARIANTS).index(name)
    shape = shape_of(variant)
    given = step_batch(variant, lengths_for(shape), number)
    with one_thread(), unchecked(), shaped(((0, shape),)), compiled(seed=seed, **settings) as session:
        compare_step(given)
    return session


def run_loss_of_turns(seed: int = 0, **settings) -> None:
    """GSPO over turns against plain torch, averaged over the tokens of each sequence, forward and backward."""
    shape = shape_of(LOSS_VARIANTS["gspo"])
    batch = random_sequences(0, lengths_for(shape), scale=0.1, advantages="token")
    laid = lay_out(batch, "packed_gaps", torch.float32)
    surrogate = rc.GSPO(0.05, 0.1, over="turn")
    given = {"surrogate": surrogate, "turns": offsets_of(laid, random_turns(batch, 0))}
    given["mean"] = rc.Mean("sequence")
    wanted, wanted_slope = loss_of(laid, "torch", **given)
    with one_thread(), shaped(((0, shape),)), compiled(seed=seed, **settings):
        found, slope = loss_of(laid, "triton", **given)
    assert_near(found.value, wanted.value, torch.float32)
    assert_near(slope, wanted_slope, torch.float32)


def run_file(name: str, seed: int = 0, **settings) -> Session:
    """A variant of the file to copy, against its own reference. A long sequence has helpers that zero its tokens."""
    return run_file_of((0, 200_000, 9) if FILE_VARIANTS[name].length == LONGEST else LENGTHS, name, seed, **settings)


def run_file_of(lengths: tuple[int, ...], name: str = "file_packed", seed: int = 0, **settings) -> Session:
    """Such a variant, with sequences of these lengths."""
    variant = FILE_VARIANTS[name]
    kinds = {"dtype": variant.train, "mask": variant.mask, "offsets": variant.offsets}
    given = batch_of(lengths, packed=variant.packed, bad=variant.mask is not None, **kinds)
    given = (*(None if x is None else variant.place(x) for x in given[:3]), given.cu_seqlens)
    with compiled(seed=seed, **settings) as session:
        launches, out = launches_of(*given, variant.settings)
        for each in launches:
            session.run(each)
    reference = kernel.correct_reference(*given, variant.settings)
    assert differing(out, reference) == []
    if variant.wide_bytes:
        read = session.executed[0][1].kernel
        assert sum(x.opcode.startswith("ld.global.v4") for x in read.code) >= 2, (
            "log-probs are loaded 4 bytes at a time"
        )
    assert variant.mask is None or 0 < reference.keep.sum() < reference.keep.numel()
    return session


def run_uncontracted(name: str, seed: int = 0) -> None:
    """Give weights, mask and verdicts the same bits where the compiler makes no product and sum one operation.

    It may choose otherwise in another kernel, and ptxas behind it. What decides has its operations written out.
    """
    options, shape, found, counts = Launch.options, shape_of(VARIANTS[name]), [], []
    sequences, spec, _ = as_declared(name, lengths=lengths_for(shape))
    laid = laid_out(VARIANTS[name], sequences)
    for fuses in (True, False):

        def chosen(*given, contracts=fuses, **named):
            return options(*given, **named) | {"enable_fp_fusion": contracts}

        patched = mock.patch.object(Launch, "options", chosen)
        with patched, one_thread(), unchecked(), shaped(((0, shape),)), compiled(seed=seed) as session:
            out = laid.correct(spec, backend="triton")
        found.append([x for x in (out.weights, out.mask, out.keep) if x is not None])
        counts.append(sum(int(done.threads.sum()) for _, done in session.executed))
    assert counts[0] < counts[1] and all(map(torch.equal, *found))


def wrong_offsets(tokens: int) -> list[list[int]]:
    """Offsets that fall, overlap, are negative, lie beyond the batch, and are as large as they can be."""
    far = 2**31 - 1
    return [
        [0, tokens - 3, 40, tokens // 2, 41, tokens],
        [tokens, tokens // 3, 20, 0],
        [-5, 10, -tokens, tokens // 2, tokens + 7, 3 * tokens],
        [-far - 1, 7, far, -far, far, 33],
    ]


def run_wrong_offsets(name: str, seed: int = 0, kind: int | None = None, **settings) -> None:
    """A packed variant with offsets that are garbage, of one kind or of all: in bounds, whatever they say.

    A token may have several owners then, in one program or several, which write it in any order. The file to copy reads
    slots that nothing has filled.
    """
    variant = variant_of(name)
    if not variant.packed:
        return
    shape = shape_of(variant)
    tokens = 8 * shape.tile + shape.tile // 3
    unfilled = ("unwritten",) * (name in FILE_VARIANTS)
    settings = {"seed": seed, "allowed": ("race of programs", "race in a program", *unfilled)} | settings
    kinds = wrong_offsets(tokens)
    for offsets in kinds if kind is None else [kinds[kind % len(kinds)]]:
        given = filled(variant, tokens, len(offsets) - 1)
        given.offsets.copy_(torch.tensor(offsets))
        if getattr(given, "turns", None) is not None:
            given.turns.copy_(torch.tensor(offsets[::-1]))
        with shaped(((0, shape),)), compiled(**settings) as session:
            for each in variant.launches(given):
                session.run(each)


def run_large(tokens: int = 400_000, sequences: int = 300, seed: int = 0, **settings) -> Session:
    """Token weights, a mask and a criterion over sequences, against plain torch; all metrics, of a histogram too."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(tokens, generator=generator)
    train = rollout + 0.1 * torch.randn(tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) < 0.9
    bounds = torch.randint(0, tokens, (sequences,), generator=generator).sort().values
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), bounds, torch.tensor([tokens])])
    spec = rc.Spec(
        rc.Weight.token(lower=0.8, upper=1.2),
        (rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.998, upper=1.01),),
        detail="full",
    )
    reference = rc.correct(train, rollout, mask=mask, cu_seqlens=offsets, spec=spec, backend="torch")
    assert 0 < reference.keep.sum() < reference.keep.numel()
    with one_thread(), unchecked(), compiled(seed=seed, **settings) as session:
        out = rc.correct(train, rollout, mask=mask, cu_seqlens=offsets, spec=spec, backend="triton")
    assert_like_reference(out, reference)
    return session


def run_many_sequences(seed: int = 0, **settings) -> Session:
    """So many sequences that programs over them add up the rows of their neighbors."""
    return run_large(8_000, 2_500, seed, **settings)


CASES = {
    **{name: partial(run_correct, name) for name in VARIANTS},
    **{name: partial(run_split, name) for name in SPLIT_VARIANTS},
    **{name: partial(run_turns, name) for name in TURN_VARIANTS},
    **{f"loss_{name}": partial(run_loss, name) for name in LOSS_VARIANTS},
    **{name: partial(run_file, name) for name in FILE_VARIANTS},
    **{f"step_{name}": partial(run_step, name) for name in STEP_VARIANTS if name != "tis_propagate"},
    "loss_of_turns": run_loss_of_turns,
    "many_sequences": run_many_sequences,
}


class _Enough(Exception):
    """The front end is through."""


def read_by_triton(variant) -> None:
    """Let Triton's front end read the formula of a loss: types and constants, which its interpreter lets pass."""
    add_stages = CUDABackend.add_stages

    def stop(*given: Any) -> None:
        raise _Enough

    def first_alone(backend, stages, *given):
        add_stages(backend, stages, *given)
        stages[list(stages)[1]] = stop

    # What follows the gradient is the same for every formula.
    (gradient,) = [each for each in variant.launches() if each.kernel.__name__ == "gradient_kernel"]
    with mock.patch.object(CUDABackend, "add_stages", first_alone), suppress(_Enough):
        compile_ptx(gradient)


def run_case(name: str, seed: int = 0, kind: int | None = None, **settings) -> None:
    """A case, then its variant, where one is declared, with wrong offsets of one kind or of all."""
    CASES[name](seed, **settings)
    if name not in ("loss_of_turns", "many_sequences"):
        run_wrong_offsets(name, seed, kind, **settings)


def run_with_fault(name: str, place: str, before: str, after: str) -> str:
    """Run a case with one text exchanged in the source of a Triton function; tell how that is noticed, "" if it is not.

    Args:
        name: Of the case.
        place: The function, as "module:name".
        before, after: The text, which stands there once, and what takes its place.
    """
    module, _, function = place.partition(":")
    function = getattr(importlib.import_module(f"rollout_corr.kernels.{module}"), function)
    source = function.src
    assert source.count(before) == 1, source
    try:
        _compile_from(function, source.replace(before, after))
        run_case(name)
    except FoundWrong as error:
        return ", ".join(sorted({x.kind for x in error.findings}))
    except AssertionError:
        return "numbers"
    finally:
        _compile_from(function, source)
    return ""


def _compile_from(function: JITFunction, source: str) -> None:
    function._unsafe_update_src(source)
    for name, module in list(sys.modules.items()):
        if name.startswith("rollout_corr.kernels"):
            for other in vars(module).values():
                if isinstance(other, JITFunction):
                    other.hash = None  # callers' hashes hold those of what they call
