"""Sequences cut over ranks in every way that frameworks cut them, and what the ranks found put together again."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import torch

import rollout_corr as rc
from builders.batches import lay_out, random_sequences, spoil, wild
from builders.loss_cases import SURROGATES, only, random_batch
from builders.same_bits import outcome
from builders.threaded_ranks import Rank, Ranks
from builders.turns import offsets_of

# --- the ways ---


def contiguous(sequences, ranks):
    """Every sequence in as many stretches as there are ranks; a short one leaves the last ranks without a token."""
    return [[t // max(1, -(-len(q) // ranks)) for t in range(len(q))] for q in sequences]


def zigzag(sequences, ranks):
    """Megatron's: twice as many stretches; a rank has one from the front and one from the back."""
    halves = contiguous(sequences, 2 * ranks)
    return [[min(half, 2 * ranks - 1 - half) for half in row] for row in halves]


def ulysses(sequences, ranks):
    """The pack is cut and not its sequences: most of them lie on one rank, some on two."""
    total, places = sum(map(len, sequences)), iter(range(sum(map(len, sequences))))
    return [[next(places) * ranks // max(1, total) for _ in range(len(q))] for q in sequences]


def whole(sequences, ranks):
    """Every sequence on one rank only."""
    return [[s % ranks] * len(q) for s, q in enumerate(sequences)]


def last(sequences, ranks):
    """Everything on the last rank, nothing at all on the others."""
    return [[ranks - 1] * len(q) for q in sequences]


def scattered(sequences, ranks):
    """Any token anywhere."""
    rng = random.Random(sum(map(len, sequences)))
    return [[rng.randrange(ranks) for _ in range(len(q))] for q in sequences]


WAYS = {way.__name__: way for way in (contiguous, zigzag, ulysses, whole, last, scattered)}


def tokens_of(sequences, way, ranks, rank):
    """Which tokens of each sequence a rank holds, in the order in which it holds them."""
    held = [[t for t, owner in enumerate(row) if owner == rank] for row in WAYS[way](sequences, ranks)]
    if way == "scattered":
        for row in held:
            random.Random(len(row)).shuffle(row)
    return held


def picked(sequences, held):
    """The sequences with some of their tokens."""

    def of(values, row):
        return [values[t] for t in row] if isinstance(values, list) else values

    return [
        replace(
            q,
            **{name: of(value, row) for name, value in vars(q).items() if name != "external"},
            **({"external": {name: of(x, row) for name, x in q.external.items()}} if hasattr(q, "external") else {}),
        )
        for q, row in zip(sequences, held, strict=True)
    ]


def together(parts, sequences, way, ranks):
    """Rows per sequence from what the ranks hold of them."""
    if parts[0] is None:
        assert all(part is None for part in parts)
        return None
    rows = [[None] * len(q) for q in sequences]
    for rank, part in enumerate(parts):
        held = tokens_of(sequences, way, ranks, rank)
        for row, values, where in zip(rows, part, held, strict=True):
            for t, value in zip(where, values, strict=True):
                row[t] = value
    return rows


def joined(outcomes, sequences, way, ranks):
    """Outcomes of the ranks as one: all agree on the decisions, statistics are merged."""
    weights, masks, keeps, statistics = zip(*outcomes, strict=True)
    assert all(keep == keeps[0] for keep in keeps)
    merged = rc.Statistics.sum(statistics)
    return together(weights, sequences, way, ranks), together(masks, sequences, way, ranks), keeps[0], merged


# --- the cases ---

SPECS = {
    "measure": rc.Spec(detail="full"),
    "token": rc.Spec(
        rc.Weight.token(lower=0.8, upper=1.2, normalize="batch"),
        (rc.Criterion("prob_diff", lower=-0.2, upper=0.2),),
        rejected="both",
    ),
    "geometric and veto": rc.Spec(
        rc.Weight.geometric(upper=2.0),
        (
            rc.Criterion("ratio", over="sequence", reduce="min", lower=0.4),
            rc.Criterion("k3", over="sequence", reduce="mean", upper=0.08),
            rc.Criterion("external", over="sequence", reduce="max", upper=1.7, name="entropy"),
        ),
        nonfinite="neutral",
    ),
    "survivors": rc.Spec(
        rc.Weight.product(upper=2.0),
        (
            rc.Criterion("ratio", lower=0.5, drop="sequence"),
            rc.Criterion("ratio", upper=1.5),
            rc.Criterion("abs", over="sequence", reduce="sum", upper=1.0),
        ),
        sums_over="kept",
    ),
    "some tokens": rc.Spec(
        None,
        (
            rc.Criterion("abs", over="sequence", reduce="mean", upper=0.3, when="outward", drop="token"),
            rc.Criterion("k1", over="sequence", reduce="sum", upper=0.3, when="negative_advantage", drop="token"),
            rc.Criterion("k2", over="sequence", reduce="max", upper=0.4, when="positive_advantage"),
        ),
        rejected="both",
    ),
    "broken": rc.Spec(rc.Weight.product(), (rc.Criterion("k2", over="sequence", reduce="sum", upper=1.0),)),
    "poisoned": rc.Spec(
        rc.Weight.product(lower=0.1),
        (
            rc.Criterion("k1", over="sequence", reduce="mean", upper=0.5),
            rc.Criterion("ratio", over="sequence", reduce="max", upper=3.0),
        ),
        nonfinite="propagate",
    ),
    "verl": rc.spec("verl.decoupled_seq_is_rs"),
    "xtuner": rc.spec("xtuner.reasoning"),
    "skyrl": rc.spec("skyrl.tldr"),
}
LOSS_SPEC = rc.Spec(
    rc.Weight.geometric(upper=2.0),
    (
        rc.Criterion("k1", over="sequence", reduce="mean", upper=0.3, of="new/old", when="negative_advantage"),
        rc.Criterion("ratio", lower=0.3, drop="sequence", of="new/rollout"),
        rc.Criterion("abs", upper=1.0, label="far"),
    ),
)
DIVIDED = (
    rc.Mean("token"),
    rc.Mean("sequence", over="kept"),
    rc.Mean("token", over="kept"),
    rc.Mean("sequence_sum"),
    rc.Mean("sequence"),
    rc.Mean("sequence_sum", length=20.0),
    rc.Mean("sum"),
)
LOSS_LAYOUTS = ("packed", "padded_right", "packed_row", "padded_holes", "list")
LAYOUTS = ("packed", "packed_row", "padded_right", "padded_holes", "jagged", "list")
DTYPES = (torch.float32, torch.bfloat16)


def cases(every=1):
    """(name, sequences, spec, way, layout, dtype): every way with every Spec, the rest taking turns."""
    turns = itertools.cycle(itertools.product(LAYOUTS, DTYPES))
    for seed, ((name, spec), way) in enumerate([*itertools.product(SPECS.items(), WAYS)][::every]):
        batch = wild(random_sequences(seed, (9, 1, 12, 0, 5, 17, 3)))
        if name in ("broken", "poisoned"):
            spoil(batch, seed, 0.7)
        layout, dtype = next(turns)
        # SkyRL counts padding, and every rank has its own.
        layout = "packed" if name == "skyrl" else layout
        yield f"{name}, {way}, {layout}, {dtype}", batch, spec, way, layout, dtype


def loss_cases(every=1):
    """(name, sequences, options, way, layout, dtype): every surrogate, the rest taking turns."""
    turns = itertools.cycle(itertools.product(WAYS, DIVIDED))
    layouts = itertools.cycle(LOSS_LAYOUTS)
    for seed, (name, surrogate) in enumerate([*SURROGATES.items()][::every]):
        for fused, dtype in ((False, torch.float64), (True, torch.float32)):
            way, mean = next(turns)
            options = {"surrogate": surrogate, "mean": mean, "kl": rc.KL("k3", 0.1, scope="all")}
            options |= {"spec": LOSS_SPEC} if fused else {}
            tensors = ("old", "rollout", "ref") if fused else ("old", "ref", "weights", "train_mask")
            batch = only(random_batch(seed, (9, 1, 12, 0, 5, 17, 3), broken=seed % 3 == 0), *tensors)
            layout = next(layouts)
            yield f"{name}, {fused}, {way}, {mean}, {layout}", batch, options, way, layout, dtype


# --- ranks that are not there ---


def lockstep(sequences, spec, way, ranks, dtype, layout="packed", **options):
    """Outcome of `correct` on ranks that are played by this process, as one."""
    return joined(outcomes(sequences, spec, way, ranks, dtype, layout, **options), sequences, way, ranks)


def turns_of(turns, held):
    """The lengths of turns on a rank, from those of whole sequences and the tokens that it holds of each."""
    found = []
    for lengths, row in zip(turns, held, strict=True):
        ends = list(itertools.accumulate(lengths))
        found.append([sum(end - n <= t < end for t in row) for end, n in zip(ends, lengths, strict=True)])
    return found


def outcomes(sequences, spec, way, ranks, dtype, layout="packed", *, sent=None, turns=None, kept=None, **options):
    """Run `correct` on every rank of a split batch, with as few exchanges as it needs.

    `sent` collects the tables that travel. With `turns`, their lengths in each sequence, `kept` collects `keep_turns`.
    Options are those of the call, and the `device` of its tensors.
    """
    group, device = Ranks(ranks), options.pop("device", "cpu")

    def of_rank(rank):
        held = tokens_of(sequences, way, ranks, rank)
        laid = lay_out(picked(sequences, held), layout, dtype, seed=rank).to(device)
        more = {} if turns is None else {"turns": offsets_of(laid, turns_of(turns, held))}
        out = laid.correct(spec, sequence_group=Rank(rank=rank, ranks=ranks), **options, **more)
        return outcome(laid, out), out.keep_turns

    found = group.run(of_rank)
    assert group.rounds == 1 + spec.reads_entropy  # once more for the gap of the entropy
    if sent is not None:
        sent += group.sent
    if kept is not None:
        kept += [keep_turns.tolist() for _, keep_turns in found]
    return [one for one, _ in found]
