"""What `rollout-corr eject` prints: what is left of a file, its header, frameworks' functions, refusals, --check."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import types
from textwrap import dedent

import pytest
import torch

import rollout_corr as rc
from builders.files_to_copy import loaded
from rollout_corr.cli.main import main
from rollout_corr.eject import FRAMEWORKS, CannotEject, calls, check, eject
from rollout_corr.eject.markers import cut

# --- what is left ---

SOURCE = '''
import math
from dataclasses import dataclass

@dataclass(frozen=True)
class Settings:
    """Two options."""

    kind: str = "a"  # or "b" or "c"
    upper: float | None = None
    scale: float = 1.0

def run(x, settings):
    if settings.kind == "a":
        # The first.
        y = x
    elif settings.kind == "b" and x is not None:
        y = _log(
            x
        )
    else:
        y = -x
    if settings.upper is not None:
        return min(y, settings.upper)
    return settings.scale * y

def _log(x):
    return math.log(x)
'''


# What `run` is then, and what the file imports and defines.
LEFT = {
    "a branch that is always taken stays without its test": (
        {"kind": "a"}, ["y = x", "return settings.scale * y"], "dataclass Settings run"),
    "a branch that is never taken goes": (
        {"kind": "c"}, ["y = -x", "return settings.scale * y"], "dataclass Settings run"),
    "a test of something else too stays": (
        {"kind": "b"},
        ["if settings.kind == 'b' and x is not None:\n    y = _log(x)\nelse:\n    y = -x", "return settings.scale * y"],
        "math dataclass Settings run _log"),
    "what follows a return goes": (
        {"kind": "a", "upper": 2.0}, ["y = x", "return min(y, settings.upper)"], "dataclass Settings run"),
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
def test_branches(what):
    values, lines, names = LEFT[what]
    body = ast.parse(cut(SOURCE, values)).body
    assert [getattr(node, "name", None) or node.names[0].name for node in body] == names.split()
    run = next(node for node in body if getattr(node, "name", "") == "run")
    assert list(map(ast.unparse, run.body)) == lines


def test_a_comment_moves_with_its_branch():
    assert "\n    # The first.\n    y = x\n" in cut(SOURCE, {"kind": "a"})


def test_settings_have_the_values_that_are_read_as_defaults():
    text = cut(SOURCE, {"kind": "a", "upper": 2.0})
    assert "    upper: float | None = 2.0\n" in text and "kind" not in text and "scale" not in text
    assert loaded(text).run(5.0, loaded(text).Settings()) == 2.0


CRITERIA = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class Criterion:
    """A test."""

    stat: str
    over: str = "token"
    drop: str = "unit"

@dataclass(frozen=True)
class Settings:
    """Tests."""

    criteria: tuple[Criterion, ...] = ()
    stat: str = "none"

def run(settings):
    found = []
    if settings.criteria is None:
        return settings.stat
    for criterion in settings.criteria:
        if criterion.over == "token":
            if criterion.drop == "sequence":
                found.append("veto")
            else:
                found.append("token")
    for criterion in settings.criteria:
        if criterion.over == "sequence":
            found.append(criterion.stat)
    return found
'''


@pytest.mark.parametrize(("criteria", "gone", "stays"), [
    ((), ["for criterion", "criteria", "Criterion"], []),
    (({"stat": "k1"},), ["veto", "stat", "if "], ["for criterion", "token"]),
    (({"stat": "k1"}, {"stat": "k2", "over": "sequence", "drop": "sequence"}), ["veto", ".drop"],
     ["stat", "if criterion.over"]),
    (({"stat": "k1", "over": "sequence"},), ["veto", "over", "if "], ["stat"]),
], ids=["none", "token", "both", "sequence"])  # fmt: skip
def test_tests_of_criteria_are_decided_for_all_of_them(criteria, gone, stays):
    """Within a branch, for those that reach it: no token criterion drops its sequence."""
    text = cut(CRITERIA, {"criteria": criteria})
    assert all(word not in text for word in gone) and all(word in text for word in stays)
    assert "class Settings" in text and 'stat: str = "none"' not in text
    file, whole = loaded(text), loaded(CRITERIA)
    every = whole.Settings(tuple(whole.Criterion(**one) for one in criteria))
    assert file.run(file.Settings()) == whole.run(every)


TRITON = '''
from dataclasses import dataclass

@dataclass(frozen=True)
class Settings:
    """Bounds."""

    upper: float | None = None
    lower: float | None = None

def kernel(
    x,
    UPPER: tl.constexpr,
    LOWER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if UPPER is not None:
        x = min(x, UPPER)
    if LOWER is not None:
        x = max(x, LOWER)
    return x

def run(x, settings):
    return kernel[(1,)](
        x,
        UPPER=settings.upper,
        LOWER=settings.lower,
        BLOCK=4,
    )
'''


def test_a_parameter_that_nothing_reads_goes_with_its_argument():
    text = cut(TRITON, {"lower": 1.0})
    assert "UPPER" not in text and "upper" not in text
    assert "    LOWER: tl.constexpr,\n    BLOCK: tl.constexpr,\n" in text and "LOWER=settings.lower,\n" in text
    assert "    x = max(x, LOWER)\n    return x\n" in text


# --- the files ---

KINDS = [
    ("trl.token_truncate", {}),
    ("skyrl.tldr", {"metrics": True}),
    ("trl.dapo", {"loss": True}),
    ("verl.decoupled_geo_rs_token_tis", {"framework": "verl"}),
    ("slime.mis_geo", {"framework": "slime"}),
]


@pytest.mark.parametrize(("name", "flags"), KINDS, ids=[name for name, _ in KINDS])
def test_a_file_imports_torch_alone_and_has_no_line_to_spare(name, flags):
    text = eject(name, **flags)
    lines = text.splitlines()
    assert lines[0].startswith("# Written by rollout-corr ") and lines[1].startswith(f"# rollout-corr eject {name}")
    assert len(lines) < 300 and max(map(len, lines)) <= 120
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    roots = {(getattr(node, "module", None) or node.names[0].name).partition(".")[0] for node in imported}
    assert roots <= {"__future__", "dataclasses", "math", "torch", "typing", "verl"}
    ran = subprocess.run([sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F401,F811,E9", "-"],
                         input=text, capture_output=True, text=True, check=False)  # fmt: skip
    assert ran.returncode == 0, ran.stdout


def test_a_file_says_what_it_does_in_words():
    text = eject("trl.sequence_mask")
    assert "# 4. Criterion 'sequence_sum_ratio': for each sequence, the product of the ratio e^D over its valid" in text


def test_a_loss_says_what_its_arguments_are():
    base, rest = eject("trl.dapo", loss=True).splitlines()[2:4]
    assert base == "# base_logp is old_logp."
    assert rest == "# For weights= and train_mask=, correct old_logp and rollout_logp: rollout-corr eject trl.dapo."
    name = "verl.bypass_ppo_clip_geo_rs"
    base, rest = eject(name, loss=True).splitlines()[2:4]
    assert base == "# base_logp is rollout_logp."
    assert rest == f"# For train_mask=, correct new_logp and rollout_logp: rollout-corr eject {name}. No weights."


@pytest.mark.parametrize(("name", "flags", "said"), [
    ("roll.segment", {}, "Weight.over='turn'; Criterion.over='turn' of 'turn_mean_ratio'"),
    ("ctpo.cumprod", {}, "Weight.over='prefix'"),
    ("slime.mis", {}, "Weight.normalize='batch'"),
    ("areal.m2po", {}, "bounds of 'm2po' that the batch decides"),
    ("minirl.mask", {}, "Criterion.when='outward' of 'clip'; Criterion.of='new/old' of 'clip'"),
    ("nemo.mult_err", {}, "Criterion.stat='ratio_error' of 'sequence_mean_ratio_error'"),
    ("dppo.tv", {"loss": True}, "the surrogate DPPO"),
    ("skyrl.grpo", {"loss": True}, "a KL of rejected tokens too; a KL with a mean of its own"),
    ("swift.real", {"loss": True}, "the surrogate REAL; turns or groups of the Batch"),
    ("nemo.mult_err", {"loss": True}, "Criterion.stat='ratio_error'"),
    ("trl.default", {"kernel": True}, r"nonfinite='neutral' \(with --kernel\); level='product' \(with --kernel\)"),
])  # fmt: skip
def test_what_no_file_says_is_refused_by_name(name, flags, said):
    with pytest.raises(
        CannotEject, match=f"no file to copy says .*{said}.*Install the package: pip install rollout-corr"
    ):
        eject(name, **flags)


@pytest.mark.parametrize(("name", "flags", "said"), [
    ("nope.x", {}, "unknown name 'nope.x'"),
    ('trl.dapo"""', {}, "unknown name"),
    ("areal.ppo", {}, "areal.ppo: expected a name with a correction, got a recipe of a loss alone; add --loss"),
    ("trl.dapo", {"loss": True, "metrics": True}, "expected one of --loss, .* and --metrics, got --loss --metrics"),
    ("trl.dapo", {"framework": "nope"}, "--for: expected one of .*, got 'nope'"),
    ("skyrl.outlier_mask", {"framework": "trl"}, "trl"),
])  # fmt: skip
def test_what_eject_refuses(name, flags, said):
    with pytest.raises(ValueError, match=said):
        eject(name, **flags)


