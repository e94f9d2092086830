"""Hooks of mkdocs that make a site of the Markdown which a forge shows.

Files outside docs/ become pages, the names in docs/api/ docstrings, and formulas MathML.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files, InclusionLevel
from pymdownx.slugs import slugify

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

SITE = Path(__file__).resolve().parent
ROOT = SITE.parents[1]
# Where files outside docs/ lie in the site.
OUTSIDE = "repository/"
LINK = re.compile(r"\[([^][]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^\s*```.*?^\s*```$)", re.DOTALL | re.MULTILINE)
# An entry of a page in docs/api/: the name of an object, a link to its source, its first line.
ENTRY = re.compile(r"^- \[`(rollout_corr[\w.]*)`\]\(.*$", re.MULTILINE)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
# A function's name, after an operand or not, and before a bracket or not.
FUNCTION = re.compile(
    r"(</m(?:i|n|sub|sup)>|&#x(?:00029|02207);</mo>)?<m([io])>(log|exp|min|max)</m\2>(<mo (?:stretchy|minsize))?"
)
CELL = re.compile(r"<td((?: style=\"[^\"]*\")?)>(?=(.*?)</td>)", re.DOTALL)
LANGUAGES = {".py": "python", ".json": "json", ".ipynb": "json"}


def page_of(path: str) -> str:
    """The page of the site that shows a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return OUTSIDE + (path if path.endswith(".md") else f"{path}.md")


def file_of(page: str) -> str:
    """The file of the repository that a page of the site shows."""
    if not page.startswith(OUTSIDE):
        return f"docs/{page}"
    path = page.removeprefix(OUTSIDE)
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def target_of(link: str, path: str) -> str | None:
    """The file that a link in the file `path` leads to; None for an address or a place on the same page."""
    name = link.partition("#")[0]
    if not name or re.match(r"[a-z]+:", name):
        return None
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), name))
    readme = f"{found}/README.md"
    return readme if (ROOT / readme).exists() else found


def prose_links(text: str) -> list[str]:
    """The links of a page, those in fenced blocks apart."""
    return [link for _, link in LINK.findall(FENCE.sub("", text))]


def title_of(path: str) -> str:
    """The first heading of a page."""
    return (ROOT / path).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def outside() -> set[str]:
    """Every file outside docs/ to which a page leads, and to which such a file leads in turn."""
    todo = [path.relative_to(ROOT).as_posix() for path in SITE.parent.rglob("*.md")]
    todo += ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
    found: set[str] = set()
    while todo:
        path = todo.pop()
        if path in found or not (ROOT / path).is_file():
            continue
        found.add(path)
        if path.endswith(".md"):
            links = prose_links((ROOT / path).read_text(encoding="utf-8"))
            todo += [target for link in links if (target := target_of(link, path))]
    return {path for path in found if not path.startswith("docs/")}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that a forge gives them, so that a link fits both, and pages the version."""
    version = re.search(r'"(.+)"', (ROOT / "rollout_corr" / "_version.py").read_text(encoding="utf-8").splitlines()[-1])
    config.copyright = f"rollout-corr {version[1] if version else ''}"
    repository = re.search(r'^REPOSITORY = "(.+)"$', (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    config.repo_url = repository[1] if repository else None
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages lead to, and the style."""
    for path in sorted(outside()):
        text = (ROOT / path).read_text(encoding="utf-8")
        if not path.endswith(".md"):
            language = LANGUAGES.get(Path(path).suffix, "text")
            # Whoever searches wants the pages.
            text = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````{language}\n{text}\n````\n"
        added = File.generated(config, page_of(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(added)
    files.append(File.generated(config, "assets/site.css", content=(SITE / "site.css").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to pages of the site, and replace names by docstrings."""
    here = page.file.src_uri
    path = file_of(here)
    if not path.endswith(".md"):
        return markdown

    def led(match: re.Match[str]) -> str:
        shown, link = match.groups()
        target = target_of(link, path)
        if target is None:
            return match[0]
        if (ROOT / target).is_dir():
            return shown
        if re.fullmatch(r"[\w./]+\.md", shown) and target.startswith("docs/"):
            shown = title_of(target)
        to = posixpath.relpath(page_of(target), posixpath.dirname(here) or ".")
        return f"[{shown}]({to}{''.join(link.partition('#')[1:])})"

    parts = FENCE.split(markdown)
    text = "".join(part if FENCE.fullmatch(part) else LINK.sub(led, part) for part in parts)
    return ENTRY.sub(r"::: \1", text) if here.startswith("api/") else text


def on_page_content(html_text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Typeset formulas as MathML, which needs no script, and mark cells of tables that hold a sentence."""

    def spaced(match: re.Match[str]) -> str:
        before, _, name, bracket = match.groups(default="")
        left, right = ("0.17em" if there else "0" for there in (before, not bracket))
        return f'{before}<mo lspace="{left}" rspace="{right}">{name}</mo>{bracket}'

    def typeset(match: re.Match[str]) -> str:
        made = convert(html.unescape(match[2]).strip(), display="block" if match[1] == "div" else "inline")
        # Browsers no longer read this attribute.
        made = made.replace('<mi mathvariant="double-struck">E</mi>', "<mi>&#x1D53C;</mi>")
        # Browsers space these wrongly: `logq`, `min (r, 1)`, `| A |`, and `<` at the start of an index.
        made = FUNCTION.sub(spaced, made).replace("<mo>&#x0007C;</mo>", '<mo lspace="0" rspace="0">&#x0007C;</mo>')
        return made.replace("<mrow><mo>&#x0003C;</mo>", '<mrow><mo lspace="0" rspace="0">&#x0003C;</mo>')

    def sized(match: re.Match[str]) -> str:
        length = len(re.sub("<.*?>", "", match[2]))
        return f'<td class="{"words long" if length > 160 else "words"}"{match[1]}>' if length > 40 else match[0]

    return CELL.sub(sized, FORMULA.sub(typeset, html_text))
