"""The results of `doctor` and `report`, `Diagnosis` and `Report`: measurements and findings, which show themselves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..whole_files import write_whole
from .doctor.cause import SEVERITIES, Finding, Severity
from .doctor.diagnosis import Diagnosed, is_healthy
from .doctor.in_common import InCommon, in_common
from .measure.bits import Difference
from .read.dump import SUFFIXES, Dump, Source, suffix_of
from .read.problems import DumpError
from .show import page, plain_data, terminal
from .show.html import element, framed, preformatted

# Pixels of the frame in which a notebook shows a page; the page scrolls in it.
FRAME = 720


@dataclass(frozen=True, eq=False, repr=False)
class Diagnosis(Diagnosed):
    """The findings of `doctor`. They print as the command prints them.

    Attributes:
        source: Files, or tensors: its `fields`, and the `problems` of a file.
        measured: The statistics, profiles and worst tokens of the source.
        findings: The causes that were recognized, the most serious first.
        mistakes: Mistakes in the configuration saved with the dumps of a job, as `check_config` names them.
    """

    @property
    def healthy(self) -> bool:
        """True if nothing worse than a note was found."""
        return is_healthy(self.findings)

    @property
    def counts(self) -> dict[Severity, int]:
        """The number of findings of each severity."""
        return {each: sum(finding.severity == each for finding in self.findings) for each in SEVERITIES}

    @property
    def tokens(self) -> int:
        """The number of valid tokens."""
        return self.measured.evidence.tokens

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return int(self.metrics()["sequences"])

    @property
    def first_difference(self) -> Difference | None:
        """With `exact`, the first token whose two log-probs are not equal, in the order of the source."""
        return None if self.measured.bits is None else self.measured.bits.first

    @property
    def in_common(self) -> tuple[InCommon, ...]:
        """With `exact`, what the tokens that differ have in common beyond chance: at most two things."""
        bits = self.measured.bits
        return () if bits is None else tuple(in_common(bits, self.measured.label_names))

    def metrics(self) -> dict[str, float]:
        """The metrics of `correct` over all tokens, and the metrics of each kind of weight as `kind/name`."""
        return self.measured.metrics()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as `rollout-corr doctor --json` prints it; what is not finite is None."""
        return plain_data.doctor(self)

    def __repr__(self) -> str:
        """Return the text that the command prints, without colors."""
        return terminal.text_of(terminal.findings(self))


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """The measurements of `report`. They print as the command prints them, and a notebook shows their page.

    Attributes:
        diagnoses: The diagnosis of the source, and of a second one that it is compared with.
    """

    diagnoses: tuple[Diagnosis, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The causes that were recognized in the first source, the most serious first."""
        return self.diagnoses[0].findings

    @property
    def healthy(self) -> bool:
        """True if nothing worse than a note was found in the first source."""
        return self.diagnoses[0].healthy

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the first source."""
        return self.diagnoses[0].metrics()

    def html(self) -> str:
        """Return the page: one file that loads nothing."""
        return page.report_page(self.diagnoses)

    def save(self, page: str | os.PathLike[str]) -> Path:
        """Write the page, whole or not at all.

        Args:
            page: Where, such as "page.html".

        Returns:
            Where it is.

        Raises:
            ValueError: It cannot be written there, or would replace a dump that was read.
        """
        path = where_to_write(page, [each.source for each in self.diagnoses])
        try:
            write_whole(path, self.html())
        except OSError as error:
            raise DumpError(f"page {path}: cannot be written: {error.strerror or error}") from error
        return path

    def to_dict(self) -> dict[str, Any]:
        """Return everything as `rollout-corr report --json` prints it; what is not finite is None."""
        first, *others = (plain_data.report(each) for each in self.diagnoses)
        return first | ({"compare": others[0]} if others else {})

    def __repr__(self) -> str:
        """Return the text that the command prints, without colors."""
        return terminal.text_of(terminal.report(self.diagnoses))

    def _repr_html_(self) -> str:
        """Return the findings and the page to a notebook; one that is not trusted shows no frame."""
        found = [line for each in self.diagnoses for line in repr(each).splitlines()]
        return element("div", preformatted(found), framed(self.html(), "report", FRAME)).source


def where_to_write(page: str | os.PathLike[str], sources: Sequence[Source]) -> Path:
    """Return where a page goes.

    Raises:
        DumpError: There is a dump that is read.
    """
    path = Path(page)
    for source in sources:
        for file in source.files:
            # Not by name: the page may be a symlink or a hard link to the dump.
            if path.exists() and file.exists() and path.samefile(file):
                raise DumpError(f"page {path}: this is the dump {file}, which the page would overwrite")
        for folder in source.paths if isinstance(source, Dump) else ():
            if suffix_of(path) in SUFFIXES and folder.is_dir() and path.resolve().is_relative_to(folder.resolve()):
                raise DumpError(f"page {path}: in {folder} this would be read as a dump; name it .html")
    return path
