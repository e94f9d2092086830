"""Results as tables and sentences in a terminal, by rich, and as the text of an object."""

from __future__ import annotations

import io
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

from ..best_settings import Outcome, Verdict, verdict_of, worth_of
from ..doctor.cause import Severity, counted
from ..doctor.diagnosis import Diagnosed, is_healthy
from ..measure.measurement import Measurement
from ..measure.profiles import Row, joined
from ..read.dump import Source
from ..read.problems import DumpError
from ..what_if import WhatIf
from .content import (
    ABOUT_SUGGESTION,
    ABOUT_TOO_LONG,
    AXES,
    HEALTHY,
    KEYS,
    UNSEEN,
    Table,
    Unit,
    about_best,
    around,
    enough,
    fields_of,
    metrics_table,
    named,
    pasted_lines,
    problems_title,
    summary,
    unit_of,
    unused_of,
    weights_table,
)
from .order import first_views
from .visible import MOST_OF_TOKEN, visible

# Neighbors of longer axes are joined in the terminal; the page and --json have all rows.
MOST_ROWS = 16
# Characters of the longest bar to each side, and worst tokens in the terminal.
BAR, MOST_WORST = 9, 10
ABOUT_BARS = "Bars: mean D, to the left where it is negative, and light on to mean |D|"
# What bars are made of: a full block, a light one, and a middle.
BLOCKS = "\u2588\u2591\u2502"
STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
# Texts are folded to columns of this width, and not to narrower ones; no number is as long.
FOLDED = 24
# A line and its style.
Line = tuple[str, str]
VERDICTS = {"broken": "bold red", "healthy": "bold green", "equal": "bold cyan", "better": "bold cyan"}


class Terminal:
    """Prints untrusted text: every string passes `_text`, and the console is never exposed.

    Args:
        stderr: Print there, and not on stdout.
        into: Print there, without colors.

    Raises:
        DumpError: rich is not installed.
    """

    def __init__(self, stderr: bool = False, into: io.StringIO | None = None) -> None:
        options = {} if into is None else {"file": into, "color_system": None, "force_terminal": False}
        width = None if into is None else shutil.get_terminal_size().columns
        self._console = _rich("console").Console(stderr=stderr, highlight=False, width=width, **options)
        # rich would exit with 1, which tells a gate that the dump is unhealthy.
        self._console.on_broken_pipe = _raise
        self._made = _rich("text").Text
        self._text_alone = into is not None

    @property
    def blocks(self) -> bool:
        """Whether the encoding of what is printed has block characters."""
        encoding = getattr(sys.stdout, "encoding", None) if self._text_alone else self._console.encoding
        try:
            BLOCKS.encode(encoding or "utf-8")
        except (LookupError, UnicodeEncodeError):
            return False
        return True

    @property
    def width(self) -> int:
        """Characters of a line."""
        return int(self._console.width)

    def _text(self, content: str, style: str = "") -> Any:
        """Return a text as rich shows it: the door through which every text passes. Nothing in it is markup."""
        return self._made(visible(content), style=style)

    def line(self, content: str = "", style: str = "", wrap: bool = True) -> None:
        """Print one line, wrapped at the width unless it is to be copied; a line break in it is shown and not made."""
        self._console.print(self._text(content, style), soft_wrap=not wrap)

    def table(self, title: str, content: Table) -> None:
        """Print a table; where it does not fit the terminal, each row as lines below one another."""
        if self._console.width < _narrowest(content):
            self.line(title, style="bold")
            for row in content.rows:
                lines = [row[0]]
                for head, cell in zip(content.heads[1:], row[1:], strict=True):
                    # A column without a name belongs to the one before.
                    lines += [f"  {head}: {cell}"] if head else [f"{lines.pop()} {cell}"]
                for line in lines:
                    self.line(line)
            self.line()
            return
        box = _rich("box").SIMPLE_HEAD
        made = _rich("table").Table(
            title=self._text(title), title_justify="left", title_style="bold", box=box, padding=(0, 1, 0, 0)
        )
        for i, head in enumerate(content.heads):
            made.add_column(self._text(head), justify="left" if i < content.text else "right", overflow="fold")
        for row in content.rows:
            made.add_row(*map(self._text, row))
        self._console.print(made)

    @contextmanager
    def progress(self, content: str) -> Iterator[Callable[[float, str], None]]:
        """Show a progress bar behind a text; yields what moves it, from 0 to 1, and adds to the text."""
        bars = _rich("progress")
        columns = (
            bars.TextColumn("{task.description}", markup=False),
            *(bars.BarColumn(), bars.TaskProgressColumn(), bars.TimeRemainingColumn()),
        )
        with bars.Progress(*columns, transient=True, console=self._console) as progress:
            task = progress.add_task(visible(content), total=1.0)
            yield lambda done, doing: progress.update(
                task, completed=done, description=visible(f"{content}: {doing}" if doing else content)
            )


