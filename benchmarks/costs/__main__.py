"""Launches, waits, bytes and temporaries of ours and of the frameworks: `python -m benchmarks.costs`, without a GPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine, tables
from benchmarks.cases.batches import Batch, both_layouts
from benchmarks.costs import host, ours, peers
from benchmarks.costs.counting import Cost
from benchmarks.costs.tables import BY_HAND, all_tables

RESULTS = machine.RESULTS / "costs.json"
# 34 thousand tokens, 0.3 and 2.3 million. The smallest tells whether ours became dearer.
SHAPES = ((64, 1024), (256, 2048), (1024, 4096))
COUNTS = ("launches", "waits", "read", "written", "temporaries")

Row = dict[str, Any]


def row_of(who: str, version: str, what: str, shape: tuple[int, int], layout: str, tokens: int, cost: Cost) -> Row:
    """Write a cost down."""
    waits = Counter(f"{wait.what}, {wait.place}" for wait in cost.waits)
    return {
        "who": who,
        "version": version,
        "what": what,
        "shape": list(shape),
        "layout": layout,
        "tokens": tokens,
        **cost.amounts(),
        "temporaries": cost.temporaries,
        "places": [f"{place} ({times})" for place, times in waits.items()],
    }


def rows_of_ours(shape: tuple[int, int], both: dict[str, Batch], runs: ours.Runs | None = None) -> Iterator[Row]:
    """Count our calls, in both layouts; `runs` as in `ours.on_kernels`."""
    for layout, batch in both.items():
        for who, costs in ((ours.KERNELS, ours.on_kernels(batch, runs)), (ours.PLAIN, ours.on_plain_torch(batch))):
            for what, cost in costs.items():
                yield row_of(who, "", what, shape, layout, batch.tokens, cost)


def rows_of_compiled(shape: tuple[int, int], both: dict[str, Batch]) -> Iterator[Row]:
    """Count what inductor makes of our correction on plain torch, whose metrics wait as ever, and of code by hand."""
    from benchmarks.costs import compiled  # inductor takes seconds to import, and --check and the tests need none of it

    for layout, batch in both.items():
        cost = compiled.correction(batch)
        cost.waits = ours.on_plain_torch(batch)[peers.CORRECTION].waits
        row = row_of(ours.COMPILED, "", peers.CORRECTION, shape, layout, batch.tokens, cost)
        yield row | {"temporaries": None}
    padded = both["padded"]
    for what, count in ((peers.CORRECTION, compiled.corrections_by_hand), (peers.LOSS, compiled.losses_by_hand)):
        for metrics, cost in count(padded).items():
            row = row_of(f"{BY_HAND}, {metrics}", "", what, shape, "padded", padded.tokens, cost)
            yield row | {"temporaries": None}


def rows_of_peers(shape: tuple[int, int], both: dict[str, Batch], found: list[peers.Found]) -> Iterator[Row]:
    """Count the frameworks' calls, each in the layout that it takes."""
    for one in found:
        layout = "packed" if one.peer.packed else "padded"
        batch = peers.batch_of(both[layout], one.peer.packed)
        for what in one.rows:
            row = row_of(one.peer.name, one.version, what, shape, layout, int(batch.mask.sum()), one.cost(what, batch))
            yield row if one.peer.compiles is None else row | {"temporaries": None}


def measure(shapes: tuple[tuple[int, int], ...], found: list[peers.Found], compiles: bool = True) -> dict[str, Any]:
    """Count everybody on every size; what inductor makes, which differs from torch to torch, only if asked."""
    torch.set_num_threads(1)
    rows = []
    for shape in shapes:
        both = both_layouts(*shape)
        of_compiled = rows_of_compiled(shape, both) if compiles else ()
        for row in (*rows_of_ours(shape, both), *of_compiled, *rows_of_peers(shape, both, found)):
            print(
                f"{row['who']}, {row['what']}, {shape[0]} x {shape[1]} {row['layout']}: {row['launches']} launches, "
                f"{row['waits']} waits",
                file=sys.stderr,
                flush=True,
            )
            rows.append(row)
    versions = {"torch": torch.__version__, "triton": machine.version("triton")}
    return {**machine.head(), **versions, "rows": rows}


def on_the_host(found: list[peers.Found]) -> dict[str, dict[str, float]]:
    """Time everybody's host: microseconds by who and what."""
    torch.set_num_threads(1)
    both = both_layouts(*host.SHAPE)
    times = {ours.KERNELS: host.of_ours()}
    for one in found:
        if one.peer.compiles is not None:
            continue
        batch = both["packed" if one.peer.packed else "padded"]
        times[one.peer.name] = {what: host.of_framework(one, what, batch) for what in one.rows}
    return {who: {what: float(f"{us:.3g}") for what, us in of.items()} for who, of in times.items()}


def grown(now: list[Row], before: list[Row]) -> list[str]:
    """Say which counts of ours are higher than they were."""
    said = []
    known = {(row["who"], row["what"], tuple(row["shape"]), row["layout"]): row for row in before}
    for row in now:
        old = known[row["who"], row["what"], tuple(row["shape"]), row["layout"]]
        where = f"{row['who']}, {row['what']}, {row['shape'][0]} x {row['shape'][1]} {row['layout']}"
        said += [f"{where}: {name} {row[name]}, was {old[name]}" for name in COUNTS if row[name] > old[name]]
    return said


def main(given: list[str] | None = None) -> int:
    """Count, print and write; 1 if a count has grown that --check compares."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--host", action="store_true", help="only time the host again, for the file that --json names")
    again.add_argument("--ours", action="store_true", help="only count ours again, for the file that --json names")
    parser.add_argument("--check", action="store_true", help="compare ours, on the smallest size, with the results")
    options = parser.parse_args(given)
    if (options.host or options.ours) and options.json is None:
        parser.error("--host and --ours: expected --json FILE with results, got none")
    os.environ["TRITON_INTERPRET"] = "0"
    if options.check:
        now = measure(SHAPES[:1], [], compiles=False)["rows"]
        said = grown(now, json.loads(RESULTS.read_text(encoding="utf-8"))["rows"])
        print("\n".join(said) or f"{len(now)} calls cost no more than in {RESULTS.name}")
        return int(bool(said))
    found = [] if options.ours else list(peers.found())
    results = {} if options.host else measure(SHAPES, found)
    if options.host or options.ours:
        old = json.loads(options.json.read_text(encoding="utf-8"))
        results = old | results
        if options.ours:
            results["rows"] += [row for row in old["rows"] if row["version"]]
    if not options.ours:
        results["host"] = on_the_host(found)
    if options.json is not None:
        machine.write(options.json, results)
    print(tables.drawn(all_tables(results), []))
    absent = sorted({peer.name for peer in peers.PEERS} - {one.peer.name for one in found})
    if absent and not options.ours:
        print(f"not found here: {', '.join(absent)} (PEERS names a folder of checkouts, as for make conformance)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
