"""Results as tables and sentences in a terminal, and as the text of an object."""

from __future__ import annotations

import io
import math
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

from ...frameworks.shared.nearest import lines_of
from ..best_settings import verdict_of
from ..doctor.cause import Severity, counted
from ..doctor.diagnosis import Diagnosed, first_views, is_healthy
from ..measure.measurement import Measurement
from ..measure.profiles import Row, joined
from ..read.dump import Source
from ..what_if import Setting, SettingResult, WhatIf
from .content import (
    ABOUT_D,
    AXES,
    HEALTHY,
    KEYS,
    UNSEEN,
    Table,
    around,
    fields_of,
    metrics_table,
    more_of,
    named,
    problems_title,
    weights_table,
)
from .visible import MOST_OF_TOKEN, visible

# Neighbors of longer axes are joined in the terminal; the page and --json have all rows.
MOST_ROWS = 16
# Worst tokens in the terminal.
MOST_WORST = 10
# Styles: parameters of the terminal's escape sequence for them.
BOLD, RED, YELLOW, BOLD_RED, BOLD_BLUE, BOLD_GREEN = "1", "31", "33", "1;31", "1;36", "1;32"
STYLES: dict[Severity, str] = {"error": BOLD_RED, "warning": "1;33", "note": BOLD_BLUE}
# Texts are folded to columns of this width, and not to narrower ones; no number is as long.
FOLDED = 24
# A line and its style, or a title and its table.
Shown = tuple[str, "str | Table"]
VERDICTS = {"broken": BOLD_RED, "healthy": BOLD_GREEN, "equal": BOLD_BLUE, "better": BOLD_BLUE}


