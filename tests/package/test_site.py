"""The site of `make docs`: its list of pages is whole, and its API pages name all that is public."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

import rollout_corr as rc

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8"))


def pages(entries) -> list[str]:
    """Every page of the list, in its order."""
    found = []
    for entry in entries:
        for at in entry.values():
            found += [at] if isinstance(at, str) else pages(at)
    return found


def test_every_page_is_in_the_list_once():
    listed = [page for page in pages(CONFIG["nav"]) if not page.startswith("repository/")]
    written = [path.relative_to(DOCS).as_posix() for folder in (DOCS, DOCS / "api") for path in folder.glob("*.md")]
    assert sorted(listed) == sorted(written), "docs/site/mkdocs.yml"


def test_pages_from_outside_docs_exist():
    listed = [page for page in pages(CONFIG["nav"]) if page.startswith("repository/")]
    assert listed and all((ROOT / page.removeprefix("repository/")).is_file() for page in listed)


def test_public_names_are_on_one_api_page_each():
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    named = Counter(re.findall(r"^- \[`rollout_corr\.(\w+)`\]\(", text, re.MULTILINE))
    assert named == Counter(rc.__all__)


@pytest.mark.parametrize("path", sorted((DOCS / "api").glob("*.md")), ids=lambda path: path.name)
def test_an_entry_links_the_file_that_defines_it(path):
    for name, file in re.findall(r"^- \[`[\w.]*\b(\w+)`\]\(([^)]+)\)", path.read_text(encoding="utf-8"), re.MULTILINE):
        source = (path.parent / file).read_text(encoding="utf-8")
        assert name == Path(file).stem or re.search(rf"^((def|class) )?{name}\b", source, re.MULTILINE), (name, file)


def test_nothing_is_loaded_from_elsewhere():
    """A page shows the same without a network."""
    assert CONFIG["theme"]["font"] is False and "extra_javascript" not in CONFIG
    assert all("//" not in style for style in CONFIG["extra_css"])


def test_readers_can_choose_the_colors():
    """Without a toggle a browser keeps those of the first visit, whatever its system switches to."""
    palette = CONFIG["theme"]["palette"]
    assert [way["media"].partition(": ")[2] for way in palette] == ["", "light)", "dark)"]
    assert all(way["toggle"]["icon"] and way["toggle"]["name"] for way in palette)


def test_calls_in_tables_keep_their_words():
    """On a phone `level="token"` was broken after every few letters."""
    style = (DOCS / "site" / "site.css").read_text(encoding="utf-8")
    assert "table:not([class]) code { word-break: normal; overflow-wrap: normal; }" in style
