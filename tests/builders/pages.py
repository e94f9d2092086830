"""The Python of pages, examples and the notebook, as text and as modules for type checkers."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "SKILL.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "api").glob("*.md"))]
EXAMPLES = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "examples").glob("*.ipynb"))]

# What checkers read the types of.
TYPED = {*sys.stdlib_module_names, "rollout_corr", "torch", "numpy"}


class Block(NamedTuple):
    """A fenced block."""

    path: Path
    line: int
    language: str
    code: str


def blocks(path: Path) -> Iterator[Block]:
    """Every fenced block of a page."""
    language, start, lines = None, 0, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r"\s*```(.*)", line)
        if fence and language is None:
            language, start, lines = fence[1].strip(), number, []
        elif fence:
            yield Block(path, start, language, "\n".join(lines) + "\n")
            language = None
        else:
            lines.append(line)
    assert language is None, f"{path.name}:{start}: a fence that is never closed"


def modules() -> Iterator[tuple[str, str]]:
    """Each Python block of a page, each example and the notebook, as a name and the code of a module of its own.

    The lines of a block have the numbers that they have in the page.
    """
    for path in PAGES:
        stem = "_".join(path.relative_to(ROOT).with_suffix("").parts)
        for block in blocks(path):
            if block.language == "python":
                yield f"{stem}_{block.line}", "\n" * block.line + block.code
    for path in EXAMPLES:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
            text = "\n".join("".join(cell) + "\n" for cell in cells)
        yield path.stem, text


def write_modules(folder: Path) -> int:
    """Write these modules to a folder, and stubs to its folder `typings`; give their number.

    The stubs are of what is imported besides Python, torch, NumPy and this package. They allow everything, so that
    checkers say the same whatever is installed.
    """
    written = dict(modules())
    for name, code in written.items():
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
        for imported in _imported(code):
            if imported.partition(".")[0] in TYPED | written.keys():
                continue
            package = folder / "typings"
            for part in imported.split("."):
                package /= part
                package.mkdir(parents=True, exist_ok=True)
                (package / "__init__.pyi").write_text("def __getattr__(name: str): ...\n")
    return len(written)


def _imported(code: str) -> Iterator[str]:
    """The full names of the modules that code imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
