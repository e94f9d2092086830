"""The sources of the package, parsed once in a process, for tests of what may stand where."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("rollout_corr", "kernels")


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file, its module first."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def paths() -> dict[str, Path]:
    """Every file by its path in the repository; kernels once, not behind the symlink too."""
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    inside = {path.relative_to(ROOT).as_posix(): path for path in found}
    return {name: path for name, path in inside.items() if not name.startswith("rollout_corr/kernels/")}
