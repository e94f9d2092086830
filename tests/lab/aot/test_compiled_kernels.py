"""The compiled kernels: variants cover every option, `make kernels` says what is wrong.

The interpreter's tests share a process with these, and there a kernel cannot be compiled. So whatever compiles runs in
a process of its own.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lab.aot import ahead_of_time, report
from lab.aot.machine_code import MachineCode
from lab.aot.report import KernelRow
from lab.aot.step_variants import STEP_VARIANTS
from lab.aot.variant import LONG, LONGEST, MEDIUM, SHORT, Variant
from lab.aot.variants import FEW, OF_NEW_VARIANTS, SPLIT_VARIANTS, TURN_VARIANTS, VARIANTS
from rollout_corr.backends import batch
from rollout_corr.kernels.grid import SHAPES, cut_for
from rollout_corr.specs import choices

TESTS = Path(__file__).resolve().parents[2]

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
}


def test_every_option_is_in_a_variant():
    """A new value of an option is missed here until a variant has it."""
    options = {name: set(value) for name, value in vars(choices).items() if name.isupper() and isinstance(value, tuple)}
    assert options == {name: USED.get(name, set()) | BEYOND.get(name, set()) for name in (*USED, *BEYOND)}
    pairs = {(criterion.over, criterion.stat) for criterion in CRITERIA if criterion.over in ("token", "sequence")}
    assert pairs == {(over, stat) for over in ("token", "sequence") for stat in USED["STATS"]}
    # Fields without options to choose from.
    assert all(any(getattr(x, name) is not None for x in WEIGHTS) for name in ("lower", "upper", "token_clamp"))
    assert all(
        any(getattr(x, name) is not None for x in CRITERIA) for name in ("lower", "upper", "token_clamp", "name")
    )
    assert {x.apply for x in SPECS} == {x.turns for x in SPECS} == {True, False}


def test_every_kind_of_tensor_is_in_a_variant():
    variants = VARIANTS.values()
    assert {x.train for x in variants} == {x.rollout for x in variants} == {*batch.LOGP_DTYPES} - {torch.float64}
    assert any(x.train != x.rollout for x in variants)
    assert {x.mask for x in variants} == {None, *batch.MASK_DTYPES}
    assert {x.offsets for x in variants} == {torch.int32, torch.int64}
    assert {x.advantages for x in variants} == {None, "token", "sequence"}
    lie = {(x.packed, x.aligned, x.unit) for x in variants}
    assert lie >= {(packed, *how) for packed in (True, False) for how in ((True, True), (False, True), (True, False))}
    lengths = {(True, LONGEST), (True, LONG), (True, MEDIUM), (True, SHORT), (False, LONG)}
    assert {(x.packed, x.length) for x in variants} >= lengths
    cuts = [cut_for(length, 1, 4, True, True).shape for length in (LONGEST, LONG, SHORT)]
    assert cuts == [shape for _, shape in SHAPES]
    # Every one costs seconds for each target.
    assert len(VARIANTS) <= 42 and set(FEW) <= set(VARIANTS)


@pytest.mark.parametrize("name", [*VARIANTS, *OF_NEW_VARIANTS, *SPLIT_VARIANTS])
def test_a_variant_makes_its_launches_from_metadata(name):
    variant = (VARIANTS | OF_NEW_VARIANTS | SPLIT_VARIANTS)[name]
    read, *others = variant.launches()
    gathers, applies = ["gather_kernel"] * variant.split, ["apply_kernel"] * read.arguments["PLAN"].applies
    assert [x.kernel.__name__ for x in (read, *others)] == ["read_kernel", *gathers, "decide_kernel", *applies]
    assert read.arguments["TILING"].unit == variant.unit
    assert read.arguments["TILING"].aligned == (variant.aligned and variant.unit)
    tensors = [x for x in read.arguments.values() if isinstance(x, torch.Tensor)]
    assert all(x.device.type == "meta" for x in tensors)


def test_place_keeps_values_and_moves_them():
    x = torch.arange(64.0).view(2, 32)
    for variant in (Variant("x"), Variant("x", aligned=False), Variant("x", unit=False)):
        placed = variant.place(x)
        assert torch.equal(placed, x)
        assert (placed.data_ptr() % 16 == 0) == (placed.stride(0) % 16 == 0) == variant.aligned
        assert (placed.stride(1) == 1) == variant.unit


@pytest.mark.parametrize(("variant", "nvidia", "amd"), [("metrics_packed", 4, 4), ("token_unaligned", 4, 2)])
def test_tokens_of_a_thread(variant, nvidia, amd):
    """A warp of 64 threads takes a step of four parts as two, and a step of one part twice as long."""
    launch = VARIANTS[variant].launches()[0]
    found = [ahead_of_time.tokens_of_thread(launch, ahead_of_time.TARGETS[name]) for name in ("sm_90", "gfx942")]
    assert found == [nvidia, amd]


def plan_of(variant, **changed):
    return dataclasses.replace(variant.launches()[0].arguments["PLAN"], **changed)


@pytest.mark.parametrize(
    ("variant", "changed", "registers"),
    [
        # With 128 a thread of `read` spills 80 bytes where advantages are packed, and up to 20 of padded rows.
        (VARIANTS["open_instruct.vaco"], {}, 136),
        (VARIANTS["open_instruct.vaco"], {"packed": True}, 168),
        (VARIANTS["open_instruct.vaco"], {"packed": True, "advantages": None}, 128),
        # Two criteria of tokens, a kept mass and further policies spill 20 or 24 bytes in loops for sm_100 with 128 and
        # 168, with these none.
        (VARIANTS["slime.mis"], {}, 136),
        (VARIANTS["verl.decoupled_k3_rs_token_tis"], {}, 136),
        (STEP_VARIANTS["zeroed"], {}, 184),
        (STEP_VARIANTS["zeroed"], {"mass": None, "spec_mass": False}, 168),
        (STEP_VARIANTS["of_new"], {}, 184),
    ],
)
def test_the_cap_of_registers(variant, changed, registers):
    assert plan_of(variant, **changed).registers == registers


# --- what has to hold ---


@pytest.mark.parametrize(
    ("variant", "kernel", "spilled", "wide", "problem"),
    [
        ("metrics_packed", "read", 0, 8, ""),
        ("metrics_packed", "decide", 0, 0, ""),
        ("token_bf16", "read", 16, 0, ""),
        ("token_bf16", "read", 17, 0, "spills 17 bytes in loops, at most 16 are allowed"),
        ("token_unaligned", "apply", 24, 0, "spills 24 bytes"),
        ("token_unaligned", "decide", 24, 0, ""),
        ("metrics_packed", "read", 0, 7, "has 7 loads of 128 bits, 8 and more were expected"),
        # The mask's own eight wide loads are not those of log-probs.
        ("metrics_padded", "read", 0, 15, "has 15 loads of 128 bits, 16 and more"),
        ("metrics_padded", "read", 0, 16, ""),
        ("token_unaligned", "read", 0, 0, ""),
        ("token_strided", "read", 0, 0, ""),
        # Of a step's three log-probs `read` loads the two of the correction.
        ("step_product", "read", 0, 7, "has 7 loads of 128 bits, 8 and more were expected"),
        ("step_product", "read", 0, 8, ""),
    ],
)
def test_spills_and_narrow_loads_fail(variant, kernel, spilled, wide, problem, capsys):
    code = MachineCode(120, spilled, spilled, 2000, {128: wide, 32: 4}, {64: 13})
    row = KernelRow(variant, "sm_90", kernel, 32, 16 if kernel == "read" else 0, 1.25, code)
    assert report.publish([row], []) == bool(problem)
    head, cells, *said = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["variant", "target", "kernel", "registers"]
    each = "125" if kernel == "read" else "-"
    wanted = f"{variant} sm_90 {kernel} 120 {spilled} {spilled} 32 2000 {each} 1.2 {wide}x128 4x32 13x64"
    assert re.sub(" +", " ", cells).strip() == wanted
    assert (f"- {variant} for sm_90: {kernel} {problem}" in "\n".join(said)) == bool(problem)


# --- the command ---


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which compiles unless it is told to interpret."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), env.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "lab.aot", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=3000, check=False)


def test_the_command_refuses(capsys):
    """In a process whose kernels are interpreted, as here."""
    for arguments, message in (
        (["--variant", "nothing"], "--variant: expected some of metrics_packed"),
        (["--target", "sm_70"], "argument --target: invalid choice: 'sm_70'"),
        ([], "TRITON_INTERPRET=1 is set"),
    ):
        with pytest.raises(SystemExit):
            report.main(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_every_variant_compiles_for_every_target():
    done = run()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
