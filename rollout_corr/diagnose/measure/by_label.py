"""Tallies by label for the doctor: which environment, source or policy version differs far more than the others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..read.chunk import ValidTokens
from .profiles import MOST_LABELS, Excess, Numbering, add_up

# |D| is cut here, so that no single token decides that a label is ill.
MOST = 1.0
# A label with fewer sequences is not judged: a broken sample is not a broken environment.
FEWEST_SEQUENCES = 4
# A label differs if its mean |D| is so many times the others' at equal probability, at least so many nats, and
# so many standard errors above theirs. Sequences are what is sampled, so the error is that over sequences.
TIMES, MATTERS, SURE = 2.0, 5e-3, 4.0


@dataclass(frozen=True)
class IllLabel:
    """A label that differs far more than the others."""

    label: int  # its value
    # How many have it, of tokens those with a finite D.
    sequences: int
    tokens: int
    logratio_abs_mean: float  # their mean |D|, cut at 1
    times: float  # divided by the mean |D| of equally likely tokens of the labels that agree
    # mean |D| and mean k3 of the labels that agree, D cut at 1.
    rest_logratio_abs_mean: float
    rest_k3: float


class ByLabel:
    """Tallies over chunks of one column of labels: up to MOST_LABELS whole numbers >= 0. Others are no labels."""

    def __init__(self) -> None:
        self.places = Numbering(MOST_LABELS)  # the row of each label in the tallies
        self.bad = torch.zeros(MOST_LABELS, dtype=torch.int64)  # tokens whose D is not finite, by label
        self._excess = Excess()
        self._k3 = torch.zeros(MOST_LABELS, dtype=torch.float64)
        # Per label: the number of sequences; then the sum of their means of min(|D|, 1), and the sum of the squares.
        self._sequences = torch.zeros(MOST_LABELS, 3, dtype=torch.float64)
        self._no_labels = False

    def add(self, tokens: ValidTokens, values: Tensor | None) -> None:
        """Add the tokens of a chunk; [M] values, None: the chunk has none."""
        if values is None or self._no_labels:
            return
        # A record without a label has -1 or NaN. Whole numbers of a .jsonl file are read as floating ones.
        known = values >= 0
        whole = values[known].long()
        group = self.places.of_each(whole)
        self._no_labels = not torch.equal(whole.to(values.dtype), values[known]) or bool((group < 0).any())
        if self._no_labels or not group.numel():
            return
        finite = tokens.finite[known]
        self.bad += torch.bincount(group[~finite], minlength=MOST_LABELS)
        group, owner = group[finite], tokens.owner[known][finite]
        d = tokens.d[known][finite].double().clamp(-MOST, MOST)
        self._excess.add(group, tokens.rollout[known][finite], d)
        self._k3 += torch.bincount(group, d.expm1() - d, minlength=MOST_LABELS)
        # A label per token may change within a sequence, which then counts in each of its labels.
        pair, where = (owner * MOST_LABELS + group).unique(return_inverse=True)
        mean = torch.bincount(where, d.abs()) / torch.bincount(where)
        add_up(self._sequences, pair % MOST_LABELS, (None, mean, mean * mean))

    def broken(self) -> list[int]:
        """Return the labels with tokens whose D is not finite, if at least half of all labels have none."""
        found = sorted(value for value, place in self.places.items() if self.bad[place])
        return found if not self._no_labels and 2 * len(found) <= len(self.places) else []

    def ill(self) -> list[IllLabel]:
        """Return the labels that differ far more than the others, the worst first.

        They are compared with the half of the labels that agrees best, so that several may be ill.
        """
        tokens = self._excess.tokens_of_each()
        judged = [
            (value, place)
            for value, place in self.places.items()
            if self._sequences[place, 0] >= FEWEST_SEQUENCES and place < len(tokens) and tokens[place]
        ]
        if self._no_labels or len(judged) < 2:
            return []
        levels = self._excess.each_over(([place] for _, place in judged), [place for _, place in judged])
        order = [place for _, (_, place) in sorted(zip(levels, judged, strict=True))]
        agree = order[: len(order) // 2]
        times = self._excess.each_over(([place] for _, place in judged), agree)
        count, magnitude = self._excess.table()
        usual = float(count[agree].sum())
        rest, rest_k3 = float(magnitude[agree].sum()) / usual, float(self._k3[agree].sum()) / usual
        rest_mean, rest_error = self._over_sequences(agree)
        found = []
        for (value, place), many in zip(judged, times, strict=True):
            mean, error = self._over_sequences([place])
            own = float(magnitude[place].sum() / count[place].sum())
            if many >= TIMES and own >= MATTERS and mean - rest_mean > SURE * math.hypot(error, rest_error):
                found.append(IllLabel(value, int(self._sequences[place, 0]), tokens[place], own, many, rest, rest_k3))
        return sorted(found, key=lambda one: -one.times)

    def _over_sequences(self, places: list[int]) -> tuple[float, float]:
        """Return the mean over sequences of their mean |D|, and its standard error."""
        count, total, squares = self._sequences[places].sum(0).tolist()
        mean = total / count
        return mean, math.sqrt(max(squares / count - mean * mean, 0.0) / max(count - 1.0, 1.0))
