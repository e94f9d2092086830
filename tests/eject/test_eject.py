"""Files that stand alone: bit by bit what the package computes, written anew when the definition changes."""

import re
import sys
import types
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from builders import ejected
from rollout_corr.backends import run, whole
from rollout_corr.cli.main import main
from rollout_corr.definition import tokens
from rollout_corr.eject import CannotEject, check, eject
from rollout_corr.eject.host import written
from rollout_corr.eject.program import TOLD_ROUNDED

FILES = [
    ("trl.token_truncate", {}),
    ("verl.decoupled_geo_rs_token_tis", {"framework": "verl"}),
    ("verl.decoupled_seq_is_rs", {"layout": "padded", "metrics": "all"}),
    ("skyrl.tldr", {"framework": "skyrl"}),
    ("skyrl.sequence_tis", {"framework": "skyrl"}),
    ("trl.sequence_mask", {"framework": "trl"}),
    ("slime.mis", {"layout": "padded"}),
    ("roll.segment", {"layout": "padded"}),
    ("areal.m2po", {}),
    ("verl.staleness", {}),
    ("open_instruct.vaco", {"metrics": "none"}),
]


@pytest.fixture(autouse=True)
def whole_batches(monkeypatch):
    """The package runs the definition on whole batches here, as it does on devices: blocks sum in another order."""
    monkeypatch.setitem(run.CORRECTIONS, "blocks", whole.run_whole)


@pytest.mark.parametrize(("name", "options"), FILES, ids=lambda x: x if isinstance(x, str) else "-".join(x.values()))
def test_equals_the_package_bit_by_bit(name, options):
    made = eject(name, **options)
    assert ejected.differences(made) == []
    lines = made.source.splitlines()
    assert len(lines) <= (530 if options.get("metrics") == "all" else 400)
    assert max(map(len, lines)) <= 120


def test_its_own_test_runs_with_torch_alone_and_reaches_every_line():
    every, missed = ejected.alone(eject("verl.decoupled_geo_rs_token_tis", "verl"))
    assert missed <= 0.05 * every


def test_a_change_of_the_definition_changes_the_file(monkeypatch):
    before = eject("trl.token_truncate").source
    monkeypatch.setattr(tokens, "LARGEST_D", 512.0)
    after = eject("trl.token_truncate").source
    changed = [line for line in after.splitlines() if line not in before.splitlines()]
    assert [line for line in changed if not line.startswith("# sha256")] == ["LARGEST_D = 2.0**9"]


def test_a_file_computes_what_its_function_gives():
    of_trl = eject("trl.token_truncate", "trl").source
    assert "keep" not in of_trl
    assert "numbers" not in of_trl
    bare = eject("trl.token_truncate", metrics="none").source
    assert "weights, kept_mask, keep = _eager(" in bare


def test_the_note_on_rounded_bounds_stands_above_the_first():
    source = eject("skyrl.tldr", "skyrl").source
    above, _, below = source.partition(TOLD_ROUNDED)
    assert below.split()[0] == "LOG_WEIGHT_UPPER_F32"
    assert "\nWEIGHT_UPPER = " in above


def test_a_bound_of_one_gives_its_name_to_nothing_else():
    spec = rc.Spec(weight=rc.Weight.token(upper=1.0), criteria=(rc.Criterion("ratio", upper=1.0),))
    source = eject(spec, layout="padded").source
    assert "torch.where(measured, d, 0.0)" in source
    assert "d <= LOG_TOKEN_RATIO_UPPER" in source
    assert not re.search(r"where\(.*, [A-Z_]+( - 1.0)?\)", source)
    of_loss = eject("verl.decoupled_token_is", loss=True).source
    assert re.search(r"divisor = torch.where\(.* == 0, 1\.0, ", of_loss)


@pytest.mark.parametrize("formula", [
    lambda v: {"some": 0.0 if v["a"] or v["b"] else 1.0},
    lambda v: {"some": (1.0 if v["b"] else 2.0) if v["a"] else 3.0},
    lambda v: {"some": 0.0 if v["a"] and (v["b"] or v["c"]) else 1.0 if v["b"] else 2.0},
])  # fmt: skip
def test_a_metric_of_two_questions_is_refused(formula):
    with pytest.raises(CannotEject, match=r"some depends on several of|asks .* only if not"):
        written(formula, {name: f"v.{name}" for name in "abc"}, [])


def test_the_file_refuses_what_it_was_not_written_for():
    made = eject("verl.decoupled_geo_rs_token_tis", "verl")
    module = types.ModuleType("ejected")
    with mock.patch.dict(sys.modules, ejected.FRAMEWORKS):
        exec(compile(made.source, "ejected", "exec"), module.__dict__)
    x = torch.zeros(2, 3)
    correct = module.compute_rollout_correction_and_rejection_mask
    with pytest.raises(
        ValueError, match=r"written for .*'rollout_is_threshold': 2.0.*got .*'rollout_is_threshold': 3.0"
    ):
        correct(x, x, x, **{**module.SETTINGS, "rollout_is_threshold": 3.0})
    with pytest.raises(ValueError, match=r"response_mask: expected shape \[2, 3\], got \[2, 2\]"):
        correct(x, x, x[:, 1:], **module.SETTINGS)


