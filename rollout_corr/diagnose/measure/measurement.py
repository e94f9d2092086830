"""One pass over a dump: all that is shown or diagnosed later, in tables that merge over chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ...api.correct import correct
from ...backends.given import Batch, KeptMass
from ...metrics.histogram import HISTOGRAM, HISTOGRAM_BINS, histogram, percentile
from ...metrics.native import PERCENTILES
from ...metrics.statistics import Statistics
from ...metrics.warnings import warnings_of
from ...specs.correction import Spec, Weight
from ..read.chunk import Chunk, ValidTokens
from ..read.dump import Source
from ..read.fields import Names
from .bits import Bits
from .by_sequence import WorstSequence
from .evidence import Evidence
from .profiles import (
    PROBABILITY_LABELS,
    ByValue,
    Profile,
    Row,
    geometric_bins,
    geometric_rows,
    probability_bins,
)
from .worst_tokens import WORST, WorstToken, WorstTokens

BASE = Spec(detail="full")
# The bound at which most frameworks truncate weights by default.
UPPER = 2.0
_WEIGHTS = (
    Weight.token(upper=UPPER),
    Weight.product(upper=UPPER),
    Weight.geometric(upper=UPPER),
    Weight("prefix", upper=UPPER),
)
WEIGHTED = {weight.kind: Spec(weight=weight) for weight in _WEIGHTS}

# The density of train against rollout log-probs: cells per axis, and the log-prob at which the axes begin.
CELLS, LOWEST_LOGP = 64, -16.0

# Later turns are counted as this one.
MOST_TURNS = 64

POSITIONS_PER_OCTAVE, LENGTHS_PER_OCTAVE = 4, 2


class Measurement:
    """Statistics, profiles, densities, evidence and worst tokens of a dump, added chunk by chunk.

    Args:
        by: Names of further columns by which D is shown.
        exact: Count which tokens differ at all, too.
    """

    def __init__(self, by: Iterable[str] = (), exact: bool = False) -> None:
        by = tuple(by)
        self.statistics: dict[str, Statistics] = {}
        self.position, self.probability, self.length, self.turn = Profile(), Profile(), Profile(), Profile()
        self.columns = {"versions": ByValue(True), "steps": ByValue(True)} | {name: ByValue(False) for name in by}
        self.density = torch.zeros(CELLS * CELLS, dtype=torch.int64)
        self.probability_density = torch.zeros(CELLS * CELLS, dtype=torch.int64)
        self.sequence_means = torch.zeros(HISTOGRAM_BINS, dtype=torch.int64)
        self.evidence = Evidence(by)
        self.bits = Bits(by) if exact else None
        self.label_names: Names = {}
        self._worst = WorstTokens()

    def add(self, chunk: Chunk) -> None:
        """Add the tokens of a chunk."""
        tokens = ValidTokens.of(chunk)
        mass = None if chunk.log_mass is None else KeptMass(chunk.log_mass)
        batch = Batch(mask=chunk.mask, cu_seqlens=chunk.offsets, kept_mass=mass)
        for name, spec in (("", BASE), *WEIGHTED.items()):
            found = correct(chunk.train, chunk.rollout, batch, spec=spec).statistics
            self.statistics[name] = self.statistics[name] + found if name in self.statistics else found
        self.evidence.add(tokens)
        if self.bits is not None:
            self.bits.add(tokens)
        self._add_profiles(tokens)
        self._add_densities(tokens)
        self._worst.add_all(tokens)

    def _add_profiles(self, tokens: ValidTokens) -> None:
        finite = tokens.finite
        d = tokens.d[finite]
        self.position.add(geometric_bins(tokens.position[finite], POSITIONS_PER_OCTAVE), d)
        self.probability.add(probability_bins(tokens.rollout[finite]), d)
        self.turn.add(tokens.turns[finite].clamp(max=MOST_TURNS), d)
        for name, profile in self.columns.items():
            values = tokens.column(name)
            if values is not None:
                profile.add(values[finite], d)
        count = torch.bincount(tokens.owner[finite], minlength=tokens.lengths.shape[0])
        sums = torch.bincount(tokens.owner[finite], d.double(), minlength=tokens.lengths.shape[0])
        some = count > 0
        means = sums[some] / count[some]
        self.length.add(geometric_bins(count[some] - 1, LENGTHS_PER_OCTAVE), means)
        self.sequence_means += histogram(means, None)

    def _add_densities(self, tokens: ValidTokens) -> None:
        train, rollout = tokens.train[tokens.finite], tokens.rollout[tokens.finite]

        def counts(x: Tensor, y: Tensor) -> Tensor:
            cells = [(z.double() * CELLS).long().clamp_(0, CELLS - 1) for z in (x, y)]
            return torch.bincount(cells[1] * CELLS + cells[0], minlength=CELLS * CELLS)

        self.density += counts(1.0 - rollout / LOWEST_LOGP, 1.0 - train / LOWEST_LOGP)
        self.probability_density += counts(rollout.exp(), train.exp())

    @property
    def worst(self) -> list[WorstToken]:
        """Tokens with the largest |D|, the worst first."""
        return self._worst.ranked()[:WORST]

    def worst_of(self, file: str, record: int) -> list[WorstToken]:
        """Return tokens of a record with a large |D|, the worst first."""
        return self._worst.of(file, record)

    @property
    def worst_sequences(self) -> list[WorstSequence]:
        """Sequences with the largest sums of k3, the worst first."""
        return self.evidence.by_sequence.worst

    def raw(self) -> dict[str, float]:
        """Copy the raw statistics without weights to the host."""
        return self.statistics[""].metrics_async().values()

    def metrics(self) -> dict[str, float]:
        """Return the native metrics, percentiles of |D|, and the metrics of each kind of weights as `kind/name`."""
        found = self.statistics[""].metrics() | abs_percentiles(self.raw())
        for kind in WEIGHTED:
            weighted = self.statistics[kind].metrics()
            found |= {f"{kind}/{key}": value for key, value in weighted.items() if "weight_" in key}
        return found

    def mismatch_warnings(self) -> list[str]:
        """Return the warnings of `correct` for the whole dump, which hold whatever the weights."""
        return warnings_of(self.raw(), BASE)

    def profiles(self) -> dict[str, list[Row]]:
        """Return D by every axis that has more than one bin."""
        axes = {
            "position": geometric_rows(self.position, POSITIONS_PER_OCTAVE, 0),
            "probability": self.probability.rows(PROBABILITY_LABELS, range(len(PROBABILITY_LABELS))),
            "length": geometric_rows(self.length, LENGTHS_PER_OCTAVE, 1),
            "turn": self.turn.rows([str(i) for i in range(MOST_TURNS + 1)], range(MOST_TURNS + 1)),
        }
        axes |= {name: profile.rows(self.label_names.get(name, ())) for name, profile in self.columns.items()}
        return {name: rows for name, rows in axes.items() if len(rows) > 1}


def abs_percentiles(raw: dict[str, float]) -> dict[str, float]:
    """Compute percentiles of |D| from raw statistics: the histogram of D is folded at 0."""
    half = HISTOGRAM_BINS // 2
    folded = {name: raw[name] + raw[HISTOGRAM[i + half]] for i, name in enumerate(HISTOGRAM[:half])}
    folded |= dict.fromkeys(HISTOGRAM[half:], 0.0)
    folded |= {name: raw[name] for name in ("tokens_differing", "tokens_nonfinite")}
    folded |= {"-min_d": 0.0, "max_d": max(raw["max_d"], raw["-min_d"])}
    if not math.isfinite(folded["max_d"]):
        folded["max_d"] = 0.0
    return {f"logratio_abs_p{percent:g}": percentile(folded, percent) for percent in PERCENTILES}


def measure(source: Source, each: Callable[[], object] = lambda: None, exact: bool = False) -> Measurement:
    """Read a dump or a batch once and measure it.

    Args:
        source: What is read.
        each: Called after every chunk, to show progress.
        exact: As of `Measurement`.
    """
    measured = Measurement(source.wanted.by, exact)
    for chunk in source.chunks():
        measured.add(chunk)
        each()
    measured.label_names = source.label_names
    return measured
