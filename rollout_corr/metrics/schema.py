"""The order of the statistics: of tokens, of sequences, of a call; the native ones before the peers', then a loss's.

The kernels' phases each fill a stretch of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.metrics import aggregates, loss, peers
from rollout_corr.metrics.extra import Extra
from rollout_corr.metrics.histogram import HISTOGRAM
from rollout_corr.metrics.labels import Labels, maxima_of, sums_of
from rollout_corr.metrics.labels import columns_of as of_label_columns
from rollout_corr.metrics.peers import Columns
from rollout_corr.spec.caches import cached
from rollout_corr.spec.checked import by_path
from rollout_corr.spec.correction import Spec
from rollout_corr.spec.loss import Objective


def columns_of(spec: Spec, names: Sequence[str] | None = None) -> Columns:
    """All statistics without the histogram, the native ones first in each stretch.

    Args:
        spec: The Spec.
        names: The names of the criteria in names of statistics; None: their labels.
    """
    names = [criterion.label for criterion in spec.criteria] if names is None else names
    rows = aggregates.aggregates_of(spec, tuple(names))
    of_tokens, of_sequences = ([row for row in rows if (row.at == "tokens") == here] for here in (True, False))
    found = Columns(
        token_sums=tuple(name for row in of_tokens for name in row.sums),
        sequence_sums=tuple(name for row in of_sequences for name in row.sums),
        token_maxima=tuple(name for row in of_tokens for name in row.maxima),
        sequence_maxima=tuple(name for row in of_sequences for name in row.maxima),
    )
    return found.joined(peers.columns(spec, names))


def sum_names(spec: Spec) -> tuple[str, ...]:
    """All sums of a correction. The bins of the histogram of D come before the sums taken once a call."""
    found = columns_of(spec)
    bins = HISTOGRAM if spec.detail == "full" else ()
    return (*found.token_sums, *found.sequence_sums, *bins, *found.call_sums)


def max_names(spec: Spec) -> tuple[str, ...]:
    """All maxima of a correction. Minima travel as maxima of the negated value."""
    found = columns_of(spec)
    return (*found.token_maxima, *found.sequence_maxima, *found.call_maxima)


@cached(maxsize=256)
def layout(
    spec: Spec | None, objective: Objective | None = None, extra: Extra | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the sums and of the maxima, in order: of a correction, of what it was given more, of a policy loss."""
    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()
    if spec is not None:
        sums, maxima = sum_names(spec), max_names(spec)
    if extra is not None:
        sums, maxima = sums + extra.sums(spec), maxima + extra.maxima(spec)
    if objective is not None:
        sums, maxima = sums + loss.sum_names(objective), maxima + loss.max_names()
    return sums, maxima


class Places(NamedTuple):
    """Places of statistics in one vector of sums and then maxima.

    Attributes:
        names: Those of the whole batch, in order.
        pick: [k] int64 on the CPU, their places in the vector; None: all of them are.
        length: The numbers of the vector.
    """

    names: tuple[str, ...]
    pick: Tensor | None
    length: int


@cached(maxsize=256)
def of_the_batch(spec: Spec | None, objective: Objective | None = None, extra: Extra | None = None) -> Places:
    """Find the statistics of a whole batch among those of its labels, of which there are many more."""
    sums, maxima = layout(spec, objective, extra)
    every = (*sums, *maxima)
    if spec is None or extra is None or not extra.labels:
        return Places(every, None, len(every))
    own = extra.of_labels(spec)
    places = [place for place, name in enumerate(every) if name not in own]
    with torch.inference_mode(False):
        pick = torch.tensor(places, device="cpu")
    return Places(tuple(every[place] for place in places), pick, len(every))


class PlacesOfLabels(NamedTuple):
    """Places of the statistics of labels, as `label_metrics.read` takes them.

    Attributes:
        sums, maxima: Among all sums and among all maxima.
        of_sums: How many sums there are.
        length: How many sums and maxima.
    """

    sums: slice
    maxima: slice
    of_sums: int
    length: int


@cached(maxsize=256)
def of_labels(spec: Spec, objective: Objective | None, extra: Extra, labels: Labels) -> PlacesOfLabels:
    """Find the statistics of labels."""
    sums, maxima = layout(spec, objective, extra)

    def stretch(names: tuple[str, ...], wanted: tuple[str, ...]) -> slice:
        first = names.index(wanted[0])
        return slice(first, first + len(wanted))

    found = stretch(sums, sums_of(labels, spec)), stretch(maxima, maxima_of(labels, spec))
    return PlacesOfLabels(*found, len(sums), len(sums) + len(maxima))


@cached(maxsize=256)
def digest(spec: Spec | None, objective: Objective | None = None, extra: Extra | None = None) -> float:
    """A number that differs where statistics do not merge; a float64 holds it exactly."""
    given = [by_path("Spec", spec), by_path("Objective", objective), layout(spec, objective, extra)]
    found = hashlib.blake2b(json.dumps(given).encode(), digest_size=8).digest()
    return float(int.from_bytes(found, "big") >> 12)


class Stretches(NamedTuple):
    """Stretches of the two vectors, each from its first place to before its last."""

    sums: tuple[tuple[int, int], ...]
    maxima: tuple[tuple[int, int], ...]


@cached(maxsize=256)
def of_whole_sequences(spec: Spec, objective: Objective | None = None, extra: Extra | None = None) -> Stretches:
    """Find the statistics of whole sequences, which one rank of a sequence group alone may add.

    All of an `Extra` but those of labels are added on the first rank.
    """
    found = columns_of(spec)
    here = {name for row in aggregates.aggregates_of(spec) if row.local for name in row.sums} | peers.local_sums(spec)
    local = {*found.token_sums, *HISTOGRAM, *here}, set(found.token_maxima)
    stretches = []
    for names, own in zip(layout(spec), local, strict=True):
        wanted = [False, *(name not in own for name in names), False]
        edges = [i for i in range(len(names) + 1) if wanted[i] != wanted[i + 1]]
        stretches.append(list(zip(edges[::2], edges[1::2], strict=True)))
    if extra is not None:
        for one in extra.labels:
            columns, places = of_label_columns(spec, one.units), of_labels(spec, objective, extra, one)
            parts = (places.sums, len(columns.sums)), (places.maxima, len(columns.maxima))
            for part, (place, of_tokens) in zip(stretches, parts, strict=True):
                part.append((place.start + of_tokens * len(one.every), place.stop))
    return Stretches(*map(tuple, stretches))
