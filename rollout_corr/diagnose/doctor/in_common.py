"""Hypotheses of what differing tokens have in common, and a test that chance and base rates do not pass.

A hypothesis is a set of tokens, or of sequences, by the columns of the dump. Each is a way to write down which tokens
differ: the rate in the set, the rate outside of it, and then which ones. What is explained takes fewer bits. Chance is
written down in the ways of `_chance`: every token by itself, whole sequences, sequences with rates of their own, and
runs that begin or lie anywhere. A hypothesis is named if it saves `SURE` bits over the shortest of these, its own name
paid for; so chance of one of these forms passes in fewer than 2^-SURE of dumps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..measure.bits import PAGES, PREFIX_PAGES, Bits, Group
from ..read.fields import Names, name_of
from .cause import counted

SURE = 10.0
# Borders whose bits are so few more may be the true one, and the roundest of them is named.
NEAR = 3.0
# What is named holds this share of the differences at least.
MOST_OF_ALL = 0.9
# Others that explain as well are listed up to so many.
MOST_ALIKE = 3

Unit = Literal["tokens", "sequences"]
UNITS: tuple[Unit, ...] = get_args(Unit)


class Sets(NamedTuple):
    """The sets of a hypothesis over one column."""

    of: str  # the column's name, as a message says it
    parameters: Any  # what each set is made by: a residue, a first position, a value
    counts: Tensor  # the counts of each set, as of `Counts`
    bits: float  # bits that name one of them
    page: int | None = None  # page size; `parameters` are places in it
    # Where a set begins: the smallest number that makes the same set. `parameters` are the largest ones.
    lowest: list[int] | None = None


Make = Callable[[Bits], Iterator[Sets]]


@dataclass(frozen=True)
class Hypothesis:
    """Something that tokens which differ may have in common."""

    kind: str  # its name
    unit: Unit  # whether its sets are of tokens or of whole sequences
    says: str  # the sentence, with {of}, {at} and {page}
    advice: str  # what to try
    make: Make  # gives its sets


@dataclass(frozen=True)
class InCommon:
    """Something that the tokens which differ have in common.

    Attributes:
        kind: Such as "page" or "label".
        says: In words.
        advice: What to try.
        of: The column that it is about, such as "position" or "rank".
        at: The parameter: a place of the page, the first position, the value of a label.
        page: The size of the page, where it is about one.
        unit: What is counted: tokens, or sequences.
        size, differing: How many there are, and how many of these differ.
        share: The share of all differing tokens that it holds; 1.0 covers them all.
        bits: What it saves over chance.
        alike: What else holds the same tokens, in words.
    """

    kind: str
    says: str
    advice: str = field(repr=False)
    of: str
    at: float | str
    page: int | None
    unit: Unit
    size: int
    differing: int
    share: float
    bits: float
    alike: tuple[str, ...] = ()


# --- the sets

# Coordinates along a sequence, by preference where they are the same.
COORDINATES = {
    "position": "position",
    "place": "place in the row",
    "context": "position from the prompt's first token",
}


def _coordinates(bits: Bits) -> Iterator[tuple[str, Group]]:
    for name, of in COORDINATES.items():
        if name in bits.groups and (name != "place" or bits.holes):
            yield of, bits.groups[name]


def _thresholds(of: str, table: Tensor) -> Iterator[Sets]:
    """Make the sets of all values from one on, except for the first, which has all."""
    first, *values = table[0].nonzero().squeeze(1).tolist() or [0]
    if values:
        lowest = [value + 1 for value in (first, *values[:-1])]
        counts = table.flip(1).cumsum(1).flip(1)[:, values]
        yield Sets(of, values, counts, math.log2(len(values)), lowest=lowest)


def _first_tokens(bits: Bits) -> Iterator[Sets]:
    yield Sets("position", [0], bits.groups["position"].tokens.table[:, :1], 0.0)


def _modulo(of: str, table: Tensor, sizes: Sequence[int], extra: float) -> Iterator[Sets]:
    """Make the sets of values with one remainder."""
    for size in sizes:
        sums = torch.nn.functional.pad(table, (0, -table.shape[1] % size)).view(len(table), -1, size).sum(1)
        yield Sets(of, range(size), sums, extra + math.log2(len(sizes) * size), size)


def _pages(bits: Bits) -> Iterator[Sets]:
    for of, group in _coordinates(bits):
        yield from _modulo(of, group.tokens.table, PAGES, 0.0)


def _marked(bits: Bits, unit: Unit, name: str, of: str, cost: float, page: int | None = None) -> Iterator[Sets]:
    """Make the set that is counted under the value 1, if anything is in it."""
    group = bits.groups.get(name)
    table = None if group is None else getattr(group, unit).table[:, 1:]
    if table is not None and table.shape[1]:
        yield Sets(of, [page or 1], table, cost, page)


def _phases(bits: Bits) -> Iterator[Sets]:
    for page in PAGES:
        cost = math.log2(len(PAGES)) + bits.affected * math.log2(page)
        yield from _marked(bits, "tokens", f"phase/{page}", "place in the row", cost, page)


def _prefix_hits(unit: Unit) -> Make:
    def made(bits: Bits) -> Iterator[Sets]:
        yield from _marked(bits, unit, "cached", "cached_tokens", 1.0)
        for page in PREFIX_PAGES:
            cost = 1.0 + math.log2(len(PREFIX_PAGES))
            yield from _marked(bits, unit, f"prefix/{page}", "token_ids", cost, page)

    return made


def _turns(bits: Bits) -> Iterator[Sets]:
    yield from _thresholds("turn", bits.groups["turn"].tokens.table)


def _positions(bits: Bits) -> Iterator[Sets]:
    for of, group in _coordinates(bits):
        yield from _thresholds(of, group.tokens.table)


def _token_ids(bits: Bits) -> Iterator[Sets]:
    if "token_ids" in bits.groups:
        table = bits.groups["token_ids"].tokens.table
        some = table[0].nonzero().squeeze(1).tolist()
        yield Sets("token id", some, table[:, some], math.log2(max(1, len(some))))


def _labels(unit: Unit, names: tuple[str, ...] | None) -> Make:
    """Make the sets of one value of columns: of these, or of what the user calls labels."""

    def made(bits: Bits) -> Iterator[Sets]:
        for name in bits.labels if names is None else names:
            group = bits.groups.get(f"label/{name}")
            if group is None or group.too_many or (group.within != (unit == "tokens")):
                continue
            table = getattr(group, unit).table
            yield Sets(name, list(group.names)[: table.shape[1]], table, math.log2(max(1, table.shape[1])))

    return made


def _from_values(names: tuple[str, ...]) -> Make:
    """Make the sets of a column's values from one on."""

    def made(bits: Bits) -> Iterator[Sets]:
        for name in names:
            group = bits.groups.get(f"label/{name}")
            if group is None or group.too_many or group.within:
                continue
            table = group.sequences.table
            order = sorted(range(table.shape[1]), key=list(group.names).__getitem__)
            yield from (
                one._replace(parameters=[list(group.names)[order[int(i)]] for i in one.parameters], lowest=None)
                for one in _thresholds(name, table[:, order])
            )

    return made


