"""The cost of a whole step, token weights, PPO and its backward, without a GPU: `python -m benchmarks.costs.steps`.

Of ours every program of every launch runs as compiled code in an interpreter of PTX: minutes a row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import rollout_corr as rc
from benchmarks import machine, tables
from benchmarks.cases.batches import Batch, offsets_of
from benchmarks.cases.operations import STEP_SURROGATE
from benchmarks.costs import ours, peers
from benchmarks.costs.counting import Cost
from benchmarks.costs.tables import BY_HAND, ONE_PASS, PRODUCT, READY, TWO_CALLS, TWO_PASSES, WITH_VETO, steps

RESULTS = machine.RESULTS / "steps.json"
# Lengths are uniform from SHORTEST to WIDTH, so that padded rows are 56 % full.
SEQUENCES, SHORTEST, WIDTH = 1024, 512, 4096

LOSS = rc.Loss(STEP_SURROGATE)
TIS = rc.Spec(rc.Weight.token(upper=2.0))
REJECTS = rc.Spec(
    TIS.weight,
    (
        rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.99, upper=1.01),
        rc.Criterion("ratio", over="sequence", reduce="min", lower=1e-4),
    ),
)
OF_SEQUENCES = rc.Spec(rc.Weight.product(upper=2.0))

# The frameworks' own code for such a step.
CLIPS = {"epsilon_high": STEP_SURROGATE.high}
PEERS = (
    peers.Peer(
        "verl",
        "verl",
        {peers.BOTH: peers.Asked("verl.decoupled_token_is", {"threshold": 2.0}, (peers.VERL, *peers.VANILLA))},
    ),
    peers.Peer("TRL", "trl", {peers.BOTH: peers.Asked("trl.dapo", peers.TRL_WITH | CLIPS, peers.FRAGMENT)}),
    peers.Peer(
        "Liger Kernel, ready weights",
        "liger",
        {peers.BOTH: peers.Asked("trl.dapo", peers.TRL_WITH | CLIPS | {"clip_min": None}, ("ppo_loss_fn",))},
        compiles=peers.LIGER,
    ),
)

Row = dict[str, Any]


def batches(sequences: int) -> dict[str, Batch]:
    """Make one batch in both layouts: packed with a bool mask of ones, and padded with an int64 mask."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(SHORTEST, WIDTH + 1, (sequences,), generator=generator)
    valid = torch.arange(WIDTH) < lengths[:, None]
    advantages = torch.randn(sequences, generator=generator)
    rollout = -torch.rand(valid.shape, generator=generator) - 0.01
    old = rollout + 0.01 * torch.randn(valid.shape, generator=generator)
    new = old + 0.1 * torch.randn(valid.shape, generator=generator)

    def batch(logps: list[torch.Tensor], mask: torch.Tensor, offsets: torch.Tensor | None) -> Batch:
        rollout, old, new = logps
        return Batch(old, rollout, mask, offsets, lengths, new.requires_grad_(), advantages)

    logps = [rollout, old, new]
    packed = [x[valid] for x in logps]
    return {
        "packed": batch(packed, torch.ones_like(packed[0], dtype=torch.bool), offsets_of(lengths).int()),
        "padded": batch(logps, valid.long(), None),
    }


# --- ours ---


def calls_of(given: Batch) -> dict[str, Callable[[], object]]:
    """Our ways to run a step, by name, with its metrics."""
    new, advantages = given.new, given.advantages
    assert new is not None and advantages is not None
    batch = rc.Batch(mask=given.mask, cu_seqlens=given.cu_seqlens)
    # On the device, as an all-reduce over ranks leaves it; a number takes the launch of a fill.
    counted = replace(batch, total=torch.tensor(float(given.tokens), dtype=torch.float64))
    ready = rc.correct(given.old, given.rollout, batch, spec=TIS, backend="torch")

    def with_backward(batch: rc.Batch, **more: Any) -> object:
        loss = rc.policy_loss(new, advantages, batch, LOSS, old_logp=given.old, backend="triton", **more)
        (gradient,) = torch.autograd.grad(loss.value, new)
        return loss, gradient, loss.metrics()

    def two_calls(spec: rc.Spec) -> object:
        out = rc.correct(given.old, given.rollout, batch, spec=spec, backend="triton")
        return out, out.metrics(), with_backward(batch, correction=out)

    return {
        ONE_PASS: lambda: with_backward(batch, rollout_logp=given.rollout, spec=TIS),
        TWO_CALLS: lambda: two_calls(TIS),
        READY: lambda: with_backward(counted, correction=ready),
        f"{ONE_PASS}{WITH_VETO}": lambda: with_backward(batch, rollout_logp=given.rollout, spec=REJECTS),
        f"{TWO_CALLS}{WITH_VETO}": lambda: two_calls(REJECTS),
        f"{TWO_PASSES}{PRODUCT}": lambda: with_backward(batch, rollout_logp=given.rollout, spec=OF_SEQUENCES),
        f"{TWO_CALLS}{PRODUCT}": lambda: two_calls(OF_SEQUENCES),
    }


