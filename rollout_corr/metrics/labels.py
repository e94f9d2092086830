"""Labels, such as the environment of a sequence or the policy version of a token: their names, and those of statistics.

A label of a sequence has the statistics that a call with its sequences alone would give: sequence_labels.py. A label of
tokens has those of its tokens: token_labels.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rollout_corr.definition.sequences import Packed
from rollout_corr.metrics.aggregates import rows_at, weighs_sequences
from rollout_corr.spec.caches import cached
from rollout_corr.spec.correction import Criterion, Spec

# Tokens up to which a batch is small.
SMALL = 65_536

Units = Literal["sequences", "tokens"]
SEQUENCES: Units = "sequences"
TOKENS: Units = "tokens"


class Labels(NamedTuple):
    """A property that sequences, or tokens, are told apart by, with a name for each of its values.

    Attributes:
        name: Such as "environment".
        values: The name of each label, in the order of the ids.
        units: Those that have a label of their own.
    """

    name: str
    values: tuple[str, ...]
    units: Units = SEQUENCES

    @property
    def every(self) -> tuple[str, ...]:
        """The labels, and behind them that of units whose id names none."""
        return (*self.values, "?")


class Labelled(NamedTuple):
    """Labels, and those of a batch.

    Attributes:
        labels: Their names.
        ids: Integers, [S], or those of tokens in the shape of the batch.
    """

    labels: Labels
    ids: Tensor


# --- names ---


class Columns(NamedTuple):
    """Names of the sums and maxima of a label, in order.

    Attributes:
        sums, maxima: Those that blocks of tokens give.
        more_sums, more_maxima: Behind them, those that the facts of whole sequences give.
    """

    sums: tuple[str, ...]
    maxima: tuple[str, ...]
    more_sums: tuple[str, ...] = ()
    more_maxima: tuple[str, ...] = ()

    @property
    def all_sums(self) -> tuple[str, ...]:
        """All sums."""
        return self.sums + self.more_sums

    @property
    def all_maxima(self) -> tuple[str, ...]:
        """All maxima."""
        return self.maxima + self.more_maxima


OF_TOKENS = ("abs_d", "d2", "k3", "ratio", "ratio2", "tokens_clamped")
SQUARES = ("raw2", "weight2")
BEYOND = ("tokens_above", "tokens_below")
PLAIN = ("raw_plain", "raw_plain2", "weight_plain", "weight_plain2")


@cached(maxsize=256)
def columns_of(spec: Spec, units: str) -> Columns:
    """Name the statistics of a label of sequences, or of tokens."""
    return _of_sequences(spec) if units == "sequences" else _of_tokens(spec)


def _of_sequences(spec: Spec) -> Columns:
    sums, ends, more_sums, more_ends = [*OF_TOKENS], ["d"], [], ["log_ppl_diff"]
    if spec.weighs_tokens:
        sums += [*SQUARES, *BEYOND[: 0 if spec.weighs_prefixes else None]]
        ends += ["raw", "weight"]
    if weighs_sequences(spec):
        more_sums += [*SQUARES, *BEYOND]
        more_ends += ["raw", "weight"]
    if weighs(spec):
        more_ends += ["sequence_raw", "sequence_weight"]
    for criterion in criteria_of(spec):
        value = f"{criterion.label}/value"
        (sums if criterion.per_token else more_sums).extend((value, f"{value}2"))
        (ends if criterion.per_token else more_ends).append(value)
    more_sums += [row.sums[0] for row in rows_at(spec, "sequences", "measured") if row.each]
    return Columns(tuple(sums), _both(ends), tuple(more_sums), ("max_abs_sum_d", *_both(more_ends)))


def _of_tokens(spec: Spec) -> Columns:
    sums = ["tokens", "tokens_measured", "tokens_nonfinite", "tokens_kept", "d", *OF_TOKENS]
    ends = ["d"]
    if spec.weight is not None:
        sums += ["raw", "weight", *SQUARES, *BEYOND]
        sums += () if spec.weight.level == "token" else PLAIN
        ends += ["raw", "weight"]
    for criterion in spec.criteria:
        own, value = criterion.label, f"{criterion.label}/value"
        sums.append(f"{own}/tokens")
        if criterion.per_token:
            sums += [f"{own}/units", value, f"{value}2"]
            ends.append(value)
    return Columns(tuple(sums), _both(ends))


def _both(names: list[str]) -> tuple[str, ...]:
    """All maxima, then all minima, which travel as maxima of the negated value."""
    return tuple(f"{end}_{name}" for end in ("max", "-min") for name in names)


def weighs(spec: Spec) -> bool:
    """Tell whether tokens or sequences have a weight of their own."""
    return spec.weighs_tokens or weighs_sequences(spec)


def criteria_of(spec: Spec) -> list[Criterion]:
    """The criteria whose values are measured by label of a sequence: not those of turns."""
    return [criterion for criterion in spec.criteria if criterion.over != "turn"]


def sums_of(labels: Labels, spec: Spec) -> tuple[str, ...]:
    """Names of all sums, each of all labels before the next."""
    return _named(labels, columns_of(spec, labels.units).all_sums)


def maxima_of(labels: Labels, spec: Spec) -> tuple[str, ...]:
    """Names of all maxima, likewise."""
    return _named(labels, columns_of(spec, labels.units).all_maxima)


def count_outside(labels: Labels) -> str:
    """Name the sum of units whose id names no label."""
    return f"{labels.name}={labels.every[-1]}/{labels.units}"


def outside_of(labels: Labels) -> str:
    """The key of the count of units whose id names no label."""
    return f"{labels.name}/outside/{labels.units}"


def _named(labels: Labels, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{labels.name}={value}/{name}" for name in names for value in labels.every)


# --- places ---


def places_of(labelled: Labelled, look: bool = False) -> Tensor:
    """int64 in the shape of the ids: the place of each label; an id that names none has the place behind all of them.

    An index out of range would end a process on a device. `look` reads whether there is one.
    """
    ids, many = labelled.ids.long(), len(labelled.labels.values)
    if look and ids.numel() and int(ids.amin()) >= 0 and int(ids.amax()) < many:
        return ids
    return torch.where((ids >= 0) & (ids < many), ids, many)


def narrow_places(labelled: Labelled) -> Tensor:
    """Give the places of CPU tensors in as few bytes as hold them, in memory of their own."""
    ids, many = labelled.ids, len(labelled.labels.values)
    if ids.numel():
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= many:
            ids = places_of(labelled)
    dtype = torch.uint8 if many < 256 else torch.int32
    return ids.clone() if ids.dtype == dtype else ids.to(dtype)


def sorted_by(place: Tensor, many: int) -> tuple[Tensor, Packed]:
    """Sort units by label: what adds them up in this order gives the same bits every time, as atomics do not.

    Args:
        place: [N] integers, of `places_of`.
        many: How many labels there are.

    Returns:
        [N] int64, the units in order, and which of them have which label.
    """
    ordered, order = place.sort(stable=True)
    # As many labels as bytes can name have one more end than those.
    ends = torch.arange(many, device=place.device).to(place.dtype)
    begins = torch.searchsorted(ordered, ends)
    return order, Packed(torch.cat([begins, begins.new_full((1,), place.shape[0])]), place.shape[0])