def _files(bits: Bits) -> Iterator[Sets]:
    group = bits.groups["file"]
    if not group.too_many and len(group.names) > 1:
        yield Sets("file", list(group.names), group.sequences.table, math.log2(len(group.names)))


def _rows(bits: Bits) -> Iterator[Sets]:
    table = bits.groups["row"].sequences.table
    if len(bits.groups["file"].names) > 1:
        yield Sets("record", range(table.shape[1]), table, 1.0 + math.log2(table.shape[1]))
    yield from _modulo("record", table, [size for size in (2, 4, 8, *PAGES) if 2 * size <= table.shape[1]], 1.0)


def _batch_sizes(bits: Bits) -> Iterator[Sets]:
    """Make the sets of files with one number of sequences, where several have it: each file is a batch."""
    group = bits.groups["file"]
    table = group.sequences.table
    sizes, inverse, files = table[0].unique(return_inverse=True, return_counts=True)
    if not group.too_many and sizes.numel() > 1:
        sums = table.new_zeros(len(table), sizes.numel()).index_add_(1, inverse, table)
        several = files > 1
        yield Sets("file", sizes[several].tolist(), sums[:, several], math.log2(sizes.numel()))


def _lengths(bits: Bits) -> Iterator[Sets]:
    groups = [(of, group) for of, group in _coordinates(bits)]
    if "prompt" in bits.groups:
        groups.append(("prompt", bits.groups["prompt"]))
    for of, group in groups:
        for one in _thresholds(of, group.sequences.table):
            # Above a number: the border may be the longest of the others.
            longest = [int(length) - 1 for length in one.parameters]
            lowest = [length - 1 for length in one.lowest or ()]
            yield one._replace(of="prompt " if of == "prompt" else "", parameters=longest, lowest=lowest)


