"""The package as a whole: what importing it needs and costs, what its names promise, what no committed file may say.

.ci/test_wheel runs this file against an installed wheel, from outside the checkout. So nothing here relies on the
current folder, and every subprocess starts in an empty one.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import typing
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

import rollout_corr as rc

ROOT = Path(__file__).resolve().parents[2]

TORCH_AND_ITS_REQUIREMENTS = {
    "torch", "torchgen", "functorch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools",
    "sympy", "typing_extensions",
}  # fmt: skip

# The driver's front door in torch. Each of these wakes a driver or asks about one.
DRIVER_QUERIES = (
    "cuda.is_available",
    "cuda.device_count",
    "cuda.current_device",
    "cuda.get_device_name",
    "cuda.get_device_properties",
    "cuda.get_device_capability",
    "cuda.init",
    "cuda._lazy_init",
    "cuda.synchronize",
    "xpu.is_available",
    "xpu.device_count",
    "mps.is_available",
    "accelerator.is_available",
    "accelerator.current_accelerator",
)

CORRECT = """
mean_k1 = rc.Criterion("k1", over="sequence", reduce="mean", upper=0.5)
out = rc.correct(
    torch.tensor([[0.0, -1.0], [-3.0, -3.0]]),
    torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]),
    spec=rc.Spec(weight=rc.Weight.token(upper=2.0), criteria=(mean_k1,)),
)
torch.testing.assert_close(out.weights, torch.tensor([[2.0, 1.0], [math.exp(-2.0)] * 2]))
assert out.mask.tolist() == [[True, True], [False, False]]
assert out.keep.tolist() == [True, False]
assert out.metrics()
assert rc.Spec().explain()
"""


def run_fresh(code: str, folder: Path) -> str:
    """Return the output of `code` in a fresh interpreter that sees the installed packages and no checkout."""
    # Bytecode is written whatever the caller's shell says: an installed package has it, and import times count on it.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_old_names_are_answered_by_what_takes_their_place() -> None:
    for name, instead in (("preset", "rc.spec(name)"), ("from_config", "rc.spec(framework, config)")):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'; write {re.escape(instead)}$"):
            getattr(rc, name)
    with pytest.raises(AttributeError, match=r"no attribute 'corect'$"):
        getattr(rc, "corect")  # noqa: B009 - a checker refuses the attribute


# The most modules of ours that a fresh process may hold after `import rollout_corr`, and after a correction.
MOST_MODULES = 60

# Each of these takes longer to import than all of ours, or reads the disk for what is installed.
HEAVY = (
    "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.fx.experimental", "torch.onnx",
    "torch.utils.tensorboard", "triton", "numpy", "pandas", "rich", "importlib.metadata", "pkg_resources",
    "rollout_corr.kernels", "rollout_corr.frameworks", "rollout_corr.diagnose", "rollout_corr.cli",
)  # fmt: skip


def test_torch_alone_is_enough_and_no_driver_is_asked(tmp_path):
    """Everything but torch, what torch requires, and the standard library is refused; then a correction runs.

    The number of modules decides how long an import takes: `python -m benchmarks` measures that.
    """
    code = f"""
import importlib.abc, math, sys

ALLOWED = {TORCH_AND_ITS_REQUIREMENTS} | set(sys.stdlib_module_names) | {{"rollout_corr"}}

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"refused {{name}}", name=name)

sys.meta_path.insert(0, Refuse())
import torch

def refuse(name):
    def query(*args, **kwargs):
        raise AssertionError(f"torch.{{name}} was called")
    return query

for name in {DRIVER_QUERIES}:
    module, _, function = name.rpartition(".")
    found = getattr(torch, module, None)
    if found is not None and hasattr(found, function):
        setattr(found, function, refuse(name))

def report():
    added = set(sys.modules) - before
    print(sum(name.partition(".")[0] == "rollout_corr" for name in added))
    # Since Python 3.12 importlib.metadata, which torch imports, has parts that reading a version imports.
    added -= {{name for name in added if name.startswith("importlib.metadata._")}}
    print(*(name for name in added if name.startswith({HEAVY})))