# --- frameworks' functions ---

OLD = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -2.0, 9.0]])
ROLLOUT = torch.tensor([[-1.1, -1.2, -0.9], [-3.0, -2.1, 9.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
# exp(D), at most 2.
TOKENS = torch.tensor([[0.1, 0.2, -0.1], [2.0, 0.1, 0.0]]).exp().clamp(max=2.0) * MASK


def function(name, framework):
    file = loaded(eject(name, framework=framework))
    return getattr(file, FRAMEWORKS[framework]), file


def test_verls_function(monkeypatch):
    protocol = types.ModuleType("verl.protocol")
    protocol.DataProto = type("DataProto", (), {"from_dict": staticmethod(lambda tensors: tensors)})
    monkeypatch.setitem(sys.modules, "verl", types.ModuleType("verl"))
    monkeypatch.setitem(sys.modules, "verl.protocol", protocol)
    call, _ = function("verl.decoupled_token_is", "verl")
    proto, mask, metrics = call(OLD, ROLLOUT, MASK, rollout_is="token", rollout_is_threshold=2.0)
    assert torch.allclose(proto["rollout_is_weights"], TOKENS) and torch.equal(mask, MASK)
    assert len(metrics) == 10 and metrics["rollout_corr/logratio_abs_max"] == 2.0
    with pytest.raises(ValueError, match=r"this file was written for .*'rollout_is_threshold': 2\.0.*got .*3\.0"):
        call(OLD, ROLLOUT, MASK, rollout_is="token", rollout_is_threshold=3.0)


def test_skyrls_function():
    call, file = function("skyrl.sequence_tis", "skyrl")
    config = types.SimpleNamespace(**file.CONFIG)
    ratio, metrics, mask = call(OLD, ROLLOUT, MASK, config)
    # e^0.2, and e^2.1 is cut at 5.
    assert ratio.tolist() == [pytest.approx([1.2214028]), [5.0]] and torch.equal(mask, MASK.float())
    assert len(metrics) == 10 and metrics["off_policy_correction/tokens_nonfinite"] == 0.0
    ratio, _, _ = call(OLD, ROLLOUT, MASK * 0, config)
    assert ratio.tolist() == [[1.0], [1.0]]
    with pytest.raises(ValueError, match="this file was written for"):
        call(OLD, ROLLOUT, MASK, types.SimpleNamespace(tis_ratio_type="token"))


def test_trls_function():
    call, _ = function("trl.sequence_mask", "trl")
    ratio, metrics = call(OLD, ROLLOUT, MASK, "sequence_mask", 3.0, None)
    # e^2.1 is above 3.
    assert ratio.tolist() == [pytest.approx([1.2214028]), [0.0]]
    assert len(metrics) == 10 and metrics["sampling/sequences_kept_fraction"] == 0.5
    with pytest.raises(ValueError, match="this file was written for"):
        call(OLD, ROLLOUT, MASK, "token_mask", 3.0, None)


def test_slimes_function():
    call, _ = function("slime.tis", "slime")
    samples = [OLD[0], OLD[1, :2]], [ROLLOUT[0], ROLLOUT[1, :2]], [MASK[0], MASK[1, :2]]
    loss = torch.ones(5, requires_grad=True)
    given = dict(zip(("train_log_probs", "rollout_log_probs", "loss_masks"), samples, strict=True))
    value, masks, metrics = call(None, pg_loss=loss, **given, total_lengths=[5, 4], response_lengths=[3, 2])
    assert torch.allclose(value, torch.cat([TOKENS[0], TOKENS[1, :2]])) and value.requires_grad
    assert [mask.tolist() for mask in masks] == [[1, 1, 1], [1, 1]]
    assert len(metrics) == 10 and metrics["tis/logratio_abs_max"].tolist() == [2.0] * 5


def test_nemos_function():
    call, _ = function("nemo.tis", "nemo")
    weights, mask, metrics = call(OLD, ROLLOUT, MASK.float(), torch.tensor([1.0, 0.0]))
    assert torch.allclose(weights, TOKENS * torch.tensor([[1.0], [0.0]]))
    assert mask.tolist() == [[1, 1, 1], [0, 0, 0]] and len(metrics) == 10


# What each framework calls: the names of the parameters at the versions of tests/conformance/README.md.
SIGNATURES = {
    "verl": ["old_log_prob", "rollout_log_prob", "response_mask", "rollout_is", "rollout_is_threshold",
             "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold"],
    "skyrl": ["old_log_probs", "rollout_logprobs", "loss_mask", "off_policy_correction"],
    "slime": ["args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "kwargs"],
}  # fmt: skip


@pytest.mark.parametrize("framework", SIGNATURES)
def test_frameworks_functions_have_their_parameters(framework):
    assert list(inspect.signature(getattr(calls, FRAMEWORKS[framework])).parameters) == SIGNATURES[framework]


# --- the command ---


def test_the_command_prints_a_file_and_checks_it(tmp_path, capsys):
    path = tmp_path / "correction.py"
    assert main(["eject", "slime.tis"]) == 0
    path.write_text(capsys.readouterr().out)
    assert main(["eject", "--check", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "rollout-corr eject slime.tis", "not edited since", f"rollout-corr {rc.__version__} writes the same file",
    ]  # fmt: skip
    path.write_text(path.read_text().replace("upper: float | None = 2.0", "upper: float | None = 3.0"))
    assert main(["eject", "--check", str(path)]) == 1
    said = capsys.readouterr().out
    assert (
        "edited since" in said and "-    upper: float | None = 3.0" in said and "+    upper: float | None = 2.0" in said
    )


@pytest.mark.parametrize("flags", [{"loss": True}, {"metrics": True}, {"framework": "trl"}])
def test_check_repeats_every_command(flags):
    name = "trl.sequence_mask" if "framework" in flags else "trl.dapo"
    assert check(eject(name, **flags))[0]


def test_check_refuses_what_eject_did_not_write():
    assert check("x = 1\n") == (False, ["not written by rollout-corr eject: its header is missing"])


def test_the_command_names_what_it_cannot_do(capsys):
    assert main(["eject", "roll.segment"]) == 2
    assert "no file to copy says Weight.over='turn'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["eject"])
    assert "expected the name of a spec or a recipe, or --check FILE" in capsys.readouterr().err


def test_the_files_say_nothing_of_the_package():
    text = dedent(eject("skyrl.tldr", metrics=True)).split('"""', 1)[1]
    assert "rollout_corr" not in text
