"""The compiled kernels: variants cover every option, `make kernels` says what is wrong.

The interpreter's tests share a process with these, and there a kernel cannot be compiled. So whatever compiles runs in
a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aot import ahead_of_time
from aot import report as kernel_report
from aot.machine_code import MachineCode
from aot.report import Failure, KernelRow
from aot.variant import LONG, LONGEST, MEDIUM, SHORT, Variant
from aot.variants import (
    FEW,
    OF_NEW_VARIANTS,
    SPLIT_VARIANTS,
    TURN_VARIANTS,
    VARIANTS,
)
from builders.cases import one_in
from rollout_corr.backends import batch
from rollout_corr.kernels.grid import SHAPES, cut_for
from rollout_corr.specs import choices
from rollout_corr.specs.correction import Criterion, Spec, Weight

TESTS = Path(__file__).resolve().parents[1]

# --- the variants ---

EVERY = [one for variants in (VARIANTS, OF_NEW_VARIANTS, TURN_VARIANTS) for one in variants.values()]
SPECS = [variant.spec for variant in (*VARIANTS.values(), *TURN_VARIANTS.values())]
WEIGHTS = [x.weight for x in SPECS if x.weight is not None]
CRITERIA = [criterion for x in SPECS for criterion in x.criteria]

# Every tuple of options in rollout_corr/specs/choices.py, and the values of it that the variants use.
USED = {
    "OUTSIDE": {weight.outside for weight in WEIGHTS},
    "STRETCHES": {weight.over for weight in WEIGHTS} - {"token"},
    "STRETCH_REDUCTIONS": {weight.reduce for weight in WEIGHTS} - {None},
    "NORMALIZE": {weight.normalize for weight in WEIGHTS} - {None},
    "STATS": {criterion.stat for criterion in CRITERIA},
    "UNITS": {criterion.over for criterion in CRITERIA},
    "REDUCTIONS": {criterion.reduce for criterion in CRITERIA} - {None},
    "WHEN": {criterion.when for criterion in CRITERIA},
    "DROP": {criterion.drop for criterion in CRITERIA},
    "POLICIES": {criterion.of for variant in EVERY for criterion in variant.spec.criteria},
    "REJECTED": {x.rejected for x in SPECS},
    "NONFINITE": {x.nonfinite for x in SPECS},
    "SUMS_OVER": {x.sums_over for x in SPECS},
    "DETAIL": {x.detail for x in SPECS},
    "REPORTS": {scheme for x in SPECS for scheme in x.report},
}
BEYOND = {
    # The kernels are given ages and entropies as external statistics; other means divide weights behind them.
    "STATS": {"age", "entropy"},
    "NORMALIZE": {"group", "sequence"},
    # Prefixes run on plain torch.
    "UNITS": {"prefix"},
    "DROP": {"rest"},
    "PREFIX_REDUCTIONS": set(choices.PREFIX_REDUCTIONS),
    "GROWTH": set(choices.GROWTH),
    "SEQUENCE_ORDERS": set(choices.SEQUENCE_ORDERS),
}

# Every field of the three types: one without options to choose from is named with the variants that use it.
CHOSEN = {"outside", "normalize", "stat", "over", "reduce", "when", "drop", "of", "rejected", "nonfinite"}
CHOSEN |= {"sums_over", "detail", "report"}
FREE = {
    "lower": any(x.lower is not None for x in WEIGHTS) and any(x.lower is not None for x in CRITERIA),
    "upper": any(x.upper is not None for x in WEIGHTS) and any(x.upper is not None for x in CRITERIA),
    "token_clamp": any(x.token_clamp for x in WEIGHTS) and any(x.token_clamp for x in CRITERIA),
    "name": any(x.name for x in CRITERIA),
    "label": True,
    "eps": any(x.stat.startswith("binary_kl") for x in CRITERIA),
    "weight": any(x.weight is None for x in SPECS) and bool(WEIGHTS),
    "criteria": any(not x.criteria for x in SPECS) and bool(CRITERIA),
    "clamp": True,
    "apply": {x.apply for x in SPECS} == {True, False},
    "growth": True,
    "within": True,
    # Applied to the weights that the kernels hand back.
    "decay": True,
    "turns": any(x.turns for x in SPECS),
}


def test_every_option_is_in_a_variant():
    """A new option, or a new value of one, is missed here until a variant has it."""
    options = {name: set(value) for name, value in vars(choices).items() if name.isupper() and isinstance(value, tuple)}
    assert options == {name: USED.get(name, set()) | BEYOND.get(name, set()) for name in (*USED, *BEYOND)}
    fields = {field.name for kind in (Spec, Weight, Criterion) for field in dataclasses.fields(kind)}
    assert fields == CHOSEN | set(FREE)
    assert all(FREE.values()), FREE


def test_every_statistic_is_tested_over_both_units():
    pairs = {(criterion.over, criterion.stat) for criterion in CRITERIA if criterion.over in ("token", "sequence")}
    assert pairs == {(over, stat) for over in ("token", "sequence") for stat in USED["STATS"]}


def test_every_kind_of_tensor_is_in_a_variant():
    variants = VARIANTS.values()
    assert {x.train for x in variants} == {x.rollout for x in variants} == set(batch.LOGP_DTYPES)
    assert any(x.train != x.rollout for x in variants)
    assert {x.mask for x in variants} == {None, *batch.MASK_DTYPES}
    assert {x.offsets for x in variants} == {torch.int32, torch.int64}
    assert {x.advantages for x in variants} == {None, "token", "sequence"}
    lie = {(x.packed, x.aligned, x.unit) for x in variants}
    assert lie >= {(packed, *how) for packed in (True, False) for how in ((True, True), (False, True), (True, False))}
    assert {(x.packed, x.length) for x in variants} >= {
        (True, LONGEST),
        (True, LONG),
        (True, MEDIUM),
        (True, SHORT),
        (False, LONG),
    }
    lengths = (LONGEST, LONG, SHORT)
    assert [cut_for(length, 1, 4, True, True).shape for length in lengths] == [shape for _, shape in SHAPES]
    # Every one costs seconds for each target.
    assert len(VARIANTS) <= 42
    assert set(FEW) <= set(VARIANTS)


@pytest.mark.parametrize("name", [*VARIANTS, *OF_NEW_VARIANTS])
def test_a_variant_makes_its_launches_from_metadata(name):
    variant = (VARIANTS | OF_NEW_VARIANTS)[name]
    read, *others = variant.launches()
    names = ["read_kernel", "decide_kernel", *["apply_kernel"] * read.arguments["PLAN"].applies]
    assert [x.kernel.__name__ for x in (read, *others)] == names
    assert read.arguments["TILING"].unit == variant.unit
    assert read.arguments["TILING"].aligned == (variant.aligned and variant.unit)
    tensors = [x for x in read.arguments.values() if isinstance(x, torch.Tensor)]
    assert all(x.device.type == "meta" for x in tensors)


@pytest.mark.parametrize("name", SPLIT_VARIANTS)
def test_split_sequences_take_a_launch_more(name):
    launches = SPLIT_VARIANTS[name].launches()
    names = ["read_kernel", "gather_kernel", "decide_kernel", *["apply_kernel"] * launches[0].arguments["PLAN"].applies]
    assert [x.kernel.__name__ for x in launches] == names


def test_place_keeps_values_and_moves_them():
    x = torch.arange(64.0).view(2, 32)
    for variant in (Variant("x"), Variant("x", aligned=False), Variant("x", unit=False)):
        placed = variant.place(x)
        assert torch.equal(placed, x)
        assert (placed.data_ptr() % 16 == 0) == variant.aligned
        assert (placed.stride(1) == 1) == variant.unit
        assert (placed.stride(0) % 16 == 0) == variant.aligned


@pytest.mark.parametrize(("variant", "nvidia", "amd"), [("metrics_packed", 4, 4), ("token_unaligned", 4, 2)])
def test_tokens_of_a_thread(variant, nvidia, amd):
    """A warp of 64 threads takes a step of four parts as two, and a step of one part twice as long."""
    launch = VARIANTS[variant].launches()[0]
    found = [ahead_of_time.tokens_of_thread(launch, ahead_of_time.TARGETS[name]) for name in ("sm_90", "gfx942")]
    assert found == [nvidia, amd]


# --- what has to hold ---


def row(variant: str = "metrics_packed", kernel: str = "read", spilled: int = 0, wide: int = 8) -> KernelRow:
    """A kernel as it should be, but for what the test is about."""
    code = MachineCode(120, spilled, spilled, 2000, {128: wide, 32: 4} if wide else {32: 36}, {64: 13})
    return KernelRow(variant, "sm_90", kernel, 32, 16 if kernel == "read" else 0, 1.25, code)


def exit_code(rows, failures, tmp_path, capsys) -> tuple[int, str, dict]:
    path = tmp_path / "report.json"
    code = kernel_report.publish(rows, failures, path)
    return code, capsys.readouterr().out, json.loads(path.read_text())


def test_a_good_report(tmp_path, capsys):
    rows = [row(), row(kernel="decide", wide=0), row(kernel="apply", wide=0)]
    code, out, report = exit_code(rows, [], tmp_path, capsys)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["variant", "target", "kernel", "registers"]
    assert re.sub(" +", " ", lines[1]) == "metrics_packed sm_90 read 120 0 0 32 2000 125 1.2 8x128 4x32 13x64"
    assert re.sub(" +", " ", lines[2]) == "metrics_packed sm_90 decide 120 0 0 32 2000 - 1.2 36x32 13x64"
    assert report["failures"] == report["problems"] == []
    assert report["kernels"][0] == {
        "variant": "metrics_packed",
        "target": "sm_90",
        "kernel": "read",
        "shared": 32,
        "tokens_per_thread": 16,
        "instructions_per_token": 125.0,
        "seconds": 1.25,
        "registers": 120,
        "spilled": 0,
        "spilled_in_loops": 0,
        "instructions": 2000,
        "loads": {"128": 8, "32": 4},
        "stores": {"64": 13},
    }
    assert report["kernels"][2]["instructions_per_token"] is None


def test_a_failed_target(tmp_path, capsys):
    code, out, report = exit_code([], [Failure("full_padded", "gfx950", "RuntimeError: no")], tmp_path, capsys)
    assert code == 1
    assert "full_padded for gfx950 does not compile: RuntimeError: no" in out
    assert report["failures"] == [{"variant": "full_padded", "target": "gfx950", "error": "RuntimeError: no"}]


@pytest.mark.parametrize(
    ("variant", "kernel", "spilled", "allowed"),
    [
        ("token_bf16", "read", 16, True),
        ("token_bf16", "read", 17, False),
        ("token_unaligned", "apply", 24, False),
        ("token_unaligned", "decide", 24, True),
        ("token_fp64", "read", 24, False),
    ],
)
def test_a_spill(variant, kernel, spilled, allowed, tmp_path, capsys):
    code, out, report = exit_code([row(variant, kernel, spilled)], [], tmp_path, capsys)
    assert code == (0 if allowed else 1)
    wanted = f"{variant} for sm_90: {kernel} spills {spilled} bytes in loops, at most 16 are allowed"
    assert report["problems"] == ([] if allowed else [wanted])
    assert (wanted in out) == (not allowed)


@pytest.mark.parametrize(
    ("variant", "wide", "enough"),
    [
        ("metrics_packed", 0, False),
        ("metrics_packed", 4, False),
        ("metrics_packed", 8, True),
        # The mask's own eight wide loads are not those of log-probs.
        ("metrics_padded", 8, False),
        ("metrics_padded", 16, True),
        ("token_unaligned", 0, True),
        ("token_strided", 0, True),
        ("token_bf16", 0, True),
    ],
)
def test_a_missing_wide_load(variant, wide, enough, tmp_path, capsys):
    code, out, _ = exit_code([row(variant, wide=wide)], [], tmp_path, capsys)
    assert code == (0 if enough else 1)
    assert ("loads of 128 bits" in out) == (not enough)


# --- the command ---


def run(*arguments: str, folder, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which compiles unless it is told to interpret."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), env.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "aot", *arguments],
        cwd=folder, env=env, capture_output=True, text=True, timeout=3000,
    )  # fmt: skip


@pytest.mark.slow
def test_the_command(tmp_path):
    done = run("--variant", "metrics_short", "--target", "sm_90", "gfx942", "--json", "report.json", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    found = [(x["variant"], x["target"], x["kernel"]) for x in report["kernels"]]
    assert found == [("metrics_short", gpu, x) for gpu in ("sm_90", "gfx942") for x in ("read", "decide")]
    for gpu in ("sm_90", "gfx942"):
        read = next(x for x in report["kernels"] if x["target"] == gpu)
        assert read["tokens_per_thread"] == 4
        assert read["registers"] > 30 and read["instructions"] > 500
    assert "metrics_short  gfx942  decide" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    one_in(
        4,
        [
            (("--variant", "nothing"), {}, "--variant: expected some of metrics_packed"),
            (("--target", "sm_70"), {}, "argument --target: invalid choice: 'sm_70'"),
            (("--jobs", "0"), {}, "--jobs: expected at least 1, got 0"),
            ((), {"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET=1 is set"),
        ],
    ),
)
def test_the_command_refuses(arguments, environment, message, tmp_path):
    done = run(*arguments, folder=tmp_path, **environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_padded_rows_are_read_16_bytes_at_a_time_on_amd(tmp_path):
    """By Triton itself: where it does not know that rows are aligned, LLVM merges what it can, in 3.9 half of it."""
    done = run("--variant", "when_sequences", "--target", "gfx942", "--json", "report.json", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    apply = json.loads((tmp_path / "report.json").read_text())["kernels"][2]
    assert apply["kernel"] == "apply" and apply["loads"]["128"] >= 4


def test_advantages_of_packed_batches_ask_for_more_registers():
    """With 128 a thread of `read` spills 80 bytes there; of padded rows, as the variant has, it spills none."""
    plan = VARIANTS["open_instruct.vaco"].launches()[0].arguments["PLAN"]
    packed = dataclasses.replace(plan, packed=True)
    assert plan.registers == 128
    assert packed.registers == 168
    assert dataclasses.replace(packed, advantages=None).registers == 128


@pytest.mark.slow
def test_every_variant_compiles_for_every_target(tmp_path):
    done = run(folder=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
