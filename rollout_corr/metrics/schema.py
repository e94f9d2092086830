"""The order of the statistics: of tokens, of sequences, of a call; the native ones before the peers', then a loss's.

The kernels' phases each fill a stretch of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..specs.caches import cached
from ..specs.checked import by_path
from ..specs.correction import Spec
from . import aggregates, peers
from .histogram import HISTOGRAM, HISTOGRAM_OF_WEIGHTS
from .peers import Columns

if TYPE_CHECKING:
    from ..specs.terms import Objective
    from .extra import Extra
    from .labels import LabelSet


def columns_of(spec: Spec, names: Sequence[str] | None = None) -> Columns:
    """All statistics without the histogram, the native ones first in each stretch; `names` as in `aggregates_of`."""
    names = [criterion.label for criterion in spec.criteria] if names is None else names
    rows = aggregates.aggregates_of(spec, tuple(names))
    late = [row for row in rows if row.at == "diagnosis"]
    of_tokens = [row for row in rows if row.at == "tokens"]
    of_sequences = [row for row in rows if row.at not in ("tokens", "diagnosis")]
    native = Columns(
        token_sums=tuple(name for row in of_tokens for name in row.sums),
        sequence_sums=tuple(name for row in of_sequences for name in row.sums),
        call_sums=tuple(name for row in late for name in row.sums),
        token_maxima=tuple(name for row in of_tokens for name in row.maxima),
        sequence_maxima=tuple(name for row in of_sequences for name in row.maxima),
        call_maxima=tuple(name for row in late for name in row.maxima),
    )
    return native.joined(peers.columns(spec, names))


def bins_weights(spec: Spec) -> bool:
    """True where the weights of turns or sequences have a histogram."""
    return spec.detail == "full" and spec.weight is not None and spec.weight.over in ("turn", "sequence")


def names_of(spec: Spec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All sums and all maxima of a correction. The bins of the histogram come before the sums taken once a call."""
    columns = columns_of(spec)
    bins = HISTOGRAM if spec.detail == "full" else ()
    of_weights = HISTOGRAM_OF_WEIGHTS if bins_weights(spec) else ()
    sums = (*columns.token_sums, *columns.sequence_sums, *bins, *of_weights, *columns.call_sums)
    return sums, (*columns.token_maxima, *columns.sequence_maxima, *columns.call_maxima)


# --- all together ---


@cached(maxsize=256)
def layout(
    spec: Spec | None, objective: Objective | None = None, extra: Extra | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the sums and of the maxima, in order: of a correction, of what it was given more, of a policy loss."""
    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()
    if spec is not None:
        sums, maxima = names_of(spec)
    if spec is not None and extra is not None and extra.labels:
        from .by_label import layout_of_labels

        of_labels = layout_of_labels(spec, extra)
        sums, maxima = sums + of_labels[0], maxima + of_labels[1]
    if extra is not None:
        sums, maxima = sums + extra.sums(), maxima + extra.maxima()
    if objective is not None:
        from . import loss

        sums, maxima = sums + loss.sum_names(objective), maxima + loss.max_names()
    return sums, maxima


class Places(NamedTuple):
    """Places of statistics in one vector of sums and then maxima."""

    names: tuple[str, ...]  # of the whole batch, in order
    pick: Tensor | None  # [k] int64 on the CPU, their places in the vector; None: all of them are
    length: int  # of the vector


@cached(maxsize=256)
def of_the_batch(spec: Spec | None, objective: Objective | None = None, extra: Extra | None = None) -> Places:
    """Find the statistics of a whole batch among the many more of its labels."""
    every = tuple(chain(*layout(spec, objective, extra)))
    if spec is None or extra is None or not extra.labels:
        return Places(every, None, len(every))
    from .by_label import layout_of_labels
    from .labels import count_outside

    own = {*chain(*layout_of_labels(spec, extra))} - {count_outside(labels) for labels in extra.labels}
    places = [place for place, name in enumerate(every) if name not in own]
    with torch.inference_mode(False):
        pick = torch.tensor(places, device="cpu")
    return Places(tuple(every[place] for place in places), pick, len(every))


@cached(maxsize=256)
def of_labels(spec: Spec, objective: Objective | None, extra: Extra, labels: LabelSet) -> tuple[slice, slice]:
    """Find the sums and the maxima of labels, among all sums and among all maxima."""
    from .by_label import of_every_label, of_label

    statistics = of_label(spec, labels.units)

    def stretch(names: tuple[str, ...], wanted: tuple[str, ...]) -> slice:
        first = names.index(of_every_label(labels, wanted[:1])[0])
        return slice(first, first + len(wanted) * len(labels.every))

    sums, maxima = layout(spec, objective, extra)
    return stretch(sums, statistics.sums), stretch(maxima, statistics.maxima)


@cached(maxsize=256)
def digest(spec: Spec | None, objective: Objective | None = None, extra: Extra | None = None) -> float:
    """A number that differs where statistics do not merge; a float64 holds it exactly."""
    fixed = [by_path("Spec", spec), by_path("Objective", objective), layout(spec, objective, extra)]
    hashed = hashlib.blake2b(json.dumps(fixed).encode(), digest_size=8).digest()
    return float(int.from_bytes(hashed, "big") >> 12)


@cached(maxsize=256)
def of_whole_sequences(
    spec: Spec, objective: Objective | None = None, extra: Extra | None = None
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Stretches of sums and of maxima over whole sequences, which one rank of `Ranks.sequence` alone may add.

    Each is from its first place to before its last. What `extra` holds besides labels is not among them.
    """
    columns = columns_of(spec)
    here = [row for row in aggregates.aggregates_of(spec) if row.local]
    local_sums = {name for row in here for name in row.sums} | peers.local_sums(spec)
    local_maxima = {name for row in here for name in row.maxima}
    sums, maxima = (
        _stretches([name not in local for name in names])
        for names, local in zip(
            layout(spec),
            ({*columns.token_sums, *HISTOGRAM, *local_sums}, {*columns.token_maxima, *local_maxima}),
            strict=True,
        )
    )
    for labels in () if extra is None else extra.labels:
        from .by_label import of_label

        assert extra is not None
        mine, (in_sums, in_maxima) = of_label(spec, labels.units), of_labels(spec, objective, extra, labels)
        sums.append((in_sums.start + mine.token_sums * len(labels.every), in_sums.stop))
        maxima.append((in_maxima.start + mine.token_maxima * len(labels.every), in_maxima.stop))
    return sums, maxima


def _stretches(wanted: list[bool]) -> list[tuple[int, int]]:
    padded = [False, *wanted, False]
    edges = [i for i in range(len(wanted) + 1) if padded[i] != padded[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))
