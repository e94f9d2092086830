"""What must hold on a GPU beside the tests: `python -m benchmarks.gpu_report.checks GROUP --json x.json`.

Each check raises `Broken`, or says in a sentence what it saw. The file is written after every check.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks import batches, operations
from benchmarks.batches import Batch
from benchmarks.contenders import OURS
from benchmarks.device import Host, present
from benchmarks.device_contenders import EAGER, Contender, contenders
from benchmarks.device_gate import check as gate
from benchmarks.gate import WrongResult
from benchmarks.gpu import write
from benchmarks.operations import BOTH, PRODUCT, SKYRL, SKYRL_STEP, SURROGATE, TOKEN, XTUNER, Operation

# Of `correct` without metrics; of PPO three forward, one backward, and torch's own that makes the 1 which a backward
# starts from.
MOST_LAUNCHES = {TOKEN.name: 3, PRODUCT.name: 3, BOTH.name: 5}
SMALL = ("32k in 256", "xtuner's pack", "SkyRL's row", "1M")
REPEATS = 10


class Broken(Exception):
    """A check found that something does not hold."""


def hold(so: bool, otherwise: str) -> None:
    """Raise unless it is so."""
    if not so:
        raise Broken(otherwise)


def named(batch: Batch, operation: Operation, name: str) -> Contender:
    """A contender that is there."""
    found = next((who for who in contenders(batch, operation) if who.name == name), None)
    hold(found is not None and found.on_device is not None, f"{name} does not run {operation.name} here")
    assert found is not None
    return found


def wanted(where: Host, case: str) -> list[tuple[Batch, Operation]]:
    """The operations that the plan has for a case."""
    batch = batches.make(batches.named(case), where.name)
    return [(batch, operation) for name, some in operations.PLAN if name == case for operation in some]


def tensors(out: object) -> list[Tensor]:
    """Every tensor in what a contender's call on the device gives."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, rc.Correction):
        parts = (out.weights, out.mask, out.keep, out.statistics.sums, out.statistics.maxima)
        return [x for x in parts if isinstance(x, Tensor)]
    if isinstance(out, tuple):
        return [x for part in out for x in tensors(part)]
    return []


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Bit by bit; a NaN equals the same NaN."""

    def bits(x: Tensor) -> Tensor:
        return x.detach().reshape(-1).view(torch.uint8)

    return all(a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


# --- the checks ---


def agrees(where: Host, names: Sequence[str] = SMALL) -> str:
    """Ours runs on the kernels and equals the reference."""
    here = rc.backend_for(torch.empty(1, device=where.name))
    hold(here.name == ("triton" if where.name == "cuda" else "torch"), f"backend_for says {here}")
    seen = 0
    for name in names:
        for batch, operation in wanted(where, name):
            reference = next((who for who in contenders(batch, operation) if who.name == EAGER), None)
            whole = named(batch, operation, OURS).whole
            if reference is None or reference.whole is None or whole is None:
                continue
            try:
                gate(batch, operation, {OURS: whole(), EAGER: reference.whole()})
            except WrongResult as problem:
                raise Broken(f"{name}, {operation.name}: {problem}") from problem
            seen += 1
    hold(seen > 0 or where.name == "cpu", "nothing was compared")
    return f"{seen} operations equal the reference; {here.reason}"


def repeats(where: Host, names: Sequence[str] = ("32k in 256", "1M", "16M in 100,000")) -> str:
    """The same call gives the same bits."""
    seen = 0
    for name in names:
        for batch, operation in wanted(where, name):
            call = named(batch, operation, OURS).on_device
            assert call is not None
            first = [x.clone() for x in tensors(call())]
            for _ in range(REPEATS):
                hold(same(first, tensors(call())), f"{name}, {operation.name}: a second call gave other bits")
            seen += len(first)
    return f"{seen} tensors, {REPEATS} more times each, bit by bit"


def repacked(batch: Batch, order: Tensor, gap: int) -> tuple[Batch, Tensor]:
    """The sequences in another order behind `gap` tokens of none, and where each of their tokens was."""
    device = batch.old.device
    assert batch.cu_seqlens is not None and batch.mask is not None
    starts = batch.cu_seqlens.cpu().long()
    came = torch.cat([torch.arange(int(starts[s]), int(starts[s + 1])) for s in order.tolist()]).to(device)
    lengths = starts.diff()[order]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]) + gap

    def moved(x: Tensor) -> Tensor:
        return torch.cat([x.new_ones(gap), x[came]])

    return replace(
        batch,
        old=moved(batch.old),
        rollout=moved(batch.rollout),
        mask=moved(batch.mask),
        cu_seqlens=offsets.to(device, torch.int32),
    ), came


def packs(where: Host, name: str = "32k in 256") -> str:
    """A sequence's weights, mask and verdict do not depend on what is packed around it, nor where it starts."""
    batch = batches.make(batches.named(name), where.name)
    assert batch.cu_seqlens is not None
    many = batch.case.sequences
    generator = torch.Generator().manual_seed(0)
    layouts = [(torch.randperm(many, generator=generator), gap) for gap in (0, 1, 7, 4096)]
    layouts += [(torch.tensor([s]), 3) for s in range(0, many, max(1, many // 8))]
    for operation in (TOKEN, PRODUCT, XTUNER):

        def corrected(given: Batch, spec: rc.Spec = operation.spec) -> rc.Correction:
            return rc.correct(given.old, given.rollout, given.mask, cu_seqlens=given.cu_seqlens, spec=spec)

        whole = corrected(batch)
        for order, gap in layouts:
            other, came = repacked(batch, order, gap)
            out = corrected(other)
            hold(
                same([whole.weights[came], whole.mask[came]], [out.weights[gap:], out.mask[gap:]])
                and torch.equal(whole.keep.cpu()[order], out.keep.cpu()),
                f"{operation.name}: {len(order)} of {many} sequences behind {gap} tokens gave other bits",
            )
            hold(not out.weights[:gap].any() and not out.mask[:gap].any(), f"{operation.name}: a token of no sequence")
    return f"{many} sequences in {len(layouts)} packings, three operations, bit by bit"


def launches(where: Host, names: Sequence[str] = ("32k in 256", "16M in 100,000", "1M in 1", "1M")) -> str:
    """No wait of the host before metrics, and as many launches for one sequence as for 100,000."""
    seen: dict[str, set[int]] = {}
    for name in names:
        for batch, operation in wanted(where, name):
            if operation.name not in MOST_LAUNCHES:
                continue
            who = named(batch, operation, OURS)
            assert who.on_device is not None and who.whole is not None
            who.whole()
            alone, whole = where.counts(who.on_device), where.counts(who.whole)
            hold(alone is not None and whole is not None, "the profiler saw no device")
            assert alone is not None and whole is not None
            where_ = f"{name}, {operation.name}"
            hold(alone.syncs == 0, f"{where_}: the host waits {alone.syncs} times before metrics")
            hold(whole.syncs <= 1, f"{where_}: the host waits {whole.syncs} times with metrics")
            most = MOST_LAUNCHES[operation.name]
            hold(0 < alone.kernels <= most, f"{where_}: {alone.kernels} kernels, at most {most} were promised")
            seen.setdefault(operation.name, set()).add(alone.kernels)
    for operation_name, counts in seen.items():
        hold(len(counts) == 1, f"{operation_name}: {sorted(counts)} kernels, and the number of sequences decides")
    return "; ".join(f"{name}: {counts.pop()} kernels" for name, counts in seen.items())


def no_waits(where: Host) -> str:
    """torch itself raises where the host would wait."""
    seen = 0
    for name in SMALL:
        for batch, operation in wanted(where, name):
            call = named(batch, operation, OURS).on_device
            assert call is not None
            call()
            where.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                call()
            except RuntimeError as problem:
                raise Broken(f"{name}, {operation.name}: {problem}") from problem
            finally:
                torch.cuda.set_sync_debug_mode("default")
            seen += 1
    return f"{seen} operations under set_sync_debug_mode('error')"


def graphs(where: Host) -> str:
    """Captured, and replayed on other numbers, the bits are those of a call."""
    for operation in (TOKEN, PRODUCT, BOTH, SKYRL_STEP):
        case = batches.named("SkyRL's row" if operation is SKYRL_STEP else "32k in 256")
        batch = batches.make(case, where.name)
        call = named(batch, operation, OURS).on_device
        assert call is not None
        call()
        replay = where.graph([call])
        hold(replay is not None, "there are no graphs here")
        assert replay is not None
        for seed in (1, 2):
            other = batches.make(case, where.name, seed)
            with torch.no_grad():
                for name in ("new", "old", "rollout", "advantages", "mask"):
                    getattr(batch, name).copy_(getattr(other, name))
                if batch.cu_seqlens is not None and other.cu_seqlens is not None:
                    batch.cu_seqlens.copy_(other.cu_seqlens)
            # A replay gives a list of what its calls gave.
            replayed = replay()
            where.synchronize()
            hold(
                same(tensors(tuple(replayed)), tensors(call())),
                f"{operation.name}: the replay gave other bits than a call",
            )
    return "four operations, two replays each on other numbers, bit by bit"


def compiles(where: Host) -> str:
    """Under torch.compile(fullgraph=True) the bits are those of a call."""

    def step(
        new: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, offsets: Tensor
    ) -> tuple[Tensor, ...]:
        out = rc.correct(old, rollout, mask, cu_seqlens=offsets, spec=operations.TOKEN_SPEC)
        loss = rc.policy_loss(
            new,
            advantages,
            mask,
            old_logp=old,
            weights=out.weights,
            train_mask=out.mask,
            cu_seqlens=offsets,
            surrogate=SURROGATE,
        )
        return out.weights, out.mask, out.keep, out.statistics.sums, loss.value, loss.statistics.sums

    compiled = torch.compile(step, fullgraph=True)
    for name in ("32k in 256", "1M"):
        batch = batches.make(batches.named(name), where.name)
        assert batch.mask is not None and batch.cu_seqlens is not None
        given = (batch.new, batch.old, batch.rollout, batch.advantages, batch.mask, batch.cu_seqlens)
        found = []
        for call in (step, compiled):
            out = call(*given)
            (gradient,) = torch.autograd.grad(out[4], batch.new)
            found.append([*(x.detach() for x in out), gradient])
        hold(same(*found), f"{name}: the compiled step gave other bits")
    return "a step of correct and policy_loss, forward and backward, no graph break, bit by bit"


def many_sequences(where: Host, sequences: int = 1_000_000) -> str:
    """More sequences than a second axis of a grid could hold."""
    batch = batches.make(batches.Case("", "", 8 * sequences, sequences, skew=0.3), where.name)
    for operation in (TOKEN, PRODUCT):
        out, expected = (
            rc.correct(
                batch.old, batch.rollout, batch.mask, cu_seqlens=batch.cu_seqlens, spec=operation.spec, backend=b
            )
            for b in ("auto", "torch")
        )
        hold(torch.equal(out.keep, expected.keep), f"{operation.name}: verdicts differ from the reference")
        hold(torch.equal(out.mask, expected.mask), f"{operation.name}: the mask differs from the reference")
        hold(torch.allclose(out.weights, expected.weights, rtol=1e-6, atol=0.0), f"{operation.name}: weights differ")
    return f"{sequences:,} sequences equal the reference"


def many_tokens(where: Host, copies: int = 2049, tokens: int = 1 << 20) -> str:
    """More than 2^31 tokens: a block of sequences over and over, the last copy like the first."""
    case = batches.Case("", "", tokens, 256, logp=torch.bfloat16)
    batch = batches.make(case, where.name)
    assert batch.cu_seqlens is not None and batch.mask is not None
    total = copies * tokens
    needed = total * (2 + 2 + 1 + 4 + 1) * 1.3
    if where.name == "cuda" and torch.cuda.mem_get_info()[0] < needed:
        raise Broken(f"not tried: {needed / 2**30:.0f} GiB are needed")
    starts = batch.cu_seqlens[:-1].long()
    offsets = (starts + torch.arange(copies, device=where.name)[:, None] * tokens).flatten()
    offsets = torch.cat([offsets, offsets.new_tensor([total])])
    one = rc.correct(batch.old, batch.rollout, batch.mask, cu_seqlens=batch.cu_seqlens, spec=TOKEN.spec)
    out = rc.correct(
        batch.old.repeat(copies),
        batch.rollout.repeat(copies),
        batch.mask.repeat(copies),
        cu_seqlens=offsets,
        spec=TOKEN.spec,
    )
    for which in (0, copies // 2, copies - 1):
        part = slice(which * tokens, (which + 1) * tokens)
        hold(same([one.weights, one.mask], [out.weights[part], out.mask[part]]), f"copy {which} has other bits")
    hold(torch.equal(one.keep.repeat(copies), out.keep), "verdicts differ between copies")
    a, b = one.metrics(), out.metrics()
    hold(b["tokens"] == copies * a["tokens"], f"{b['tokens']} tokens were counted, not {copies * a['tokens']}")
    hold(abs(a["d_abs_mean"] - b["d_abs_mean"]) <= 1e-5 * a["d_abs_mean"], "the mean of |D| differs")
    return f"{total:,} tokens, every copy like the first"


def sanitized(where: Host) -> str:
    """Every kind of kernel once, on small batches, aligned and not: for compute-sanitizer to watch."""
    seen = 0
    for name, wanted_here in operations.PLAN:
        batch = batches.make(batches.named(name).tiny(), where.name)
        for operation in wanted_here:
            if operation in (TOKEN, PRODUCT, BOTH, XTUNER, SKYRL):
                whole = named(batch, operation, OURS).whole
                assert whole is not None
                whole()
                seen += 1
    batch = batches.make(batches.named("32k in 256").tiny(), where.name)
    shifted, _ = repacked(batch, torch.arange(batch.case.sequences), 1)
    cut = [x[1:] for x in (shifted.old, shifted.rollout, shifted.mask) if x is not None]
    assert shifted.cu_seqlens is not None
    layouts = [shifted.cu_seqlens - 1]
    if where.name == "cuda":
        # Offsets that a CPU refuses. On a device nobody looks at them, and the numbers are wrong.
        garbage = torch.tensor([7, -5, 1 << 30, 3, 3, 900, 0, -(1 << 30)], dtype=torch.int32, device=where.name)
        layouts += [garbage, garbage.long() << 20]
    for offsets in layouts:
        for operation in (TOKEN, PRODUCT):
            rc.correct(*cut, cu_seqlens=offsets, spec=operation.spec).metrics()
    where.synchronize()
    return f"{seen} calls of the plan, {2 * len(layouts)} with other offsets"


Check = Callable[[Host], str]

GROUPS: dict[str, tuple[Check, ...]] = {
    "first": (agrees,),
    "bits": (repeats, packs),
    "calls": (launches, no_waits, graphs, compiles),
    "sizes": (many_sequences, many_tokens),
    "sanitized": (sanitized,),
}


def run(where: Host, checks: Sequence[Check], save: Callable[[dict[str, Any]], None]) -> bool:
    """Run them all, save after each, and say whether all held."""
    found: dict[str, Any] = {}
    for check in checks:
        found[check.__name__] = {"what": (check.__doc__ or "").splitlines()[0], "held": None, "said": "under way"}
        save(found)
        try:
            held, said = True, check(where)
        except Broken as problem:
            held, said = False, str(problem)
        except Exception as problem:  # noqa: BLE001  (said below)
            # A check that breaks in whatever way must not lose those behind it: it counts as not held, stands in the
            # report with its message, is printed with its traceback, and makes the exit status 1.
            traceback.print_exc()
            held, said = False, f"{type(problem).__name__}: {problem}".splitlines()[0]
        found[check.__name__] |= {"held": held, "said": said}
        save(found)
        print(f"{check.__name__}: {'holds' if held else 'BROKEN'}: {said}", flush=True)
        where.free()
    return all(one["held"] for one in found.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a group; the exit status says whether all of it holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report.checks")
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("checks: torch sees no GPU here")
    if not run(present(), GROUPS[options.group], lambda found: write(options.json, found)):
        sys.exit(1)


if __name__ == "__main__":
    main()
