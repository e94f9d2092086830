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
from benchmarks.tables import Found, markdown
from rollout_corr.whole_files import write_whole

CPU_RESULTS, GPU_RESULTS, COSTS = (RESULTS / f"{name}.json" for name in ("cpu", "gpu", "costs"))
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"

METHOD = """\
# Benchmarks

Made from the files in `benchmarks/results/` by `python -m benchmarks.report`; do not edit.

Run it yourself from the root of a checkout:

```
make bench-costs PEERS=~/peers                                    # launches, waits and bytes, next to checkouts
make bench ARGS=--quick                                           # on a CPU: a minute, and an environment with verl
make bench ARGS="--blocks --json benchmarks/results/cpu.json"     # all of it
make bench ARGS=--operations                                      # on a CPU: counts alone, on a busy machine too
make gpu-report ARGS="--out benchmarks/results"                   # on a GPU: everything, in nine minutes
make gpu-report ARGS="--rehearse --out /tmp"                      # its steps on a CPU: shows only that they work
python -m benchmarks.report                                       # this page
make bench-compare                                                # store a baseline, later compare with it
```

`make bench` is `python -m benchmarks` in an environment that has verl: the GPU's benchmark where torch sees one, else
the CPU's. Where verl is not installed, its column is missing. `make gpu-report` uses the torch, Triton and pytest that
`PYTHON` has, and needs no network. Each of its steps has a time limit, and time that is left over goes to the steps
after it. Both files are written while the steps run, so a run that is ended early keeps what it has.

## What a micro-batch costs

On a GPU a call also pays for launches, for waits of the host, and for memory. These are counted without a GPU, on
everybody's own code and the same batch.

- **Batch**: fp32 log-probs, bool mask, 256 sequences, 0.3 million tokens. *padded*: rows of 2,048, 55 % full. *packed*:
  one behind the other. Three numbers are for 64, 256 and 1,024 sequences (34 thousand to 2.3 million tokens).
- **Launches**: operations of torch that compute or copy, forward and backward. A sort, which takes several kernels,
  counts once. On our kernels: launches of Triton plus operations of torch.
- **Waits**: `.item()`, `bool(tensor)`, shapes that depend on values, copies from and to the host. Their files and lines
  are in `benchmarks/results/costs.json`. Ours is the copy of the statistics in `metrics()`.
- **Bytes a token**: what the operations read and write, over the valid tokens; of the kernels what their compiled code
  loads and stores, counted by an interpreter of PTX. **Temporaries**: the most at a time beyond what is returned.
- **Host**: CPU time within these functions over ours, metrics and backward included, for 256 sequences of up to
  8 tokens. Ours runs over a driver that does nothing, the others compute on a CPU, 1 to 2 us an operation. Two runs
  on a shared machine differed by up to a third.
- **ejected**: files of `rollout-corr eject` in plain torch, for tensors or as a framework's function with its metrics:
  `verl.decoupled_geo_rs_token_tis`, `skyrl.tldr` and `trl.token_truncate`; losses: `verl.ppo` (no weights) and
  `verl.bypass_ppo_clip_geo_rs`.
- **Settings**: PPO clipped at 0.2 and 3, ratios between 0.5 and 2, sequences rejected where the framework can. What a
  framework gives to `torch.compile` runs as it is written. TRL and OpenRLHF take most of their metrics, and wait for
  them, outside of these statements. verl's decoupled correction and ROLL's run on CPU tensors, where nothing waits.

{costs}
Ours in plain torch sums exactly, leaves NaN and infinity out, and takes statistics that most of the others do not have:
that is most of its launches and bytes. prime-rl's temporaries are for one sample.

`torch.compile` is inductor's schedule of plain torch for sm_90, made without a GPU: kernels after fusion, and every
buffer that each of them reads or writes, once. Its Triton is neither written nor run, and temporaries are not counted.

![Bounds of a correction by tokens, for everybody in the first table; nothing in it was measured](bounds.svg)

This chart is a model and no result. It assumes 5 us for a launch, 20 us for a wait, 4.3 TB/s for an H200's copy, that
the host launches while the device moves bytes, and that no cache holds any of them.

## On a GPU

{gpu}
## On a CPU

In verl's default mode rollout correction runs on the driver, on CPU tensors, with one thread, every step, even when
only metrics are wanted. So the CPU is measured too.

**What runs.** *metrics only* is `Spec()` against verl's function with importance sampling and rejection off: verl
computes its 13 metrics in every step of every run. *weights + rejection* is a token weight truncated at 2 and
rejection of sequences by the geometric mean of their ratios within 0.999 to 1.001, which is verl's
`decoupled_geo_rs_token_tis`. Every time includes all outputs, and the metrics as Python floats.

- *rollout-corr*: `correct(...)` and `.metrics()`, default backend.
- *rollout-corr, verl's metrics*: the default backend with verl's own keys by verl's own formulas, on top of ours.
- *torch by hand*: equal weights, mask and native metrics by one torch op after the other over the whole batch
  (`benchmarks/peers/by_hand.py`).
- *verl*: `compute_rollout_correction_and_rejection_mask` of verl 0.9.1. It has no packed form: in packed rows its
  time is that for the same tokens padded.

**Data.** Lengths uniform from 10 % to 100 % of the width, at 1024 x 8192 to 40 %, which fills a quarter. fp32
log-probs, int64 mask. *packed* is the same tokens in one row with `cu_seqlens` and no mask. D, train -
rollout, has a standard deviation of 0.02, and of 1 at one token in 1000.

**How.** One process. First all results are compared with ours: weights to 1e-5, masks equal except for sequences
within 1e-6 of a bound, metrics to 2e-3. Nothing is timed after a wrong result. Then all run once a round, in random
order. Times are medians of all rounds; the result of a call is freed after the clock has stopped, and the garbage
collector is off. Sizes run in ascending order, so the C library's allocator has been warmed by smaller ones. Each round
also times `torch.exp` of 4 MiB: *disturbed* is the share of rounds in which that took over {disturbed:.2f} times its
fastest, so something else was running. A round in which it took over {busy:g} times its
median, or a call over {busy:g} times its processor time, is dropped; *rounds* is the number that is left.
*In CPU time* compares the processor time of the process instead of the clock.

**Pages.** A good part of verl's time is page faults. glibc takes fresh pages for every temporary above 32 MiB, which is
every full-size one at 2048 x 8192; below that, what the process did before decides whether pages are kept. The table
of page faults says how many there were. *pages kept* is the other extreme: another run in the same process with glibc
told to keep all memory, so that there are no page faults; some other allocators come close to that.

**Bytes.** *GB/s* is the required bytes over the time: each input read once, each output written once. A padded
slot has 8 bytes of log-probs and 8 of mask to read, and 4 of weight and 8 of mask to write.

**Temporaries** are the peak of what a call holds beyond its inputs and the outputs that it returns, from every event of
torch's CPU allocator, as its profiler reports them, in a separate call. Memory that is still allocated when the call
returns counts as output from its allocation on.

**Counts.** What another process cannot disturb: operations of torch that compute or copy, and views; *passes over
tokens*, which is the elements of the largest tensor of each operation, all together, over the valid tokens; bytecodes
that Python executes; bytes allocated; page faults. Hand-written torch stands in brackets.

**What is missed, and why.** At 64 x 1024 everything lies in the second-level cache. There an operation of torch takes 1
to 2 us however little it does, and a pass over the 34,258 tokens of the packed batch from 2 us (a sum) over 20 us (the
sums of sequences) and 22 us (exp in float32) to 46 us (expm1 in float64). Ours takes fewer operations and fewer passes
than hand-written torch, and five to six times as many bytecodes: checks of arguments, blocks, statistics that merge.
The rest goes to work that the hand-written code leaves out: exact sums of D, so that no order decides (4 passes), k3
without cancellation (expm1 in float64 where exp in float32 would do), tokens that are not finite.

At 256 x 2048 padded we win by fewer passes over tokens (43 against 66 of hand-written torch, 53 against 108) and by
verl's page faults: some thousands a call, none where pages are kept. On packed batches hand-written torch wastes no
work on padding. Ours then makes about as many passes (29 and 27, 35 and 44; four are the exact sums of D), so both take
about the same time until a batch no longer fits in cache.

The losses of verl, SkyRL and TRL run on padded batches. There ours packs the valid tokens first. At 64 x 1024 finding
them takes 18 % of the time in torch, packing five tensors 17 %, scattering the gradient and making the mask that is
returned 11 %, and k3 without cancellation 7 %. TRL's, the fastest, needs none of these. The others pass
over every slot, hand-written torch some 80 times, which costs more the less of a batch fits in cache. So the lead grows
with the size, and most where fresh pages have to be faulted in.
"""


