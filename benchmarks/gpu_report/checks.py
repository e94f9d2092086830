"""What must hold on a GPU beside the tests: `python -m benchmarks.gpu_report.checks GROUP --json x.json`.

Each check raises `Broken`, or says in a sentence what it saw. The file is written after every check. On the CPU they
run in sizes that show nothing, and what needs a GPU does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks import batches, operations
from benchmarks.batches import Batch
from benchmarks.contenders import OURS
from benchmarks.device import Cuda, Host
from benchmarks.device_contender import EAGER
from benchmarks.device_contenders import contenders
from benchmarks.device_gate import check as gate
from benchmarks.gate import WrongResult
from benchmarks.gpu import KEPT_LINES, write
from benchmarks.gpu_report.compare import Broken, case_of, hold, named, same, tensors, wanted
from benchmarks.gpu_report.sizes import many_sequences, many_tokens
from benchmarks.gpu_report.steps import DOES_NOT_HOLD
from benchmarks.measure import first_line
from benchmarks.operations import BOTH, PRODUCT, SKYRL, SKYRL_STEP, SURROGATE, TOKEN, XTUNER

# Of `correct` without metrics; of PPO three forward, one backward, and torch's own that makes the 1 which a backward
# starts from.
MOST_LAUNCHES = {TOKEN.name: 3, PRODUCT.name: 3, BOTH.name: 5}
SMALL = ("32k in 256", "xtuner's pack", "SkyRL's row", "1M")
REPEATS = 10


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
    batch = batches.make(case_of(where, name), where.name)
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
        case = case_of(where, "SkyRL's row" if operation is SKYRL_STEP else "32k in 256")
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
        batch = batches.make(case_of(where, name), where.name)
        assert batch.mask is not None and batch.cu_seqlens is not None
        given = (batch.new, batch.old, batch.rollout, batch.advantages, batch.mask, batch.cu_seqlens)
        found = []
        for call in (step, compiled):
            out = call(*given)
            (gradient,) = torch.autograd.grad(out[4], batch.new)
            found.append([*(x.detach() for x in out), gradient])
        hold(same(*found), f"{name}: the compiled step gave other bits")
    return "a step of correct and policy_loss, forward and backward, no graph break, bit by bit"


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


def run(
    where: Host,
    checks: Sequence[Check],
    save: Callable[[dict[str, Any]], None],
    before: Mapping[str, dict[str, Any]] | None = None,
) -> bool:
    """Run them all, save after each, and say whether all held.

    Args:
        where: The device.
        checks: Which.
        save: Called with what is known, before and after each.
        before: What a run that ended early had saved: what it was in the middle of did not hold, the rest stands.
    """
    found = {name: dict(one) for name, one in (before or {}).items()}
    for one in found.values():
        if one["held"] is None:
            one |= {"held": False, "said": "the run ended in it"}
    save(found)
    for check in checks:
        if check.__name__ in found:
            continue
        found[check.__name__] = {"what": (check.__doc__ or "").splitlines()[0], "held": None, "said": "under way"}
        save(found)
        try:
            held, said = True, check(where)
        except Broken as problem:
            held, said = False, str(problem)
        except Exception as problem:  # noqa: BLE001  (said below)
            # A check that breaks in whatever way must not lose those behind it: it counts as not held, stands in the
            # report with its message, is printed with its traceback, and makes the exit status tell.
            traceback.print_exc()
            held, said = False, first_line(problem)
            found[check.__name__]["traceback"] = traceback.format_exc().splitlines()[-KEPT_LINES:]
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
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--resume", action="store_true", help="go on where the file of --json ends")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("checks: torch sees no GPU here")
    before = json.loads(options.json.read_text(encoding="utf-8")) if options.resume and options.json.exists() else {}
    where = Cuda() if options.device == "cuda" else Host()
    if not run(where, GROUPS[options.group], lambda found: write(options.json, found), before):
        sys.exit(DOES_NOT_HOLD)


if __name__ == "__main__":
    main()
