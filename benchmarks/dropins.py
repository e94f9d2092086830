"""The drop-ins beside the functions that they replace: same tensors, same process, interleaved.

    python -m benchmarks.dropins                        whatever framework can be imported
    python -m benchmarks.dropins --device cuda --sequences 2048 --width 8192

A framework that is not installed is named and left out; its checkout on PYTHONPATH will do, as far as its function can
be imported from there. xtuner has a third column: its own function with the lengths as a list, which spares its syncs.
"""

from __future__ import annotations

import argparse
import importlib
import logging
from collections.abc import Callable, Iterator
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from benchmarks.cases import Inputs, make_inputs
from benchmarks.contenders import without_checkout
from benchmarks.cpu import take_turns
from benchmarks.tables import Table, markdown
from rollout_corr.frameworks.areal import dropin as areal
from rollout_corr.frameworks.skyrl import dropin as skyrl
from rollout_corr.frameworks.trl import dropin as trl
from rollout_corr.frameworks.verl import dropin as verl
from rollout_corr.frameworks.xtuner import dropin as xtuner

Call = Callable[[], object]


class Row(NamedTuple):
    """One comparison.

    Attributes:
        framework: Whose function.
        what: Which, and how it is called.
        theirs: The framework's own call.
        ours: The drop-in's.
        mended: The framework's own with the obvious one-line improvement, if there is one.
    """

    framework: str
    what: str
    theirs: Call
    ours: Call
    mended: Call | None = None


def of_verl(given: Inputs) -> Iterator[Row]:
    helper = importlib.import_module(verl.HELPER)
    debug = importlib.import_module("verl.utils.debug.metrics")
    tensors = (given.train, given.rollout, given.mask)
    geometric = {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
    for what, config in (
        ("metrics only", {}),
        ("token weights", {"rollout_is": "token"}),
        ("geo_rs_token_tis", geometric),
    ):
        function = "compute_rollout_correction_and_rejection_mask"
        yield Row("verl", what, *_both(helper, verl, function, *tensors, **config))
    names = ("old_log_probs", "rollout_log_probs", "response_mask", "responses")
    data = SimpleNamespace(batch=dict(zip(names, (*tensors, given.mask), strict=True)))
    yield Row("verl", "debug metrics", *_both(debug, verl, "calculate_debug_metrics", data))


def of_xtuner(given: Inputs) -> Iterator[Row]:
    module = importlib.import_module(xtuner.MODULE)
    config = module.RolloutImportanceSampling(
        rollout_is_mode="both",
        rollout_is_threshold=(5, 0.5),
        rollout_is_mask_threshold=(5, 0.5),
        rollout_is_veto_threshold=(20, 0),
    )
    old, rollout = given.packed_train[None], given.packed_rollout[None]
    sizes = given.cu_seqlens.diff()
    sizes, listed, mask = sizes.to(old.device), sizes.tolist(), torch.ones_like(old, dtype=torch.bool)
    own = config.compute_rollout_importance_weights_and_metrics
    yield Row(
        "xtuner",
        "token, both, veto; one pack",
        lambda: own(old, rollout, sizes, mask),
        lambda: xtuner.compute_rollout_importance_weights_and_metrics(config, old, rollout, sizes, mask),
        lambda: own(old, rollout, listed, mask),
    )


def of_skyrl(given: Inputs) -> Iterator[Row]:
    module = importlib.import_module(skyrl.MODULE)
    tldr = {
        "tis_ratio_type": "token",
        "sequence_mask_metric": "geometric",
        "outlier_token_is_threshold_low": 1e-4,
        "outlier_token_is_threshold_high": 100.0,
        "token_mask_is_threshold_low": 0.5,
        "token_mask_is_threshold_high": 2.0,
    }
    for what, changed in (("token weights", {"tis_ratio_type": "token"}), ("all that its page recommends", tldr)):
        config = SimpleNamespace(**skyrl.FIELDS | changed)
        tensors = (given.train, given.rollout, given.mask.float(), config)
        yield Row("SkyRL", what, *_both(module, skyrl, "compute_off_policy_correction", *tensors))


def of_trl(given: Inputs) -> Iterator[Row]:
    module = importlib.import_module(trl.MODULE)
    advantages = torch.linspace(-1.0, 1.0, given.train.shape[0], device=given.train.device)[:, None]
    tensors = (advantages, given.train, given.rollout, given.mask, 0.1)
    yield Row("TRL", "off-policy mask", *_both(module.GRPOTrainer, trl, "get_off_policy_mask", *tensors))


def of_areal(given: Inputs) -> Iterator[Row]:
    module = importlib.import_module(areal.MODULE)
    tensors = (given.packed_train, given.packed_rollout, torch.ones_like(given.packed_train, dtype=torch.bool))
    for level in ("token", "sequence"):
        config = SimpleNamespace(level=level, action="mask", metric="ratio", agg="mean", upper=5.0, lower=None)
        offsets = given.cu_seqlens.to(given.train.device)
        yield Row(
            "AReaL", f"ratio, {level}", *_both(module, areal, "apply_rejection_sampling", *tensors, offsets, config)
        )


FRAMEWORKS = {"verl": of_verl, "xtuner": of_xtuner, "skyrl": of_skyrl, "trl": of_trl, "areal": of_areal}


def _both(theirs: Any, ours: Any, name: str, *args: Any, **kwargs: Any) -> tuple[Call, Call]:
    own, other = getattr(theirs, name), getattr(ours, name)
    return lambda: own(*args, **kwargs), lambda: other(*args, **kwargs)


def measured(row: Row, rounds: int, finish: Call) -> list[str]:
    """A line of the table: medians in milliseconds, and how many times as fast ours is."""

    def done(call: Call) -> Call:
        return lambda: (call(), finish())

    calls = [done(call) for call in (row.theirs, row.ours, row.mended) if call is not None]
    for call in calls:
        call()
    times = [1e3 * median(samples.wall) for samples in take_turns(calls, rounds, lambda: None)[:-1]]
    mended = f"{times[2]:.2f}" if row.mended is not None else "-"
    return [row.framework, row.what, f"{times[0]:.2f}", mended, f"{times[1]:.2f}", f"{times[0] / times[1]:.1f}"]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    logging.getLogger("rollout_corr").setLevel(logging.ERROR)
    given = make_inputs(options.sequences, options.width)
    given = type(given)(*(x.to(options.device) for x in vars(given).values()))
    finish: Call = torch.cuda.synchronize if options.device.startswith("cuda") else lambda: None
    shape = f"{options.sequences} x {options.width} on {options.device}"
    print(f"{shape}, torch {torch.__version__}, {options.threads} thread\n")
    lines = []
    for name, rows in FRAMEWORKS.items():
        try:
            with without_checkout():
                found = list(rows(given))
        except ImportError as error:
            print(f"{name}: absent, {error}")
            continue
        lines += [measured(row, options.rounds, finish) for row in found]
    head = ["framework", "call", "its own, ms", "mended, ms", "drop-in, ms", "times as fast"]
    print("\n".join(markdown([Table("Drop-ins", head, lines, left=2)])))


if __name__ == "__main__":
    main()
