"""A page by Python's own parser, against the tags and attributes that this package writes."""

from __future__ import annotations

from html.parser import HTMLParser

from rollout_corr.diagnose.show import html

# Those of elements, which test_doors.py looks through, and those of the frame of a page.
TAGS = html.TAGS | {"body", "head", "html", "meta", "pre", "style"}
ATTRIBUTES = {name.lower() for name in html.ATTRIBUTES} | {"charset", "content", "lang", "name"}


class Page(HTMLParser):
    """Keeps the elements and texts of a page, and notes everything in it that this package never writes."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.elements: list[tuple[str, dict[str, str], tuple[str, ...]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        if self.open:
            self.wrong.append(f"never closed: {self.open}")

    def handle_starttag(self, tag, attributes):
        if tag not in TAGS:
            self.wrong.append(f"<{tag}>")
        for name, value in attributes:
            if name not in ATTRIBUTES or value is None:
                self.wrong.append(f"<{tag} {name}={value!r}>")
        if len(dict(attributes)) != len(attributes):
            self.wrong.append(f"<{tag}> has an attribute twice")
        self.elements.append((tag, dict(attributes), tuple(self.open)))
        if tag != "meta":
            self.open.append(tag)

    def handle_data(self, data):
        self.texts.append((data, self.open[-1] if self.open else ""))

    def said(self, *tags):
        return [text for text, tag in self.texts if tag in tags]

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> out of place")

    def handle_comment(self, data):
        self.wrong.append(f"<!--{data[:40]}")

    def handle_decl(self, declaration):
        if declaration != "DOCTYPE html":
            self.wrong.append(f"<!{declaration[:40]}")

    def handle_pi(self, data):
        self.wrong.append(f"<?{data[:40]}")

    def unknown_decl(self, data):
        self.wrong.append(f"<![{data[:40]}")
