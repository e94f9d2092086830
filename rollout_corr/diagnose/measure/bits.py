"""Which tokens differ at all, counted by everything that they could have in common: tables that merge by +."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...definition.tokens import ulps
from ..read.chunk import MISSING_INTEGER, ValidTokens
from .profiles import Numbering

# Sizes of a page or block of a KV cache. SGLang's prefix cache also has pages of one token.
PAGES = (16, 32, 64, 128, 256)
PREFIX_PAGES = (1, *PAGES)
# Places along a sequence and ids of tokens are counted one by one below this; beyond it, places modulo FOLD, a multiple
# of every page, so that what is behind a border stays there.
MOST_PLACES, FOLD = 1 << 18, 4096
# The most values of a column, files, and turns that are counted. Of a column with more values nothing is said.
MOST_VALUES, MOST_TURNS = 4096, 64


@dataclass(frozen=True)
class Difference:
    """A token whose two log-probs are not equal.

    Attributes:
        file: Path of the file.
        record: Number of its sequence in the file, from 0.
        position: Number of valid tokens of the sequence before it.
        train_logp: Log-prob of the trainer.
        rollout_logp: Log-prob of the engine.
        ulps: How many numbers of `dtype` they are apart; None where one is not finite.
        dtype: The dtype that both have in the dump, such as "bfloat16"; else the one that computes.
    """

    file: str
    record: int
    position: int
    train_logp: float
    rollout_logp: float
    ulps: int | None
    dtype: str


class Counts:
    """Counts by a whole number from 0, each value with a column of `rows` counts.

    Of tokens: all, those of sequences in which some token differs, those that differ. Of sequences: all, those in which
    some token differs, and the tokens of both kinds.
    """

    def __init__(self, rows: int) -> None:
        self.table = torch.zeros(rows, 0, dtype=torch.int64)

    def add(self, values: Tensor, *counts: Tensor) -> None:
        """Add counts or masks, each [n], at the values, [n]."""
        if not values.numel():
            return
        size = int(values.max()) + 1
        if size > self.table.shape[1]:
            more = self.table.new_zeros(len(self.table), size - self.table.shape[1])
            self.table = torch.cat([self.table, more], 1)
        for row, count in zip(self.table, counts, strict=True):
            row.index_add_(0, values, count.to(torch.int64))


class Group:
    """Counts of the tokens, and of the sequences, that have each value of something."""

    def __init__(self) -> None:
        self.tokens, self.sequences = Counts(3), Counts(4)
        # The column of the counts of each value, where it is not the value itself.
        self.names = Numbering(MOST_VALUES)
        self.within = False  # the value changes within a sequence; then a sequence has no value of its own
        self.too_many = False  # there were more values than are counted

    def places_of(self, values: Tensor) -> Tensor:
        """Give values that may be any numbers a place each; -1: it has none."""
        places, known = torch.full_like(values, -1, dtype=torch.int64), values >= 0
        places[known] = self.names.of_each(values[known])
        self.too_many = self.too_many or bool((places[known] < 0).any())
        return places


class Bits:
    """Counts over chunks; `labels` are the names of the labels that are counted."""

    def __init__(self, labels: tuple[str, ...] = ()) -> None:
        # Valid tokens, and those whose two log-probs are not equal; one that is not finite counts.
        self.tokens = self.differing = 0
        # Sequences with valid tokens, and those with a token that differs.
        self.sequences = self.affected = 0
        self.first: Difference | None = None  # in the order of the dump
        # The largest distance of two finite log-probs, in numbers of a dtype, as of `Difference`.
        self.ulps, self.dtype = 0, "float32"
        self.groups: dict[str, Group] = {}  # what was counted, by what it is counted by
        # Sums over affected sequences that say what differences cost which begin, or lie, anywhere.
        self.runs = dict.fromkeys(RUNS, 0.0)
        self.labels = labels
        self.holes = False  # some valid token has masked ones before it

    def add(self, tokens: ValidTokens) -> None:
        """Add the tokens of a chunk."""
        differs = (tokens.train != tokens.rollout) | ~tokens.finite
        count = torch.bincount(tokens.owner[differs], minlength=tokens.lengths.shape[0])
        self.tokens += differs.numel()
        self.differing += int(differs.sum())
        self.sequences += int((tokens.lengths > 0).sum())
        self.affected += int((count > 0).sum())
        self._measure(tokens, differs)
        self._add_runs(tokens, differs, count)
        each = _Chunk(tokens, differs, count)
        self._add_places(each)
        self._add_prefixes(each)
        for name in ("versions", "steps", *self.labels):
            values = tokens.column(name)
            if values is not None:
                self._add_labels(each, name, values)
        ids = tokens.column("token_ids")
        if ids is not None:
            each.count_tokens(self._group("token_ids"), ids.where(ids < MOST_PLACES, -1))
        turns = tokens.turns.clamp(max=MOST_TURNS)
        each.count_tokens(self._group("turn"), turns)
        each.count_tokens(self._group("turn_start"), (tokens.turn_starts & (turns > 0)).long())
        self._add_files(each)

    def _group(self, name: str) -> Group:
        return self.groups.setdefault(name, Group())

    def _measure(self, tokens: ValidTokens, differs: Tensor) -> None:
        """Keep the first difference, and the largest distance."""
        places = differs.nonzero().squeeze(1)
        if not places.numel():
            return
        chunk = tokens.chunk
        # In the dtype of the dump, where both sides have one.
        same = chunk.train.dtype == chunk.rollout.dtype and tokens.log_mass is None
        dtype = chunk.train.dtype if same else tokens.train.dtype
        name = str(dtype).removeprefix("torch.")
        train, rollout = tokens.train[places], tokens.rollout[places]
        apart = ulps(train, rollout, dtype).where(train.isfinite() & rollout.isfinite(), -1)
        if int(apart.max()) > self.ulps:
            self.ulps, self.dtype = int(apart.max()), name
        if self.first is None:
            i = int(places[0])
            owner, first = int(tokens.owner[i]), int(apart[0])
            self.first = Difference(
                file=chunk.file_of(owner),
                record=int(chunk.records[owner]),
                position=int(tokens.position[i]),
                train_logp=float(tokens.train[i]),
                rollout_logp=float(tokens.rollout[i]),
                ulps=None if first < 0 else first,
                dtype=name,
            )

    def _add_runs(self, tokens: ValidTokens, differs: Tensor, count: Tensor) -> None:
        """Add up where differences begin and end in their sequences."""
        owner, position = tokens.owner[differs], tokens.position[differs]
        begin = tokens.lengths.clone().scatter_reduce_(0, owner, position, "amin")
        end = torch.zeros_like(begin).scatter_reduce_(0, owner, position, "amax")
        some = count > 0
        length, begin_, end_, k = tokens.lengths[some], begin[some], end[some], count[some]
        self.runs["tokens"] += float(length.sum())
        # Tokens up to the first difference; all where there is none.
        self.runs["until"] += float((begin + some).sum())
        self.runs["begins"] += float(length.double().log2().sum())
        self.runs["after"] += float((length - begin_ - 1).sum())
        self.runs["ends"] += float((length - begin_).double().log2().sum())
        self.runs["between"] += float((end_ - begin_ - 1).clamp(min=0).sum())
        self.runs["within"] += float((k - 2).clamp(min=0).sum())
        n, k = tokens.lengths.double(), count.double()
        own = (n + 1.0).log2() + (torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)) / LOG_2
        self.runs["own_rates"] += float(own.sum())

    def _add_places(self, each: _Chunk) -> None:
        tokens = each.tokens
        place = tokens.slots - tokens.chunk.offsets[tokens.owner]
        self.holes = self.holes or not torch.equal(place, tokens.position)
        prompts = tokens.column("prompt_lengths")
        places = {"position": tokens.position, "place": place}
        if prompts is not None:
            places["context"] = place + prompts.clamp(min=0)
            each.count_sequences(self._group("prompt"), _folded(each.of_sequences(prompts)))
        for name, values in places.items():
            each.count_tokens(self._group(name), _folded(values))
            each.count_sequences(self._group(name), _folded(each.last(values) + 1))
        # The prompt's length is unknown, and with it where a page begins: in each sequence elsewhere.
        owner, at = tokens.owner[each.differs], place[each.differs]
        for page in PAGES:
            both = torch.bincount(owner * page + at % page, minlength=each.count.numel() * page).view(-1, page)
            most, phase = both.max(1)
            alike = (place % page == phase[tokens.owner]).long()
            # Where nothing differs, any place will do.
            size = torch.zeros_like(most).index_add_(0, tokens.owner, alike)
            self._group(f"phase/{page}").tokens.add(torch.ones_like(most), size, size * each.affected, most)

    def _add_prefixes(self, each: _Chunk) -> None:
        """Count what lies behind a hit of the prefix cache: as the engine says, and as ids of this chunk suggest."""
        tokens = each.tokens
        place = tokens.slots - tokens.chunk.offsets[tokens.owner]
        cached, prompts = tokens.column("cached_tokens"), tokens.column("prompt_lengths")
        if cached is not None:
            # A hit ends within the prompt. Without the prompt's length all tokens that were sampled are behind it.
            behind = torch.ones_like(cached, dtype=torch.bool) if prompts is None else place + prompts >= cached
            each.count_set(self._group("cached"), behind & (cached > 0))
        ids = tokens.chunk.columns.get("token_ids")
        if ids is None:
            return
        shared = _shared_prefixes(ids, tokens.chunk.offsets)
        for page in PREFIX_PAGES:
            hit = (shared // page * page)[tokens.owner]
            each.count_set(self._group(f"prefix/{page}"), (hit > 0) & (place >= hit))

    def _add_labels(self, each: _Chunk, name: str, values: Tensor) -> None:
        group = self._group(f"label/{name}")
        if group.too_many:
            return
        places = group.places_of(values)
        each.count_tokens(group, places)
        first = each.of_sequences(places)
        group.within = group.within or not torch.equal(first[each.tokens.owner], places)
        each.count_sequences(group, first)

    def _add_files(self, each: _Chunk) -> None:
        chunk, group = each.tokens.chunk, self._group("file")
        files = torch.tensor([group.names.of(chunk.file_of(i)) for i in range(chunk.sequences)], dtype=torch.int64)
        group.too_many = group.too_many or bool((files < 0).any())
        each.count_sequences(group, files)
        each.count_sequences(self._group("row"), _folded(chunk.records))


RUNS = ("tokens", "until", "begins", "after", "ends", "between", "within", "own_rates")
LOG_2 = 0.6931471805599453


class _Chunk:
    """The valid tokens of a chunk, those that differ, and how many differ in each sequence."""

    def __init__(self, tokens: ValidTokens, differs: Tensor, count: Tensor) -> None:
        self.tokens, self.differs, self.count = tokens, differs, count
        self.affected = count > 0

    def of_sequences(self, values: Tensor) -> Tensor:
        """Return the value of the first valid token of each sequence, [S]; -1: it has none."""
        return self._at(values, self.tokens.lengths.cumsum(0) - self.tokens.lengths)

    def last(self, values: Tensor) -> Tensor:
        """Return the value of the last valid token of each sequence, [S]."""
        return self._at(values, self.tokens.lengths.cumsum(0) - 1)

    def _at(self, values: Tensor, places: Tensor) -> Tensor:
        if not values.numel():
            return torch.full_like(places, -1)
        return values[places.clamp(0, values.numel() - 1)].where(self.tokens.lengths > 0, -1)

    def count_tokens(self, group: Group, values: Tensor) -> None:
        """Count tokens by a value each, [M]; -1: it has none."""
        known = values >= 0
        affected = self.affected[self.tokens.owner[known]]
        group.tokens.add(values[known], torch.ones_like(affected), affected, self.differs[known])

    def count_sequences(self, group: Group, values: Tensor) -> None:
        """Count sequences by a value each, [S]; those without a valid token count in nothing."""
        known = (values >= 0) & (self.tokens.lengths > 0)
        counts = (known, self.affected, self.tokens.lengths, self.count)
        group.sequences.add(values[known], *(each[known] for each in counts))

    def count_set(self, group: Group, chosen: Tensor) -> None:
        """Count the tokens of a set as the value 1, and the sequences that hold some."""
        self.count_tokens(group, chosen.long())
        some = torch.zeros_like(self.count).index_add_(0, self.tokens.owner, chosen.long()) > 0
        self.count_sequences(group, some.long())


def _folded(values: Tensor) -> Tensor:
    """Keep values below MOST_PLACES, and larger ones modulo FOLD."""
    return values.where(values < MOST_PLACES - FOLD, MOST_PLACES - FOLD + values % FOLD)


def _shared_prefixes(ids: Tensor, offsets: Tensor) -> Tensor:
    """Return how many first tokens each sequence shares with an earlier one, [S].

    Equal prefixes have equal sums of a hash of each id and its place.
    """
    lengths = offsets.diff()
    if not ids.numel():
        return torch.zeros_like(lengths)
    owner = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    place = torch.arange(ids.numel()) - offsets[owner]
    x = ids * 0x1F123BB5159A5B1D + place * 0x2545F4914F6CDD1D + 0x632BE59BD9B4E019
    for _ in range(2):
        x = (x ^ (x >> 29)) * 0x3F58476D1CE4E5B9
    sums = x.cumsum(0)
    begin = offsets[:-1].clamp(max=ids.numel() - 1)
    # Integers wrap, so differences of sums are sums.
    prefix = sums - (sums[begin] - x[begin])[owner]
    unique, inverse = prefix.unique(return_inverse=True)
    first = torch.full_like(unique, lengths.numel()).scatter_reduce_(0, inverse, owner, "amin")
    seen = (first[inverse] < owner) & (ids != MISSING_INTEGER)
    unseen = lengths.clone().scatter_reduce_(0, owner[~seen], place[~seen], "amin")
    return unseen