def rows_of_ours(layout: str, given: Batch, runs: ours.Machine) -> Iterator[Row]:
    """Count our calls, each when it has run once without its kernels: a first call does more."""
    with ours.as_on_a_device(runs.run) as launched:
        for who, call in calls_of(given).items():
            runs.on, runs.launches = False, []
            with mock.patch.object(rc.Statistics, "metrics"):
                call()
            runs.on = True
            row = row_of(who, "", layout, given.tokens, ours.cost_again(call, launched))
            for name in ("sectors", "instructions"):
                row[name] = sum(launch[name] for launch in runs.launches)
            yield row | {"by_launch": runs.launches}


# --- by hand, and the frameworks ---


def row_of(who: str, version: str, layout: str, tokens: int, cost: Cost) -> Row:
    """Write a cost down; what only our compiled code tells is None."""
    return {
        "who": who,
        "version": version,
        "layout": layout,
        "tokens": tokens,
        **cost.amounts(),
        "peak": cost.peak,
        "sectors": None,
        "instructions": None,
    }


def rows_of_others(both: dict[str, Batch]) -> Iterator[Row]:
    """Count code by hand, as inductor schedules it, and the frameworks' that are found here."""
    from benchmarks.costs import compiled  # inductor takes seconds to import, and the tests need none of it

    for layout, given in both.items():
        row = row_of(f"{BY_HAND}, six metrics", "", layout, given.tokens, compiled.step_by_hand(given))
        yield row | {"peak": None}
    padded = both["padded"]
    batch = peers.batch_of(padded, packed=False)
    for one in peers.found(PEERS):
        cost = one.cost(peers.BOTH, batch)
        row = row_of(one.peer.name, one.version, "padded", padded.tokens, cost)
        if one.peer.compiles is None:
            read, written = zip(*cost.moves, strict=True)
            yield row | {"moves": {"read": list(read), "written": list(written)}}
        else:
            yield row | {"peak": None}


def measure(sequences: int, of_ours: bool = True, of_others: bool = True) -> list[Row]:
    """Count ours, and the others, with a line for each row as it is there."""
    torch.set_num_threads(1)
    both, runs, rows = batches(sequences), ours.Machine(), []
    mine = (rows_of_ours(layout, given, runs) for layout, given in both.items())
    for row in chain(chain.from_iterable(mine) if of_ours else (), rows_of_others(both) if of_others else ()):
        rows.append(row)
        print(f"{row['who']}, {row['layout']}: {row['launches']} launches", file=sys.stderr, flush=True)
    return rows


def main(given: list[str] | None = None) -> int:
    """Count, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs.steps", description=__doc__)
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="of the batch (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--ours", action="store_true", help="only count ours again, for the file that --json names")
    again.add_argument("--others", action="store_true", help="only count the others again, likewise")
    options = parser.parse_args(given)
    rows = measure(options.sequences, not options.others, not options.ours)
    if (options.ours or options.others) and options.json is not None and options.json.exists():
        old = json.loads(options.json.read_text(encoding="utf-8"))["rows"]
        kept = [row for row in old if (row["instructions"] is not None) == options.others]
        rows = kept + rows if options.others else rows + kept
    versions = {"torch": torch.__version__, "triton": machine.version("triton")}
    results = {**machine.head(), **versions, "sequences": options.sequences, "rows": rows}
    if options.json is not None:
        machine.write(options.json, results)
    print(tables.drawn([steps(results)], []))
    return 0


if __name__ == "__main__":
    sys.exit(main())
