"""The tools of a release: a changelog that is closed, files that do not depend on the build, a layout for the Hub."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import io
import json
import re
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import pytest
import torch

import rollout_corr as rc

ROOT = Path(__file__).resolve().parents[2]


def tool(path):
    """Load a file of .ci, which is no package; its neighbors are found as where it runs."""
    if str(ROOT / ".ci" / "release") not in sys.path:
        sys.path.append(str(ROOT / ".ci" / "release"))
    spec = importlib.util.spec_from_file_location(
        f"ci_{path.replace('/', '_').removesuffix('.py')}", ROOT / ".ci" / path
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("changelog", "problem"),
    [
        ("# C\n\n## 0.2.0 (2026-12-01)\n\n### Added\n\n- this\n\n## 0.1.0 (2026-11-01)\n", None),
        ("# C\n\n## 0.2.0 (unreleased)\n\n- this\n", "unreleased"),
        ("# C\n\n## 0.1.0 (2026-11-01)\n\n- this\n", "0.1.0"),
        ("# C\n\n## 0.2.0 (2026-12-01)\n\n## 0.1.0 (2026-11-01)\n\n- this\n", "no entries"),
        ("", "expected the newest heading"),
    ],
)
def test_an_open_changelog_stops_a_release(changelog, problem):
    found = tool("release/state.py").still_open(changelog, "0.2.0")
    assert len(found) == (problem is not None) and all(problem in line for line in found)


def test_a_citation_of_another_version_stops_a_release():
    state = tool("release/state.py")
    assert not state.cited_otherwise("title: x\nversion: 0.2.0\nlicense: y\n", "0.2.0")
    assert state.cited_otherwise("title: x\nversion: 0.2.0\n", "0.2.1")


def test_contents_that_nobody_listed_stop_a_release(capsys):
    state = tool("release/state.py")
    with pytest.raises(SystemExit):
        state.compare(["wheel a", "wheel secret"], ["wheel a", "wheel b"], rehearse=False)
    assert capsys.readouterr().out == "- wheel b\n+ wheel secret\n"
    state.compare(["wheel a"], ["wheel a"], rehearse=False)


def test_the_list_of_contents_has_every_file_of_the_package(monkeypatch):
    """Both files hold the tracked sources, the kernels inside of the package in the wheel, and what packaging adds."""
    monkeypatch.chdir(ROOT)
    tracked = tool("check_wheel.py").tracked()
    kernels = "rollout_corr/kernels/"
    sources = [path.removeprefix("rollout_corr/") if path.startswith(kernels) else path for path in tracked]
    listed = (ROOT / ".ci" / "release" / "contents.txt").read_text(encoding="utf-8").splitlines()
    expected = [f"wheel {path}" for path in tracked] + [f"sdist {path}" for path in sources]
    added = re.compile(r"wheel rollout_corr-VERSION\.dist-info/|sdist (rollout_corr\.egg-info/|[\w.-]+$)")
    found = [line for line in listed if not added.match(line)]
    assert sorted(found) == sorted(expected), 'make release ARGS="--rehearse --only-build --write-contents"'
    assert len(listed) - len(found) < 25


def test_torch_of_a_row_is_the_newest_of_its_minor_version(monkeypatch):
    monkeypatch.chdir(ROOT)
    environments = tool("release/environments.py")
    oldest = environments.TORCHES[0]
    major, minor, _ = map(int, oldest.split("."))
    listed = [(major, minor, 0), (major, minor, 1), (major, 0, 9), (major, minor + 9, 2), (major, minor + 9, 1)]
    listed += [(major, minor + 10, 0)]
    found = environments.newest_of_each_minor([tuple(map(str, version)) for version in listed])
    assert found == [oldest, f"{major}.{minor}.1", f"{major}.{minor + 9}.2", f"{major}.{minor + 10}.0"]


def test_the_oldest_and_the_newest_torch_are_tried_under_every_python(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    environments = tool("release/environments.py")
    monkeypatch.setattr(environments, "runs", lambda python: python != "python3.9")
    monkeypatch.setattr(environments, "try_one", stand_in_for_one(("3.12", "c")))
    monkeypatch.setattr(environments, "show", lambda row: None)
    monkeypatch.setattr(environments, "version_of", lambda python: python.removeprefix("python"))
    pythons, torches = ["python3.9", "python3.11", "python3.12"], ["a", "b", "c"]
    tried = list(environments.try_everywhere(Path("x.whl"), pythons, torches, []))
    # For 3.12 the index has no c, so the newest that it has takes its place.
    assert [(row["python"], row["asked"]) for row in tried] == [
        *(("3.11", "a"), ("3.12", "a"), ("3.11", "b")),
        *(("3.11", "c"), ("3.12", "c"), ("3.12", "newest")),
    ]
    assert environments.not_here(pythons) == ["3.9"]
    assert capsys.readouterr().out == "python3.9: not here, so not tried\n"
    for before in ([tried[1], tried[2]], [tried[4]], [tried[3], tried[5]], tried):
        left = list(environments.try_everywhere(Path("x.whl"), pythons, torches, before))
        assert left == [row for row in tried if row not in before]


def stand_in_for_one(*absent):
    """A trial that installs nothing, of an index that lacks some versions of torch for a Python."""

    def try_one(wheel, python, torch, scratch, cache, cuda):
        row = {"python": python.removeprefix("python"), "asked": torch}
        return row | ({"absent": True} if (row["python"], torch) in absent else {})

    return try_one


def test_rows_of_the_same_bytes_are_kept_unless_they_failed(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    rows_of = tool("release/environments.py").rows_of
    path = tmp_path / "rows.json"
    assert rows_of(path, "x") == []
    path.write_text('{"tried": "x", "rows": [{"failed": []}, {"failed": ["operators"]}]}', encoding="utf-8")
    assert rows_of(path, "x") == [{"failed": []}] and rows_of(path, "y") == []


@pytest.mark.parametrize(
    ("said", "absent"),
    [
        ("Because torch==2.6.0 has no wheels with a matching Python ABI\n    tag (e.g., `cp314`)", True),
        ("ERROR: No matching distribution found for torch==2.6.0", True),
        ("ERROR: No matching distribution found for rich>=13", False),
        ("No space left on device", False),
    ],
)
def test_an_index_without_a_wheel_for_a_python_is_no_failure(monkeypatch, tmp_path, said, absent):
    monkeypatch.chdir(ROOT)
    environments = tool("release/environments.py")
    monkeypatch.setattr(environments, "install", lambda *arguments: said)
    monkeypatch.setattr(environments, "version_of", lambda python: "3.14")
    row = environments.try_one(Path("x.whl"), "python3.14", "2.6.0", tmp_path, "", cuda=True)
    assert ("absent" in row) is absent and bool(row["failed"]) is not absent


def row(python, torch, triton, checks, **more):
    """A row as `make release` writes it."""
    versions = {"rollout-corr": "0.1.0", "torch": torch, "triton": triton, "numpy": "2.3.5"}
    made = {"cuda": "installed", "commit": "0123abc"}
    return {"python": python, **versions, **made, "checks": checks, "failed": [], **more}


RAN = {"corrects": "passes", "kernels interpreted": "passes"}
ROWS = [
    row("3.11", "2.10.0+cu128", "3.6.0", RAN),
    row("3.9", "2.10.0", "3.6.0", RAN),
    row("3.11", "2.9.1", "3.5.1", {**RAN, "kernels interpreted": "refused"}, cuda="stood in"),
    {"python": "3.14", "torch": "2.6.0", "checks": {}, "failed": [], "absent": True},
]
TABLE = [
    " | torch | Triton | NumPy | CUDA | commit | corrects | kernels interpreted |",
    "|---|---|---|---|---|---|---|---|",
    "| 3.9 | 2.10.0 | 3.6.0 | 2.3.5 | installed | 0123abc | passes | passes |",
    "| 3.11 | 2.9.1 | 3.5.1 | 2.3.5 | stood in | 0123abc | passes | refused |",
    "| 3.11 | 2.10.0+cu128 | 3.6.0 | 2.3.5 | installed | 0123abc | passes | passes |",
    "",
    "The index has no torch 2.6.0 for Python 3.14.",
]


def test_the_page_of_versions_shows_what_ran():
    text = tool("release/page.py").page(ROWS)
    assert text.startswith("# Versions\n\nrollout-corr 0.1.0 ")
    assert text.partition("| Python")[2].splitlines() == TABLE


def test_rows_of_the_page_stay_until_they_run_again():
    """A new row replaces that of its Python and torch; under a new version of the package all rows are new."""
    page = tool("release/page.py").page
    before = page(ROWS)
    assert page(ROWS[:1], before) == before
    again = row("3.11", "2.9.1", "3.5.1", {**RAN, "operators": "passes"}, commit="4567def")
    lines = page([again, ROWS[3]], before).partition("| Python")[2].splitlines()
    old = [f"{line} - |" for line in (TABLE[2], TABLE[4])]
    assert lines[2:] == [
        old[0],
        "| 3.11 | 2.9.1 | 3.5.1 | 2.3.5 | installed | 4567def | passes | passes | passes |",
        old[1],
        *TABLE[5:],
    ]
    newer = [{**one, "rollout-corr": "0.2.0"} for one in ROWS[:1]]
    assert page(newer, before) == page(newer)


def test_the_page_says_which_python_was_not_there():
    """The sentence stays until that Python has a row."""
    page = tool("release/page.py").page
    text = page(ROWS[:1], not_here=["3.14", "3.15"])
    assert text.count("had no such Python: 3.14, 3.15.") == 1
    assert page(ROWS[:1], text) == page(ROWS[:1], text, ["3.15"]) == text
    tried = page([row("3.14", "2.10.0", "3.6.0", RAN)], text)
    assert "had no such Python: 3.15." in tried and "| 3.14 | 2.10.0 |" in tried
    assert "no such Python" not in page(ROWS[:1])


def test_the_page_of_versions_is_as_it_would_be_written():
    page = tool("release/page.py")
    text = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = [{**one, "rollout-corr": rc.__version__} for one in page.rows_of(text)]
    assert rows and page.page(rows, text) == text


def compiled(folder, name, code, *options):
    """A library of C."""
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-x", "none", "-o", str(folder / name)]
    subprocess.run([*command, *options], input=code, text=True, check=True)


def test_libraries_that_are_not_installed_are_stood_in_for(tmp_path):
    """A library linked with one of CUDA loads without it, whether or not its functions have versions."""
    cuda, torch = tmp_path / "cuda", tmp_path / "torch"
    cuda.mkdir()
    torch.mkdir()
    (cuda / "map").write_text("libcuA.so.12 { global: cuCount; };", encoding="utf-8")
    named = f"-Wl,--version-script,{cuda / 'map'}"
    compiled(cuda, "libcuA.so.12", "int cuCount(void) { return 7; }", "-Wl,-soname,libcuA.so.12", named)
    compiled(cuda, "libnvB.so.1", "int ncclCount(void) { return 8; }", "-Wl,-soname,libnvB.so.1")
    compiled(cuda, "libcuda.so.1", "int driver(void) { return 9; }", "-Wl,-soname,libcuda.so.1")
    code = "int cuCount(void); int ncclCount(void); int count(void) { return cuCount() + ncclCount(); }"
    libraries = [str(cuda / name) for name in ("libcuA.so.12", "libnvB.so.1")]
    compiled(torch, "libtorch.so", code, *libraries, "-Wl,-rpath,$ORIGIN")
    compiled(torch, "libother.so", "int driver(void); int other(void) { return driver(); }", str(cuda / "libcuda.so.1"))
    for path in cuda.iterdir():
        path.unlink()
    stand_in = tool("release/without_cuda.py").stand_in
    assert stand_in(torch) == ["libcuA.so.12", "libnvB.so.1"]
    assert ctypes.CDLL(str(torch / "libtorch.so")).count() == 200
    assert stand_in(torch) == [] and not list(torch.glob("*.map"))


def test_what_torch_needs_besides_cuda(monkeypatch):
    without_cuda = tool("release/without_cuda.py")
    of_torch = ["filelock", "nvidia-nccl-cu13==2.30.7; platform_system == 'Linux'", "cuda-toolkit[cublas]==13.2.2"]
    of_torch += ["triton==3.9.0; platform_system == 'Linux'", "optree>=0.13; extra == 'optree'"]
    of_wheel = ["torch>=2.6", 'rich>=13; extra == "demo"', 'pytest; extra == "test"']
    monkeypatch.setattr(without_cuda, "said", lambda *command: json.dumps([of_torch, of_wheel]))
    expected = ["filelock", "triton==3.9.0; platform_system == 'Linux'", "rich>=13"]
    assert without_cuda.requirements(Path("python")) == expected


def archive(names, mtime, mode, owner):
    """A source distribution as setuptools might write it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as files:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode, member.uname = 3, mtime, mode, owner
            files.addfile(member, io.BytesIO(name[-3:].encode()))
    return out.getvalue()


