"""The tools of a release: a closed changelog, files that do not depend on the build and hold what git tracks."""

from __future__ import annotations

import ast
import io
import re
import runpy
import subprocess
import sys
import tarfile
import types
import zipfile

import pytest
import torch

import rollout_corr as rc
from builders.sources import ROOT, nodes


@pytest.fixture
def tool(monkeypatch):
    """Return a function that loads a file of .ci, which is no package, where it runs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT / ".ci" / "release")
    return lambda path: types.SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / path)))


@pytest.mark.parametrize(
    ("changelog", "problem"),
    [
        ("# C\n\n## 0.2.0 (2026-12-01)\n\n### Added\n\n- this\n\n## 0.1.0 (2026-11-01)\n", None),
        ("# C\n\n## 0.2.0 (unreleased)\n\n- this\n", "unreleased"),
        ("# C\n\n## 0.1.0 (2026-11-01)\n\n- this\n", "0.1.0"),
        ("# C\n\n## 0.2.0 (2026-12-01)\n\n## 0.1.0 (2026-11-01)\n\n- this\n", "no entries"),
    ],
)
def test_an_open_changelog_stops_a_release(changelog, problem, tool):
    found = tool("release/__main__.py").still_open(changelog, "0.2.0")
    assert len(found) == (problem is not None) and all(problem in line for line in found)


def archive(names, mtime, mode, owner):
    """A source distribution as setuptools might write it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as files:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode, member.uname = 3, mtime, mode, owner
            files.addfile(member, io.BytesIO(name[-3:].encode()))
    return out.getvalue()


def test_a_source_distribution_does_not_show_who_built_it_and_when(tool):
    settled = tool("release/__main__.py").settled
    one = settled(archive(["x/a.py", "x/b.py"], 5.25, 0o600, "me"), 100)
    assert one == settled(archive(["x/b.py", "x/a.py"], 9.5, 0o644, "you"), 100)
    assert one != settled(archive(["x/a.py", "x/c.py"], 5.25, 0o600, "me"), 100)


@pytest.mark.parametrize(("change", "wrong"), [(0, None), (-1, "lacks ['"), (+1, "holds ['rollout_corr/secret.py']")])
def test_a_wheel_holds_the_tracked_files_and_no_other(change, wrong, tool, tmp_path):
    check = tool("check_dist.py")
    held = [f"rollout_corr/{name}" if name.startswith("kernels/") else name for name in sorted(check.sources())]
    held = held[:change] if change < 0 else held + ["rollout_corr/secret.py"] * change
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        for name in [*held, "rollout_corr-0.1.0.dist-info/licenses/LICENSE"]:
            files.writestr(name, "")
    if wrong is None:
        check.check(str(wheel))
    else:
        with pytest.raises(SystemExit, match=re.escape(wrong)):
            check.check(str(wheel))


def test_kernels_compile_ahead_without_what_tests_need():
    """The smoke test of a release runs lab.aot where the package, torch and what torch requires are all there is."""
    absent = ("pytest", "_pytest", "hypothesis", "rich", "matplotlib", "yaml", "xdist")
    code = f"import sys; sys.path.append('tests'); sys.modules.update(dict.fromkeys({absent})); import lab.aot.report"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_card_of_the_hub_runs(monkeypatch):
    """The names and arguments in the example of the card exist."""
    card = (ROOT / ".ci" / "hub" / "CARD.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.+?)```", card, re.DOTALL)
    monkeypatch.setitem(sys.modules, "kernels", types.SimpleNamespace(get_kernel=lambda *name, **options: rc))
    given = {"train_logp": torch.zeros(3), "rollout_logp": torch.zeros(3), "offsets": torch.tensor([0, 3])}
    exec(code, given)
    assert given["out"].weights.tolist() == [1.0, 1.0, 1.0]


def test_the_benchmark_of_the_hub_verifies_what_it_times(tool, monkeypatch):
    """Each workload as the Hub's runner calls it."""
    module = types.SimpleNamespace(Benchmark=type("Benchmark", (), {"device": "cpu"}))
    monkeypatch.setitem(sys.modules, "kernels.benchmark", module)
    one = tool("hub/benchmarks/benchmark.py").RolloutCorr()
    one.kernel = rc
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(one.seed)
        one.setup()
    workloads = [name.partition("_")[2] for name in dir(one) if name.startswith("benchmark_")]
    assert workloads == ["correct", "step"]
    for name in workloads:
        getattr(one, f"benchmark_{name}")()
        wanted = getattr(one, f"verify_{name}")()
        torch.testing.assert_close(one.out, wanted, rtol=1e-4, atol=1e-5)
        assert wanted.std() > 0.01


def test_what_the_hub_copies_imports_by_relative_names(tool):
    """Under another name, an absolute import would load the installed package, or nothing."""
    hub = tool("hub/__main__.py")
    for source, inside in hub.files().items():
        every = nodes(ROOT / source)
        names = [alias.name for node in every if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in every if isinstance(node, ast.ImportFrom) and not node.level]
        assert not [name for name in names if name.partition(".")[0] == "rollout_corr"], inside
