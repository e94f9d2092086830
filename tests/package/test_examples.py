"""The examples as a new user runs them: in an empty folder, with only the packages that their first lines name."""

from __future__ import annotations

import ast
import itertools
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from builders.forked_ranks import example, starter
from builders.fresh import in_a_fresh_process, printed_by
from rollout_corr.testing import example_batch

pytestmark = pytest.mark.usefixtures("one_thread")

TESTS = Path(__file__).resolve().parents[1]
EXAMPLES = TESTS.parent / "examples"
RESULTS = ("mismatch_results.py",)


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a copy of an example, and of its neighbor files, in a process of its own."""

    def runs(name, *command, arguments=(), path=(), needs=(), fails=False):
        for file in (name, *needs):
            shutil.copy(EXAMPLES / file, tmp_path)
        # On one thread each: other tests may run at the same time.
        paths = os.pathsep.join(filter(None, (*map(str, path), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        done = subprocess.run(
            [sys.executable, *command, name, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
            check=False,
        )
        if bool(done.returncode) != fails:
            pytest.fail(f"{name} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stderr if fails else done.stdout

    return runs


@pytest.fixture
def lines(tmp_path, monkeypatch, capsys):
    """Return a function that runs an example in this process, and gives the lines that it prints."""

    def runs(name):
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setattr(sys, "argv", [name])
        with torch.random.fork_rng(devices=[]):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return runs


def numbers(text):
    """Return every number of a text."""
    return [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?(?![\w.])", text)]


def test_ess_schedule(lines):
    """The staler the batch, the smaller the step: the root of the share of samples that count."""
    rates = [float(line.rpartition(" ")[2]) for line in lines("ess_schedule.py")]
    assert rates[0] == 0.01 and rates == sorted(rates, reverse=True) and len(set(rates)) == 4
    assert rates[-1] < 0.009


def test_plain_torch(lines):
    """All steps learn the toy, padded and packed; the broken sequence of each batch does not train."""
    found = {line.partition(": ")[0]: numbers(line) for line in lines("plain_torch.py")}
    steps = "decoupled", "one_pass", "bypass"
    assert list(found) == [f"{step}, {layout}" for step in steps for layout in ("padded", "packed")]
    for before, after, mismatch, fewest, most, sequences in found.values():
        assert before < 0.2 and after > 0.8 and 0.2 < mismatch < 0.5, found
        assert (fewest, most, sequences) == (63, 63, 64), found
    for step in steps:
        padded, packed = (found[f"{step}, {layout}"] for layout in ("padded", "packed"))
        # A sum in another order may move a sampled token.
        assert packed[0] == padded[0] and packed == pytest.approx(padded, rel=0.05), found


def test_cuda_graph(lines):
    """Where there is no GPU the step runs as it is; the capture is a test of the kernels."""
    about, *batches = lines("cuda_graph.py")
    assert about == "no GPU: each step runs as it is" and len(batches) == 3
    for batch, line in enumerate(batches, 1):
        number, loss, gradient, kl = numbers(line)[:3] + numbers(line)[-1:]
        assert number == batch and abs(loss) < 0.1 and 0.005 < gradient < 0.01 and 0.001 < kl < 0.002, line


def test_agent_turns(lines):
    """The planted error is in last turns alone, and rejecting these keeps more than rejecting their sequences."""
    found = {line.partition(": ")[0]: numbers(line.partition(": ")[2]) for line in lines("agent_turns.py")}
    assert found["mean D of last turns"][0] < -0.015
    assert all(abs(found[f"mean D of {place} turns"][0]) < 0.002 for place in ("first", "middle"))
    assert found["tokens kept by sequences"][0] < found["tokens kept by turns"][0] < 1.0
    assert found["loss"][0] > 0.0


def test_context_parallel(tmp_path):
    with starter() as on_ranks:
        first, second = on_ranks(example, 2, str(EXAMPLES / "context_parallel.py"), str(tmp_path))
    assert (first.error, second.error, second.value) == ("", "", "")
    assert first.value.count("2 of 2 ranks agree with the single process") == 6, first.value


@pytest.mark.slow
def test_mismatch_rl(run, tmp_path):
    """A pipe gets a line per seed and the table, and no control codes; --out is where the files are."""
    said = run("mismatch_rl.py", needs=RESULTS, arguments=("--tiny", "--out", "made"))
    table = (tmp_path / "made" / "results.md").read_text(encoding="utf-8")
    lines = said.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == [f"int3, 2 steps old, seed {seed}" for seed in (0, 1)]
    assert table in said and len(lines) == 2 + len(table.splitlines()) + 5 and "\x1b" not in said, said
    assert lines[-1].startswith("too short to mean anything: 6 steps, and the runs part after some 60; 2 seeds")
    found = json.loads((tmp_path / "made" / "results.json").read_text(encoding="utf-8"))
    assert found["about"]["version"].startswith("rollout-corr ")  # this copy is in no repository
    assert len(found["start"]) == 2 and all(len(runs) == 2 for runs in found["curves"].values())
    drawn = (tmp_path / "made" / "curves.svg").read_text(encoding="utf-8")
    assert all(name in drawn for name in (*found["curves"], "ESS", "mismatch KL", "before RL"))


def test_slime(lines):
    """Plain loops keep and reject the same sequences, and give the same weights."""
    batch = example_batch(sequences=32, median_length=200, mismatch=0.5, catastrophic=1e-3)
    columns = (batch.train_logp, batch.rollout_logp, batch.mask)
    tokens = list(zip(*(x.tolist() for x in columns), strict=True))
    offsets = batch.cu_seqlens.tolist()
    samples = [[a - b for a, b, ok in tokens[i:j] if ok] for i, j in itertools.pairwise(offsets)]
    kept = [0.95 <= math.exp(math.fsum(d) / len(d)) <= 1.05 for d in samples]
    vetoed = [min(d) < math.log(1e-4) for d in samples]
    count = sum(map(len, samples))
    truncated = sum(x > math.log(2.0) for d in samples for x in d) / count
    rejected = sum(len(d) for d, keep in zip(samples, kept, strict=True) if not keep) / count
    of_mis = sum(keep and not veto for keep, veto in zip(kept, vetoed, strict=True))
    weight = math.fsum(min(math.exp(x), 2.0) for d in samples for x in d) / count

    said = lines("slime_hook.py")
    expected = [[0, 32, 32], [truncated], [0, of_mis, 32], [weight], [0, sum(kept), 32], [rejected]]
    assert truncated > 0 and of_mis < sum(kept) < 32, "a threshold that cuts nothing shows nothing"
    assert [numbers(line.partition(": ")[2]) for line in said] == [pytest.approx(x, abs=1e-4) for x in expected]


def agrees(said, metrics):
    """Check a printed comparison: masks, weights, the names of `metrics` metrics, and the values of some."""
    assert "masks equal: True" in said and f"names of metrics equal: True {metrics}" in said, said
    (apart,) = re.findall(r"largest difference of a weight: (\S+)", said)
    assert float(apart) <= 1e-6, said
    pairs = re.findall(r"\S+: \w+ (\S+), rollout-corr (\S+)", said)
    assert len(pairs) >= 3 and all(float(a) == pytest.approx(float(b), rel=1e-4) for a, b in pairs), said
    return [float(a) for a, _ in pairs]


@pytest.fixture
def next_to_stand_ins(tmp_path):
    """Return a function that runs an example with the stand-ins for xtuner and SkyRL, and gives what it prints."""
    path = [str(TESTS / "stand_ins")]
    return lambda name: in_a_fresh_process(printed_by, str(EXAMPLES / name), str(tmp_path), path)


def test_xtuner(next_to_stand_ins):
    said = next_to_stand_ins("xtuner_hook.py")
    agrees(said, 31)
    of_pack, of_sequences = numbers(said.splitlines()[-1])
    batch = example_batch(sequences=16, median_length=200, mismatch=0.5, catastrophic=1e-3)
    parts = (x.split(batch.lengths.tolist()) for x in (batch.train_logp, batch.mask))
    means = [logp[valid].mean() for logp, valid in zip(*parts, strict=True)]
    assert of_pack == pytest.approx(float((-batch.train_logp[batch.mask].mean()).exp()), abs=1e-3)
    assert of_sequences == pytest.approx(sum(float((-x).exp()) for x in means) / 16, abs=1e-3)


def test_skyrl(next_to_stand_ins):
    said = next_to_stand_ins("skyrl_hook.py")
    _, capped, masked = agrees(said, 8)
    assert 0 < capped < 1 and 0 < masked < 1, "a threshold that cuts nothing shows nothing"
    assert "skyrl 0.3.0 uses the functions of rollout-corr in 3 places" in said
    values = [float(x) for x in re.findall(r"^(?:rollout_corr_)?regular: (\S+)$", said, re.MULTILINE)]
    (slopes,) = re.findall(r"largest difference of a slope: (\S+)", said)
    assert values[0] == pytest.approx(values[1], rel=1e-5) and values[0] != 0.0 and float(slopes) < 1e-5, said


@pytest.mark.peers
def test_verl(run):
    """The function is verl's own in this process, and ours in a Ray worker that has run the hook."""
    said = run("verl_hook.py")
    agrees(said, 44)
    assert re.search(r"^here: +no function of verl 0.9.1 is replaced: install\(\) was not called$", said, re.MULTILINE)
    worker = r"^worker: verl 0.9.1 uses the functions of rollout-corr in 6 places; waiting .* verl.utils.debug.metrics;"
    assert re.search(worker, said, re.MULTILINE)


