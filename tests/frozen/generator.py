"""A random Spec, a random Loss and a random batch of a seed, over the ranges that users have.

Every number comes from exact operations on random bits, so that a seed means the same on every machine. This file
imports the public package alone, whatever its version.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc

Column = list[float]

# What stands where no token is valid. None of it may reach a result.
GARBAGE = (math.nan, math.inf, -math.inf, -9999.0, -1e10, 0.0)
VERSION_GARBAGE = (-1.0, 1e9, -1e9)
CURRENT_VERSION = 7
LABELS = ("a", "b", "c")
GROUPS = 3

MASKS: tuple[tuple[torch.dtype | None, float], ...] = (
    (None, 1.0), (torch.bool, 1.0), (torch.bool, 1.0), (torch.int64, 1.0), (torch.int32, 3.0), (torch.uint8, 2.0),
    (torch.int8, -1.0), (torch.float32, 0.3), (torch.bfloat16, 1.0), (torch.float16, 1.0), (torch.float64, 0.5),
)  # fmt: skip
# Of the log-probs that are trained, and of the rollout's.
DTYPES = (
    (torch.float32, torch.float32), (torch.float32, torch.float32), (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float64, torch.float64),
    (torch.bfloat16, torch.float32),
)  # fmt: skip


# --- tokens ---


@dataclass
class Tokens:
    """The tokens of a batch, sequence after sequence, without a layout.

    Attributes:
        lengths: Tokens of each sequence.
        valid: [N] bool.
        columns: [N] floats by name, with garbage where a token is not valid.
        of_sequences: [S] floats by name.
        turns: The lengths of the turns of each sequence, some of them 0.
    """

    lengths: list[int]
    valid: list[bool]
    columns: dict[str, Column]
    of_sequences: dict[str, Column]
    turns: list[list[int]]

    def rows(self, column: Sequence[Any]) -> list[list[Any]]:
        """A column, sequence by sequence."""
        ends = [0, *itertools.accumulate(self.lengths)]
        return [list(column[a:b]) for a, b in itertools.pairwise(ends)]

    def held(self, owners: list[list[int]], rank: int) -> Tokens:
        """The tokens that a rank holds, by the owner of each token of each sequence."""
        flat = [owner == rank for row in owners for owner in row]
        of_turns = []
        for row, turns in zip(owners, self.turns, strict=True):
            ends = [0, *itertools.accumulate(turns)]
            of_turns.append([row[a:b].count(rank) for a, b in itertools.pairwise(ends)])
        return Tokens(
            [row.count(rank) for row in owners],
            list(itertools.compress(self.valid, flat)),
            {name: list(itertools.compress(column, flat)) for name, column in self.columns.items()},
            self.of_sequences,
            of_turns,
        )

    def sequences(self, which: Sequence[int]) -> Tokens:
        """Some of the sequences."""
        columns = {name: self.rows(column) for name, column in self.columns.items()}
        valid = self.rows(self.valid)
        return Tokens(
            [self.lengths[s] for s in which],
            [x for s in which for x in valid[s]],
            {name: [x for s in which for x in rows[s]] for name, rows in columns.items()},
            {name: [column[s] for s in which] for name, column in self.of_sequences.items()},
            [self.turns[s] for s in which],
        )


def stated(of_turns: list[list[int]] | None = None, **rows: list[Column]) -> Tokens:
    """Tokens of given numbers, sequence by sequence; columns that are not given are 0, and all tokens are valid."""
    lengths = list(map(len, next(iter(rows.values()))))
    columns = {name: [0.0] * sum(lengths) for name in COLUMNS}
    columns |= {name: list(itertools.chain(*column)) for name, column in rows.items()}
    numbers = {"ids": [float(s) for s in range(len(lengths))]}
    return Tokens(lengths, [True] * sum(lengths), columns, numbers, of_turns or [[n] for n in lengths])


def bell(rng: random.Random, scale: float) -> float:
    """A number around 0, at most three times the scale away."""
    return 2.0 * scale * (rng.random() + rng.random() + rng.random() - 1.5)


def lengths_of(rng: random.Random, kind: str | Sequence[int]) -> list[int]:
    """The lengths of sequences: of a "small" batch, with empty and one-token ones, of thousands of tokens, or given."""
    if not isinstance(kind, str):
        return list(kind)
    if kind == "small":
        count = 0 if rng.random() < 0.04 else rng.choice((1, 2, 3, 4, 6, 6, 8))
        return [rng.choice((0, 1, 2, 3, 5, 9, 17)) for _ in range(count)]
    return [rng.randint(1, 400) if rng.random() < 0.95 else 0 for _ in range({"middle": 30, "large": 400}[kind])]


def random_tokens(
    rng: random.Random, kind: str | Sequence[int] = "small", all_valid: bool = False, far: bool = False
) -> Tokens:
    """Tokens with holes, broken ones and outliers in a share of the batches; `far`: outliers in every column."""
    lengths = lengths_of(rng, kind)
    invalid = 0.0 if all_valid else rng.choice((0.0, 0.2, 0.2, 0.7))
    scale = rng.choice((0.02, 0.1, 0.4, 1.5))
    # A hole or two, a prompt before the response, or a sequence that is all invalid.
    valid = [rng.random() >= invalid for n in lengths for _ in range(n)]
    for s, (begin, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(lengths)])):
        if invalid and s % 4 == 2:
            prompt = end if s % 8 == 6 else (begin + end) // 2
            valid[begin:prompt] = [False] * (prompt - begin)
    columns: dict[str, Column] = {name: [] for name in COLUMNS}
    for _ in valid:
        for name, value in _token(rng, scale).items():
            columns[name].append(value)
    if rng.random() < 0.3:
        _outliers(rng, columns, valid)
    if rng.random() < 0.3:
        _broken(rng, columns, valid)
    if far:
        for t in range(len(valid)):
            if rng.random() < 0.3:
                name = rng.choice(("train", "rollout", "new", "ref"))
                columns[name][t] = rng.choice((-9999.0, -1100.5, -88.0, -25.0, -1e-12))
    for t, is_valid in enumerate(valid):
        if not is_valid:
            for name, column in columns.items():
                column[t] = rng.choice(VERSION_GARBAGE if name == "versions" else GARBAGE)
    of_sequences = {
        "advantages": [rng.choice((-2, -1, -1, 0, 1, 1, 3)) / 4 for _ in lengths],
        "scale": [rng.choice((0.0, 0.25, 1.0, 2.0)) for _ in lengths],
        "versions": [float(rng.choice((0, 3, 6, 7))) for _ in lengths],
        "groups": [float(rng.randrange(GROUPS)) for _ in lengths],
        "labels": [float(rng.choice((0, 1, 2, -1, 9))) for _ in lengths],
        "ids": [float(1000 + 7 * s) for s in range(len(lengths))],
    }
    return Tokens(lengths, valid, columns, of_sequences, [_turns_of(rng, n) for n in lengths])


COLUMNS = (
    "rollout", "train", "new", "ref", "advantages", "entropy", "surprise", "versions", "log_mass", "weights", "trains",
    "scale", "labels",
)  # fmt: skip


def _token(rng: random.Random, scale: float) -> dict[str, float]:
    """Most tokens are nearly certain, and a fifth are equal on both sides to the last bit."""
    u = rng.random()
    rollout = -0.0 if u < 0.05 else -8.0 * u * u * u * u
    train = rollout if rng.random() < 0.2 else min(rollout + bell(rng, scale), 0.0)
    entropy = rng.choice((0.0, 3.0 * rng.random()))
    return {
        "rollout": rollout,
        "train": train,
        "new": min(train + bell(rng, scale), 0.0),
        "ref": min(train + bell(rng, scale), 0.0),
        # Multiples of 1/4, so that no rounding changes the sign of a mean.
        "advantages": rng.choice((-2, -1, -1, 0, 1, 1, 3)) / 4,
        "entropy": entropy,
        "surprise": 0.5 - entropy,
        "versions": float(rng.choice((0, 3, 4, 6, 7, 7, 8))),
        "log_mass": -rng.random(),
        "weights": rng.choice((0.0, 1.0, 2.0 * rng.random())),
        "trains": float(rng.random() < 0.8),
        "scale": rng.choice((0.0, 0.25, 1.0, 2.0)),
        "labels": float(rng.choice((0, 1, 2, -1, 9))),
    }


def _outliers(rng: random.Random, columns: dict[str, Column], valid: list[bool]) -> None:
    """Log-ratios beyond every clamp, the -9999 of an engine, a probability near 1, a log-ratio near 0."""
    odd = [(-0.5, -30.5), (-40.5, -0.5), (-9999.0, -1.0), (-1e-3, -1e-12), (-1.0 + 3e-5, -1.0), (-2.0, -9999.0)]
    rng.shuffle(odd)
    for t, is_valid in enumerate(valid):
        if is_valid and odd and t % 5 == 0:
            columns["train"][t], columns["rollout"][t] = odd.pop()


def _broken(rng: random.Random, columns: dict[str, Column], valid: list[bool]) -> None:
    """NaN or infinity at a few valid tokens."""
    places = [t for t, is_valid in enumerate(valid) if is_valid]
    for _ in range(min(3, len(places))):
        name = rng.choice(("train", "rollout", "new", "ref", "weights", "scale", "entropy", "surprise", "advantages"))
        columns[name][rng.choice(places)] = rng.choice((math.nan, math.inf, -math.inf))


def _turns_of(rng: random.Random, length: int) -> list[int]:
    cuts = sorted(rng.randint(0, length) for _ in range(rng.randint(0, 3)))
    return [b - a for a, b in itertools.pairwise([0, *cuts, length])]


# --- layouts ---


@dataclass(frozen=True)
class Layout:
    """Where the tokens lie.

    Attributes:
        kind: "packed" [N], "row" [1, N], "gaps" (tokens of no sequence around the packed ones), "right" and "left"
            (padded [B, T]), "holes" (tokens anywhere in their rows), "jagged" or "list".
        lie: Plain tensors "contiguous", a "slice" without the first column, or every other element ("step").
        offsets: Dtype of the offsets of packed sequences and turns.
    """

    kind: str
    lie: str = "contiguous"
    offsets: torch.dtype = torch.int32

    @property
    def packed(self) -> bool:
        """Test whether the batch comes with offsets."""
        return self.kind in ("packed", "row", "gaps")

    @property
    def padded(self) -> bool:
        """Test whether each row is a sequence."""
        return self.kind in ("right", "left", "holes")


KINDS = ("packed", "packed", "row", "gaps", "right", "right", "left", "holes", "jagged", "list")


def random_layout(rng: random.Random) -> Layout:
    """Any layout; lists and nested tensors lie as they lie."""
    kind, lie = rng.choice(KINDS), rng.choice(("contiguous", "contiguous", "slice", "step"))
    return Layout(kind, "contiguous" if kind in ("jagged", "list") else lie, rng.choice((torch.int32, torch.int64)))


class LaidOut:
    """Tokens in a layout: makes the tensor of a column."""

    def __init__(self, tokens: Tokens, layout: Layout, rng: random.Random) -> None:
        self.tokens, self.layout = tokens, layout
        lengths = tokens.lengths
        if layout.padded:
            width = max([*lengths, 1]) + 2
            self.begins = [s * width for s in range(len(lengths) + 1)]
            self.shape: tuple[int, ...] = (len(lengths), width)
            first = {"right": 0, "left": 1, "holes": 0}[layout.kind]
            columns = [range(first * (width - n), first * (width - n) + n) for n in lengths]
            if layout.kind == "holes":
                columns = [sorted(rng.sample(range(width), n)) for n in lengths]
            places = [s * width + c for s, row in enumerate(columns) for c in row]
        else:
            before, after = (3, 2) if layout.kind == "gaps" else (0, 0)
            self.begins = [before + n for n in itertools.accumulate(lengths, initial=0)]
            size = self.begins[-1] + after
            self.shape = (1, size) if layout.kind == "row" else (size,)
            places = list(range(before, self.begins[-1]))
        self.places = torch.tensor(places, dtype=torch.int64)
        # A short draw, repeated: a large padded batch has a million slots.
        self.garbage = torch.tensor(rng.choices(GARBAGE, k=101), dtype=torch.float64)

    def read(self, x: Any) -> list[list[float]]:
        """The values at the tokens of each sequence."""
        if isinstance(x, list):
            return [row.double().tolist() for row in x]
        flat = (x.values() if x.is_nested else x.reshape(-1)).double().tolist()
        return self.tokens.rows([flat[i] for i in self.places.tolist()])

    def elsewhere(self, x: Any) -> list[float]:
        """The values at slots that hold no token of any sequence."""
        if isinstance(x, list) or x.is_nested:
            return []
        taken = set(self.places.tolist())
        return [value for i, value in enumerate(x.reshape(-1).double().tolist()) if i not in taken]

    @property
    def cu_seqlens(self) -> Tensor | None:
        """[S + 1] offsets of a packed batch."""
        return torch.tensor(self.begins, dtype=self.layout.offsets) if self.layout.packed else None

    def tensor(self, column: Sequence[float], dtype: torch.dtype, fill: float | None = None) -> Any:
        """The column in the layout, with `fill` or garbage in slots without a token."""
        values = torch.tensor(column, dtype=torch.float64)
        if self.layout.kind == "list":
            return [row.to(dtype) for row in values.split(self.tokens.lengths)]
        size = math.prod(self.shape)
        slots = self.garbage.repeat(size // 101 + 1)[:size] if fill is None else values.new_full((size,), fill)
        slots[self.places] = values
        made = slots.to(dtype).reshape(self.shape)
        if self.layout.kind == "jagged":
            return torch.nested.nested_tensor_from_jagged(made, torch.tensor(self.begins))
        first, step = {"contiguous": (0, 1), "slice": (1, 1), "step": (0, 2)}[self.layout.lie]
        around = made.new_empty((*made.shape[:-1], first + step * made.shape[-1]))
        lying = around[..., first::step]
        lying.copy_(made)
        return lying

    def turn_offsets(self, of_turns: list[list[int]] | None = None) -> Tensor:
        """[U + 1] offsets of turns, by default of its own, among the slots.

        Slots between two tokens belong to the earlier turn.
        """
        found, place = [], 0
        every = self.tokens.turns if of_turns is None else of_turns
        for s, (length, turns) in enumerate(zip(self.tokens.lengths, every, strict=True)):
            starts = list(itertools.accumulate(turns, initial=0))[1:-1]
            found += [self.begins[s]]
            found += [int(self.places[place + t]) if t < length else self.begins[s + 1] for t in starts]
            place += length
        return torch.tensor([*found, self.begins[-1]], dtype=self.layout.offsets)

    def could_be_ids(self, offsets: Tensor) -> bool:
        """Tell whether there are as many offsets of turns as slots or tokens, which is refused."""
        return offsets.shape[0] in (math.prod(self.shape), len(self.places))

    def turn_ids(self) -> Any:
        """An id for each token, which differs between neighboring turns."""
        ids = [float(i % 5) for i, n in enumerate(n for row in self.tokens.turns for n in row) for _ in range(n)]
        return self.tensor(ids, torch.int32, 0.0)


# --- a batch ---


@dataclass
class Drawn:
    """The tensors of a call: log-probs and advantages by name, and the fields of its Batch.

    `fill` stands in slots without a token; None: garbage does.
    """

    tensors: dict[str, Any]
    batch: dict[str, Any]
    laid: LaidOut
    dtypes: tuple[torch.dtype, torch.dtype]
    fill: float | None

    def column(self, name: str, dtype: torch.dtype | None = None) -> Any:
        """Another column of the tokens in the layout."""
        return self.laid.tensor(self.laid.tokens.columns[name], dtype or self.computes, self.fill)

    @property
    def computes(self) -> torch.dtype:
        """The dtype that the call computes in."""
        return torch.promote_types(torch.promote_types(*self.dtypes), torch.float32)


@dataclass
class Wants:
    """What a Spec and a Loss need of a batch."""

    turns: bool = False
    versions: bool = False
    entropy: bool = False
    groups: bool = False
    external: set[str] = field(default_factory=set)


def needs_of(spec: rc.Spec | None, loss: rc.Loss | None = None) -> Wants:
    """Read from a Spec and a Loss what a call of them has to bring."""
    wants = Wants()
    if spec is not None:
        weight = spec.weight
        units = [*spec.criteria, *([] if weight is None else [weight])]
        wants.turns = spec.turns or any("turn" in (unit.over, unit.within) for unit in units)
        wants.versions = weight is not None and weight.decay is not None
        wants.versions |= any(criterion.stat == "age" for criterion in spec.criteria)
        wants.entropy = any(criterion.stat == "entropy" for criterion in spec.criteria)
        wants.external = {criterion.name for criterion in spec.criteria if criterion.name is not None}
        rules = [bound for criterion in spec.criteria for bound in (criterion.lower, criterion.upper)]
        wants.groups = weight is not None and weight.normalize == "group"
        wants.groups |= any(getattr(rule, "within", "batch") == "group" for rule in rules)
    if loss is not None:
        wants.turns |= getattr(loss.surrogate, "over", "sequence") == "turn"
        wants.entropy |= loss.entropy_bonus is not None
        wants.groups |= isinstance(loss.surrogate, rc.REAL)
    return wants


def random_batch(
    rng: random.Random,
    wants: Wants,
    *,
    kind: str | Sequence[int] = "small",
    layout: Layout | None = None,
    dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    mask: tuple[torch.dtype | None, float] | None = None,
    per_sequence: bool | None = None,
    extras: float = 0.12,
    part: Tokens | None = None,
    far: bool = False,
) -> Drawn:
    """A batch with what a call needs, and some of what it does not.

    Args:
        rng: Draws.
        wants: What the call needs.
        kind: The size, or the lengths, as `lengths_of` takes them.
        layout: None: any; so are the others.
        dtypes: Of the trainer's and the rollout's log-probs.
        mask: Its dtype and the value of a valid token.
        per_sequence: Advantages are [S].
        extras: The probability of each part that the call does not need.
        part: The tokens, which one of several ranks holds. They come with a mask, and what could be of tokens or of
            sequences is of tokens. Equal draws for every rank make calls that go together.
        far: Log-ratios lie beyond every clamp at a third of the tokens.
    """
    layout = random_layout(rng) if layout is None else layout
    dtypes = rng.choice(DTYPES) if dtypes is None else dtypes
    mask_dtype, value = rng.choice(MASKS) if mask is None else mask
    if part is not None:
        mask_dtype, per_sequence = mask_dtype or torch.bool, False
    tokens = part or random_tokens(rng, kind, mask_dtype is None, far)
    laid = LaidOut(tokens, layout, rng)
    # Without a mask padding counts as tokens, and zeros are what it looks like.
    drawn = Drawn({}, {}, laid, dtypes, 0.0 if layout.padded and mask_dtype is None else None)
    computes, count = drawn.computes, len(tokens.lengths)

    def of_sequences(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor(tokens.of_sequences[name], dtype=torch.float64).to(dtype)

    drawn.tensors = {name: drawn.column(name, dtypes[name == "rollout"]) for name in ("train", "rollout", "new", "ref")}
    # Where there are as many sequences as tokens, [S] counts as per token.
    per_sequence = rng.random() < 0.4 if per_sequence is None else per_sequence
    per_sequence &= count != sum(tokens.lengths)
    drawn.tensors["advantages"] = of_sequences("advantages", computes) if per_sequence else drawn.column("advantages")
    batch = drawn.batch
    if mask_dtype is not None:
        # Tokens of no sequence may be marked as valid.
        of_mask = [value * is_valid for is_valid in tokens.valid]
        batch["mask"] = laid.tensor(of_mask, mask_dtype, value if layout.kind == "gaps" else 0.0)
    if layout.packed:
        batch["cu_seqlens"] = laid.cu_seqlens

    def has(wanted: bool) -> bool:
        return wanted or rng.random() < extras

    if has(wants.turns):
        batch["turns"] = _turns(rng, laid, batch) if part is None else laid.turn_offsets()
    if has(wants.entropy):
        batch["entropy"] = drawn.column("entropy", dtypes[0])
    if has(bool(wants.external)):
        batch["external"] = {name: drawn.column(name) for name in ("surprise", "entropy")}
    if has(wants.versions):
        ids = of_sequences("versions", torch.int64)
        if part is not None or rng.random() < 0.7 or count == sum(tokens.lengths):
            ids = laid.tensor(tokens.columns["versions"], torch.int64, -1.0)
        batch["versions"] = rc.Versions(ids, CURRENT_VERSION)
    if has(wants.groups):
        sized = part is None and count % 2 == 0 and rng.random() < 0.3
        index = of_sequences("groups", rng.choice((torch.int32, torch.int64)))
        batch["groups"] = rc.Groups(size=2) if sized else rc.Groups(index=index, count=GROUPS)
    if has(False):
        batch["kept_mass"] = rc.KeptMass(drawn.column("log_mass"), of=rng.choice(("rollout", "train")))
    if has(False):
        batch["labels"] = _labels(rng, drawn, of_sequences("labels", torch.int64))
    if rng.random() < 0.5:
        batch["sequence_ids"] = of_sequences("ids", torch.int64)
    return drawn


def _turns(rng: random.Random, laid: LaidOut, batch: dict[str, Any]) -> Any:
    """Turns as offsets, as ids, as ids with a bound on their number, or as the runs of the mask."""
    kind = rng.choice(("offsets", "offsets", "ids", "at most", "runs"))
    offsets = laid.turn_offsets()
    if kind == "offsets" and laid.could_be_ids(offsets):
        kind = "ids"
    if kind == "offsets":
        return offsets
    if kind == "runs" and "mask" in batch:
        return "runs"
    most = max(1, sum(map(len, laid.tokens.turns)) + len(laid.tokens.lengths))
    if laid.layout.kind == "holes":
        # The id of a slot between two tokens begins a turn of its own.
        most = max(1, math.prod(laid.shape))
    return laid.turn_ids() if kind == "ids" else rc.TurnIds(laid.turn_ids(), at_most=most)


def _labels(rng: random.Random, drawn: Drawn, of_sequences: Tensor) -> dict[str, rc.Labels]:
    """Labels of sequences or tokens, and those that ages make."""
    ids = of_sequences if rng.random() < 0.6 else drawn.laid.tensor(drawn.laid.tokens.columns["labels"], torch.int64, 5)
    found = {"place": rc.Labels(ids, LABELS)}
    if "versions" in drawn.batch and rng.random() < 0.5:
        found["age"] = rc.Labels(names=("0", "1", "2+"))
    return found


# --- a Spec ---

# Where each statistic usually lies.
UPPERS = {
    "ratio": 1.3, "k1": 0.3, "k2": 0.06, "k3": 0.06, "k3_reverse": 0.06, "abs": 0.3, "ratio_error": 1.3,
    "ratio_deviation": 0.3, "prob_diff": 0.05, "tv": 0.1, "binary_kl": 0.02, "binary_kl_reverse": 0.02,
    "binary_kl_symmetric": 0.02, "age": 3.0, "entropy": 1.5, "external": 0.4,
}  # fmt: skip
SIGNED = ("k1", "prob_diff", "external", "age")
UNITS = ("token", "sequence", "sequence", "turn", "prefix")


def random_spec(rng: random.Random, units: Sequence[str] = UNITS, rules: bool = True, of_loss: bool = False) -> rc.Spec:
    """Any Spec.

    Args:
        rng: Draws.
        units: The units that weights and criteria are over.
        rules: Some bounds are decided by the batch.
        of_loss: Some criteria compare the policy that is trained.
    """
    drawn = [random_criterion(rng, units, rules, of_loss) for _ in range(rng.choice((0, 0, 1, 1, 2, 3, 4)))]
    criteria = tuple({criterion.label: criterion for criterion in drawn}.values())
    weight = random_weight(rng, units, rules) if rng.random() < 0.8 else None
    plain = all(unit.over in ("token", "sequence") for unit in (*criteria, *([weight] if weight else [])))
    plain &= not needs_of(rc.Spec(weight, criteria)).turns
    plain &= weight is None or weight.normalize in (None, "batch")
    plain &= not any(_is_rule(bound) for unit in (*criteria, weight) if unit for bound in (unit.lower, unit.upper))
    return rc.Spec(
        weight,
        criteria,
        rejected=rng.choice(("mask", "zero", "both")),
        clamp=rng.choice((20.0, 20.0, 0.5)),
        nonfinite=rng.choice(("reject", "reject", "neutral", "propagate")),
        sums_over=rng.choice(("valid", "valid", "kept")),
        detail=rng.choice(("basic", "full")),
        apply=rng.random() < 0.95,
        report=("native", *(("verl", "xtuner", "skyrl") if plain and rng.random() < 0.2 else ())),
        turns="turn" in units and rng.random() < 0.1,
    )


def _is_rule(bound: object) -> bool:
    return bound is not None and not isinstance(bound, float)


def random_criterion(rng: random.Random, units: Sequence[str], rules: bool, of_loss: bool) -> rc.Criterion:
    """Any criterion, with bounds where its statistic usually lies."""
    stat, over = rng.choice(tuple(UPPERS)), rng.choice(units)
    middle = UPPERS[stat]
    upper: Any = middle * (0.7 + 1.5 * rng.random())
    lower: Any = -upper * rng.random() if stat in SIGNED else upper * rng.choice((0.01, 0.3, 0.7))
    if stat == "age":
        lower, upper = rng.choice((-2.0, 0.5, 1.0)), rng.choice((1.0, 3.0, 3.5))
    sides, clamp = rng.choice(("upper", "upper", "both", "lower")), rng.choice((None, None, 0.5))
    if stat in ("abs", "k1") and clamp is not None and rng.random() < 0.5:
        # A bound at which clamped tokens lie to the bit.
        lower, upper = (clamp, clamp) if stat == "abs" else (-clamp, clamp)
    if rules and over != "prefix" and rng.random() < 0.35:
        lower, upper = _rules(rng, rng.choice(("batch", "group")), rc.MeanBelow(middle, "batch"))
    reduces = None if over == "token" else rng.choice(("sum", "mean", "mean", "max", "min"))
    policies = ("train/rollout", "new/rollout", "new/old") if of_loss else ("train/rollout",)
    return rc.Criterion(
        stat,
        over,
        reduces,
        lower=None if sides == "upper" else lower,
        upper=None if sides == "lower" else upper,
        when=rng.choice(("any", "any", "negative_advantage", "positive_advantage", "outward")),
        drop=rng.choice(("unit", "unit", "sequence", "token", *(("rest", "rest") if over == "prefix" else ()))),
        of=rng.choice(policies) if stat not in ("age", "entropy", "external") else "train/rollout",
        name=rng.choice(("surprise", "entropy")) if stat == "external" else None,
        token_clamp=clamp,
        eps=rng.choice((1e-8, 0.1)),
        growth=rng.choice((None, "sqrt")) if over == "prefix" else None,
        within=rng.choice(("sequence", "turn")) if over == "prefix" and "turn" in units else "sequence",
    )


def _rules(rng: random.Random, within: str, mean_below: Any = None) -> tuple[Any, Any]:
    """A lower and an upper bound that the batch decides."""
    lower = rng.choice((rc.Quantile(0.1, within), rc.TopK(share=0.8, within=within), rc.TopK(5, within=within)))
    upper = rng.choice((rc.Quantile(0.9, within), rc.Bottom(share=0.8, within=within), rc.Bottom(9, within=within)))
    return lower, mean_below if mean_below is not None and rng.random() < 0.25 else upper


def random_weight(rng: random.Random, units: Sequence[str] = UNITS, rules: bool = True) -> rc.Weight:
    """Any weight."""
    over = rng.choice(units)
    lower, upper = rng.choice(((None, None), (None, 2.0), (0.512345, 1.987654), (None, 1.123456), (0.901234, None)))
    outside, growth = rng.choice(("clamp", "clamp", "zero")), rng.choice((None, "sqrt")) if over == "prefix" else None
    if rules and growth is None and rng.random() < 0.25:
        lower, upper = _rules(rng, "batch")
        if outside == "clamp" and rng.random() < 0.4:
            lower, upper = None, rc.KeepESS(0.8)
    return rc.Weight(
        over,
        {"token": None, "prefix": rng.choice(("sum", "mean", "min"))}.get(over, rng.choice(("sum", "mean"))),
        lower,
        upper,
        outside,
        rng.choice((None, None, None, "batch", "group", *(("sequence",) if over != "sequence" else ()))),
        token_clamp=rng.choice((None, None, 0.5)),
        growth=growth,
        within=rng.choice(("sequence", "turn")) if over == "prefix" and "turn" in units else "sequence",
        decay=rng.choice((None, None, None, 0.8)),
    )


# --- a Loss ---


def _ratio(rng: random.Random) -> float:
    return 0.02 + 0.4 * rng.random()


# Of each class of surrogates, with and without bounds of its own.
SURROGATES: dict[str, Callable[[random.Random, dict[str, Any]], Any]] = {
    "PPO": lambda rng, own: rc.PPO(
        _ratio(rng), _ratio(rng), rng.choice((None, 1.2, 3.0)), rng.choice((None, 1.5)), **own
    ),
    "GSPO": lambda rng, own: rc.GSPO(
        _ratio(rng) / 9, _ratio(rng) / 9, rng.choice((None, 1.1)), through=rng.choice(("sequence", "token")),
        over=rng.choice(("sequence", "sequence", "turn")), **own,
    ),
    "AveragePPO": lambda rng, own: rc.AveragePPO(
        _ratio(rng) / 3, _ratio(rng) / 3, rng.choice((None, 1.2)), level=rng.choice(("average", "geometric_average")),
        **own,
    ),
    "Reinforce": lambda rng, own: rc.Reinforce(**own),
    "Score": lambda rng, own: rc.Score(
        rng.choice((None, 0.8)), rng.choice((None, 1.2)), rng.choice(("clamp", "zero")),
        rng.choice(("token", "token", "sequence", "average", "geometric_average")), **own,
    ),
    "Score()": lambda rng, own: rc.Score(**own),
    "DPPO": lambda rng, own: rc.DPPO(
        rng.choice(("tv", "kl")), _ratio(rng) / 9, _ratio(rng) / 9, upper=rng.choice((None, 1.4)), **own
    ),
    "SAPO": lambda rng, own: rc.SAPO(gate=rng.choice(("differentiable", "stopped")), **own),
    "GMPO": lambda rng, own: rc.GMPO(_ratio(rng), _ratio(rng), **own),
    "GPG": lambda rng, own: rc.GPG(**own),
    "DRO": lambda rng, own: rc.DRO(0.5, rng.choice(("token", "sequence")), **own),
    "TOPR": lambda rng, own: rc.TOPR(0.1, 1.2, positive=0.5, negative=2.0, **own),
    "REC": lambda rng, own: rc.REC(
        rng.choice(("one_side", "two_side", "ring")), 0.1, 0.1, 0.3, 0.4, rng.choice(("one", "ratio")),
        rng.choice(("token", "sequence")), **own,
    ),
    "VESPO": lambda rng, own: rc.VESPO(**own),
    "ClipCov": lambda rng, own: rc.ClipCov(
        0.2, 0.2, rng.choice((None, 1.2)), share=0.2, lower=-0.5, upper=5.0, seed=rng.randrange(9), **own
    ),
    "KLCov": lambda rng, own: rc.KLCov(0.2, 0.7, **own),
    "REAL": lambda rng, own: rc.REAL(rng.choice((0.5, 0.05)), **own),
}  # fmt: skip


def random_mean(rng: random.Random) -> rc.Mean:
    """Any mean."""
    of = rng.choice(("token", "token", "sequence", "sequence_sum", "sum"))
    counted = ("original", "kept", *(("rows",) if of.startswith("sequence") else ()))
    length = rng.choice((None, 16.0)) if of == "sequence_sum" else None
    return rc.Mean(of, "original" if of == "sum" else rng.choice(counted), length)


def random_loss(rng: random.Random, surrogate: str | None = None) -> rc.Loss:
    """Any Loss; a name of `SURROGATES` chooses the class."""
    name = rng.choice(tuple(SURROGATES)) if surrogate is None else surrogate
    own = {
        "of": rng.choice((None, None, None, "new/old", "new/rollout")),
        "clamp": rng.choice((20.0, 20.0, 0.3)),
        "coef": rng.choice((1.0, 1.0, 0.5)),
    }
    kinds, scopes = ("k1", "k2", "k3", "abs"), ("kept", "all")
    kl = None
    if rng.random() < 0.35:
        kl = rc.KL(
            rng.choice(kinds),
            rng.choice((0.001, 0.1)),
            gradient=rng.choice((None, None, *kinds)),
            value_clamp=rng.choice((None, None, 0.2)),
            weight=rng.choice((None, None, "ratio", "weights")),
            scope=rng.choice(scopes),
            bound=rng.choice((None, None, 0.05)),
            swapped=rng.random() < 0.2,
            mean=rng.choice((None, None, None, rc.Mean("sequence"), rc.Mean("token", "kept"))),
        )
    return rc.Loss(
        SURROGATES[name](rng, own),
        random_mean(rng),
        kl,
        rc.SquaredLogRatio(0.1, rng.choice(scopes)) if rng.random() < 0.2 else None,
        rc.EntropyBonus(rng.choice((0.01, -0.1)), rng.choice(scopes)) if rng.random() < 0.15 else None,
    )