@contextmanager
def progress_of(content: str, shown: bool | None) -> Iterator[Callable[[float, str], None]]:
    """Show a progress bar on stderr; yields what moves it.

    Args:
        content: What is under way.
        shown: Show it; None: where stderr is a terminal and rich is installed.

    Raises:
        DumpError: It is asked for, and rich is not installed.
    """
    bars = None
    if shown or (shown is None and sys.stderr is not None and sys.stderr.isatty()):
        try:
            bars = Terminal(stderr=True)
        except DumpError:
            if shown:
                raise
    if bars is None:
        yield lambda done, doing: None
        return
    with bars.progress(content) as move:
        yield move


def _narrowest(content: Table) -> int:
    """Return the width below which numbers of a table would be folded, or texts into columns too narrow to read."""
    widths = [max((len(visible(cell)) for cell in column), default=0) for column in zip(*content.rows, strict=True)]
    return sum(1 + min(width, FOLDED) for width in widths)


def _raise() -> NoReturn:
    """Raise the exception that is being handled."""
    # rich calls this where it handles one.
    raise


def _rich(module: str) -> Any:
    try:
        return import_module(f"rich.{module}")
    except ModuleNotFoundError as error:
        raise DumpError("printing results needs rich: pip install rich numpy") from error


def _print(out: Terminal, lines: Iterator[Line]) -> None:
    for content, style in lines:
        for part in _folded(content, out.width):
            out.line(part, style)


def _of_source(source: Source) -> Iterator[Line]:
    """Say what was read, and the problems of the rest."""
    yield f"{source.where}: {fields_of(source)}", ""
    if source.about:
        yield f"found: {source.about}", ""
    if source.unused:
        yield f"not used: {unused_of(source)}", ""
    if source.problems.count:
        yield f"{problems_title(source)}:", "bold red"
        for problem in source.problems.shown:
            yield f"  {problem}", "red"


def print_report(out: Terminal, diagnoses: Sequence[Diagnosed]) -> None:
    """Print the report of a dump: the causes, then tables. Of two dumps only the metrics are tables."""
    for diagnosis in diagnoses:
        if len(diagnoses) > 1:
            out.line(diagnosis.source.where, style="bold")
        _print(out, _of_findings(diagnosis))
        if is_healthy(diagnosis.findings):
            _print(out, ((f"! {warning}", "yellow") for warning in diagnosis.measured.mismatch_warnings()))
        out.line()
    dumps = named(diagnoses)
    out.table("Mismatch", metrics_table(dumps, KEYS))
    if len(diagnoses) == 1:
        measured, first = diagnoses[0].measured, first_views(diagnoses[0].findings)
        out.line(f"{ABOUT_BARS}.")
        profiles = measured.profiles()
        for axis in sorted(profiles, key=lambda axis: axis not in first):
            rows = profiles[axis]
            title, shown = visible(AXES.get(axis, axis), MOST_OF_TOKEN), joined(rows, MOST_ROWS)
            cut = ""
            if axis not in AXES and len(rows) > MOST_ROWS:
                # Labels have no neighbors.
                shown = sorted(rows, key=lambda row: -row.logratio_abs_mean)[:MOST_ROWS]
                cut = f", the {MOST_ROWS} of {len(rows)} with the largest mean |D|"
            out.table(f"D by {title}{cut}", _axis_table(title, shown, unit_of(axis), out.blocks))
        if measured.worst:
            out.table("Worst tokens", _worst_table(measured))
        out.table("Importance weights", weights_table(dumps))


def text_of_report(diagnoses: Sequence[Diagnosed]) -> str:
    """Return what `print_report` prints; where rich is missing, what was found, and what to install."""
    into = io.StringIO()
    try:
        print_report(Terminal(into=into), diagnoses)
    except DumpError as error:
        return "\n".join([*map(text_of_findings, diagnoses), str(error)])
    return "\n".join(line.rstrip() for line in into.getvalue().splitlines()).rstrip()


def _axis_table(title: str, rows: Sequence[Row], unit: Unit, blocks: bool) -> Table:
    # A few tokens far out would make all other bars short.
    most = max(row.logratio_abs_mean for row in enough(rows, unit)) or 1.0
    cells = []
    for row in rows:
        bar = _bar(row.logratio_mean / most, row.logratio_abs_mean / most, BLOCKS if blocks else "#.|")
        values = (f"{value:.3g}" for value in (row.logratio_mean, row.logratio_abs_mean, row.logratio_abs_max))
        cells.append((row.label, bar, *values, f"{row.count:,}"))
    return Table((title.partition(" (")[0], "mean D", "", "mean |D|", "max |D|", "count"), cells, text=2)


def _bar(part: float, reach: float, characters: str) -> str:
    """Draw a number from -1 to 1 to the left or to the right of a middle, and light on to a larger magnitude."""
    full, light, middle = tuple(characters)
    solid, whole = (round(BAR * min(1.0, abs(length))) for length in (part, reach))
    if part < 0:
        return f"{(whole - solid) * light + solid * full:>{BAR}}{middle}"
    return f"{'':{BAR}}{middle}{solid * full}{(whole - solid) * light}"


