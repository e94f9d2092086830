"""The pages in a real browser, on a desktop and a phone, light and dark.

Nothing overflows, nothing overlaps, what is folded unfolds, and nothing is requested from a network.
`make test-browser` runs this; it needs a Chromium (any of `chromium.BROWSERS`, or $BROWSER).
"""

from __future__ import annotations

import json
import re

import pytest
import torch

from builders import planted_dumps
from builders.chromium import DARK, run
from rollout_corr.cli.main import main

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("one_thread")]

# A desktop and a phone: their first screens.
SCREENS = {"desktop": (1280, 800), "phone": (390, 844)}
# What the browser is asked about the page; it answers in the page's own text.
QUESTIONS = r"""
<script>
window.addEventListener("load", () => {
  const all = (what, within) => [...(within || document).querySelectorAll(what)];
  const box = (element) => { const b = element.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const wider = () => document.documentElement.scrollWidth - document.documentElement.clientWidth;
  // As it is opened.
  const answer = {
    width: document.documentElement.clientWidth,
    wider: wider(),
    tiles: all(".tile").map((tile) => box(tile)[3]),
    cards: all(".card").map((card) => box(card)[1]),
    order: all("body > *").map((part) => part.className || part.tagName),
    paper: getComputedStyle(document.body).backgroundColor,
    asked: performance.getEntriesByType("resource").map((entry) => entry.name),
  };
  answer.folded = all("details").filter((details) => !details.parentElement.closest("details")).map((details) => {
    const height = () => details.getBoundingClientRect().height, summary = details.querySelector("summary");
    const before = height();
    summary.click();
    const after = height();
    summary.click();
    return [summary.textContent, before, after, height()];
  });
  // With all that is folded.
  all("details").forEach((details) => { details.open = true; });
  answer.opened = wider();
  answer.outside = [], answer.overlaps = [], answer.labels = [], answer.faint = [];
  answer.shapes = 0;
  // No column is out of sight.
  answer.cut = all(".wide").filter((b) => b.scrollWidth > b.clientWidth).map((b) => b.textContent.slice(0, 80));
  // Each place has a box that it shows alone, around its text and inside of the chart.
  answer.says = 0, answer.silent = [];
  for (const says of all(".says")) {
    const tip = says.querySelector(".tip"), svg = box(says.closest("svg"));
    const hidden = getComputedStyle(tip).display === "none";
    says.focus({preventScroll: true});
    const shown = getComputedStyle(tip).display !== "none" && document.activeElement === says;
    const [a, b, c, d] = box(tip.querySelector("rect"));
    const inside = all("text", tip).every((t) => {
      const [left, top, right, bottom] = box(t);
      return left >= a && top >= b - 1 && right <= c && bottom <= d + 1;
    });
    const fits = a >= svg[0] - 1 && b >= svg[1] - 1 && c <= svg[2] + 1 && d <= svg[3] + 1;
    answer.says += 1;
    if (!(hidden && shown && inside && fits)) answer.silent.push([tip.textContent, hidden, shown, inside, fits]);
    says.blur();
  }
  const figures = all("figure").map(box);
  answer.figures = figures.length;
  answer.small = figures.filter((b) => b[2] - b[0] < 250 || b[3] - b[1] < 120).length;
  for (const svg of all("svg")) {
    const [left, top, right, bottom] = box(svg), called = svg.getAttribute("aria-label");
    const drawn = (what) => all(what, svg).filter((part) => !part.closest(".tip"));
    for (const part of drawn("text, rect, circle, polyline, line")) {
      const [a, b, c, d] = box(part);
      answer.shapes += 1;
      if (a < left - 1 || b < top - 1 || c > right + 1 || d > bottom + 1)
        answer.outside.push(`${called}: ${part.tagName} ${part.textContent}`);
      if (part.tagName === "text" && !part.getAttribute("transform") && d - b < 9)
        answer.faint.push(`${called}: ${part.textContent} is ${d - b} pixels high`);
    }
    const texts = drawn("text").filter((t) => !t.getAttribute("transform"));
    texts.forEach((t, i) => texts.slice(i + 1).forEach((u) => {
      const p = box(t), q = box(u);
      if (p[0] < q[2] && q[0] < p[2] && p[1] < q[3] - 1 && q[1] < p[3] - 1)
        answer.labels.push(`${called}: ${t.textContent} on ${u.textContent}`);
    }));
  }
  figures.forEach((p, i) => figures.slice(i + 1).forEach((q, j) => {
    if (p[0] < q[2] - 1 && q[0] < p[2] - 1 && p[1] < q[3] - 1 && q[1] < p[3] - 1)
      answer.overlaps.push([i, i + 1 + j]);
  }));
  answer.painted = [...new Set(all("polyline.line, rect.bar, rect.cell, circle.dot").map((e) => {
    const style = getComputedStyle(e);
    return style.fill === "none" || style.fillOpacity === "0" ? style.stroke : style.fill;
  }))];
  parent.postMessage(JSON.stringify(answer), "*");
});
</script>
"""

