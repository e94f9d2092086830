"""Checks that must hold on a GPU beyond the tests: `python -m benchmarks.gpu_report.checks NAME ... --json x.json`.

Each check raises `Broken`, or returns a sentence about what it saw. The file is written after every check.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from benchmarks import machine
from benchmarks.cases import gate, operations
from benchmarks.cases.batches import make
from benchmarks.cases.contender import EAGER, OURS
from benchmarks.cases.contenders import contenders
from benchmarks.cases.operations import BOTH, METRICS, PRODUCT, SURROGATE, TOKEN, XTUNER, Operation
from benchmarks.gpu.__main__ import KEPT_LINES
from benchmarks.gpu.device import Gpu
from benchmarks.gpu.measure import first_line
from benchmarks.gpu_report.compare import Broken, case_of, hold, ours, planned, same, tensors
from benchmarks.gpu_report.sizes import many_sequences, many_tokens

# Of `correct` without metrics; of PPO three forward, one backward, and torch's own that makes the 1 which a backward
# starts from.
MOST_LAUNCHES = {TOKEN.name: 3, PRODUCT.name: 3, BOTH.name: 5}
SMALL = ("32k in 256", "xtuner's pack", "SkyRL's row", "1M")
REPEATS = 10

# --- the checks -------------------------------------------------------------------------------------------------------


def agrees(where: Gpu, names: Sequence[str] = SMALL, some: Sequence[Operation] | None = None) -> str:
    """Ours runs on the kernels and equals the reference."""
    here = rc.backend_for(torch.empty(1, device="cuda"))
    hold(here.name == "triton", f"backend_for says {here}")
    seen = 0
    for said, batch, operation in planned(where, names):
        if some is not None and operation not in some:
            continue
        calls = {who.name: who.whole for who in contenders(batch, operation) if who.name in (OURS, EAGER)}
        try:
            gate.check(batch, operation, {name: call() for name, call in calls.items() if call is not None})
        except gate.WrongResult as problem:
            raise Broken(f"{said}: {problem}") from problem
        seen += 1
    hold(seen > 0, "nothing was compared")
    return f"{seen} operations equal the reference; {here.reason}"


def repeats(where: Gpu, names: Sequence[str] = ("32k in 256", "1M", "16M in 100,000")) -> str:
    """A call that is repeated gives the same bits."""
    seen = 0
    for said, batch, operation in planned(where, names):
        call, _ = ours(batch, operation)
        first = [x.clone() for x in tensors(call())]
        for _ in range(REPEATS):
            hold(same(first, tensors(call())), f"{said}: a second call gave other bits")
        seen += len(first)
    return f"{seen} tensors, {REPEATS} more times each, bit by bit"


def launches(where: Gpu, names: Sequence[str] = ("32k in 256", "16M in 100,000", "1M in 1", "1M")) -> str:
    """No wait of the host before metrics, and as many launches for one sequence as for 100,000."""
    seen: dict[str, set[int]] = {}
    for said, batch, operation in planned(where, names):
        if operation.name not in MOST_LAUNCHES:
            continue
        on_device, whole = ours(batch, operation)
        whole()
        alone, with_metrics = where.counts(on_device), where.counts(whole)
        if alone is None or with_metrics is None:
            raise Broken("the profiler saw no device")
        hold(alone.syncs == 0, f"{said}: the host waits {alone.syncs} times before metrics")
        hold(with_metrics.syncs <= 1, f"{said}: the host waits {with_metrics.syncs} times with metrics")
        most = MOST_LAUNCHES[operation.name]
        hold(0 < alone.kernels <= most, f"{said}: {alone.kernels} kernels, at most {most} were promised")
        seen.setdefault(operation.name, set()).add(alone.kernels)
    for name, counts in seen.items():
        hold(len(counts) == 1, f"{name}: {sorted(counts)} kernels, and the number of sequences decides")
    return "; ".join(f"{name}: {counts.pop()} kernels" for name, counts in seen.items())


def compiles(where: Gpu) -> str:
    """Under torch.compile(fullgraph=True) the bits are those of a call."""

    def step(
        new: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, offsets: Tensor
    ) -> tuple[Tensor, ...]:
        out = rc.correct(old, rollout, mask=mask, cu_seqlens=offsets, spec=operations.TOKEN_SPEC)
        loss = rc.policy_loss(
            new,
            advantages,
            loss=rc.Loss(SURROGATE),
            mask=mask,
            cu_seqlens=offsets,
            old_logp=old,
            correction=rc.Factors(weights=out.weights, mask=out.mask),
        )
        return out.weights, out.mask, out.keep, out.statistics.sums, loss.value, loss.statistics.sums

    compiled = torch.compile(step, fullgraph=True)
    for name in ("32k in 256", "1M"):
        batch = make(case_of(where, name), "cuda")
        given = (batch.new, batch.old, batch.rollout, batch.advantages, batch.mask, batch.cu_seqlens)
        found = []
        for call in (step, compiled):
            out = call(*given)
            found.append([*(x.detach() for x in out), *torch.autograd.grad(out[4], batch.new)])
        hold(same(*found), f"{name}: the compiled step gave other bits")
    return "a step of correct and policy_loss, forward and backward, no graph break, bit by bit"


def sanitized(where: Gpu) -> str:
    """Every kind of kernel once, on small batches, aligned and not: for compute-sanitizer to watch."""
    seen = 0
    for case, operation in operations.planned(tiny=True):
        if operation in (METRICS, TOKEN, PRODUCT, BOTH, XTUNER):
            ours(make(case, "cuda"), operation)[1]()
            seen += 1
    batch = make(operations.CASES["32k in 256"].tiny(), "cuda")
    assert batch.cu_seqlens is not None
    # No address is a multiple of 16 bytes.
    shifted = [torch.cat([x[:1], x])[1:] for x in (batch.old, batch.rollout, batch.valid)]
    # Offsets that a CPU refuses. On a device they are not checked, and the numbers are wrong.
    garbage = torch.tensor([7, -5, 1 << 30, 3, 3, 900, 0, -(1 << 30)], dtype=torch.int32, device="cuda")
    layouts = [batch.cu_seqlens, garbage, garbage.long() << 20]
    for offsets in layouts:
        for operation in (TOKEN, PRODUCT):
            rc.correct(*shifted[:2], mask=shifted[2], cu_seqlens=offsets, spec=operation.spec).metrics()
    where.synchronize()
    return f"{seen} calls of the plan, {2 * len(layouts)} with other offsets"


# --- running them -----------------------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[Gpu], str]] = {
    "agrees": agrees,
    "repeats": repeats,
    "launches": launches,
    "compiles": compiles,
    "many_sequences": many_sequences,
    "many_tokens": many_tokens,
    "sanitized": sanitized,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run checks; return the exit status, 1 if one does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report.checks")
    parser.add_argument("checks", nargs="+", choices=CHECKS)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("checks: torch sees no GPU here")
    where, found = Gpu(options.tiny), dict[str, dict[str, Any]]()
    for name in options.checks:
        check = CHECKS[name]
        answer: dict[str, Any] = {"what": (check.__doc__ or "").splitlines()[0], "held": None, "said": "under way"}
        found[name] = answer
        machine.write(options.json, found)
        try:
            answer |= {"said": check(where), "held": True}
        except Broken as problem:
            answer |= {"said": str(problem), "held": False}
        except Exception as problem:  # noqa: BLE001  (said below)
            # A check that fails in whatever way must not lose those behind it: it does not hold, is in the report with
            # its message, is printed with its traceback, and the exit status tells.
            traceback.print_exc()
            end = traceback.format_exc().splitlines()[-KEPT_LINES:]
            answer |= {"said": first_line(problem), "held": False, "traceback": end}
        machine.write(options.json, found)
        print(f"{name}: {'holds' if answer['held'] else 'BROKEN'}: {answer['said']}", flush=True)
        where.free()
    return 0 if all(one["held"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