def _worst_table(measured: Measurement) -> Table:
    rows = []
    for token in measured.worst[:MOST_WORST]:
        shown = token.tokens or ["nan" if d is None else f"{d:.2g}" for d in token.context]
        shown = [visible(text, MOST_OF_TOKEN) for text in shown]
        context = " ".join(f"[{text}]" if i == token.at else text for i, text in enumerate(shown))
        values = (f"{value:.4g}" for value in (token.d, token.train_logp, token.rollout_logp))
        rows.append((f"{token.record}:{token.position}", context, *values))
    return Table(("record:position", around(measured.worst), "D", "train", "rollout"), rows, text=2)


def print_findings(out: Terminal, diagnosis: Diagnosed) -> None:
    """Print the findings of the doctor, the gravest first."""
    _print(out, _of_findings(diagnosis))


def text_of_findings(diagnosis: Diagnosed) -> str:
    """Return what `print_findings` prints, as wide as the terminal; rich is not needed."""
    width = shutil.get_terminal_size().columns
    return "\n".join(part for content, _ in _of_findings(diagnosis) for part in _folded(content, width))


def _folded(content: str, width: int) -> list[str]:
    """Fold a line; what follows is indented as the text behind its number or dash."""
    begin = re.match(r" *(?:-> |- |\d+\. )?", content)
    indent = " " * (begin.end() if begin else 0)
    lines = textwrap.wrap(
        visible(content), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines or [""]


def _of_findings(diagnosis: Diagnosed) -> Iterator[Line]:
    """Say what was found, the gravest cause first and alone on its line; then what was read."""
    if is_healthy(diagnosis.findings):
        yield f"healthy: {HEALTHY}", "bold green"
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
                yield f"   -> {mistake}", "bold"
        yield f"   -> {finding.advice}", ""
    yield summary(diagnosis), ""
    yield from _of_source(diagnosis.source)
    named = {finding.name for finding in diagnosis.findings}
    others = [mistake for mistake in diagnosis.mistakes if not named.intersection(mistake.causes)]
    if others:
        yield "in the configuration:", "bold red"
        for mistake in others:
            yield f"  {mistake}", "red"


def print_what_if(
    out: Terminal, source: Source, tried: WhatIf, everything: bool = False, sequences: float | None = None
) -> None:
    """Print the verdict, then the best settings with a reason each; with `everything` the result of every setting."""
    outcomes, count = tried.outcomes(), tried.sequences if sequences is None else sequences
    verdict = verdict_of(tried, outcomes, count)
    _print(out, _of_verdict(verdict))
    out.line()
    _print(out, _of_source(source))
    if everything:
        heads = ("setting", "kept", "ESS", "bias", "95 %", "worth")
        out.table("All settings: kept, bias and worth in %", Table(heads, [_cells(one, count) for one in outcomes]))
        if any(outcome.too_long for _, outcome in outcomes):
            out.line(ABOUT_TOO_LONG)
        for setting, _ in outcomes:
            if setting.same:
                out.line(f"{setting.name} is also {', '.join(setting.same)}")
        for reason in dict.fromkeys(tried.left_out.values()):
            names = [name for name, other in tried.left_out.items() if other == reason]
            out.line(f"not tried, because {reason}: {', '.join(names)}")
    suggestion = tried.suggestion()
    if suggestion is not None:
        out.line()
        out.line(f"{ABOUT_SUGGESTION}:", style="bold")
        pasted = [] if tried.framework is None else suggestion.to_paste(tried.framework).splitlines()
        _print(out, ((f"   {text}", "") for text in suggestion.sentences))
        for line in pasted:
            out.line(f"      {line}")
    out.line()
    broken = "On broken data: " if verdict.state == "broken" else ""
    _print(out, iter([(f"{broken}{about_best(count)}:", "bold")]))
    for i, best in enumerate(verdict.best, 1):
        out.line(f"{i}. {best.setting.name}", style="bold")
        _print(out, ((f"   {text}", "") for text in (best.does, best.reason)))
        for line in pasted_lines(best.setting, tried.framework):
            out.line(f"      {line}")
    if not everything:
        out.line(f"The other settings, {len(outcomes)} in all: --all, or --json")


def _cells(one: Outcome, sequences: float) -> list[str]:
    """Return the row of a setting, for a batch of so many sequences; bias in percent of a standard deviation."""

    def percent(bias: float) -> str:
        return f"{100.0 * bias:.0f}" if bias >= 1.0 else f"{100.0 * bias:.2g}" if bias >= 1e-4 else "0"

    setting, outcome = one
    bias, interval = "-", "-"
    if math.isfinite(outcome.bias):
        bias, interval = percent(outcome.bias), f"{percent(outcome.bias_low)}-{percent(outcome.bias_high)}"
    worth = "long" if outcome.too_long else f"{100.0 * worth_of(outcome, sequences):.3g}"
    return [setting.name, f"{100.0 * outcome.tokens_kept:.3g}", f"{outcome.ess:.2g}", bias, interval, worth]


def _of_verdict(verdict: Verdict) -> Iterator[Line]:
    """Say what to do, before any setting is named."""
    yield verdict.title, VERDICTS[verdict.state]
    for sentence in verdict.sentences:
        yield f"   {sentence}", ""
