"""The pages "How to add" in CONTRIBUTING: a statistic and a surrogate live in the files that are named, nowhere else.

That a metric is a row, and a framework a folder, is tried in tests/metrics/test_rows.py and
tests/frameworks/test_one_folder.py.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = re.split(r"^### ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
# Rooms in which an addition costs a line. Frameworks and ahead-of-time variants use what there is.
CORE = ("rollout_corr/__init__.py", "rollout_corr/[sdmba]*/**/*.py", "kernels/**/*.py")


def code_words(path: Path) -> set[str]:
    """The names of a file and its strings, docstrings apart."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, (ast.alias, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def core_files() -> set[Path]:
    files = {path for pattern in CORE for path in ROOT.glob(pattern)}
    return {path for path in files if path.relative_to(ROOT).parts[1] != "diagnose"}


def links(title: str) -> list[Path]:
    """The source files that a page links."""
    (page,) = [page for page in PAGES if page.startswith(f"{title}\n")]
    page = page.partition("\n## ")[0]
    return [(ROOT / link).resolve() for link in re.findall(r"\]\(((?:rollout_corr|kernels)/[^)]*)\)", page)]


# The name of a surrogate is exported too: one file more.
@pytest.mark.parametrize(("title", "example", "most"), [("A statistic", "k3_reverse", 3), ("A surrogate", "SAPO", 4)])
def test_an_addition_touches_the_files_of_its_page(title, example, most):
    named = {path for path in core_files() if example in code_words(path)}
    assert named == set(links(title))
    assert len(named) <= most


TITLES = ("A statistic", "A surrogate", "A metric", "A preset", "A framework")


def test_pages_name_what_exists():
    pages = "".join(page for page in PAGES if page.startswith(TITLES))
    named = re.findall(r"`((?:tests|rollout_corr|kernels)/[\w/.]+)`", pages)
    assert len(named) > 5
    for name in named:
        assert "NAME" in name or (ROOT / name).exists(), name


def test_a_name_of_a_file_is_defined_there():
    """As in "`statistic` of [criteria.py](...)" and "`SURROGATES` of `tests/builders/loss_cases.py`"."""
    pages = "".join(page for page in PAGES if page.startswith(TITLES))
    named = re.findall(r"`(\w+)`\s+of\s+(?:\[[^\]]+\]\(|`)([\w/.]+\.py)[`)]", pages)
    assert len(named) > 5
    for name, path in named:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(def {name}\(|class {name}\b|{name}\b.*=)", text, re.MULTILINE), (path, name)