NO_GPU_YET = "No result of a GPU is committed yet: nothing on this page, and nothing elsewhere, was measured on one.\n"


def page(results: Found | None, of_gpu: Found | None, counted: Found) -> str:
    """Return docs/benchmarks.md.

    Args:
        results: Of the CPU, None before there are any.
        of_gpu: A report of `benchmarks.gpu_report`, None before there is one.
        counted: Of `benchmarks.costs`.
    """
    gpu = NO_GPU_YET
    if of_gpu is not None:
        gpu = "\n".join(below(gpu_page.body(of_gpu)))
    of_costs = "\n".join(below(markdown(costs.all_tables(counted))))
    text = METHOD.format(disturbed=DISTURBED, busy=BUSY, gpu=gpu, costs=of_costs)
    if results is None:
        return text + "\nNo result is committed yet.\n"
    about = results["machine"]
    caches = ", ".join(f"{level} {size}" for level, size in about["caches"].items()) or "unknown"
    state = " with uncommitted changes" if results["dirty"] else ""
    verl = "without verl" if about["verl"] is None else f"verl {about['verl']}"
    setting = ", ".join(f"{name}={value}" for name, value in about["allocator"].items()) or "the defaults"
    missing = [f"{line}." for line in absent(results)]
    facts = [
        f"**This run:** {results['date']}, commit {results['commit'][:12]}{state}.",
        f"{about['cpu']}, {about['cores']} cores, caches {caches}, {about['vectors']}; {about['system']}, Python "
        f"{about['python']}, torch {about['torch']}, {verl}; allocator settings: {setting}.",
        "",
        *([*missing, ""] if missing else []),
    ]
    return "\n".join([text, *facts, *below(markdown(all_tables(results)))]).rstrip() + "\n"


def below(lines: Iterable[str]) -> list[str]:
    """Lower the headings of a part by a level: a page has one title."""
    return [f"#{line}" if line.startswith("## ") else line for line in lines]


def load(path: Path = CPU_RESULTS) -> Found | None:
    """Return committed results, None before there are any."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def counted() -> Found:
    """Return the committed results of `benchmarks.costs`."""
    found: Found = json.loads(COSTS.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Write the page, and the table in README."""
    PAGE.parent.mkdir(exist_ok=True)
    write_whole(PAGE, page(load(), load(GPU_RESULTS), counted()))
    write_whole(README, readme(README.read_text(encoding="utf-8"), load(), costs.sentence(counted())))


if __name__ == "__main__":
    main()
