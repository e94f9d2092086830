"""Random calls that ranks make together, each with its tokens of every sequence or with sequences of its own."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import torch

import rollout_corr as rc
from builders.invariance import LOOKING
from builders.rounding import near
from builders.same_bits import assert_same_statistics, in_hex
from frozen.calls import Call, loss_call
from frozen.generator import (
    GROUPS,
    LABELS,
    Layout,
    Tokens,
    needs_of,
    random_batch,
    random_loss,
    random_spec,
    random_tokens,
)
from rollout_corr.backends.operators import beyond_kernels

# Units that may lie on several ranks.
UNITS = ("token", "sequence", "sequence", "turn")
DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float16))
LAYOUTS = [Layout(kind, lie) for kind in ("packed", "right", "holes") for lie in ("contiguous", "slice")]
PACKED = LAYOUTS[0]


def owners_of(rng: random.Random, lengths: list[int], ranks: int) -> list[list[int]]:
    """The rank of each token, as frameworks cut: in stretches, there and back, by the pack, whole, all on one rank."""
    way, pack = rng.choice(("contiguous", "zigzag", "ulysses", "whole", "last")), itertools.count()

    def owner(s: int, t: int, n: int) -> int:
        half = t // max(1, -(-n // (2 * ranks)))
        return {
            "contiguous": t // max(1, -(-n // ranks)),
            "zigzag": min(half, 2 * ranks - 1 - half),
            "ulysses": next(pack) * ranks // sum(lengths),
            "whole": s % ranks,
            "last": ranks - 1,
        }[way]

    return [[owner(s, t, n) for t in range(n)] for s, n in enumerate(lengths)]


class Parts:
    """A batch, and what each of some ranks holds of it: tokens of all sequences, or some of the sequences.

    `group` names the field of `rc.Ranks`: "sequence" or "batch".
    """

    def __init__(self, rng: random.Random, group: str, count: int) -> None:
        self.tokens, self.count, self.group = random_tokens(rng), count, group
        self.owners = owners_of(rng, self.tokens.lengths, count)

    @property
    def are_clear(self) -> bool:
        """Test whether labels of sequences and offsets of turns are nowhere as many as the tokens, and so ambiguous."""
        every = [self.tokens, *map(self.of, range(self.count))]
        sizes = [(sum(one.lengths), len(one.lengths), sum(map(len, one.turns))) for one in every]
        return all(n not in (sequences, turns, turns + 1) for n, sequences, turns in sizes)

    def of(self, rank: int) -> Tokens:
        """The tokens of a rank."""
        if self.group == "sequence":
            return self.tokens.held(self.owners, rank)
        return self.tokens.sequences(range(rank, len(self.owners), self.count))

    def joined(self, rows: Any) -> list | None:
        """What is of each token of each sequence, from what the ranks have of theirs; None where they have nothing."""
        if None in rows:
            assert set(rows) == {None}
            return None
        if self.group == "batch":
            return [rows[s % self.count][s // self.count] for s in range(len(self.owners))]
        places = [[iter(row) for row in part] for part in rows]
        return [[next(places[rank][s]) for rank in row] for s, row in enumerate(self.owners)]


@dataclass
class Together:
    """A random call, and those that ranks make of it together."""

    seed: str
    parts: Parts
    spec: rc.Spec | None
    loss: rc.Loss | None = None
    labeled: bool = False

    def __str__(self) -> str:
        return f"{self.seed}, {self.parts.count} ranks: {self.spec!r} {self.loss!r}"

    @property
    def normalize(self) -> str | None:
        return None if self.spec is None or self.spec.weight is None else self.spec.weight.normalize

    def call(self, rank: int | None = None, member: Any = None) -> Call:
        """The call of a rank, by its member of a process group; None: of all tokens at once."""
        if rank is None:
            return self._drawn(self.parts.tokens, PACKED)
        rng = random.Random(f"{self.seed} {rank}")
        # SkyRL counts padding, and every rank has its own.
        packed = self.spec is not None and "skyrl" in self.spec.report
        call = self._drawn(self.parts.of(rank), rng.choice(LAYOUTS[:2] if packed else LAYOUTS))
        call.ranks = rc.Ranks(**{self.parts.group: member})
        return call

    def _drawn(self, part: Tokens, layout: Layout) -> Call:
        rng, spec, loss = random.Random(self.seed), self.spec, self.loss
        given: dict[str, Any] = {"part": part, "extras": 0.0, "dtypes": rng.choice(DTYPES), "layout": layout}
        call = Call(random_batch(rng, needs_of(spec), **given), spec)
        if loss is not None:
            call = loss_call(random.Random(self.seed), loss, spec, **given)
            call.drawn.batch["sequence_ids"] = torch.tensor(part.of_sequences["ids"]).long()
        # How much that draws depends on the layout.
        rng, batch, column = random.Random(f"more {self.seed}"), call.drawn.batch, call.drawn.column
        if loss is not None:
            call.given = {"scale": column("scale")} if rng.random() < 0.2 else {}
            if loss.mean.of != "sum" and loss.mean.over == "original" and rng.random() < 0.2:
                call.given["total"] = 13.0
            return call
        if self.labeled:
            ids = torch.tensor(part.of_sequences["labels"]).long()
            of_sequences = rc.Labels(ids[:, None] if layout.packed else ids, LABELS)
            batch["labels"] = {"kind": rc.Labels(column("labels", torch.int64), LABELS), "task": of_sequences}
        if rng.random() < 0.8:
            # Which the call may not need.
            index = torch.tensor(part.of_sequences["groups"]).long()
            batch.setdefault("groups", rc.Groups(index=index, count=GROUPS))
        if rng.random() < 0.3:
            batch["kept_mass"] = rc.KeptMass(column("log_mass"), of=rng.choice(("rollout", "train")))
        if rng.random() < 0.3:
            batch["entropy"] = column("entropy", call.drawn.dtypes[0])
        return call


def correction(seed: str, group: str, backend: str = "torch", count: int | None = None) -> Together:
    """Draw a correction for some ranks, or two or three; bounds may be rules where each has whole sequences."""
    rng = random.Random(seed)
    while True:
        parts = Parts(rng, group, count or rng.choice((2, 3)))
        spec = random_spec(rng, UNITS, rules=group == "batch")
        if parts.are_clear and (backend == "torch" or beyond_kernels(spec) is None):
            break
    if group == "batch":
        spec = replace(spec, report=("native",))  # xtuner's are of packs
    return Together(seed, parts, spec, labeled=backend == "torch" and group == "sequence")


def loss(seed: str, name: str, count: int | None = None) -> Together:
    """Draw a loss of a class of surrogates, half of them with a Spec.

    Its sequences lie on several ranks; those of a surrogate that looks, on one each, with a sum for its mean.
    """
    rng, looks = random.Random(seed), name in LOOKING
    while True:
        parts = Parts(rng, "batch" if looks else "sequence", count or rng.choice((2, 3)))
        spec = random_spec(rng, UNITS, rules=False, of_loss=True) if rng.random() < 0.5 and name != "Score" else None
        drawn = random_loss(rng, name)
        if looks:
            drawn = replace(drawn, mean=rc.Mean("sum"), kl=drawn.kl and replace(drawn.kl, mean=None))
        if parts.are_clear:
            return Together(seed, parts, spec, drawn)


# --- answers ---


def corrected(call: Call, backend: str = "torch") -> tuple:
    """Weights and mask by sequence, decisions, and the result."""
    out, held = call.corrected(call.spec, backend), call.drawn.laid
    weights = None if out.weights is None else held.read(out.weights)
    turns = None if out.keep_turns is None else out.keep_turns.tolist()
    return weights, held.read(out.mask), out.keep.tolist(), turns, out.statistics


def lost(call: Call) -> tuple:
    """Value, gradients of log-probs and of the entropy where it has a bonus, mask and statistics of a loss."""
    out, new, entropy = call.lost("torch", call.loss)
    held, leaves = call.drawn.laid, [new] if entropy is None else [new, entropy]
    slopes = torch.autograd.grad(out.value, leaves, materialize_grads=True)
    return out.value.item(), tuple(map(held.read, slopes)), held.read(out.mask), out.statistics


def assert_one_correction(together: Together, found: list[tuple], wanted: tuple) -> None:
    """Compare what ranks found with one call: weights, masks and decisions to the bit, and the sums of statistics."""
    parts, case = together.parts, str(together)
    of_ranks, masks, keeps, of_turns, each = zip(*found, strict=True)
    weights, mask, keep, turns, statistics = wanted
    assert parts.joined(masks) == mask, case
    if parts.group == "sequence":
        assert keeps == (keep,) * parts.count and of_turns == (turns,) * parts.count, case
    else:
        own = tuple(by_sequence(parts.of(rank), x) for rank, x in enumerate(of_turns))
        assert parts.joined(keeps) == keep and parts.joined(own) == by_sequence(parts.tokens, turns), case
    weighed = parts.joined(of_ranks)
    if together.normalize == "batch" and weights is not None:
        # The mean is a float sum, which ranks add up in another order.
        assert all(row == near(other, torch.float32) for row, other in zip(weighed, weights, strict=True)), case
    else:
        assert (weighed and in_hex(weighed)) == (weights and in_hex(weights)), case
    if together.spec.asks_batch:
        assert [bounds_of(one) for one in each] == [bounds_of(statistics)] * parts.count and bounds_of(statistics), case
    elif together.spec.nonfinite != "propagate":
        merged = rc.Statistics.sum(each)
        assert_same_statistics(merged, statistics, rounds_means=True, most=1e15)
        for by in ("kind", "task") if together.labeled else ():
            its = near(without_spreads(statistics.metrics(by=by)), torch.float32)
            assert without_spreads(merged.metrics(by=by)) == its, (by, case)


def assert_one_loss(together: Together, found: list[tuple], wanted: tuple) -> None:
    """Compare what ranks found with one call: values and statistics add up, gradients are those of each token."""
    parts, case = together.parts, str(together)
    values, of_ranks, masks, each = zip(*found, strict=True)
    value, slopes, mask, statistics = wanted
    # Values of ranks that cancel have the rounding of the largest.
    size = max(1.0, *map(abs, values))
    assert sum(values) == near(value, torch.float32, size=size) and parts.joined(masks) == mask, case
    for one, other in zip(zip(*of_ranks, strict=True), slopes, strict=True):
        assert all(row == near(x, torch.float32) for row, x in zip(parts.joined(one), other, strict=True)), case
    if together.spec is None or together.spec.nonfinite != "propagate":
        its = near(without_spreads(statistics.metrics()), torch.float32)
        assert without_spreads(rc.Statistics.sum(each).metrics()) == its, case


def by_sequence(tokens: Tokens, turns: list | None) -> list[list]:
    """A flat list of what is of turns, sequence by sequence."""
    rest = iter(turns or [])
    return [[x for _, x in zip(row, rest, strict=False)] for row in tokens.turns]


def bounds_of(out: Any) -> dict[str, float]:
    """The bounds that a batch decided, of a correction or statistics."""
    return {key: x for key, x in out.metrics().items() if key.endswith(("er_max", "er_min"))}


def without_spreads(metrics: dict[str, float]) -> dict[str, float]:
    """All but standard deviations: one near 0 is the root of a rounding."""
    return {key: x for key, x in metrics.items() if not key.endswith("std")}
