"""Random calls of a seed again: in another order or layout, cut, among empty sequences, behind other garbage."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

import rollout_corr as rc
from builders.same_bits import outcome
from frozen.calls import Call
from frozen.generator import (
    GARBAGE,
    KINDS,
    SURROGATES,
    UNITS,
    VERSION_GARBAGE,
    Layout,
    Tokens,
    needs_of,
    random_batch,
    random_loss,
    random_spec,
    random_tokens,
)

PACKED = Layout("packed")
# The gaps of one batch are there again in each of its parts.
WITHOUT_GAPS = [Layout(kind, lie) for kind in set(KINDS) - {"gaps"} for lie in ("contiguous", "slice")]
HALVES = (torch.float32, torch.bfloat16, torch.float16)
# Log-probs that no policy has, and some that one has once in a long while.
ODD = (0.0, -1e-12, -88.0, -200.0, -1100.0, -1e10, 3.4e38, -3.4e38, 1e4, 100.0, 1e-3)


@dataclass
class Drawn:
    """Tokens, a Spec or a Loss, and the dtype of log-probs, all drawn from one seed."""

    rng: random.Random
    tokens: Tokens
    spec: rc.Spec | None
    loss: rc.Loss | None
    dtype: torch.dtype

    def call(self, tokens: Tokens | None = None, layout: Layout = PACKED, garbage: int = 0, **given) -> Call:
        """The call on some tokens, by default all; `garbage` is the seed of what stands in slots without any."""
        tokens = self.tokens if tokens is None else tokens
        wants = needs_of(self.spec, self.loss)
        made = random_batch(
            random.Random(garbage), wants, layout=layout, dtypes=(self.dtype,) * 2, mask=(torch.bool, 1.0),
            extras=0.0, part=tokens,
        )  # fmt: skip
        turns = made.batch.get("turns")
        if turns is not None and made.laid.could_be_ids(turns):
            made.batch["turns"] = torch.cat([turns, turns[-1:]])
        # ClipCov draws tokens by these numbers, and not by the places of their sequences.
        made.batch["sequence_ids"] = torch.tensor(tokens.of_sequences["ids"]).long()
        if "groups" in made.batch:
            made.batch["groups"] = rc.Groups(index=made.batch["groups"].index.long(), count=3)
        if "scale" in given:
            given["scale"] = made.column("scale")
        correction = "nothing"
        if self.loss is not None:
            correction = "mask" if self.loss.surrogate.of == "new/rollout" else "factors"
        return Call(made, self.spec, self.loss, "both", correction, given)

    @property
    def layout(self) -> Layout:
        """Any layout without gaps, but for lists and nested tensors of nothing."""
        some = [one for one in WITHOUT_GAPS if self.tokens.lengths or one.kind not in ("list", "jagged")]
        return self.rng.choice(sorted(some, key=repr))

    def order(self) -> list[int]:
        """The sequences in another order."""
        return self.rng.sample(range(len(self.tokens.lengths)), len(self.tokens.lengths))

    def parts(self) -> Iterator[list[int]]:
        """The sequences in up to four parts, some of them empty."""
        count = len(self.tokens.lengths)
        edges = [0, *sorted(self.rng.randint(0, count) for _ in range(self.rng.randint(0, 3))), count]
        for begin, end in itertools.pairwise(edges):
            yield list(range(begin, end))

    def with_empty_ones(self) -> tuple[Tokens, list[int]]:
        """The tokens with sequences among them that have none, or none that is valid; and where the others are."""
        more = random_tokens(self.rng)
        more.valid[:] = [False] * len(more.valid)
        both = joined(self.tokens, behind_garbage(more, self.rng))
        count, all_of = len(self.tokens.lengths), len(both.lengths)
        order = sorted(range(all_of), key=lambda s: self.rng.random() if s >= count else (s + 1) / (count + 1))
        return both.sequences(order), [order.index(s) for s in range(count)]


def correction(seed: int, normalize=(None, "sequence", "group"), units=UNITS) -> Drawn:
    """Draw a correction below float64, where its bits are promised."""
    rng = random.Random(f"invariant {seed}")
    spec = None
    while spec is None or (spec.weight is not None and spec.weight.normalize not in normalize):
        spec = random_spec(rng, units, rules=False)
    return Drawn(rng, random_tokens(rng), replace(spec, report=("native",)), None, rng.choice(HALVES))


LOOKING = ("ClipCov", "KLCov", "REAL")
OTHERS = [name for name in SURROGATES if name not in LOOKING]


def loss(seed: int, names: Sequence[str] = OTHERS, dtype: torch.dtype = torch.float64) -> Drawn:
    """Draw a loss of one of these surrogates."""
    rng = random.Random(f"invariant loss {seed}")
    made = None
    while made is None or getattr(made.surrogate, "over", "sequence") == "turn":
        made = replace(random_loss(rng, rng.choice(names)), entropy_bonus=None)
    return Drawn(rng, random_tokens(rng), None, made, dtype)


def joined(one: Tokens, other: Tokens) -> Tokens:
    """The sequences of two batches."""
    columns = {name: one.columns[name] + other.columns[name] for name in one.columns}
    of_sequences = {name: one.of_sequences[name] + other.of_sequences[name] for name in one.of_sequences}
    return Tokens(one.lengths + other.lengths, one.valid + other.valid, columns, of_sequences, one.turns + other.turns)


def behind_garbage(tokens: Tokens, rng: random.Random) -> Tokens:
    """The tokens with other garbage where none is valid."""
    columns = {
        name: [
            x if is_valid else rng.choice(VERSION_GARBAGE if name == "versions" else GARBAGE)
            for x, is_valid in zip(column, tokens.valid, strict=True)
        ]
        for name, column in tokens.columns.items()
    }
    return replace(tokens, columns=columns)


def odd(tokens: Tokens, rng: random.Random) -> Tokens:
    """The tokens with log-probs that nobody expects."""
    columns = dict(tokens.columns)
    for name in ("train", "rollout", "new", "ref"):
        columns[name] = [rng.choice(ODD) if rng.random() < 0.3 else x for x in columns[name]]
    return replace(tokens, columns=columns)


def run(call: Call, backend: str = "torch"):
    """Weights, mask and decisions by sequence, and the statistics."""
    return outcome(call.drawn.laid, call.corrected(call.spec, backend))
