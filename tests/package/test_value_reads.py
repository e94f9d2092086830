"""The definition reads no value of a tensor, so that it runs on every device without a wait, and a compiler follows it.

Reading on the host is how backends/cpu_sums.py is fast; what it finds is handed to the definition as data.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

DEFINITION = Path(__file__).resolve().parents[2] / "rollout_corr" / "definition"

# Methods that wait for values, or whose result has a shape that values decide.
READS = {
    "argwhere", "cpu", "equal", "is_nonzero", "item", "masked_select", "nonzero", "numpy", "tolist", "unique",
    "unique_consecutive",
}  # fmt: skip
NUMBERS = {"bool", "float", "int"}
WORDS = {"look", "near", "few", "on_host"}

# The reads that stay, by file and function, each with its reason.
ALLOWED = {}
# Checks offsets that a call brings, on the host, before anything is computed.
LEFT_OUT = {"offsets.py"}


def reads(source: str, name: str = "planted.py") -> list[str]:
    """The reads of values in a module, as "line: what"."""
    found = []

    def visit(node: ast.AST, function: str) -> None:
        function = node.name if isinstance(node, ast.FunctionDef) else function
        what = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
            what = node.func.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NUMBERS:
            what = f"{node.func.id}()"
        elif isinstance(node, (ast.Name, ast.arg, ast.Attribute)):
            word = getattr(node, "id", getattr(node, "arg", getattr(node, "attr", "")))
            what = word if word in WORDS else None
        elif isinstance(node, ast.Subscript) and any(isinstance(x, ast.Invert) for x in ast.walk(node.slice)):
            what = "an index of bools"
        if what is not None and what not in ALLOWED.get((name, function), ()):
            found.append(f"{node.lineno}: {what}")
        for inner in ast.iter_child_nodes(node):
            visit(inner, function)

    visit(ast.parse(source), "")
    return found


@pytest.mark.parametrize("path", sorted(DEFINITION.glob("*.py")), ids=lambda path: path.name)
def test_the_source_reads_no_value(path: Path) -> None:
    if path.name not in LEFT_OUT:
        assert not reads(path.read_text(encoding="utf-8"), path.name)


@pytest.mark.parametrize("line", ["bool(x.any())", "x.nonzero()", "x[~x.isnan()]", "x if look else -x"])
def test_a_planted_read_is_found(line: str) -> None:
    assert reads(f"def planted(x):\n    return {line}\n")
