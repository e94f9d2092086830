"""Write the kernels for Hugging Face's Hub from this tree into build/hub: `make hub`.

`build.toml` and `torch-ext/` are what its kernel-builder takes; `build/torch-BACKEND` is what it would make of them, so
that the package `kernels` loads it from the folder. Imports become relative, and operators are registered in a
namespace that has the commit in its name, since several versions may be loaded into one process.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

NAME = "rollout_corr"
OUT = Path("build", "hub")
HERE = Path(__file__).parent
# Without a GPU there is the definition, in plain torch; an XPU has it too.
BACKENDS = ("cpu", "cuda", "rocm")
# What works at the command line is the wheel's.
LEFT_OUT = ("__main__.py", "cli/", "testing.py", "frameworks/__main__.py")

# What names the package otherwise than by an import: (file, pattern, replacement), each found as often as it says.
RENAMED = (
    (
        "backends/registration.py",
        r'Library\("rollout_corr", "DEF"\)',
        'Library(add_op_namespace_prefix("")[:-2], "DEF")',
        1,
    ),
    ("backends/registration.py", r'f"rollout_corr::\{name\}"', "add_op_namespace_prefix(name)", 1),
    ("backends/operators.py", r"torch\.ops\.rollout_corr\.correct\(", "ops.correct(", 1),
    ("backends/loss_operators.py", r"torch\.ops\.rollout_corr\.(\w+)\(", r"ops.\1(", 2),
    ("metrics/peers.py", r'f"rollout_corr\.frameworks', "f\"{__name__.partition('.')[0]}.frameworks", 1),
    # Another folder of this name is not in the way there.
    ("kernels/__init__.py", r"(?s)\n\nif __name__ != .*", "\n", 1),
)
NEEDS_OPS = {"backends/registration.py", "backends/operators.py", "backends/loss_operators.py"}

OPS = '''"""The operators of this version, in a namespace of their own; kernel-builder writes this file anew."""

import torch

_OPS_NAME = "{namespace}"
ops = getattr(torch.ops, _OPS_NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    """Prefix an operator by the namespace."""
    return f"{{_OPS_NAME}}::{{op_name}}"
'''


def main() -> None:
    """Write the folder anew."""
    parser = argparse.ArgumentParser(prog="make hub", description=__doc__)
    parser.add_argument("--repo", default="rollout-corr/rollout-corr", help="its name on the Hub")
    args = parser.parse_args()
    commit = git("rev-parse", "--short=7", "HEAD") + (
        "_dirty" if git("status", "--porcelain", "--", NAME, "kernels") else ""
    )
    # Versions of the Hub are whole numbers, and 0 is that of what may still change.
    major = int(re.findall(r'^__version__ = "(\d+)\.', Path(NAME, "_version.py").read_text("utf-8"), re.MULTILINE)[0])
    shutil.rmtree(OUT, ignore_errors=True)
    sources = {path: source(path) for path in files()}
    for path, text in sources.items():
        write(OUT / "torch-ext" / NAME / path, text)
    write(OUT / "build.toml", build_toml(args.repo, major))
    write(OUT / "CARD.md", (HERE / "CARD.md").read_text("utf-8"))
    write(OUT / "benchmarks" / "benchmark_correct.py", (HERE / "benchmark.py").read_text("utf-8"))
    for backend in BACKENDS:
        write_variant(sources, backend, f"_{NAME}_{backend}_{commit}", major)
    print(f"{OUT}: {len(sources)} files for {', '.join(BACKENDS)}, version {major}, commit {commit}")


def git(*arguments: str) -> str:
    """Ask git."""
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def files() -> list[str]:
    """Name the files of the package, as they lie in an installed one."""
    tracked = [x for x in git("ls-files", NAME, "kernels").splitlines() if x.endswith(".py")]
    inside = [x.removeprefix(f"{NAME}/") for x in tracked]
    return [x for x in inside if not x.startswith(LEFT_OUT)]


def source(path: str) -> str:
    """Give a file with relative imports and with the namespace of its version."""
    text = (Path() if path.startswith("kernels/") else Path(NAME)).joinpath(path).read_text("utf-8")
    lines = text.splitlines(keepends=True)
    up = "." * (path.count("/") + 1)
    for node in ast.walk(ast.parse(text)):
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(name.partition(".")[0] == NAME for name in named):
            sys.exit(f"{path}:{node.lineno}: expected `from {NAME} import`, which can be made relative")
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == NAME:
            module = str(node.module)
            here = lines[node.lineno - 1]
            lines[node.lineno - 1] = here.replace(f"from {module} ", f"from {up}{module.partition('.')[2]} ", 1)
    text = "".join(lines)
    for where, pattern, replacement, count in RENAMED:
        if where == path:
            text, found = re.subn(pattern, replacement, text)
            if found != count:
                sys.exit(f"{path}: expected {pattern} {count} times, found it {found} times")
    if path in NEEDS_OPS:
        at = text.index("\nimport torch\n")
        text = f"{text[:at]}\nfrom .._ops import {imported(text)}{text[at:]}"
    absolute = [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == NAME
    ]
    if absolute or re.search(rf"torch\.ops\.{NAME}\.\w+\(|\"{NAME}::", text):
        sys.exit(f"{path}: still names the package, by imports in lines {absolute} or by its operators")
    return text


def imported(text: str) -> str:
    """Name what a file uses of the operators' namespace."""
    return "add_op_namespace_prefix" if "add_op_namespace_prefix" in text else "ops"


def build_toml(repo: str, version: int) -> str:
    """Write what kernel-builder reads."""
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS)
    return f"""[general]
name = "{NAME.replace("_", "-")}"
version = {version}
edition = 5
license = "Apache-2.0"
backends = [{backends}]

[general.hub]
repo-id = "{repo}"

[torch-noarch]
"""


def write_variant(sources: dict[str, str], backend: str, namespace: str, version: int) -> None:
    """Write what is loaded for a backend, with the metadata and the digests that its loader checks."""
    folder = OUT / "build" / f"torch-{backend}"
    inside = {**sources, "_ops.py": OPS.format(namespace=namespace)}
    for path, text in inside.items():
        write(folder / path, text)
    metadata = {
        "id": namespace,
        "name": NAME.replace("_", "-"),
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": {path: digest(text) for path, text in sorted(inside.items())}},
    }
    write(folder / "metadata.json", json.dumps(metadata, indent=2) + "\n")


def digest(text: str) -> str:
    """Give the hash of a file in the form of the metadata."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def write(path: Path, text: str) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