# A window has at least 500 pixels, a frame as many as it is asked for.
FRAME = """<!DOCTYPE html><iframe src="%s" width="%d" height="%d" style="border: 0"></iframe>
<script>
window.addEventListener("message", (message) => {
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = message.data;
  document.body.appendChild(answer);
});
</script>
"""


def ask(page, screen, *options):
    """Open a page in the browser and return its answers to `QUESTIONS`."""
    asked, frame = page.with_suffix(".asked.html"), page.with_suffix(".frame.html")
    text = page.read_text(encoding="utf-8")
    assert text.count("</body>") == 1
    asked.write_text(text.replace("</body>", QUESTIONS + "</body>"), encoding="utf-8")
    frame.write_text(FRAME % (asked.name, *SCREENS[screen]), encoding="utf-8")
    # Time that passes only while nothing is left to do: the answer is there before it is over.
    more = ("--enable-logging=stderr", "--virtual-time-budget=10000", "--window-size=1400,1000")
    done = run(page.parent / "profile", *more, *options, "--dump-dom", frame.as_uri())
    answer = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert answer, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    return json.loads(answer[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write three pages by the commands."""
    folder = tmp_path_factory.mktemp("pages")
    turns = planted_dumps.retokenized(0, 2)
    n = turns["mask"].numel()
    torch.save(turns | {"versions": torch.arange(n) % 3, "steps": torch.arange(n) // 200}, folder / "turns.pt")
    torch.save(planted_dumps.renormalized(0, top_p=0.8), folder / "truncated.pt")
    torch.save(planted_dumps.temperature(0, 0.7, 0.7, 1.0), folder / "hot.pt")
    made = {name: folder / f"{name}.html" for name in ("report", "hot", "compare")}
    one, two = str(folder / "turns.pt"), str(folder / "truncated.pt")
    assert main(["report", one, "--page", str(made["report"])]) == 0
    assert main(["report", str(folder / "hot.pt"), "--page", str(made["hot"])]) == 0
    assert main(["report", one, "--compare", two, "--page", str(made["compare"])]) == 0
    return made


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", ["report", "hot", "compare"])
def test_a_page_fits_and_can_be_read(name, screen, scheme, pages):
    found = ask(pages[name], screen, *([DARK] if scheme == "dark" else []))
    width, height = SCREENS[screen]
    assert found["width"] == width
    assert found["figures"] >= 8 and found["shapes"] > 200 and found["small"] == 0
    assert found["outside"] == [] and found["overlaps"] == [] and found["labels"] == []
    # Folded and unfolded: what is wide scrolls in its own box.
    assert found["wider"] <= 0 and found["opened"] <= 0
    assert found["asked"] == []
    # Both colors of the style sheet arrive, and nothing is painted in the browser's own black.
    assert not {"rgb(0, 0, 0)", "none"} & set(found["painted"]) and found["painted"]
    assert found["faint"] == []
    assert len(found["folded"]) >= 3
    for summary, before, after, again in found["folded"]:
        # Most are folded; those of a finding are open.
        assert before == again and (before < 0.5 * after or after < 0.5 * before), summary
    assert found["cut"] == []
    assert found["silent"] == [] and found["says"] > 100
    # The first screen.
    assert len(found["tiles"]) == 5
    # What was found, with its picture; then the numbers.
    assert found["cards"][0] < height / 2
    assert max(found["tiles"]) < (1.25 if screen == "desktop" else 2.5) * height


def test_a_dark_page_has_other_colors(pages):
    light, dark = ask(pages["compare"], "desktop"), ask(pages["compare"], "desktop", DARK)
    assert len(light["painted"]) == len(dark["painted"]) and not set(light["painted"]) & set(dark["painted"])
    assert light["paper"] == "rgb(255, 255, 255)" != dark["paper"]
