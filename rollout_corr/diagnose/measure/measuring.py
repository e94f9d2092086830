"""One pass over a dump: everything that is shown or judged later, in tables that merge over blocks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout_corr.api import correct as ops
from rollout_corr.definition.histogram import HISTOGRAM, HISTOGRAM_BINS, histogram, percentile
from rollout_corr.diagnose.measure.evidence import Evidence
from rollout_corr.diagnose.measure.profiles import (
    PROBABILITY_LABELS,
    ByValue,
    Profile,
    Row,
    geometric_bins,
    geometric_rows,
    probability_bins,
)
from rollout_corr.diagnose.read.block import Block, ValidTokens
from rollout_corr.diagnose.read.reading import Dump
from rollout_corr.metrics.native import PERCENTILES
from rollout_corr.metrics.statistics import Statistics
from rollout_corr.metrics.warnings import warnings_of
from rollout_corr.spec.correction import LEVELS, Spec, Weight

BASE = Spec(detail="full")
# Truncated at 2, the bound that most frameworks start from.
UPPER = 2.0
WEIGHTED = {level: Spec(weight=Weight(level, upper=UPPER)) for level in LEVELS}

# The density of train against rollout log-probs: cells a side, and where the axes begin.
CELLS, LOWEST_LOGP = 64, -16.0

WORST, CONTEXT = 20, 6
MOST_TURNS = 64

POSITIONS_PER_OCTAVE, LENGTHS_PER_OCTAVE = 4, 2


@dataclass(frozen=True)
class WorstToken:
    """One of the tokens with the largest |D|, among its neighbours.

    Attributes:
        file: The file.
        record: Number of its sequence in it.
        position: Valid tokens of the sequence before it.
        d: train_logp - rollout_logp.
        train_logp: Of the token.
        rollout_logp: Of the token.
        at: Where it stands in the context.
        context: D of the valid tokens around it, in order; None where it is not finite.
        tokens: What they are: texts or ids, where the dump has them.
        turn: Its turn, from 0.
        version: Its weight version, or None.
    """

    file: str
    record: int
    position: int
    d: float
    train_logp: float
    rollout_logp: float
    at: int
    context: tuple[float | None, ...]
    tokens: tuple[str, ...] | None
    turn: int
    version: int | None


class Measured:
    """What one pass over a dump found.

    Args:
        by: Further columns along which D is shown.
    """

    def __init__(self, by: Iterable[str] = ()) -> None:
        self.statistics: dict[str, Statistics] = {}
        self.position, self.probability, self.length, self.turn = Profile(), Profile(), Profile(), Profile()
        self.columns = {"versions": ByValue(True), "steps": ByValue(True)} | {name: ByValue(False) for name in by}
        self.density = torch.zeros(CELLS * CELLS, dtype=torch.int64)
        self.probability_density = torch.zeros(CELLS * CELLS, dtype=torch.int64)
        self.sequence_means = torch.zeros(HISTOGRAM_BINS, dtype=torch.int64)
        self.evidence = Evidence()
        self._worst: list[tuple[float, int, WorstToken]] = []
        self._seen = 0

    def add(self, block: Block) -> None:
        """Add a block."""
        tokens = ValidTokens.of(block)
        for name, spec in (("", BASE), *WEIGHTED.items()):
            found = ops.correct(block.train, block.rollout, block.mask, cu_seqlens=block.offsets, spec=spec).statistics
            self.statistics[name] = self.statistics[name] + found if name in self.statistics else found
        self.evidence.add(tokens)
        self._add_profiles(tokens)
        self._add_densities(tokens)
        self._add_worst(tokens)

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

    def _add_worst(self, tokens: ValidTokens) -> None:
        least = self._worst[0][0] if len(self._worst) == WORST else 0.0
        magnitude = tokens.d.abs()
        count = min(WORST, magnitude.numel())
        for value, i in zip(*(x.tolist() for x in magnitude.topk(count)), strict=True):
            if value <= least:
                break
            # The number breaks ties: two tokens cannot be compared.
            self._seen += 1
            entry = (value, -self._seen, self._worst_token(tokens, i))
            if len(self._worst) < WORST:
                heapq.heappush(self._worst, entry)
            else:
                heapq.heappushpop(self._worst, entry)
            least = self._worst[0][0] if len(self._worst) == WORST else 0.0

    def _worst_token(self, tokens: ValidTokens, i: int) -> WorstToken:
        owner, block = int(tokens.owner[i]), tokens.block
        before = int(tokens.position[i])
        begin = i - min(before, CONTEXT)
        end = min(i + CONTEXT + 1, i - before + int(tokens.lengths[owner]))
        context = [
            value if finite else None
            for value, finite in zip(tokens.d[begin:end].tolist(), tokens.finite[begin:end].tolist(), strict=True)
        ]
        ids, shown = tokens.column("token_ids"), None
        texts = None if block.texts is None else block.texts[owner]
        if texts is not None:
            shown = tuple(texts[slot - int(block.offsets[owner])] for slot in tokens.slots[begin:end].tolist())
        elif ids is not None:
            shown = tuple(str(token) for token in ids[begin:end].tolist())
        versions = tokens.column("versions")
        return WorstToken(
            file=block.file,
            record=int(block.records[owner]),
            position=before,
            d=float(tokens.d[i]),
            train_logp=float(tokens.train[i]),
            rollout_logp=float(tokens.rollout[i]),
            at=i - begin,
            context=tuple(context),
            tokens=shown,
            turn=int(tokens.turns[i]),
            version=None if versions is None else int(versions[i]),
        )

    @property
    def worst(self) -> list[WorstToken]:
        """The tokens with the largest |D|, the worst first."""
        return [token for _, _, token in sorted(self._worst, reverse=True)]

    def raw(self, level: str = "") -> dict[str, float]:
        """The raw statistics of all tokens, or under the weight of a level."""
        return self.statistics[level].metrics_async().values()

    def metrics(self) -> dict[str, float]:
        """Named floats: the native metrics, percentiles of |D|, and each level's weights under `level/`."""
        found = self.statistics[""].metrics() | abs_percentiles(self.raw())
        for level in LEVELS:
            of_level = self.statistics[level].metrics()
            found |= {f"{level}/{key}": value for key, value in of_level.items() if "weight_" in key}
        return found

    def warnings(self) -> list[str]:
        """What deserves a look, in plain words."""
        found = warnings_of(self.raw(), BASE)
        for level in LEVELS:
            of_level = warnings_of(self.raw(level), WEIGHTED[level])
            found += [f"{level} weights up to {UPPER:g}: {text}" for text in of_level if text not in found]
        return found

    def profiles(self) -> dict[str, list[Row]]:
        """D along every axis on which there is more than one bin."""
        axes = {
            "position": geometric_rows(self.position, POSITIONS_PER_OCTAVE, 0),
            "probability": self.probability.rows(PROBABILITY_LABELS, range(len(PROBABILITY_LABELS))),
            "length": geometric_rows(self.length, LENGTHS_PER_OCTAVE, 1),
            "turn": self.turn.rows([str(i) for i in range(MOST_TURNS + 1)], range(MOST_TURNS + 1)),
        }
        axes |= {name: profile.rows() for name, profile in self.columns.items()}
        return {name: rows for name, rows in axes.items() if len(rows) > 1}


def abs_percentiles(raw: dict[str, float]) -> dict[str, float]:
    """Percentiles of |D|, from the histogram of D folded at 0."""
    half = HISTOGRAM_BINS // 2
    folded = {name: raw[name] + raw[HISTOGRAM[i + half]] for i, name in enumerate(HISTOGRAM[:half])}
    folded |= dict.fromkeys(HISTOGRAM[half:], 0.0)
    folded |= {"-min_d": 0.0, "max_d": max(raw["max_d"], raw["-min_d"])}
    if not math.isfinite(folded["max_d"]):
        folded["max_d"] = 0.0
    return {f"abs_logp_p{percent:g}": percentile(folded, percent) for percent in PERCENTILES}


def measure(dump: Dump, each: Callable[[], Any] = lambda: None) -> Measured:
    """Measure a dump.

    Args:
        dump: The dump.
        each: Called after every block.
    """
    measured = Measured(dump.wanted.by)
    for block in dump.blocks():
        measured.add(block)
        each()
    return measured
