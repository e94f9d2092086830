"""Batches for the tests: random sequences, every layout of them as tensors, and the comparison with the oracle."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field, replace

import torch

import rollout_corr as rc
from builders import compare
from builders.calls import bundled
from frozen.generator import GARBAGE, VERSION_GARBAGE, LaidOut, Layout, Tokens
from frozen.runners import one_thread as one_thread  # for those that move
from frozen.runners import run_as
from oracles import correction as oracle

_LAYOUTS = {
    "packed": Layout("packed"),
    "packed_row": Layout("row", offsets=torch.int64),
    "packed_gaps": Layout("gaps", offsets=torch.int64),
    "padded_right": Layout("right"),
    "padded_left": Layout("left"),
    "padded_holes": Layout("holes"),
    "padded_strided": Layout("right", "slice"),
    "jagged": Layout("jagged"),
    "list": Layout("list"),
}
LAYOUTS = tuple(_LAYOUTS)
MASK_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


def random_sequences(
    seed,
    lengths=(5, 1, 7, 0, 4, 6),
    *,
    scale=0.4,
    invalid=0.25,
    advantages="token",
    external=True,
    mask_values=(1,),
    renormalized=None,
):
    """Sequences of the given lengths with random holes in their masks. The third is all invalid.

    Advantages are multiples of 1/4, so that no rounding changes the sign of their mean. With `renormalized` there is a
    kept mass, and that side's log-probs are over the kept set.
    """
    rng, of_mass, of_bits = random.Random(seed), random.Random(seed), random.Random(seed)
    made, of_versions = [], random.Random(seed)
    for s, length in enumerate(lengths):
        mask = [0 if s == 2 or rng.random() < invalid else rng.choice(mask_values) for _ in range(length)]
        rollout = [-rng.expovariate(1.0) for _ in range(length)]
        train = [min(x + rng.gauss(0.0, scale), 0.0) for x in rollout]
        if renormalized is None:
            # Equal to the last bit, as tokens that are certain are in every engine.
            train = [x if of_bits.random() < 0.2 else y for x, y in zip(rollout, train, strict=True)]
        tokens = [rng.choice((-2, -1, -1, 0, 1, 1, 3)) / 4 for _ in range(length)]
        extra = [rng.gauss(0.0, 1.0) for _ in range(length)]
        for t in range(length):
            if mask[t] == 0:
                train[t], rollout[t], tokens[t], extra[t] = (rng.choice(GARBAGE) for _ in range(4))
        mass = None
        if renormalized is not None:
            mass = [-of_mass.random() if m else of_mass.choice((*GARBAGE, 5.0)) for m in mask]
            full = train if renormalized == "rollout" else rollout
            full[:] = [x + y if m else x for x, y, m in zip(full, mass, mask, strict=True)]
        given = {"token": tokens, "sequence": rng.choice((-0.5, 0.25, 1.0)), None: None}[advantages]
        versions = [
            of_versions.choice((0, 3, 4, 6, 7, 7)) if m else int(of_versions.choice(VERSION_GARBAGE)) for m in mask
        ]
        kept = mass, renormalized or "rollout", versions, 7
        made.append(oracle.Sequence(train, rollout, mask, given, {"entropy": extra} if external else {}, *kept))
    return made


def spoil(sequences, seed, share=0.3):
    """Put NaN or an infinity at one valid token of some sequences."""
    rng = random.Random(seed)
    for sequence in sequences:
        valid = [t for t, m in enumerate(sequence.mask) if m]
        if valid and rng.random() < share:
            where = rng.choice((sequence.train, sequence.rollout))
            where[rng.choice(valid)] = rng.choice((math.nan, math.inf, -math.inf))
    return sequences


def wild(sequences):
    """Give some sequences tokens that reach the clamps (D = 30 and -40), probabilities near 1, and a tiny D."""
    odd = [(-0.5, -30.5), (-40.5, -0.5), (-1e-3, -1e-12), (-1.0 + 3e-5, -1.0), (-2.0, -2.0)]
    for sequence in sequences[::2] + sequences[1::2]:
        for t, mask in enumerate(sequence.mask):
            if mask and odd and t % 3 == 0:
                sequence.train[t], sequence.rollout[t] = odd.pop(0)
    return sequences


def rounded(sequences, dtype):
    """Copy sequences with every log-prob and external value rounded to `dtype`."""

    def cast(values):
        return torch.tensor(values, dtype=torch.float64).to(dtype).double().tolist()

    return [
        replace(
            q,
            train=cast(q.train),
            rollout=cast(q.rollout),
            external={name: cast(v) for name, v in q.external.items()},
            mass=None if q.mass is None else cast(q.mass),
        )
        for q in sequences
    ]


def cut(values, pattern, signed=True):
    """Bounds (lower, upper) in the middle of gaps between sorted values, so that some of them fail."""
    known = sorted({v for v in values if v is not None and math.isfinite(v)})
    gaps = [(a, b) for a, b in itertools.pairwise(known) if b - a > 1e-5 * max(1.0, abs(a), abs(b))]
    middles = [(a + b) / 2 for a, b in gaps]
    if not middles:
        edge = known[0] if known else 0.0
        middles = [edge + (0.5 * abs(edge) or 0.5)]
    if not signed:
        middles = [m for m in middles if m > 0] or [0.5]
    lower, upper = middles[len(middles) // 4], middles[(3 * len(middles)) // 4]
    return {"lower": (lower, None), "upper": (None, upper), "both": (lower, upper)}[pattern]


def fitted(spec, sequences):
    """The Spec with bounds that cut this batch, in the middle of gaps, and no unit within 1e-6 of one."""
    done = {}
    # Criteria of tokens first: what sums over the kept see depends on them.
    for i in sorted(range(len(spec.criteria)), key=lambda i: spec.criteria[i].over == "sequence"):
        criterion = spec.criteria[i]
        before = tuple(c for c in done.values() if c.over == "token")
        open_ended = replace(criterion, lower=None, upper=math.inf)
        found = oracle.correct(sequences, replace(spec, criteria=(*before, open_ended))).outcomes[-1]
        values = itertools.compress(itertools.chain(*found.values), itertools.chain(*found.tested))
        sides = "upper" if criterion.lower is None else "lower" if criterion.upper is None else "both"
        lower, upper = cut(values, sides, signed=criterion.statistic.signed or criterion.statistic.log_space)
        if criterion.stat == "ratio":
            lower, upper = (None if bound is None else math.exp(bound) for bound in (lower, upper))
        done[i] = replace(criterion, lower=lower, upper=upper)
    return replace(spec, criteria=tuple(done[i] for i in range(len(done))))


def moved(x, device):
    """An argument of `rc.correct` on a device. `Tensor.to` alone would make a slice contiguous."""
    if x is None:
        return None
    if isinstance(x, list):
        return [moved(row, device) for row in x]
    if x.is_nested:
        return torch.nested.nested_tensor_from_jagged(x.values().to(device), x.offsets().to(device))
    held = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((held,), (1,), 0).to(device).as_strided(x.shape, x.stride(), x.storage_offset())


TENSORS = ("train", "rollout", "mask", "advantages", "log_mass", "versions")


@dataclass
class Laid:
    """Arguments of `rc.correct` for one layout, and where each token went."""

    train: object
    rollout: object
    mask: object
    places: list
    shape: tuple
    cu_seqlens: object = None
    advantages: object = None
    external: dict | None = None
    log_mass: object = None
    renormalized: str = "rollout"
    versions: object = None
    current_version: int = 0
    others: dict = field(default_factory=dict)
    out: LaidOut | None = None  # made it

    def correct(self, spec, call=rc.correct, **overrides):
        arguments = {
            "cu_seqlens": self.cu_seqlens,
            "advantages": self.advantages,
            "external": self.external,
            **({} if self.log_mass is None else {"log_mass": self.log_mass, "renormalized": self.renormalized}),
            **({"versions": self.versions, "current_version": self.current_version} if spec.reads_versions else {}),
            **({"entropy": self.external["entropy"]} if spec.reads_entropy else {}),
            **self.others,
            **overrides,
        }
        return call(self.train, self.rollout, **bundled(mask=self.mask, spec=spec, **arguments))

    def to(self, device):
        """Copy to a device, with the strides kept; offsets given apart stay on the CPU."""
        external = None if self.external is None else {name: moved(x, device) for name, x in self.external.items()}
        tensors = {name: moved(getattr(self, name), device) for name in TENSORS}
        return replace(self, **tensors, external=external)

    def read(self, value):
        """The values at each sequence's tokens, as lists of floats."""
        if isinstance(value, list):
            rows = [row.double().tolist() for row in value]
            return [[rows[s][t] for s, t in places] for places in self.places]
        flat = value.values() if value.is_nested else value.reshape(-1)
        flat = flat.double().tolist()
        return [[flat[i] for i in places] for places in self.places]

    def elsewhere(self, value):
        """The values at slots that belong to no sequence or hold none of its tokens."""
        if isinstance(value, list) or value.is_nested:
            return []
        taken = {i for places in self.places for i in places}
        return [v for i, v in enumerate(value.double().reshape(-1).tolist()) if i not in taken]


