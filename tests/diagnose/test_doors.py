"""The two doors that every text of a dump passes, terminal and page; and that nothing is shown past them."""

from __future__ import annotations

import ast
import unicodedata
from pathlib import Path

import pytest

import rollout_corr
from builders.hostile import TEXTS
from builders.parsed_page import Page
from rollout_corr.diagnose.show.content import Table
from rollout_corr.diagnose.show.html import ATTRIBUTES, TAGS, Html, document, element, preformatted
from rollout_corr.diagnose.show.svg import TURNED, Axis, Chart
from rollout_corr.diagnose.show.terminal import BOLD_RED, Terminal
from rollout_corr.diagnose.show.visible import MOST, visible

PACKAGE = Path(rollout_corr.__file__).parent


@pytest.mark.parametrize("text", TEXTS)
def test_visible_texts_are_one_line_of_printable_characters(text):
    shown = visible(text)
    shown.encode()
    assert shown.isprintable() and len(shown) <= MOST and visible(shown) == shown


def test_visible_keeps_what_can_be_read():
    assert visible("Ġhello wörld 漢字 🙂 'q' \\n [/b] <i>") == "Ġhello wörld 漢字 🙂 'q' \\n [/b] <i>"
    assert visible("a\nb\x1b[2J\u202ec\udc80") == "a\\nb\\x1b[2J\\u202ec\\udc80"
    assert visible("x" * 5000) == "x" * (MOST - 22) + "... (5,000 characters)"


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_a_terminal_shows_a_text_in_every_place(text, color, capsys, monkeypatch):
    """Lines, titles, heads and cells: no control character, no line that the text made."""
    monkeypatch.setenv("COLUMNS", "20000")
    monkeypatch.setenv("FORCE_COLOR" if color else "NO_COLOR", "1")
    out = Terminal()
    out.line(text, BOLD_RED)
    out.table(text, Table((text, text), [(text, text)]))
    said = capsys.readouterr().out
    for code in ("\x1b[1m", "\x1b[1;31m", "\x1b[0m"):
        said = said.replace(code, "")
    assert not [c for c in said if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    # Line, title, heads, ruler, row and an empty line or two.
    assert len(said.rstrip("\n").split("\n")) <= 7
    assert said.count(visible(text).strip()) >= 6


def test_a_table_that_does_not_fit_is_printed_row_by_row(capsys, monkeypatch):
    """Numbers are never folded; of the texts the widest one is."""
    table = Table(("setting", "kept", "count"), [("a long name of a setting", "0.0123456", "1234567")])
    shown = {
        20: ["Title", "a long name of a", "setting", "  kept: 0.0123456", "  count: 1234567", ""],
        44: ["Title", "", "setting                        kept    count"],
        60: ["Title", "", "setting                        kept    count"],
    }
    for width, lines in shown.items():
        monkeypatch.setenv("COLUMNS", str(width))
        Terminal().table("Title", table)
        said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert said[: len(lines)] == lines, width
    folded = Table(table.heads, [("a long name of a setting, " * 2, *table.rows[0][1:])])
    monkeypatch.setenv("COLUMNS", "60")
    Terminal().table("Title", folded)
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in said[4:6]] == ["a long name of a setting, a long name of", "a setting,"]
    assert max(map(len, said)) <= 60 and said[4].endswith("0.0123456  1234567")


@pytest.mark.parametrize("text", TEXTS)
def test_a_page_shows_a_text_in_every_place(text):
    """A text stays a text in elements, in attributes, and wherever a chart shows one."""
    chart = Chart(text, Axis(text, 0.0, 1.0, ticks=[(0.5, text)]), Axis(text, 0.0, 1.0))
    chart.vertical(0.5, text)
    chart.legend.append(("a", text))
    chart.band(0.0, 0.5, [text])
    chart.cells([[1]], lambda row, column, side, count: [text])
    turned = Chart(text, Axis(text, 0.0, 1.0, ticks=[(0.5, text)]), Axis(text, 0.0, 1.0), bottom=TURNED)
    parts = (preformatted([text, text]), chart.svg(), turned.svg())
    source = document(text, "", element("p", text, [text], class_=text, data_says=text), parts)
    source.encode()
    page = Page(source)
    # Classes are ours; here they are the text too.
    assert [wrong for wrong in page.wrong if " class=" not in wrong] == []
    assert len([1 for _, attributes, _ in page.elements if attributes.get("class") == "tip"]) == 2
    assert all(c.isprintable() or c == "\n" for c in source)


def test_markup_is_not_made_of_strings():
    """A string never becomes markup, and markup never joins a string unnoticed."""
    assert element("b", "<i>").source == "<b>&lt;i&gt;</b>"
    assert element("b", title='" onload="x').source == '<b title="&quot; onload=&quot;x"></b>'
    with pytest.raises(TypeError):
        "".join([element("b", "x")])  # type: ignore[list-item]  # the mistake that is tested
    with pytest.raises(ValueError, match=r"tag: expected one of .* got 'script'"):
        element("script", "x")
    for name in ("onclick", "href", "src", "style"):
        with pytest.raises(ValueError, match=f"got '{name}'"):
            element("b", **{name: "x"})
    assert not {"script", "style", "a", "img", "iframe", "link", "form", "foreignObject", "use"} & TAGS
    assert not ATTRIBUTES & {"href", "id", "src", "style", "xlink:href"}
    assert not [name for name in ATTRIBUTES if name.startswith("on")]


# Who may write: each of these passes every text through `visible`.
DOORS = {
    "print": set(),
    "stdout": {"cli/streams.py", "cli/main.py", "cli/spec_commands.py", "diagnose/show/terminal.py"},
    "stderr": {"cli/streams.py", "diagnose/show/terminal.py"},
    "Html(": {"diagnose/show/html.py"},
    "escape": {"diagnose/show/html.py"},
}


def found_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "print":
                yield "print"
            elif node.func.id == Html.__name__:
                yield "Html("
        if isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr", "__stdout__", "__stderr__"):
            yield node.attr.strip("_")
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            yield from ({"escape"} & {part for n in names for part in n.split(".")})


def test_nothing_is_shown_past_the_doors():
    """A new row, table or line in another file has no way to a terminal or a page but these functions."""
    for room in ("cli", "diagnose"):
        for path in (PACKAGE / room).rglob("*.py"):
            name = path.relative_to(PACKAGE).as_posix()
            for door in set(found_in(ast.parse(path.read_text(encoding="utf-8")))):
                assert name in DOORS[door], f"{name} uses {door}: show texts by Terminal, print_line or html.element"