def test_tokens_outside_of_sequences_without_a_mask():
    made, names = eject(rc.Spec(weight=rc.Weight.token(upper=2.0)), metrics="all"), {}
    exec(made.source, names)
    train, offsets = -torch.rand(1, 9), torch.tensor([2, 4, 7])
    _, mask, _, metrics = names["correct"](train, train, None, offsets)
    out = rc.correct(train, train, cu_seqlens=offsets, spec=made.request.spec)
    assert torch.equal(mask, out.mask)
    assert metrics["tokens_outside"] == out.metrics()["tokens_outside"] == 4


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("dppo.tv", {}, "criterion 'dppo' compares new/rollout, which exists only inside of a policy loss"),
        ("trl.token_truncate", {"framework": "nobody"}, "framework: expected one of .*'plain'.*, got 'nobody'"),
        ("trl.token_truncate", {"layout": "rows"}, "layout: expected one of .*, got 'rows'"),
        ("trl.token_truncate", {"metrics": "many"}, "metrics: expected one of .*, got 'many'"),
        ("trl.token_truncat", {}, "unknown name 'trl.token_truncat'"),
        (rc.Spec(weight=rc.Weight.token(upper=2.0, normalize="batch")), {"framework": "verl"}, "normalize"),
        ("verl.staleness", {"framework": "verl"}, 'Criterion."age".* has no setting'),
        ("skyrl.token_tis", {"framework": "trl"}, 'nonfinite="reject" has no setting'),
        (rc.Spec(), {"framework": "trl"}, "spec: expected a weight"),
        (rc.Spec(detail="full"), {}, "spec: expected detail='basic', got 'full'"),
    ],
)
def test_errors(what, options, message):
    with pytest.raises(ValueError, match=message):
        eject(what, **options)
    assert issubclass(CannotEject, ValueError)


def test_without_a_mask_tokens_outside_of_sequences_do_not_train():
    module = types.ModuleType("ejected")
    exec(eject("trl.token_truncate").source, module.__dict__)
    logp, offsets = torch.zeros(1, 8), torch.tensor([1, 3, 5])
    expected = rc.correct(logp, logp, cu_seqlens=offsets, spec=rc.spec("trl.token_truncate")).mask
    assert module.correct(logp, logp, None, offsets)[1].tolist() == expected.tolist()


def test_check_tells_version_edit_and_change(monkeypatch):
    source = eject("trl.token_truncate", layout="padded").source
    assert check(source) == (True, [
        f"Written by rollout-corr {rc.__version__}, Apache License 2.0.", "not edited since",
        f"rollout-corr {rc.__version__} writes the same file",
    ])  # fmt: skip
    assert check(source.replace("\n    ", "\n  "))[1][1] == "not edited since"
    same, said = check(source.replace("CLAMP = 20.0", "CLAMP = 10.0"))
    assert not same
    assert said[1] == "edited since"
    assert "-CLAMP = 10.0" in said
    assert "+CLAMP = 20.0" in said
    monkeypatch.setattr(tokens, "LARGEST_D", 512.0)
    same, said = check(source)
    assert not same
    assert said[1] == "not edited since"
    assert "+LARGEST_D = 2.0**9" in said
    assert check("import torch\n")[0] is False
    assert check(eject(rc.Spec()).source)[1][-1] == "its Spec has no name, so it cannot be written again"


def test_command(capsys, tmp_path):
    test = tmp_path / "test_fused.py"
    assert main(["eject", "trl.token_truncate", "--layout", "padded", "--test", str(test)]) == 0
    source = capsys.readouterr().out
    assert re.search(r"^def correct\($", source, re.MULTILINE)
    assert "from fused import correct" in test.read_text()
    file = tmp_path / "fused.py"
    file.write_text(source)
    assert main(["eject", "--check", str(file)]) == 0
    file.write_text(source.replace("20.0", "10.0"))
    assert main(["eject", "--check", str(file)]) == 1
    capsys.readouterr()
    assert main(["eject", "dppo.tv"]) == 2
    assert "only inside of a policy loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected a spec's name, or --check FILE"),
        (["trl.token_truncate", "--for", "trl", "--layout", "padded"], "--layout: expected none with --for trl"),
        (["--check", "file.py", "--for", "plain"], "--for: expected none with --check FILE"),
        (["--check", "file.py", "--test", "test_file.py"], "--test: expected none with --check FILE"),
        (["verl.ppo", "--test", "loss.py"], "--test: expected a file test_NAME.py .* got 'loss.py'"),
        (["verl.ppo", "--test", "test_my-loss.py"], "--test: expected a file test_NAME.py .* got 'test_my-loss.py'"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["eject", *arguments])
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "'utf-8' codec can't decode"),
        (b"#     rollout-corr eject trl.token_truncate --for", "expected a command with a value for each flag"),
        (b"#     rollout-corr eject trl.renamed --for plain", "spec: unknown name 'trl.renamed'"),
    ],
)
def test_check_names_the_file_that_it_cannot_check(content, message, capsys, tmp_path):
    file = tmp_path / "file.py"
    file.write_bytes(content)
    assert main(["eject", "--check", str(file)]) == 2
    assert re.search(f"file.py: .*{message}", capsys.readouterr().err)


def test_a_license_may_stand_above_the_head():
    assert "writes the same file" in check("#\n" * 13 + eject("trl.token_truncate").source)[1][-1]
