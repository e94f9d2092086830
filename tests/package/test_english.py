"""Pages, messages and docstrings have no words that only this project understands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "api").glob("*.md"))]
SOURCES = sorted(path for path in (ROOT / "rollout_corr").rglob("*.py") if not path.parent.is_symlink())

# A pattern that readers did not understand, and what to write. Most are of people who tried the package.
NOT_UNDERSTOOD = {
    r"verdict": "finding",
    r"\bjudge": "check, test",
    r"\bmended\b": "fixed",
    r"in vain": "timed out waiting for",
    r"without a word": "silently",
    r"(directory|index) stands at": "the index is at the end of the file",
    r"leads? nowhere": "a broken link",
    r"nobody can (parse|read)": "cannot be parsed",
    r"(field|name|column)[^.]{0,20} is there twice": "occurs twice",
    r"(GPUs|imports|modules) that are not there": "missing; needs no GPU",
    r"meets? nobody": "runs no collective",
    r"wrong partners": "train and rollout log-probs of different sequences are paired",
    r"have nothing else, \d": "some sequences have only such values",
    r"D's square": "the mean square of D",
    r"no other is better": "no other setting has both a lower bias and a lower variance",
    r"is every token's own": "the weight of a token is its own ratio",
    r"under the names of": "also those of verl",
    r"outward advantages": "criteria applied only where advantage and D have the same sign",
    r"\bh[au]ngs? on\b": "depends on",
    r"suffer from is a test": "bugs reported against other implementations are tests here",
    r"Everything after the log-probs": "from two log-probs of each token to weights, metrics and the loss",
    r"beside ready": "together with weights that were passed in",
    r"selected away": "replaced before use",
    r"divides nothing": "nothing is divided",
    r"warnings\(\)` speaks": "warnings() reports",
    r"drift apart by": "differ by",
    r"helps nobody": "say what goes wrong",
    r"such bounds keep": "these bounds keep",
}
PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern in NOT_UNDERSTOOD), re.IGNORECASE)
# D is the letter of the whole package, and means nothing to whoever opens one page.
DEFINED = re.compile(r"train_logp - rollout_logp|log-ratio|`train_logp` minus|D, train -|D_t = ", re.DOTALL)
USED = re.compile(r"(?<![\w`'\"/$|-])\|?D\|?(?= (is|has|of|at|in|over|follows|beyond|once)\b)")
# Stems of British spellings; Future.cancelled and CancelledError are names of Python.
BRITISH = re.compile(
    r"(?:normal|regular|optim|quant|vector|initial|special|recogn|organ|maxim|minim|summar|serial|penal|neutral"
    r"|synchron|token|parallel|general|standard|random|util|stabil)is(?:e[drs]?\b|ing|ation)"
    r"|(?:behavi|neighb|col|fav|flav)our|centre|centring|\bgrey|licence|labell|modell|spelt|spoilt|learnt|towards|artefact",
    re.IGNORECASE,
)
WRITTEN = ("*.md", "*.py", "*.yml", "*.toml", "*.ipynb", "*.css", "*.js")


def strings(path: Path) -> Iterator[str]:
    """Every string of a file, docstrings too; the pieces of an f-string with a gap between them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces = [piece.value if isinstance(piece, ast.Constant) else "..." for piece in node.values]
            inner |= {id(piece) for piece in node.values}
            yield "".join(map(str, pieces))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


def test_pages_are_understood():
    found = [f"{path.name}: {match[0]}" for path in PAGES for match in PATTERN.finditer(path.read_text("utf-8"))]
    assert not found, "NOT_UNDERSTOOD says what to write"


def test_messages_help_and_docstrings_are_understood():
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in SOURCES
        for text in strings(path)
        for match in PATTERN.finditer(text)
    ]
    assert not found, "NOT_UNDERSTOOD says what to write"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_d_is_defined_before_it_is_used(path):
    prose = re.sub(r"^\s*```.*?^\s*```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    used, defined = USED.search(prose), DEFINED.search(prose)
    assert used is None or (defined is not None and defined.start() < used.end() + 80), used


def test_spelling_is_american():
    """Names are part of the surface, and a reader searches for one spelling."""
    folders = (".ci", "benchmarks", "docs", "examples", "kernels", "rollout_corr", "tests")
    paths = [path for name in WRITTEN for folder in folders for path in (ROOT / folder).rglob(name)]
    paths += [path for name in WRITTEN for path in ROOT.glob(name)]
    assert len(paths) > 500
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in paths
        if path != Path(__file__)
        for match in BRITISH.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found
