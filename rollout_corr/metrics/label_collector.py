"""Taking the statistics of labels: from each block of whole sequences, then from the facts of all of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from rollout_corr.definition.findings import Findings
from rollout_corr.definition.sequences import Packed
from rollout_corr.definition.tokens import Number
from rollout_corr.metrics import sequence_labels, token_labels
from rollout_corr.metrics.all_sequences import AllSequences
from rollout_corr.metrics.deferred import Deferred, Later, OfLabels
from rollout_corr.metrics.extra import Extra
from rollout_corr.metrics.labels import SMALL, Labelled, Labels, count_outside, narrow_places, places_of
from rollout_corr.metrics.schema import layout
from rollout_corr.metrics.sequence_labels import PerSequence
from rollout_corr.metrics.statistics import Statistics, deferring
from rollout_corr.metrics.token_labels import PerLabel
from rollout_corr.spec.caches import cached
from rollout_corr.spec.correction import Spec

T = TypeVar("T")


class LabelCollector:
    """The statistics of labels from consecutive blocks.

    Args:
        spec: The Spec.
        look: Read values, as `evaluate` does: on the CPU, where statistics may wait until somebody asks for them.
        labelled: Labels of the batch.
    """

    def __init__(self, spec: Spec, look: bool, labelled: tuple[Labelled, ...]) -> None:
        self._spec, self._look = spec, look
        # What waits must not see what the caller writes into ids afterwards.
        self._of_sequences = [
            Labelled(labels, ids.clone() if look else ids) for labels, ids in labelled if labels.units == "sequences"
        ]
        self._of_tokens = [
            (one.labels, narrow_places(one) if look else places_of(one))
            for one in labelled
            if one.labels.units == "tokens"
        ]
        self._labels = tuple(one.labels for one in labelled)
        # In the order of the blocks, because sums round.
        self._per_sequence: list[Callable[[], PerSequence]] = []
        self._per_label: list[list[Callable[[], PerLabel]]] = [[] for _ in self._of_tokens]
        self._outside: dict[str, float] = {}
        self._waiting = 0

    def take(self, found: Findings, choose: Callable[[Tensor], Tensor] | None = None) -> None:
        """Take the next block, as `Collector.take` does."""
        waits = self._look and self._may_wait(found)
        if waits:
            self._waiting += found.tokens.d.shape[0]
            found = own(found)
        if self._of_sequences:
            of_block = partial(sequence_labels.of_block, found)
            self._per_sequence.append(of_block if waits else _known(of_block()))
        for (labels, every), blocks in zip(self._of_tokens, self._per_label, strict=True):
            place = every if choose is None else choose(every)
            of_tokens = partial(token_labels.of_block, found, labels, place, self._look)
            outside: Number = 0
            if waits:
                blocks.append(of_tokens)
                outside = torch.count_nonzero(place == len(labels.values))
            else:
                taken = of_tokens()
                blocks.append(_known(taken))
                outside = taken.sums[len(labels.values)]
            if self._look:
                self._count(labels, float(outside))

    def _count(self, labels: Labels, outside: float) -> None:
        name = count_outside(labels)
        self._outside[name] = self._outside.get(name, 0.0) + outside

    def _may_wait(self, found: Findings) -> bool:
        """Tell whether the tokens of a block are few enough to be kept, and none of them is the caller's."""
        few = self._waiting + found.tokens.d.shape[0] <= SMALL
        return few and found.tokens.turns is None and _is_of_own_tensors(found.spec)

    def beside(self, whole: Statistics, view: AllSequences) -> Statistics:
        """Append the statistics of all labels to those of the batch.

        Args:
            whole: As `of_vector` made them.
            view: Of all sequences of the batch.
        """
        if not self._look:
            for labels, of_label in zip(self._labels, self.found(view), strict=True):
                whole = whole.beside(Extra((labels,)), *of_label)
            return whole
        for labels, ids in self._of_sequences:
            known = len(labels.values)
            low, high = (int(x) for x in ids.aminmax()) if ids.numel() else (0, 0)
            within = low >= 0 and high < known
            there = view.facts.tokens > 0
            self._count(labels, 0.0 if within else float(torch.count_nonzero(there & ((ids < 0) | (ids >= known)))))
        sums, maxima = map(len, layout(self._spec))
        return deferring(whole, Deferred(self._labels, self._outside, sums, maxima, Later(partial(self.found, view))))

    def found(self, view: AllSequences) -> OfLabels:
        """Give the sums and maxima of each of the labels.

        Args:
            view: Of all sequences of the batch.
        """
        found: dict[str, tuple[Tensor, Tensor]] = {}
        if self._of_sequences:
            per_sequence = sequence_labels.joined([block() for block in self._per_sequence], view)
            for one in self._of_sequences:
                found[one.labels.name] = sequence_labels.by_label(one, per_sequence, self._look)
        for (labels, _), blocks in zip(self._of_tokens, self._per_label, strict=True):
            total, *others = (block() for block in blocks)
            for other in others:
                total = total.joined(other)
            found[labels.name] = total
        return [found[labels.name] for labels in self._labels]


def _known(value: T) -> Callable[[], T]:
    return lambda: value


@cached(maxsize=256)
def _is_of_own_tensors(spec: Spec) -> bool:
    """Tell whether what labels add up is made of tensors that nobody else has."""
    # Prefixes give the very tensor that is handed back as weights.
    return not spec.has_prefixes and all(criterion.tensor_name is None for criterion in spec.criteria)


def own(found: Findings) -> Findings:
    """Keep a block whose tokens are dropped, and whose offsets the caller has."""
    kept, tokens, decision = copy(found), copy(found.tokens), copy(found.decision)
    sequences = tokens.sequences
    assert isinstance(sequences, Packed)
    sequences.offsets = sequences.offsets.clone()
    # Log-probs are the caller's, and no statistic of labels reads them. A weight is of the former tokens.
    found.tokens.train = found.tokens.rollout = tokens.train = tokens.rollout = tokens.d
    tokens.derived = dict(tokens.derived)
    kept.tokens, kept.decision, kept.weights = tokens, decision, None
    return kept
