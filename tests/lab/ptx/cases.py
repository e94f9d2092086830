"""Compiled kernels on hard batches, compared as the tests of Triton's interpreter compare; for a process without it."""

from __future__ import annotations

import importlib
import random
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
from builders import judges
from builders.kernel_cases import assert_like_reference, assert_loss_like_reference, shaped, unchecked
from builders.kernel_file import LENGTHS, batch_of, differing
from frozen.calls import Call, loss_call
from frozen.cases import of_variant
from frozen.generator import Layout
from frozen.runners import one_thread
from lab.aot.file_variants import FILE_VARIANTS, launches_of
from lab.aot.loss_variants import LOSS_VARIANTS
from lab.aot.step_variants import STEP_VARIANTS
from lab.aot.variant import LONGEST, StepVariant, Variant
from lab.aot.variants import SPLIT_VARIANTS, TURN_VARIANTS, VARIANTS
from lab.ptx.counts import filled, variant_of
from lab.ptx.losses import compare_with_reference, tensors_of
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
    return (*hard, 4 * tile + 14, *(4 * (tile // 2,)), *(1, 2) * 32)


def call_of(variant: Variant | StepVariant) -> Call:
    """The first random call of a variant whose criteria keep some tokens and reject some, on sequences that are hard.

    Rows are two columns wider than the longest sequence, and begin at multiples of 16 elements.
    """
    for i in range(99):
        call = of_variant(variant, f"compiled {i}", lengths_for(shape_of(variant)))
        if "turns" in call.drawn.batch:
            call.drawn.batch["turns"] = call.drawn.laid.turn_offsets()
        out = call.corrected(call.spec, "torch") if call.loss is None else call.lost("torch", call.loss)[0]
        if not call.spec.criteria or 0 < out.metrics()["tokens_kept"] < out.metrics()["tokens"]:
            return call
    raise AssertionError(f"{variant}: no random call keeps some tokens and rejects others")


def run_call(variant: Variant | StepVariant, seed: int = 0, **settings) -> Session:
    """A variant in its own shape, judged by the loops of tests/oracles; of split sequences all are on one rank."""
    call, split = call_of(variant), partial(launch.prepare, split=getattr(variant, "split", False))
    patched = mock.patch.object(launch, "prepare", split)
    with (
        patched,
        one_thread(),
        unchecked(),
        shaped(((0, shape_of(variant)),)),
        compiled(seed=seed, **settings) as session,
    ):
        if call.loss is None:
            judges.judge_correction(call, call.corrected(call.spec, "triton"))
        else:
            judges.judge_loss(call, "triton")
    plans = [each.arguments["PLAN"] for each, _ in session.executed]
    # Of a backward pass the judge keeps the graph, so that it is not in place.
    wanted = [each.arguments["PLAN"] for each in variant.launches() if each.kernel.__name__ != "scale_kernel"]
    assert all(plan in plans for plan in wanted), "other kernels than the variant's"
    return session


def run_loss(name: str, seed: int = 0, **settings) -> Session:
    """A variant of `policy_loss`, forward and backward."""
    variant, number = LOSS_VARIANTS[name], list(LOSS_VARIANTS).index(name)
    shape = shape_of(variant)
    given = tensors_of(variant, number, lengths_for(shape))
    with one_thread(), shaped(((0, shape),)), compiled(seed=seed, **settings) as session:
        compare_with_reference(given, variant.objective, f"{name} {number}", variant.differentiable)
    return session


def run_loss_of_turns(seed: int = 0, **settings) -> None:
    """GSPO over turns, which has no oracle, against plain torch: a mean over sequences, forward and backward."""
    shape, given = shape_of(LOSS_VARIANTS["gspo"]), {"layout": Layout("gaps"), "dtypes": (torch.float32,) * 2}
    loss = rc.Loss(rc.GSPO(0.05, 0.1, over="turn"), rc.Mean("sequence"))
    call = loss_call(random.Random("turns"), loss, None, "decoupled", kind=lengths_for(shape), extras=0.0, **given)
    call.drawn.batch["turns"] = call.drawn.laid.turn_offsets()
    with one_thread(), shaped(((0, shape),)), compiled(seed=seed, **settings):
        assert_loss_like_reference(call)


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
    call = call_of(VARIANTS[name])
    for fuses in (True, False):

        def chosen(*given, contracts=fuses, **named):
            return options(*given, **named) | {"enable_fp_fusion": contracts}

        patched = mock.patch.object(Launch, "options", chosen)
        with patched, one_thread(), unchecked(), shaped(((0, shape),)), compiled(seed=seed) as session:
            out = call.corrected(call.spec, "triton")
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
    **{name: partial(run_call, one) for name, one in (VARIANTS | SPLIT_VARIANTS | TURN_VARIANTS).items()},
    **{f"loss_{name}": partial(run_loss, name) for name in LOSS_VARIANTS},
    **{name: partial(run_file, name) for name in FILE_VARIANTS},
    **{f"step_{name}": partial(run_call, one) for name, one in STEP_VARIANTS.items() if name != "tis_propagate"},
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