def lay_out(sequences, layout, dtype=torch.float64, mask_dtype=torch.bool, seed=0):
    """Turn sequences into tensors of a layout. Slots without a token hold garbage; in a gap even the mask is 1."""
    lengths = [len(q) for q in sequences]
    out = LaidOut(Tokens(lengths, [], {}, {}, [[n] for n in lengths]), _LAYOUTS[layout], random.Random(seed))
    per_sequence = any(q.advantages is not None and not isinstance(q.advantages, list) for q in sequences)
    with_advantages = not sequences or any(q.advantages is not None for q in sequences)
    names = sorted({name for q in sequences for name in q.external}) if sequences else ["entropy"]

    def build(rows, kind, fill=None):
        return out.tensor([x for row in rows for x in row], kind, fill)

    laid = Laid(
        train=build([q.train for q in sequences], dtype),
        rollout=build([q.rollout for q in sequences], dtype),
        mask=build([q.mask for q in sequences], mask_dtype, float(layout == "packed_gaps")),
        places=out.rows,
        shape=out.shape,
        cu_seqlens=out.cu_seqlens,
        out=out,
    )
    if with_advantages:
        if per_sequence:
            laid.advantages = torch.tensor([q.advantages for q in sequences], dtype=torch.float64).to(dtype)
        else:
            laid.advantages = build([q.advantages for q in sequences], dtype)
    if names:
        laid.external = {name: build([q.external[name] for q in sequences], dtype) for name in names}
    if any(q.mass is not None for q in sequences):
        laid.log_mass = build([q.mass for q in sequences], dtype)
        laid.renormalized = sequences[0].renormalized
    if not sequences or any(q.versions is not None for q in sequences):
        laid.current_version = sequences[0].current_version if sequences else 0
        if not sequences or isinstance(sequences[0].versions, list):
            laid.versions = build([q.versions for q in sequences], torch.int64, -1.0)
        else:
            laid.versions = torch.tensor([q.versions for q in sequences])
    return laid


def check(sequences, spec, layout="packed", *, dtype=torch.float64, mask_dtype=torch.bool, whole=False, **given):
    """Compare `rc.correct` with the oracle in one layout: decisions and masks exactly, all else but for rounding.

    `whole` takes the way that other devices go, all sequences at once; more arguments are those of the call. Returns
    the correction and the oracle's answer.
    """
    laid = lay_out(sequences, layout, dtype, mask_dtype)
    with run_as("whole" if whole else "blocks"):
        out = laid.correct(spec, **given)
    groups = given.get("group_index")
    exact = sequences if dtype == torch.float64 else rounded(sequences, dtype)
    expected = oracle.correct(exact, spec, None if groups is None else groups.tolist())
    case = f"{'whole ' * whole}{layout} {dtype} {mask_dtype} {spec.to_dict()}"
    compare_all(laid, out, expected, spec, mask_dtype, dtype, case)
    return out, expected


def compare_all(laid, out, expected, spec, mask_dtype, dtype, case, valid=None, metrics=None):
    """Results and metrics, in what a dtype computes in."""
    del mask_dtype, valid
    computes = torch.promote_types(dtype, torch.float32)
    compare.correction(spec, out, expected, laid.out, laid.mask, computes, case, metrics)