@pytest.mark.peers
def test_trl(run):
    """TRL's own ratio and ours give equal losses; a Spec gives others."""
    said = run("trl_hook.py").splitlines()
    assert said[0] == (
        "trl 1.16.0 uses the functions of rollout-corr in 2 places; "
        "waiting for the import of trl.experimental.async_grpo.async_grpo_trainer"
    )
    theirs, ours, spec, ratio, kept = (numbers(line.partition(": ")[2]) for line in said[1:])
    # What is rejected has the ratio 0, and the others at most 1.1.
    assert len(ratio) == 4 and min(kept) < 0.5 and all(0.9 * k < r <= 1.1 * k for r, k in zip(ratio, kept, strict=True))
    assert len(theirs) == len(spec) == 4 and len({*theirs}) == 4
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6) and spec != pytest.approx(theirs, rel=0.1)


def test_missing_framework(run, tmp_path):
    """A missing framework gives one line that says what to install, as the first lines of the example do."""
    name, blocked = "verl_hook.py", tmp_path / "blocked"
    blocked.mkdir()
    for module in ("datasets", "ray", "skyrl", "trl", "verl", "xtuner"):
        text = f"raise ModuleNotFoundError(\"No module named '{module}'\", name={module!r})\n"
        (blocked / f"{module}.py").write_text(text)
    said = run(name, path=[blocked], fails=True)
    missing, _, install = said.rstrip("\n").partition(": ")
    assert re.fullmatch(r"No module named '\w+'", missing), said
    assert "install /path/to/rollout-corr" in install and "\n" not in install, said
    assert install in (EXAMPLES / name).read_text(encoding="utf-8").partition("from __future__")[0]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_first_lines_name_what_it_needs(path):
    """Imports outside a try are torch, this package, or named in the docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    first = ast.get_docstring(tree)
    modules = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    needed = {name.partition(".")[0] for name in modules} - {"torch", "rollout_corr"} - sys.stdlib_module_names
    assert not [name for name in needed if name not in first], first
    assert "install /path/to/rollout-corr" in first and path.name in first
