"""docs/benchmarks.md, and README's table, from the committed results: `python -m benchmarks.report` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.costs import tables as costs
from benchmarks.cpu.tables import DISTURBED, absent, all_tables, readme
from benchmarks.cpu.turns import BUSY
from benchmarks.gpu_report import page as gpu_page
from benchmarks.machine import RESULTS, ROOT
from benchmarks.tables import Found, markdown, markdown_rows
from rollout_corr.whole_files import write_whole

CPU_RESULTS, GPU_RESULTS, COSTS = (RESULTS / f"{name}.json" for name in ("cpu", "gpu", "costs"))
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"

METHOD = """\
# Benchmarks

You want to know what a correction and a loss cost, next to the frameworks' own code. On a GPU nothing was timed yet.
What a GPU call has to do was counted without one, and times were taken on a CPU.

{headline}
These are padded rows on a GPU. verl's decoupled correction has CPU tensors, where nothing waits; TRL takes its metrics,
and waits for them, elsewhere. [All frameworks](#what-a-micro-batch-costs), and [times on a CPU](#on-a-cpu).

## What a micro-batch costs

A GPU call pays for launches, for waits of the host, and for memory traffic. All run on the same batch: fp32 log-probs,
bool mask, 256 sequences, 0.3 million tokens. *padded*: rows of 2,048, 55 % full. *packed*: one sequence behind the
other. Where a cell has three numbers, they are for 64, 256 and 1,024 sequences.

| column | what is counted |
| :-- | :-- |
| launches | operations of torch that compute or copy, forward and backward; of our kernels, launches of Triton plus \
operations of torch. A sort counts once |
| waits | `.item()`, `bool(tensor)`, shapes that depend on values, copies from and to the host; \
`benchmarks/results/costs.json` has their lines. Ours is the copy in `metrics()` |
| bytes moved a token | what operations read and write, over the valid tokens; of our kernels, what their compiled \
code loads and stores, counted by an interpreter of PTX |
| temporaries a token | the most memory at a time beyond what is returned |
| host | CPU time within these functions, metrics and backward included, over our kernels' time, for 256 sequences \
of up to 8 tokens. Ours runs over a driver that does nothing; the others compute on a CPU, 1 to 2 us an operation. \
The least of five runs, which differed by up to a factor of two on a shared machine |

| who | what runs |
| :-- | :-- |
| all | PPO clipped at 0.2 and 3, ratios between 0.5 and 2, sequences rejected where the framework can. What a \
framework gives to `torch.compile` runs as it is written |
| TRL, OpenRLHF | take most of their metrics, and wait for them, outside of the code that is counted |
| verl's decoupled correction, ROLL's | have CPU tensors in a real run, where nothing waits |
| ejected | files of `rollout-corr eject` in plain torch: `verl.decoupled_geo_rs_token_tis`, `skyrl.tldr` and \
`trl.token_truncate`; losses: `verl.ppo` (no weights) and `verl.bypass_ppo_clip_geo_rs` |
| torch.compile | inductor's schedule of our plain torch for sm_90: kernels after fusion, and each buffer that a \
kernel reads or writes, once. Its Triton is neither written nor run |

{costs}
Our plain torch and ejected files spend most of their launches and bytes on exact sums, on leaving NaN and infinity
out, and on statistics that most of the others do not have. prime-rl's temporaries are for one sample.

![Bounds of a correction by tokens, for everybody in the first table; nothing in it was measured](bounds.svg)

The chart is a model, not a measurement. It assumes 5 us for a launch, 20 us for a wait, 4.3 TB/s for an H200's copy,
that the host launches while the device moves bytes, and a cold cache.

## On a GPU

{gpu}
## On a CPU

In verl's decoupled mode the correction runs in one process, the trainer's `TaskRunner`, on CPU tensors, with one
thread, every step, even when only metrics are wanted. So the CPU is timed too.

| word | meaning |
| :-- | :-- |
| metrics only | `Spec()`; verl's function with importance sampling and rejection off |
| weights + rejection | a token weight truncated at 2, and rejection of sequences by the geometric mean of their \
ratios within 0.999 to 1.001: verl's `decoupled_geo_rs_token_tis` |
| rollout-corr | `correct(...)` and `.metrics()`; *verl's metrics* adds verl's keys by verl's formulas |
| torch by hand | one operation after the other over the whole batch (`benchmarks/peers/by_hand.py`) |
| verl | `compute_rollout_correction_and_rejection_mask` of 0.9.1. It has no packed form: in packed rows it has the \
same tokens padded |
| our reference, the definition | our plain torch on the whole batch, as on devices without Triton; *rollout-corr* \
works in blocks |
| padded, packed | lengths uniform from 10 % to 100 % of the width, at 1024 x 8192 to 40 %; fp32 log-probs, int64 \
mask. *packed* is the same tokens in one row with `cu_seqlens` and no mask |
| D | train - rollout, with a standard deviation of 0.02; of 1 at one token in 1000 |
| pages kept | another run in the same process, with glibc told to keep all memory |
| GB/s | each input read once and each output written once, over the time |
| temporaries | the peak of what a call holds beyond its inputs and outputs, from every event of torch's CPU \
allocator, in a separate call. Memory that is still allocated when the call returns counts as output |

**How it is timed.** Times include all outputs, and the metrics as Python floats. First all results are compared with
ours: weights to 1e-5, masks equal except for sequences within 1e-6 of a bound, metrics to 2e-3. Then all run once a
round, in random order, in one process; times are medians over the rounds. *In CPU time* compares the processor time of
the process. Each round also times `torch.exp` of 4 MiB. A round is *disturbed* if that took over {disturbed:.2f} times
its fastest. It is dropped if that took over {busy:g} times its median, or if a call took over {busy:g} times its own
processor time.

**Page faults.** Linux hands out a page of 4 KiB when it is first written to, and clears it. A new temporary of 64 MiB
costs 16,384 faults, some 25 ms, before it holds a number. glibc takes fresh pages for every temporary above 32 MiB,
which is every full-size one at 2048 x 8192; below that, what the process did before decides.

**Where ours is not far ahead, and why.**

- 64 x 1024: everything lies in the second-level cache, and an operation takes 1 to 2 us however little it does. Ours
  takes fewer operations than hand-written torch, but more Python: it checks arguments, works in blocks, and makes
  statistics that merge. It also sums D exactly (4 passes), computes k3 without cancellation, and handles tokens
  that are not finite.
- 256 x 2048 padded: fewer passes win, and so do verl's page faults, which *pages kept* takes away.
- Packed batches: there is no padding to save, so hand-written torch takes about as long, until a batch no longer fits
  in cache.
- The loss of padded rows packs the valid tokens first, which the frameworks' losses do without.

"""


END = """
## Run it

In a checkout; DIR is `benchmarks/results`.

| command | what it does |
| :-- | :-- |
| `make bench-costs PEERS=~/peers ARGS="--json $DIR/costs.json"` | launches, waits and bytes, next to a folder of \
checkouts |
| `python -m benchmarks.costs.bounds` | the chart of bounds |
| `make gpu-report ARGS="--out $DIR"` | on a GPU: everything, in nine minutes, without a network; it takes the \
torch, Triton, pytest and hypothesis that `PYTHON` has |
| `make gpu-report ARGS="--rehearse --out /tmp"` | its steps on a CPU: shows only that they work |
| `make bench ARGS="--json $DIR/cpu.json"` | installs verl into its own environment; times on a CPU, next \
to verl. `--quick` takes a minute. Where torch sees a GPU, the GPU's benchmark |
| `make bench-compare` | fails where a call of ours launches, waits, moves or holds more than in `$DIR/costs.json`; \
prints times next to the last ones stored |
| `python -m benchmarks.report` | this page, from the files in `benchmarks/results/`; do not edit it |

CI runs the report and the tests of the GPU on a runner with the labels `self-hosted` and `gpu`: weekly, in the merge
queue, when asked for, and on a pull request with the label `gpu`. The files are the artifact `gpu-report`. Every other
job needs no GPU, and fails where the counts grow.

**Next:** [kernels.md](kernels.md) for what each kernel does, [patches.md](patches.md) to put one into a framework.
"""


NO_GPU_YET = (
    "No number in this project was measured on a GPU yet. What bounds each kernel is on [their page](kernels.md).\n"
)


def page(results: Found | None, of_gpu: Found | None, counted: Found) -> str:
    """Return docs/benchmarks.md."""
    gpu = NO_GPU_YET
    if of_gpu is not None:
        gpu = "\n".join(below(gpu_page.body(of_gpu)))
    of_costs = "\n".join(below(markdown(costs.all_tables(counted))))
    head = [["call", "who", *costs.AMOUNTS[:2], "bytes moved a token"], [":--", ":--", *["--:"] * 3]]
    short = "\n".join([*markdown_rows(head + costs.headline(counted)), ""])
    text = METHOD.format(disturbed=DISTURBED, busy=BUSY, gpu=gpu, costs=of_costs, headline=short)
    if results is None:
        return f"{text}No result is committed yet.\n{END}"
    about = results["machine"]
    caches = ", ".join(f"{level} {size}" for level, size in about["caches"].items()) or "unknown"
    state = " with uncommitted changes" if results["dirty"] else ""
    verl = "without verl" if about["verl"] is None else f"verl {about['verl']}"
    setting = ", ".join(f"{name}={value}" for name, value in about["allocator"].items()) or "the defaults"
    missing = [f"{line}." for line in absent(results)]
    facts = [
        f"**This run of the CPU:** {results['date']}, commit {results['commit'][:12]}{state}.",
        f"{about['cpu']}, {about['cores']} cores, caches {caches}, {about['vectors']}; {about['system']}, Python "
        f"{about['python']}, torch {about['torch']}, {verl}; allocator settings: {setting}.",
        "",
        *([*missing, ""] if missing else []),
    ]
    return "\n".join([text + facts[0], *facts[1:], *below(markdown(all_tables(results)))]).rstrip() + "\n" + END


def below(lines: Iterable[str]) -> list[str]:
    """Lower the headings of a part by a level: a page has one title."""
    return [f"#{line}" if line.startswith("## ") else line for line in lines]


def load(path: Path = CPU_RESULTS) -> Found | None:
    """Return committed results, None before there are any."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def counted() -> Found:
    """Return the committed results of `benchmarks.costs`."""
    return json.loads(COSTS.read_text(encoding="utf-8"))


def main() -> None:
    """Write the page, and the table in README."""
    PAGE.parent.mkdir(exist_ok=True)
    write_whole(PAGE, page(load(), load(GPU_RESULTS), counted()))
    write_whole(README, readme(README.read_text(encoding="utf-8"), load(), costs.sentence(counted())))


if __name__ == "__main__":
    main()
