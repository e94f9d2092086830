"""The tools of a release: a changelog that is closed, files that do not depend on the build, a layout for the Hub."""

from __future__ import annotations

import ast
import importlib.util
import io
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tool(path):
    """Load a file of .ci, which is no package."""
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