class Terminal:
    """Prints untrusted text: every string passes `visible`, and the stream is never exposed.

    Args:
        into: Print there, without colors, and not on stdout.
    """

    def __init__(self, into: io.StringIO | None = None) -> None:
        self._into = into
        wanted = "FORCE_COLOR" in os.environ or (os.name != "nt" and sys.stdout is not None and sys.stdout.isatty())
        self._colors = into is None and wanted and "NO_COLOR" not in os.environ
        self.width = shutil.get_terminal_size().columns

    def line(self, content: str = "", style: str = "", wrap: bool = True) -> None:
        """Print one line, wrapped at the width unless it is to be copied; a line break in it is shown and not made."""
        shown = visible(content)
        for part in _folded(shown, self.width) if wrap else [shown]:
            self._write(part, style)

    def _write(self, shown: str, style: str = "") -> None:
        """Print a line of what `visible` has returned."""
        text = f"\x1b[{style}m{shown}\x1b[0m" if style and self._colors else shown
        (self._into or sys.stdout).write(text + "\n")

    def show(self, parts: Iterable[Shown]) -> None:
        """Print lines and tables."""
        for content, more in parts:
            if isinstance(more, Table):
                self.table(content, more)
            else:
                self.line(content, more)

    def table(self, title: str, content: Table) -> None:
        """Print a table; where it does not fit the terminal, each row as lines below one another."""
        rows = [[visible(cell) for cell in row] for row in (content.heads, *content.rows)]
        widths = [max(map(_cells, column)) for column in zip(*rows, strict=True)]
        # Numbers are never folded, and of the texts the widest alone.
        text = max(range(content.text), key=widths.__getitem__)
        room = self.width - sum(widths) - 2 * (len(widths) - 1) + widths[text]
        if title:
            self.line(title, BOLD)
        if room < min(widths[text], FOLDED):
            for row in content.rows:
                self.line(row[0])
                for head, cell in zip(content.heads[1:], row[1:], strict=True):
                    self.line(f"  {head}: {cell}")
            self.line()
            return
        widths[text] = min(widths[text], room)
        self.line()
        for number, row in enumerate(rows):
            parts = [[cell] for cell in row]
            if _cells(row[text]) > widths[text]:
                # textwrap counts letters, and some letters are two cells wide.
                parts[text] = textwrap.wrap(row[text], widths[text] // (1 if row[text].isascii() else 2))
            for line in zip_longest(*parts, fillvalue=""):
                cells = (_padded(cell, widths[i], i < content.text) for i, cell in enumerate(line))
                self._write("  ".join(cells).rstrip(), "" if number else BOLD)
            if not number:
                self._write("-" * (sum(widths) + 2 * (len(widths) - 1)))
        self.line()


def _cells(text: str) -> int:
    """Return how many cells of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum((1 + (unicodedata.east_asian_width(c) in "WF")) * (unicodedata.combining(c) == 0) for c in text)


def _padded(cell: str, width: int, left: bool) -> str:
    space = " " * (width - _cells(cell))
    return cell + space if left else space + cell


@contextmanager
def progress_of(content: str, shown: bool | None) -> Iterator[Callable[[float, str], None]]:
    """Show how far something is on stderr; yields what moves it, from 0 to 1, and adds to the text.

    Args:
        content: What is under way.
        shown: Show it; None: where stderr is a terminal.
    """
    stream = sys.stderr
    if stream is None or not (stream.isatty() if shown is None else shown):
        yield lambda done, doing: None
        return
    width = shutil.get_terminal_size().columns - 1

    def move(done: float, doing: str) -> None:
        text = visible(f"{done:4.0%} {content}{f': {doing}' if doing else ''}")
        stream.write(f"\r{text[:width]:<{width}}")
        stream.flush()

    try:
        yield move
    finally:
        stream.write(f"\r{'':{width}}\r")


def text_of(parts: Iterable[Shown]) -> str:
    """Return what `Terminal.show` prints, without colors."""
    into = io.StringIO()
    Terminal(into).show(parts)
    return "\n".join(line.rstrip() for line in into.getvalue().splitlines()).rstrip()


def _source(source: Source) -> Iterator[Shown]:
    """Say what was read, and the problems of the rest."""
    yield f"{source.where}: {fields_of(source)}", ""
    for term, said in more_of(source):
        yield f"{term}: {said}", ""
    if source.problems.count:
        yield f"{problems_title(source)}:", BOLD_RED
        for problem in source.problems.shown:
            yield f"  {problem}", RED


def report(diagnoses: Sequence[Diagnosed]) -> Iterator[Shown]:
    """Show the report of a dump: the causes, then tables. Of two dumps only the metrics are tables."""
    for diagnosis in diagnoses:
        if len(diagnoses) > 1:
            yield diagnosis.source.where, BOLD
        yield from findings(diagnosis)
        if is_healthy(diagnosis.findings):
            for warning in diagnosis.measured.mismatch_warnings():
                yield f"! {warning}", YELLOW
        yield "", ""
    dumps = named(diagnoses)
    yield "Mismatch", metrics_table(dumps, KEYS)
    if len(diagnoses) > 1:
        return
    measured, first = diagnoses[0].measured, first_views(diagnoses[0].findings)
    profiles = measured.profiles()
    for axis in sorted(profiles, key=lambda axis: axis not in first):
        rows = profiles[axis]
        title, shown = visible(AXES.get(axis, axis), MOST_OF_TOKEN), joined(rows, MOST_ROWS)
        cut = ""
        if axis not in AXES and len(rows) > MOST_ROWS:
            # Labels have no neighbors.
            shown = sorted(rows, key=lambda row: -row.logratio_abs_mean)[:MOST_ROWS]
            cut = f", the {MOST_ROWS} of {len(rows)} with the largest mean |D|"
        yield f"D by {title}{cut}", _axis_table(title, shown)
    if measured.worst:
        yield "Worst tokens", _worst_table(measured)
    yield "Importance weights", weights_table(dumps)


def _axis_table(title: str, rows: Sequence[Row]) -> Table:
    cells = [
        (
            row.label,
            *(f"{x:.3g}" for x in (row.logratio_mean, row.logratio_abs_mean, row.logratio_abs_max)),
            f"{row.count:,}",
        )
        for row in rows
    ]
    return Table((title.partition(" (")[0], "mean D", "mean |D|", "max |D|", "count"), cells)


def _worst_table(measured: Measurement) -> Table:
    rows = []
    for token in measured.worst[:MOST_WORST]:
        shown = token.tokens or ["nan" if d is None else f"{d:.2g}" for d in token.context]
        shown = [visible(text, MOST_OF_TOKEN) for text in shown]
        context = " ".join(f"[{text}]" if i == token.at else text for i, text in enumerate(shown))
        values = (f"{value:.4g}" for value in (token.d, token.train_logp, token.rollout_logp))
        rows.append((f"{token.record}:{token.position}", context, *values))
    return Table(("record:position", around(measured.worst), "D", "train", "rollout"), rows, text=2)


def _folded(content: str, width: int) -> list[str]:
    """Fold a line; what follows is indented as the text behind its number or dash."""
    begin = re.match(r" *(?:-> |- |\d+\. )?", content)
    indent = " " * (begin.end() if begin else 0)
    lines = textwrap.wrap(content, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def _summary(diagnosis: Diagnosed) -> str:
    """Say how much was measured, and how large the mismatch is."""
    metrics = diagnosis.measured.metrics()
    return (
        f"{counted(metrics['tokens'], 'token')} in {counted(metrics['sequences'], 'sequence')}: mean |D| "
        f"{metrics['logratio_abs_mean']:.3g}, 99th percentile of |D| {metrics['logratio_abs_p99']:.3g}, k3 "
        f"{metrics['kl_rollout_train_k3']:.3g} nats per token. {ABOUT_D}"
    )


def findings(diagnosis: Diagnosed) -> Iterator[Shown]:
    """Show what the doctor found, the gravest cause first and alone on its line; then what was read."""
    if is_healthy(diagnosis.findings):
        yield f"healthy: {HEALTHY}", BOLD_GREEN
        bits = diagnosis.measured.bits
        if bits is not None:
            yield f"exact: the two log-probs of all {counted(bits.tokens, 'token')} are equal", ""
        if "entropy" not in diagnosis.source.fields:
            yield UNSEEN, ""
    for i, finding in enumerate(diagnosis.findings, 1):
        if i > 1:
            yield "", ""
        yield f"{i}. {finding.severity}: {finding.title} [{finding.name}]", STYLES[finding.severity]
        for line in finding.evidence:
            yield f"   - {line}", ""
        for mistake in diagnosis.mistakes:
            if finding.name in mistake.causes:
                yield f"   -> {mistake}", BOLD
        yield f"   -> {finding.advice}", ""
    yield _summary(diagnosis), ""
    yield from _source(diagnosis.source)
    named = {finding.name for finding in diagnosis.findings}
    others = [mistake for mistake in diagnosis.mistakes if not named.intersection(mistake.causes)]
    if others:
        yield "in the configuration:", BOLD_RED
        for mistake in others:
            yield f"  {mistake}", RED


def what_if(source: Source, tried: WhatIf, everything: bool = False, sequences: float | None = None) -> Iterator[Shown]:
    """Show the verdict, then the best settings with a reason each; with `everything` the result of every setting."""
    verdict = verdict_of(tried, sequences)
    results, count = verdict.results, verdict.sequences
    yield verdict.title, VERDICTS[verdict.state]
    for sentence in verdict.sentences:
        yield f"   {sentence}", ""
    yield "", ""
    yield from _source(source)
    if everything:
        heads = ("setting", "kept", "ESS", "bias", "95 %", "worth")
        yield "All settings: kept, bias and worth in %", Table(heads, [_row(one, count) for one in results])
        if any(one.too_long for one in results):
            yield "long: products over these sequences are chance: the mean |sum of D| is above 1 nat", ""
        for one in results:
            if one.setting.same:
                yield f"{one.setting.name} is also {', '.join(one.setting.same)}", ""
        for reason in dict.fromkeys(tried.left_out.values()):
            names = [name for name, other in tried.left_out.items() if other == reason]
            yield f"not tried, because {reason}: {', '.join(names)}", ""
    suggestion = tried.suggestion()
    if suggestion is not None:
        yield "", ""
        yield (
            "Bounds that keep 99 % of such sequences (rc.suggest), from their lengths and their mismatch:",
            BOLD,
        )
        for text in suggestion.sentences:
            yield f"   {text}", ""
        for line in [] if tried.framework is None else suggestion.to_paste(tried.framework).splitlines():
            yield f"      {line}", ""
    yield "", ""
    yield (
        f"{'On broken data: ' if verdict.state == 'broken' else ''}The best setting of each kind, by what a batch of "
        f"{counted(count, 'sequence')} is worth under it: 1 / (1 + variance + N bias^2):",
        BOLD,
    )
    for i, best in enumerate(verdict.best, 1):
        yield f"{i}. {best.setting.name}", BOLD
        yield f"   {best.does}", ""
        yield f"   {best.reason}", ""
        for line in _pasted_lines(best.setting, tried.framework):
            yield f"      {line}", ""
    if not everything:
        yield f"The other settings, {len(results)} in all: --all, or --json", ""


def _pasted_lines(setting: Setting, framework: str | None) -> list[str]:
    """Return the lines to paste into a framework's configuration for a setting."""
    if framework is None:
        return []
    if setting.config is None:
        return [f"# cannot be said in {framework}"]
    return lines_of(setting.config, framework)


def _row(one: SettingResult, sequences: float) -> list[str]:
    """Return the row of a setting, for a batch of so many sequences; bias in percent of a standard deviation."""

    def percent(bias: float) -> str:
        return f"{100.0 * bias:.0f}" if bias >= 1.0 else f"{100.0 * bias:.2g}" if bias >= 1e-4 else "0"

    bias, interval = "-", "-"
    if math.isfinite(one.bias):
        bias, interval = percent(one.bias), f"{percent(one.bias_low)}-{percent(one.bias_high)}"
    worth = "long" if one.too_long else f"{100.0 * one.worth(sequences):.3g}"
    return [one.setting.name, f"{100.0 * one.tokens_kept:.3g}", f"{one.ess:.2g}", bias, interval, worth]