def test_a_source_distribution_does_not_show_who_built_it_and_when():
    settled = tool("release/build_twice.py").settled
    one = settled(archive(["x/a.py", "x/b.py"], 5.25, 0o600, "me"), 100)
    assert one == settled(archive(["x/b.py", "x/a.py"], 9.5, 0o644, "you"), 100)
    assert one != settled(archive(["x/a.py", "x/c.py"], 5.25, 0o600, "me"), 100)


def test_the_card_of_the_hub_runs(monkeypatch):
    """The names and arguments in the example of the card exist."""
    card = (ROOT / ".ci" / "hub" / "CARD.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.+?)```", card, re.DOTALL)
    monkeypatch.setitem(sys.modules, "kernels", types.SimpleNamespace(get_kernel=lambda *name, **options: rc))
    given = {"train_logp": torch.zeros(3), "rollout_logp": torch.zeros(3), "offsets": torch.tensor([0, 3])}
    exec(code, given)
    assert given["out"].weights.tolist() == [1.0, 1.0, 1.0]


def test_sources_for_the_hub_import_each_other_by_relative_names(monkeypatch):
    """Each import leads to a file that is there too; what names the package otherwise is replaced."""
    monkeypatch.chdir(ROOT)
    hub = tool("hub/__main__.py")
    paths = {path.relative_to(ROOT / "rollout_corr").as_posix() for path in (ROOT / "rollout_corr").rglob("*.py")}
    paths |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels").rglob("*.py")}
    paths = {path for path in paths if not path.startswith(hub.LEFT_OUT)}
    there = paths | {"_ops.py"}
    for path in paths:
        for node in ast.walk(ast.parse(hub.source(path))):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level <= path.count("/") + 1, f"{path}:{node.lineno}: above the package"
                folder = path.split("/")[: -node.level]
                module = "/".join([*folder, *(node.module or "").split(".")]).strip("/")
                names = {f"{module}.py", f"{module}/__init__.py".lstrip("/")}
                assert names & there, f"{path}:{node.lineno}: {node.module}"
    assert {row[0] for row in hub.RENAMED} <= paths
