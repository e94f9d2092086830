"""The drop-ins beside the functions that they replace: same tensors, one process, interleaved.

    python -m benchmarks.peers.dropins                        with the frameworks that can be imported
    python -m benchmarks.peers.dropins --device cuda --sequences 2048 --width 8192

A framework that is not installed is named and left out; its checkout on PYTHONPATH will do, as far as its function can
be imported from there. xtuner has a third column: its own function with the lengths as a list, without its waits.
"""

from __future__ import annotations

import argparse
import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases.batches import Batch, both_layouts
from benchmarks.cpu.turns import take_turns
from benchmarks.peers.installed import without_checkout
from benchmarks.tables import Table, markdown
from rollout_corr.frameworks.areal import dropin as areal
from rollout_corr.frameworks.skyrl import dropin as skyrl
from rollout_corr.frameworks.trl import dropin as trl
from rollout_corr.frameworks.verl import dropin as verl
from rollout_corr.frameworks.xtuner import dropin as xtuner

Call = Callable[[], object]


class Row(NamedTuple):
    """A comparison.

    Attributes:
        framework: The framework.
        what: Its function, and how it is called.
        theirs: The framework's own call.
        ours: The drop-in's.
        improved: The framework's own with the obvious one-line improvement, if there is one.
    """

    framework: str
    what: str
    theirs: Call
    ours: Call
    improved: Call | None = None


def _row(framework: str, what: str, theirs: Any, ours: Any, name: str, *args: Any, **kwargs: Any) -> Row:
    """Return the call of a function of that name, in the framework and in the drop-in."""
    own, other = getattr(theirs, name), getattr(ours, name)
    return Row(framework, what, lambda: own(*args, **kwargs), lambda: other(*args, **kwargs))


def of_verl(padded: Batch, packed: Batch) -> Iterator[Row]:
    helper = importlib.import_module(verl.HELPER)
    debug = importlib.import_module("verl.utils.debug.metrics")
    tensors = (padded.old, padded.rollout, padded.mask)
    geometric = {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
    configs = {"metrics only": {}, "token weights": {"rollout_is": "token"}, "geo_rs_token_tis": geometric}
    for what, config in configs.items():
        yield _row("verl", what, helper, verl, "compute_rollout_correction_and_rejection_mask", *tensors, **config)
    names = ("old_log_probs", "rollout_log_probs", "response_mask", "responses")
    data = SimpleNamespace(batch=dict(zip(names, (*tensors, padded.mask), strict=True)))
    yield _row("verl", "debug metrics", debug, verl, "calculate_debug_metrics", data)


def of_xtuner(padded: Batch, packed: Batch) -> Iterator[Row]:
    module = importlib.import_module(xtuner.MODULE)
    config = module.RolloutImportanceSampling(
        rollout_is_mode="both",
        rollout_is_threshold=(5, 0.5),
        rollout_is_mask_threshold=(5, 0.5),
        rollout_is_veto_threshold=(20, 0),
    )
    assert packed.cu_seqlens is not None
    old, rollout, sizes = packed.old[None], packed.rollout[None], packed.cu_seqlens.diff()
    listed, mask = sizes.tolist(), torch.ones_like(old, dtype=torch.bool)
    name = "compute_rollout_importance_weights_and_metrics"
    own, other = getattr(config, name), getattr(xtuner, name)
    yield Row(
        "xtuner",
        "token, both, veto; one pack",
        lambda: own(old, rollout, sizes, mask),
        lambda: other(config, old, rollout, sizes, mask),
        lambda: own(old, rollout, listed, mask),
    )


def of_skyrl(padded: Batch, packed: Batch) -> Iterator[Row]:
    module = importlib.import_module(skyrl.MODULE)
    assert padded.mask is not None
    tldr = {
        "tis_ratio_type": "token",
        "sequence_mask_metric": "geometric",
        "outlier_token_is_threshold_low": 1e-4,
        "outlier_token_is_threshold_high": 100.0,
        "token_mask_is_threshold_low": 0.5,
        "token_mask_is_threshold_high": 2.0,
    }
    for what, changed in {"token weights": {"tis_ratio_type": "token"}, "all that its page recommends": tldr}.items():
        config = SimpleNamespace(**skyrl.FIELDS | changed)
        tensors = (padded.old, padded.rollout, padded.mask.float(), config)
        yield _row("SkyRL", what, module, skyrl, "compute_off_policy_correction", *tensors)


def of_trl(padded: Batch, packed: Batch) -> Iterator[Row]:
    trainer = importlib.import_module(trl.MODULE).GRPOTrainer
    advantages = torch.linspace(-1.0, 1.0, padded.old.shape[0], device=padded.old.device)[:, None]
    tensors = (advantages, padded.old, padded.rollout, padded.mask, 0.1)
    yield _row("TRL", "off-policy mask", trainer, trl, "get_off_policy_mask", *tensors)


def of_areal(padded: Batch, packed: Batch) -> Iterator[Row]:
    module = importlib.import_module(areal.MODULE)
    tensors = (packed.old, packed.rollout, torch.ones_like(packed.old, dtype=torch.bool), packed.cu_seqlens)
    for level in ("token", "sequence"):
        config = SimpleNamespace(level=level, action="mask", metric="ratio", agg="mean", upper=5.0, lower=None)
        yield _row("AReaL", f"ratio, {level}", module, areal, "apply_rejection_sampling", *tensors, config)


FRAMEWORKS = {"verl": of_verl, "xtuner": of_xtuner, "skyrl": of_skyrl, "trl": of_trl, "areal": of_areal}


def measured(row: Row, rounds: int, finish: Call) -> list[str]:
    """Return a line of the table: medians in milliseconds, and how many times as fast ours is."""

    def done(call: Call) -> Call:
        return lambda: (call(), finish())

    calls = [done(call) for call in (row.theirs, row.ours, row.improved) if call is not None]
    for call in calls:
        call()
    times = [1e3 * median(samples.wall) for samples in take_turns(calls, rounds, lambda: None)[:-1]]
    improved = f"{times[2]:.2f}" if row.improved is not None else "-"
    return [row.framework, row.what, f"{times[0]:.2f}", improved, f"{times[1]:.2f}", f"{times[0] / times[1]:.1f}"]


def on(batch: Batch, device: str) -> Batch:
    """Return a batch with its tensors on a device."""
    return replace(batch, **{name: x.to(device) for name, x in vars(batch).items() if isinstance(x, Tensor)})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run and print."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    logging.getLogger("rollout_corr").setLevel(logging.ERROR)
    both = both_layouts(options.sequences, options.width)
    padded, packed = (on(both[layout], options.device) for layout in ("padded", "packed"))
    finish: Call = torch.cuda.synchronize if options.device.startswith("cuda") else lambda: None
    shape = f"{options.sequences} x {options.width} on {options.device}"
    print(f"{shape}, torch {torch.__version__}, {options.threads} thread\n")
    lines = []
    for name, rows in FRAMEWORKS.items():
        try:
            with without_checkout():
                found = list(rows(padded, packed))
        except Exception as error:  # noqa: BLE001  # what is installed without its requirements fails with anything
            print(f"{name}: absent, {str(error).splitlines()[0]}")
            continue
        lines += [measured(row, options.rounds, finish) for row in found]
    head = ["framework", "call", "its own, ms", "improved, ms", "drop-in, ms", "times as fast"]
    print("\n".join(markdown([Table("Drop-ins", head, lines, left=2)])))


if __name__ == "__main__":
    main()
