"""The pages in a real browser: nothing overflows, nothing overlaps, nothing is requested from a network.

`make test-browser` runs this; it needs a Chromium (any of `BROWSERS`, or $BROWSER).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest
import torch

from builders import planted_dumps
from rollout_corr.cli.main import main

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("one_thread")]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WIDTHS = (1100, 420)

# What the browser is asked about the page; it answers in the page's own text.
QUESTIONS = """
<script>
window.addEventListener("load", () => {
  const box = (element) => { const b = element.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
  const outside = [], figures = [...document.querySelectorAll("figure")].map(box);
  let shapes = 0;
  for (const svg of document.querySelectorAll("svg")) {
    const [left, top, right, bottom] = box(svg);
    for (const part of svg.querySelectorAll("text, rect, circle, polyline, line")) {
      const [a, b, c, d] = box(part);
      shapes += 1;
      if (a < left - 1 || b < top - 1 || c > right + 1 || d > bottom + 1)
        outside.push(`${svg.getAttribute("aria-label")}: ${part.tagName} ${part.textContent}`);
    }
  }
  const overlaps = [];
  figures.forEach((p, i) => figures.slice(i + 1).forEach((q, j) => {
    if (p[0] < q[2] - 1 && q[0] < p[2] - 1 && p[1] < q[3] - 1 && q[1] < p[3] - 1) overlaps.push([i, i + 1 + j]);
  }));
  const labels = [];
  for (const svg of document.querySelectorAll("svg")) {
    const texts = [...svg.querySelectorAll("text")].filter((t) => !t.getAttribute("transform"));
    texts.forEach((t, i) => texts.slice(i + 1).forEach((u) => {
      const p = box(t), q = box(u);
      if (p[0] < q[2] && q[0] < p[2] && p[1] < q[3] - 1 && q[1] < p[3] - 1)
        labels.push(`${svg.getAttribute("aria-label")}: ${t.textContent} on ${u.textContent}`);
    }));
  }
  const painted = [...document.querySelectorAll("polyline.line, rect.bar, rect.cell, circle.dot")].map((e) => {
    const style = getComputedStyle(e);
    return style.fill === "none" || style.fillOpacity === "0" ? style.stroke : style.fill;
  });
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = JSON.stringify({
    outside, overlaps, labels, shapes, figures: figures.length, painted: [...new Set(painted)],
    wider: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    asked: performance.getEntriesByType("resource").map((entry) => entry.name),
    small: figures.filter((b) => b[2] - b[0] < 250 || b[3] - b[1] < 120).length,
  });
  document.body.appendChild(answer);
});
</script>
"""


def browser():
    """Return the path of a browser. Without one the test fails: whoever runs it asked for a browser."""
    found = os.environ.get("BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, f"no browser: install one of {', '.join(BROWSERS)}, or set BROWSER to the path of one"
    return found


def ask(page, width, *options):
    """Open a page in the browser and return its answers to `QUESTIONS`."""
    asked = page.with_suffix(".asked.html")
    text = page.read_text(encoding="utf-8")
    assert text.count("</body>") == 1
    asked.write_text(text.replace("</body>", QUESTIONS + "</body>"), encoding="utf-8")
    command = [browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += [f"--window-size={width},2000", f"--user-data-dir={page.parent / 'profile'}", *options]
    done = subprocess.run(
        [*command, "--dump-dom", asked.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    answer = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.DOTALL)
    assert answer, done.stderr[-2000:]
    return json.loads(answer[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write three pages by the commands."""
    folder = tmp_path_factory.mktemp("pages")
    turns = planted_dumps.retokenised(0, 2)
    n = turns["mask"].numel()
    torch.save(turns | {"versions": torch.arange(n) % 3, "steps": torch.arange(n) // 200}, folder / "turns.pt")
    torch.save(planted_dumps.renormalised(0, top_p=0.8), folder / "truncated.pt")
    made = {name: folder / f"{name}.html" for name in ("report", "compare", "what-if")}
    one, two = str(folder / "turns.pt"), str(folder / "truncated.pt")
    assert main(["report", one, "--html", str(made["report"])]) == 0
    assert main(["report", one, "--compare", two, "--html", str(made["compare"])]) == 0
    assert main(["what-if", one, "--html", str(made["what-if"])]) == 0
    return made


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "compare", "what-if"])
def test_a_page_fits(name, width, pages):
    found = ask(pages[name], width)
    assert found["figures"] >= 8 and found["shapes"] > 200 and found["small"] == 0
    assert found["outside"] == [] and found["overlaps"] == [] and found["labels"] == []
    assert found["wider"] <= 0
    assert found["asked"] == []
    # Both colours of the style sheet arrive, and nothing is painted in the browser's own black.
    assert not {"rgb(0, 0, 0)", "none"} & set(found["painted"]) and found["painted"]


def test_a_dark_page_has_other_colours(pages):
    light = ask(pages["compare"], 1100)["painted"]
    dark = ask(pages["compare"], 1100, "--force-dark-mode", "--blink-settings=preferredColorScheme=0")["painted"]
    assert len(light) == len(dark) == 2 and not set(light) & set(dark)
