"""Taking the statistics of labels: from each block of whole sequences, then from the facts of all of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import lru_cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from rollout_corr.definition.findings import Findings
from rollout_corr.definition.near import SMALL
from rollout_corr.definition.sequences import Packed
from rollout_corr.metrics import sequence_labels, token_labels
from rollout_corr.metrics.all_sequences import AllSequences
from rollout_corr.metrics.deferred import Deferred, Later, OfLabels
from rollout_corr.metrics.extra import Extra
from rollout_corr.metrics.labels import Labelled, count_outside
from rollout_corr.metrics.schema import layout
from rollout_corr.metrics.sequence_labels import PerSequence
from rollout_corr.metrics.statistics import Statistics, deferring
from rollout_corr.metrics.token_labels import PerLabel
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
        self._of_tokens = [one for one in labelled if one.labels.units == "tokens"]
        self._labels = tuple(one.labels for one in labelled)
        # In the order of the blocks, because sums round.
        self._per_sequence: list[Callable[[], PerSequence]] = []
        self._per_label: list[list[Callable[[], PerLabel]]] = [[] for _ in self._of_tokens]
        self._outside: dict[str, float] = {}
        self._waiting = 0

    def take(self, found: Findings, choose: Callable[[Tensor], Tensor] | None = None) -> None:
        """Take the next block, as `Collector.take` does."""
        here = [Labelled(labels, ids if choose is None else choose(ids)) for labels, ids in self._of_tokens]
        waits = self._look and self._may_wait(found)
        if waits:
            self._waiting += found.tokens.d.shape[0]
            found = own(found)
            here = [Labelled(labels, ids.clone()) for labels, ids in here]
            for one in here:
                self._count_outside(one, None)
        if self._of_sequences:
            of_block = partial(sequence_labels.of_block, found)
            self._per_sequence.append(of_block if waits else _known(of_block()))
        for one, blocks in zip(here, self._per_label, strict=True):
            of_tokens = partial(token_labels.of_block, found, one, self._look)
            if waits:
                blocks.append(of_tokens)
                continue
            taken = of_tokens()
            blocks.append(_known(taken))
            if self._look:
                name = count_outside(one.labels)
                many = len(one.labels.every)
                self._outside[name] = self._outside.get(name, 0.0) + taken.sums[many - 1].item()

    def _may_wait(self, found: Findings) -> bool:
        """Tell whether the tokens of a block are few enough to be kept, and none of them is the caller's."""
        few = self._waiting + found.tokens.d.shape[0] <= SMALL
        return few and found.tokens.turns is None and _is_of_own_tensors(found.spec)

    def _count_outside(self, one: Labelled, among: Tensor | None) -> None:
        """Count the units whose id names no label."""
        labels, ids = one
        low, high = (int(x) for x in ids.aminmax()) if ids.numel() else (0, 0)
        count, name = 0, count_outside(labels)
        if low < 0 or high >= len(labels.values):
            outside = (ids < 0) | (ids >= len(labels.values))
            count = int(torch.count_nonzero(outside if among is None else outside & among))
        self._outside[name] = self._outside.get(name, 0.0) + count

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
        for one in self._of_sequences:
            self._count_outside(one, view.facts.tokens > 0)
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
        for one, blocks in zip(self._of_tokens, self._per_label, strict=True):
            total, *others = (block() for block in blocks)
            for other in others:
                total = total.joined(other)
            found[one.labels.name] = total
        return [found[labels.name] for labels in self._labels]


def _known(value: T) -> Callable[[], T]:
    return lambda: value


@lru_cache(maxsize=256)
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
    # Log-probs are the caller's, and no statistic of labels reads them.
    tokens.train = tokens.rollout = tokens.d
    tokens._known, tokens._near = dict(tokens._known), list(tokens._near)
    kept.tokens, kept.decision, kept.weights = tokens, decision, None
    return kept