def roundest(low: int, high: int) -> int:
    """Return the number from low to high that the largest power of two divides, the smallest of these."""
    step = 1 << max(high, 1).bit_length()
    while True:
        found = -(-low // step) * step
        if found <= high and found > 0:
            return found
        if step == 1:
            return high
        step //= 2


NOT_INVARIANT = (
    "Kernels whose sums depend on the batch do this: make the engine batch invariant (vLLM: VLLM_BATCH_INVARIANT=1; "
    "SGLang: --enable-deterministic-inference)."
)
PREFIX = (
    "Turn the prefix cache off (vLLM: --no-enable-prefix-caching; SGLang: --disable-radix-cache) and dump again: what "
    "is computed after a hit takes another kernel, or another split of its sums, than a whole prefill."
)
REPLICA = "Compare what serves these with the others: weights, versions of kernels and libraries, GPU, parallelism."
ATTENTION = (
    "Look at the kernel that reads the KV cache: dump again with another page size (vLLM: --block-size; SGLang: "
    "--page-size), or another attention backend."
)
PREFILL = (
    "Prefill is split into chunks: raise the chunk beyond these (vLLM: --max-num-batched-tokens; SGLang: "
    "--chunked-prefill-size) and dump again."
)

# Values of a column that tokens or sequences have: kind, sentence, advice, and the columns; None: those of --by.
OF_COLUMNS: tuple[tuple[str, str, str, tuple[str, ...] | None], ...] = (
    ("label", "{of} {at}", REPLICA, None),
    (
        "version",
        "weight version {at}",
        "Its weights differed from the trainer's: compare a checksum of each tensor after the push.",
        ("versions",),
    ),
    ("step", "step {at}", "Look at what changed with this step.", ("steps",)),
)

# Where two hold the same tokens and cost the same, the first is named.
HYPOTHESES = (
    Hypothesis(
        "first_token",
        "tokens",
        "the first token of a sequence",
        "Its log-prob comes from the prefill, the others from decoding: compare the two passes of the engine, and "
        "whether the trainer's row for it belongs to the prompt's last token.",
        _first_tokens,
    ),
    Hypothesis(
        "turn_start",
        "tokens",
        "the first token of a later turn",
        "Text from outside ends before it: compare the ids of both sides there, and the engine's prefill.",
        lambda bits: _marked(bits, "tokens", "turn_start", "turn", 0.0),
    ),
    Hypothesis(
        "turn",
        "tokens",
        "from turn {at:g} on (the first is 0)",
        f"Later turns are prefilled after what the engine has cached. {PREFIX}",
        _turns,
    ),
    Hypothesis("prefix_hit", "tokens", "behind a prefix-cache hit ({of}{pages})", PREFIX, _prefix_hits("tokens")),
    Hypothesis("page", "tokens", "{of} modulo {page} is {at:g}", ATTENTION, _pages),
    Hypothesis(
        "position",
        "tokens",
        "from {of} {at:g} on",
        "Something changes at this length: a split of attention over the KV cache, a window, a captured graph, a RoPE "
        "scale. Look at what the engine switches there.",
        _positions,
    ),
    Hypothesis(
        "page_of_each",
        "tokens",
        "one place modulo {page}, in each sequence another one (add prompt_lengths to the dump: with them it may be "
        "one place)",
        ATTENTION,
        _phases,
    ),
    Hypothesis(
        "token_id",
        "tokens",
        "token id {at}",
        "Compare its row of the head and of the embedding on both sides: padding of the vocabulary, an added token, "
        "weights that were not pushed.",
        _token_ids,
    ),
    Hypothesis(
        "prefix_hit", "sequences", "sequences with a prefix-cache hit ({of}{pages})", PREFIX, _prefix_hits("sequences")
    ),
    Hypothesis("file", "sequences", "file {at}", REPLICA, _files),
    *(
        Hypothesis(kind, unit, says, advice, _labels(unit, names))
        for unit in UNITS
        for kind, says, advice, names in OF_COLUMNS
    ),
    Hypothesis(
        "from",
        "sequences",
        "from {of} {at:g} on",
        "Something changed there, and stayed: a push of weights that failed, a restart, another kernel.",
        _from_values(("versions", "steps")),
    ),
    Hypothesis("length", "sequences", "sequences whose {of}length is above {at:g}", PREFILL, _lengths),
    Hypothesis("batch_size", "sequences", "files of {at} sequences", NOT_INVARIANT, _batch_sizes),
    Hypothesis("row", "sequences", "record {at:g}{modulo} of a file", NOT_INVARIANT, _rows),
)


# --- the test


def _entropy(n: float, k: float) -> float:
    """Return the fewest bits that say which k of n they are, by their best rate."""
    if k <= 0 or k >= n:
        return 0.0
    rate = k / n
    return -n * (rate * math.log2(rate) + (1.0 - rate) * math.log2(1.0 - rate))


def _bits(n: Tensor, k: Tensor) -> Tensor:
    """Return the bits of how many and which k of n they are, without knowing a rate."""
    ways = torch.lgamma(n + 1.0) - torch.lgamma(k + 1.0) - torch.lgamma(n - k + 1.0)
    return (n + 1.0).log2() + ways / math.log(2.0)


def _split(n: Tensor, k: Tensor, all_n: float, all_k: float) -> Tensor:
    """Return the bits that name k of n in a set and the rest outside; infinite where the set explains too little."""
    rest, left = all_n - n, all_k - k
    outside = torch.where(left > 0, _bits(rest, left), torch.zeros_like(rest))
    explains = (k >= MOST_OF_ALL * all_k) & (rest > 0) & (k * rest > 2.0 * left * n)
    return (_bits(n, k) + outside + 1.0).where(explains, torch.inf)


def _chance(bits: Bits) -> tuple[float, float, float]:
    """Return the bits that name affected sequences, and their tokens, and the fewest that name both by chance."""
    runs, k, s = bits.runs, bits.differing, bits.affected
    which = _entropy(bits.sequences, s)
    anywhere = _entropy(runs["after"], k - s)
    # More often than in every tenth token, beginning is no chance: it would be at the first token.
    until = _entropy(max(runs["until"], 10.0 * s), s)
    # The last difference is known too, where there is a second one.
    burst = runs["ends"] + _entropy(runs["between"], runs["within"])
    within = min(_entropy(runs["tokens"], k), runs["begins"] + min(anywhere, burst))
    ways = (_entropy(bits.tokens, k), which + within, until + min(anywhere, burst), runs["own_rates"])
    return which, within, min(ways)


class _Best(NamedTuple):
    """The hypothesis with the fewest bits, its set, and the first and the last set next to it that are as good."""

    bits: float
    hypothesis: Hypothesis | None = None
    sets: Sets | None = None
    chosen: int = 0
    near: tuple[int, int] = (0, 0)


def _best(bits: Bits, unit: Unit, cost: Callable[[Tensor], Tensor]) -> _Best:
    """Find the set of a unit that takes the fewest bits, its name included."""
    made = [(one, sets) for one in HYPOTHESES if one.unit == unit for sets in one.make(bits) if sets.counts.shape[1]]
    kinds = math.log2(max(1, len({one.kind for one, _ in made})))
    best = _Best(math.inf)
    for one, sets in made:
        found = cost(sets.counts.double()) + sets.bits + kinds
        index = int(found.argmin())
        # A hair, so that rounding does not choose between equal sets.
        if float(found[index]) < best.bits - 1e-6:
            poor = (found > found[index] + NEAR).nonzero().squeeze(1)
            low, high = poor[poor < index], poor[poor > index]
            near = int(low[-1]) + 1 if low.numel() else 0, int(high[0]) - 1 if high.numel() else found.numel() - 1
            best = _Best(float(found[index]), one, sets, index, near)
    return best


def in_common(bits: Bits, names: Names) -> list[InCommon]:
    """Say what the tokens that differ have in common: nothing, something of tokens, of sequences, or one of each.

    Args:
        bits: The counts of a dump.
        names: Names of labels.
    """
    if not bits.differing:
        return []
    k, s = float(bits.differing), float(bits.affected)
    which, within, chance = _chance(bits)
    runs = bits.runs["tokens"]

    alone = _best(bits, "tokens", lambda counts: _split(counts[0], counts[2], bits.tokens, k))
    drawn = _best(bits, "tokens", lambda counts: _split(counts[1], counts[2], runs, k))
    whole = _best(bits, "sequences", lambda counts: _split(counts[0], counts[1], bits.sequences, s))
    by_rate = _best(bits, "sequences", lambda counts: _split(counts[2], counts[3], bits.tokens, k))
    # What is found, with its bits; each thing more has to save SURE bits.
    ways: list[tuple[float, tuple[_Best, ...]]] = [
        (chance, ()),
        (alone.bits, (alone,)),
        (which + drawn.bits, (drawn,)),
        (whole.bits + within, (whole,)),
        (by_rate.bits, (by_rate,)),
        (whole.bits + drawn.bits, (whole, drawn)),
    ]
    total, found = min(ways, key=lambda way: way[0] + SURE * len(way[1]))
    return [_said(bits, one, chance - total, names) for one in found]


def _said(bits: Bits, best: _Best, saved: float, names: Names) -> InCommon:
    one, sets = best.hypothesis, best.sets
    assert one is not None and sets is not None
    chosen = best.chosen
    if sets.lowest is not None:
        low, high = best.near
        border = roundest(sets.lowest[low], int(sets.parameters[high]))
        # The set that this border makes, which may be another one than the best.
        chosen = bisect_left(sets.parameters, border)
        sets.parameters[chosen] = border
    counts = sets.counts[:, chosen]
    tokens = one.unit == "tokens"
    size, differing = int(counts[0]), int(counts[2 if tokens else 1])
    alike = [
        _words(other, others, index, names)
        for other in HYPOTHESES
        if other.unit == one.unit and other.kind != one.kind
        for others in other.make(bits)
        for index in (others.counts == counts[:, None]).all(0).nonzero().squeeze(1).tolist()[:1]
    ]
    return InCommon(
        kind=one.kind,
        says=_words(one, sets, chosen, names),
        advice=one.advice,
        of=sets.of,
        at=sets.parameters[chosen],
        page=sets.page,
        unit=one.unit,
        size=size,
        differing=differing,
        share=int(counts[2 if tokens else 3]) / bits.differing,
        bits=saved,
        alike=tuple(alike[:MOST_ALIKE]),
    )


def _words(one: Hypothesis, sets: Sets, index: int, names: Names) -> str:
    at: float | str = sets.parameters[index]
    if one.kind in ("label", "version", "step", "token_id") and not isinstance(at, str):
        at = name_of(names.get(sets.of, ()), at)
    pages = f", in pages of {sets.page}" if sets.page is not None and sets.page > 1 else ""
    modulo = f" modulo {sets.page}" if sets.page is not None else ""
    return one.says.format(of=sets.of, at=at, page=sets.page, pages=pages, modulo=modulo)


def sentence(one: InCommon) -> str:
    """Say what was found, and how well it explains the differences."""
    what = counted(one.size, one.unit[:-1])
    rest = "and no other" if one.share == 1.0 else f"with {100.0 * one.share:.3g} % of all tokens that differ"
    also = f" (the same tokens: {'; '.join(one.alike)})" if one.alike else ""
    return f"{one.says}: {one.differing:,} of {what} there differ, {rest}{also}"