before = set(sys.modules)
import rollout_corr as rc
report()
x = torch.zeros(2, 3)
rc.correct(x, x, spec=rc.Spec(weight=rc.Weight.token(upper=2.0))).metrics()
report()
{CORRECT}
import rollout_corr.eject
import rollout_corr.kernels
assert not torch.cuda.is_initialized()
assert not {{"triton", "numpy", "rich"}} & sys.modules.keys()
"""
    imported, heavy, called, heavy_of_call = run_fresh(code, tmp_path).split("\n")[:4]
    assert (heavy, heavy_of_call) == ("", "")
    assert int(imported) <= MOST_MODULES and int(called) <= MOST_MODULES, (imported, called)


def test_names_do_not_wait_for_a_module_that_another_thread_imports(monkeypatch):
    monkeypatch.setitem(sys.modules, "rollout_corr.api.dump", ModuleType("half"))
    for name in ("dump", "Quantile"):
        monkeypatch.delitem(vars(rc), name, raising=False)
    assert rc.Quantile(0.5).q == 0.5


def test_a_name_that_a_caller_exchanged_stays(monkeypatch):
    monkeypatch.setattr(rc, "correct", print)
    monkeypatch.delitem(vars(rc), "Quantile", raising=False)
    assert rc.Quantile(0.5).q == 0.5 and rc.correct is print


@pytest.mark.parametrize("name", ["kernels", "rollout_corr_kernels", "other.kernels"])
def test_kernels_refuse_another_name(name):
    """The top-level name `kernels` belongs to Hugging Face; a checkout's root on sys.path must not take it over."""
    spec = importlib.util.find_spec("rollout_corr.kernels")
    assert spec is not None
    assert spec.origin is not None
    wrong = importlib.util.spec_from_file_location(name, spec.origin)
    assert wrong is not None
    assert wrong.loader is not None
    with pytest.raises(ImportError, match=rf"rollout_corr\.kernels.*imported as '{re.escape(name)}'"):
        wrong.loader.exec_module(importlib.util.module_from_spec(wrong))


def test_kernels_are_refused_from_the_root_of_a_checkout():
    """Starting Python in the checkout and importing the other `kernels` raises an error that explains."""
    done = subprocess.run(
        [sys.executable, "-c", "import kernels"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    assert "ImportError: this folder is rollout_corr.kernels" in done.stderr


def test_one_version():
    """rollout_corr/_version.py has it; the distribution, the changelog and the citation agree."""
    assert rc.__version__ == metadata.version("rollout-corr")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    latest = re.search(r"^## (\S+) \((.+)\)$", changelog, re.MULTILINE)
    assert latest is not None and latest[1] == rc.__version__
    assert f"\nversion: {rc.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_requirements():
    """torch is the only requirement; Triton is never one outside the tests' extra."""
    required = [line for line in metadata.requires("rollout-corr") or [] if "extra ==" not in line]
    assert required == ["torch>=2.10"]


def test_type_hints_of_public_names_resolve():
    for name, value in ((name, getattr(rc, name)) for name in rc.__all__):
        if inspect.isclass(value) or inspect.isfunction(value):
            methods = [x for key, x in vars(value).items() if inspect.isfunction(x) and not key.startswith("__")]
            assert all(typing.get_type_hints(x) is not None for x in (value, *methods)), name


def test_every_public_name_is_documented():
    assert sorted(set(rc.__all__)) == sorted(rc.__all__)
    for name in rc.__all__:
        value = getattr(rc, name)
        if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
            continue
        # A dataclass without a docstring is given its signature as one.
        assert value.__doc__ and not value.__doc__.startswith(f"{name}("), f"rollout_corr.{name} has no docstring"
        if inspect.isclass(value):
            for method, function in vars(value).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    assert inspect.getdoc(function), f"rollout_corr.{name}.{method} has no docstring"


def test_annotations_of_public_calls_can_be_evaluated():
    """As pydantic and whatever else builds a call from its signature does."""
    for value in (rc.correct, rc.correct_async, rc.policy_loss, rc.Batch):
        assert typing.get_type_hints(value)


def test_no_committed_file_names_a_machine_or_a_registry():
    """Such a line works for one person on one day. Written in pieces here, or this file would find itself."""
    hosts = (
        "pypi" + ".org",
        "files.python" + "hosted",
        "download." + "pytorch",
        "registry." + "npmjs",
        "deb." + "debian",
    )
    folders = "work", "farm", "root", "mnt", "opt", "tmp", "private", r"home/\w+", r"Users/\w+"
    paths = r"(?<![\w.$}~*)-])/(?:" + "|".join(folders) + ")/"
    pattern = re.compile("|".join([*map(re.escape, hosts), paths]))
    assert pattern.search("see /" + "opt/x") and pattern.search("index-url = " + "https://pypi" + ".org/simple")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = []
    for name in listed.splitlines():
        if not (ROOT / name).is_symlink() and (ROOT / name).is_file():
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            found += [f"{name}: {line.strip()}" for line in text.splitlines() if pattern.search(line)]
    assert not found, "\n".join(found)


def test_named_tuples_on_the_way_of_a_call_have_no_properties():
    """torch.compile of torch 2.10 follows their fields and methods, and stops at a property."""
    root = Path(rc.__file__).parent
    found = [
        f"{path.name}: {node.name}.{each.name}"
        for room in ("specs", "definition", "backends", "api")
        for path in sorted((root / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "NamedTuple" for base in node.bases)
        for each in node.body
        if isinstance(each, ast.FunctionDef) and "property" in map(ast.unparse, each.decorator_list)
    ]
    assert not found
