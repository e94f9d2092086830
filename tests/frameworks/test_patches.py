"""docs/patches: each applies to the framework's file, and the test that it brings along passes there.

TRL's calls this package; verl's and SkyRL's bring a file that `rollout-corr eject` wrote.

The second half needs the frameworks' files, installed or in the folder PEERS (make test-peers).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from conformance import campaign
from conformance import patched as on_patched
from conformance.sources import Cutter, parsed
from conformance.verl_parts import Proto
from rollout_corr.eject import check
from rollout_corr.frameworks.trl import asynchronous

FOLDER = Path(__file__).parents[2] / "docs" / "patches"
# What a patch imports, under the name that it has there, and the file that it changes.
PATCHES = {
    "trl": ("packed_policy_loss", asynchronous.packed_policy_loss, "trl/experimental/async_grpo/async_grpo_trainer.py"),
}


def files(name):
    """The files of a patch: their hunks as (counts of the header, lines)."""
    found = {}
    for line in (FOLDER / f"{name}.patch").read_text(encoding="utf-8").splitlines():
        if line.startswith("+++ b/"):
            hunks = found[line[6:]] = []
        elif header := re.fullmatch(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@.*", line):
            hunks.append(([int(count or 1) for count in header.groups()], []))
        elif found and line[:1] in ("+", "-", " ", "") and not line.startswith("--- "):
            hunks[-1][1].append(line or " ")
    return found


@pytest.mark.parametrize("name", PATCHES)
def test_is_small_and_calls_what_there_is(name):
    """A few dozen lines, whose calls fit the functions of this package, with their own code to fall back to."""
    imported, ours, changed = PATCHES[name]
    (code, hunks), (test, lines) = sorted(files(name).items(), key=lambda item: item[0] != changed)
    assert code == changed and test.startswith("tests/")
    for _, part in (*hunks, *lines):
        assert len(part) < 80
    for (before, after), part in (*hunks, *lines):
        assert (sum(x[0] in " -" for x in part), sum(x[0] in " +" for x in part)) == (before, after)
    ast.parse("\n".join(line[1:] for line in lines[0][1]))
    added = [line[1:] for _, part in hunks for line in part if line[0] == "+"]
    removed = [line for _, part in hunks for line in part if line[0] == "-"]
    assert len(added) < 30 and len(removed) <= 5
    text = "\n".join(added)
    assert f"except ImportError:\n    {imported} = None" in text
    path = re.search(rf"from (rollout_corr\S*) import (\w+)(?: as {imported})?\n", text)
    assert getattr(importlib.import_module(path[1]), path[2]) is ours
    (call,) = re.findall(rf"^ +(?:return|loss =) ({imported}.*?^ +\))", text, re.DOTALL | re.MULTILINE)
    node = ast.parse(textwrap.dedent(call)).body[0].value
    function = ours if isinstance(node.func, ast.Name) else getattr(ours, node.func.attr)
    inspect.signature(function).bind(*node.args, **{keyword.arg: keyword.value for keyword in node.keywords})


def patched(source, name, folder):
    """The module that a patch changes, applied to a copy of it, and the test that it brings along."""
    imported, ours, changed = PATCHES[name]
    (folder / changed).parent.mkdir(parents=True)
    (folder / changed).write_bytes((source.root / changed).read_bytes())
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "apply", str(FOLDER / f"{name}.patch")], cwd=folder, check=True)
    (test,) = [path for path in files(name) if path != changed]
    # Beside the other files of that version, which the changed one imports from.
    cutter = Cutter(source.root, {imported: ours, "nanmin": torch.min, "nanmax": torch.max})
    file = cutter.file(source.root / changed)
    file.parsed = parsed(folder / changed)

    class Changed(ModuleType):
        def __getattr__(self, asked):
            if asked == "AsyncGRPOTrainer":
                return SimpleNamespace(compute_loss=cutter.get(file.path, f"{asked}.compute_loss"))
            if asked.startswith("__"):
                raise AttributeError(asked)
            return cutter.get(file.path, asked)

        def __setattr__(self, changed, value):
            file.space[changed] = value

        def __delattr__(self, changed):
            # pytest takes back what it set on an object that had it from elsewhere.
            file.space.pop(changed, None)
            file.begun.discard(changed)

    module = Changed(changed.removesuffix(".py").replace("/", "."))
    space = {"__name__": "of_the_patch"}
    with pytest.MonkeyPatch.context() as put:
        parent, _, last = vars(module)["__name__"].rpartition(".")
        holder = ModuleType(parent)
        vars(holder)[last] = module
        put.setitem(sys.modules, parent, holder)
        for number in range(1, parent.count(".") + 1):
            above = ".".join(parent.split(".")[:number])
            put.setitem(sys.modules, above, ModuleType(above))
        exec(compile((folder / test).read_text(encoding="utf-8"), test, "exec"), space)
    return [test for name, test in space.items() if name.startswith("test_")]


def run(test):
    """Call a test with all of its parameters."""
    choices = []
    for mark in getattr(test, "pytestmark", ()):
        names = (mark.args[0],) if isinstance(mark.args[0], str) else mark.args[0]
        choices.append([zip(names, value if len(names) > 1 else (value,), strict=True) for value in mark.args[1]])
        choices[-1] = [dict(pairs) for pairs in choices[-1]]
    for parts in itertools.product(*choices):
        given = {key: value for part in parts for key, value in part.items()}
        with pytest.MonkeyPatch.context() as patch:
            if "monkeypatch" in inspect.signature(test).parameters:
                given["monkeypatch"] = patch
            test(**given)


SOURCES = [
    source
    for source in campaign.sources_of("trl")
    # It is for the rows of 1.16.0.
    if source.has("trl/experimental/async_grpo/packing.py")
]


@pytest.mark.peers
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.framework}-{source.version}")
def test_applies_and_its_own_test_passes(source, tmp_path):
    tests = patched(source, source.framework, tmp_path)
    assert tests
    for test in tests:
        run(test)


@pytest.mark.peers
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.framework}-{source.version}")
def test_its_own_test_notices_other_numbers(source, tmp_path, monkeypatch):
    name = source.framework
    imported, true, changed = PATCHES[name]

    def shifted(function, at):
        return lambda *given, **named: function(
            *(x + 0.05 if number == at else x for number, x in enumerate(given)),
            **{key: x + 0.05 if key == "old_log_prob" else x for key, x in named.items()},
        )

    wrong = shifted(true, 0)
    monkeypatch.setitem(PATCHES, name, (imported, wrong, changed))
    first, *_ = patched(source, name, tmp_path)
    with pytest.raises(AssertionError):
        run(first)


EJECTED = {
    "verl": ("verl/trainer/ppo/rollout_corr_eager.py", "old_log_prob.detach"),
    "skyrl": ("skyrl/backends/skyrl_train/utils/off_policy_correction_eager.py", "old_log_probs.detach"),
}
# verl's adds a setting to configuration files that other versions lack.
HEADS = [(name, source) for name in EJECTED for source in campaign.sources_of(name) if "." not in source.version]


@pytest.mark.parametrize("name", EJECTED)
def test_it_brings_what_eject_wrote(name):
    """Nobody edited the file in the patch; it may be of an older version, as in a framework's tree."""
    text = (FOLDER / f"{name}.patch").read_text(encoding="utf-8").split(f"+++ b/{EJECTED[name][0]}\n")[1]
    added = [line[1:] for line in text.partition("\ndiff --git")[0].splitlines() if line[:1] == "+"]
    _, said = check("\n".join(added) + "\n")
    assert said[1] == "not edited since"


@pytest.mark.peers
@pytest.mark.parametrize(("name", "source"), HEADS, ids=lambda x: x if isinstance(x, str) else x.version)
def test_an_ejected_file_passes_the_test_of_its_patch(name, source, tmp_path):
    patch, (file, shifted) = FOLDER / f"{name}.patch", EJECTED[name]
    (test,) = [path for path in on_patched.files_of(patch) if path.startswith("tests/")]
    trees = [on_patched.overlay(source.root, name, patch, tmp_path / kind) for kind in ("right", "wrong")]
    for tree in trees:
        on_patched.apply(patch, tree)
    right, wrong = trees
    assert on_patched.run(right, right / test, {"DataProto": Proto}) >= 5
    text = (wrong / file).read_text(encoding="utf-8")
    (wrong / file).write_text(text.replace(shifted, shifted.replace(".", ".add(0.05).")), encoding="utf-8")
    with pytest.raises(AssertionError):
        on_patched.run(wrong, wrong / test, {"DataProto": Proto})
