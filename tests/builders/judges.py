"""Random calls of tests/frozen, judged by the plain loops of tests/oracles: masks and decisions exactly.

A call has any Spec whose bounds are numbers, or any Loss, in any layout, with any dtypes, turns, versions, groups and
kept mass. What each option means has its own tests; here they meet.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from builders import compare
from frozen.calls import Call, correct_call, loss_call
from frozen.generator import CURRENT_VERSION, UNITS, random_loss, random_spec
from oracles import correction as oracle
from oracles import loss as oracle_loss
from oracles import metrics as oracle_metrics
from oracles.numbers import NEAR
from rollout_corr.backends import operators
from rollout_corr.backends.loss_task import beyond_kernels
from rollout_corr.specs.terms import Objective

# --- drawing ---


def correction(seed: str, units=UNITS, rules: bool = False, **of_batch: Any) -> Call:
    """Draw a correction whose padding is masked: it would count as tokens."""
    rng = random.Random(seed)
    while True:
        call = correct_call(rng, random_spec(rng, units, rules), **of_batch)
        if is_oracles(call):
            call.into = False
            return call


def loss(seed: str, name: str, term: bool, units: Sequence[str] | None = None) -> Call:
    """Draw a loss of a class of surrogates in `frozen.generator.SURROGATES`; with `term` it has a KL.

    It has no ratio of turns, since the oracle has none. With `units` it has a Spec over these,
    which propagates nothing: the oracle's sums are of finite numbers.
    """
    rng = random.Random(seed)
    while True:
        # Covariances of far log-probs are equal up to their rounding, which chooses.
        drawn, spec, mode = random_loss(rng, name), None, None
        if units is not None:
            # Half of the steps in bypass mode, where no criterion compares new and old.
            mode = "both" if drawn.surrogate.of is not None else rng.choice(("bypass", "bypass", "decoupled", "both"))
            spec = random_spec(rng, units, rules=False, of_loss=mode != "bypass")
        call = loss_call(rng, drawn, spec, mode, far=rng.random() < 0.2 and not name.endswith("Cov"))
        right = is_oracles(call) and (not term or call.loss.kl is not None)
        right &= call.correction != "correction" and getattr(call.loss.surrogate, "over", "sequence") != "turn"
        if spec is not None:
            takes_weight = spec.weight is not None and spec.apply and use_of(call) == "ratio"
            right &= spec.nonfinite != "propagate" and not (takes_weight and call.loss.surrogate.has_own_bounds)
        if right and not (name == "KLCov" and is_tied(call)):
            return call


def for_kernels(draw: Callable[[str], Call], seed: str) -> Call:
    """The first call of a seed that the kernels take."""
    return next(call for call in (draw(f"{seed} {i}") for i in range(99)) if on_kernels(call))


def on_kernels(call: Call) -> bool:
    """Whether the kernels take a call; what they leave to plain torch they refuse."""
    if call.drawn.computes == torch.float64:
        return False
    if call.spec is not None and operators.beyond_kernels(call.spec) is not None:
        return False
    return call.loss is None or beyond_kernels(call.loss.surrogate, "scale" in call.given) is None


def is_oracles(call: Call) -> bool:
    """Whether the oracles know what a call brings: one entropy, no padding that counts as tokens."""
    spec = call.spec
    # A call may have two entropies, of other dtypes.
    both = spec is not None and spec.reads_entropy and any(criterion.name == "entropy" for criterion in spec.criteria)
    return not both and ("mask" in call.drawn.batch or not call.drawn.laid.layout.padded)


def use_of(call: Call) -> str:
    """Name the use of a Spec's weights in a loss: they multiply it, take the place of its ratio, or do nothing."""
    surrogate, name = call.loss.surrogate, type(call.loss.surrogate).__name__
    if (surrogate.of or ("new/rollout" if call.mode == "bypass" else "new/old")) == "new/old":
        return "factor"
    return {"Score": "ratio", "DPPO": "ratio", "GPG": "factor", "DRO": "factor"}.get(name, "nothing")


def is_tied(call: Call) -> bool:
    """Whether several covariances lie where KLCov cuts, up to the rounding of the largest, which chooses then."""
    tokens = oracle_loss.tokens_of(call.loss.surrogate, sequences_of_loss(call, Told(call)))
    values = sorted(oracle_loss.covariances(tokens), reverse=True)
    cut = values[oracle_loss.many(call.loss.surrogate, tokens) - 1] if values else 0.0
    return sum(abs(value - cut) <= NEAR * max(map(abs, values)) for value in values) > 1


# --- what the oracles are told ---


class Told:
    """The tokens of a call as the oracles take them, rounded to their dtypes, and where they lie."""

    def __init__(self, call: Call) -> None:
        self.drawn, self.batch, self.laid = call.drawn, call.drawn.batch, call.drawn.laid
        self.tokens, self.computes = call.drawn.laid.tokens, call.drawn.computes
        self.count = len(self.tokens.lengths)

    def rows(self, name: str, dtype: torch.dtype) -> list[list[float]]:
        """A column of tokens."""
        return self.tokens.rows(compare.rounded(self.tokens.columns[name], dtype))

    def of_either(self, x: Any, name: str, dtype: torch.dtype) -> list:
        """Numbers of tokens, or one of each sequence, as the call has them."""
        each = isinstance(x, Tensor) and not x.is_nested and x.shape == (self.count,) != self.laid.shape
        return compare.rounded(self.tokens.of_sequences[name], dtype) if each else self.rows(name, dtype)

    @property
    def masks(self) -> list[list[float]]:
        mask, value = self.batch.get("mask"), 1.0
        if mask is not None:
            value = max((x for row in self.laid.read(mask) for x in row), key=abs, default=1.0)
        return self.tokens.rows([value * is_valid for is_valid in self.tokens.valid])

    @property
    def groups(self) -> list[int] | None:
        groups = self.batch.get("groups")
        if groups is None:
            return None
        return [s // groups.size for s in range(self.count)] if groups.index is None else groups.index.tolist()

    @property
    def turns(self) -> list[list[int]]:
        """The lengths of turns: those drawn, or what ids or the runs of the mask cut the slots of a sequence into."""
        given, laid = self.batch.get("turns"), self.laid
        offsets = isinstance(given, Tensor) and not given.is_nested and given.equal(laid.turn_offsets())
        if given is None or offsets:
            return self.tokens.turns
        runs = given == "runs"
        slots = self.batch["mask"] if runs else given.ids if isinstance(given, rc.TurnIds) else given
        slots = torch.cat(slots or [torch.zeros(0)]) if isinstance(slots, list) else slots
        x = (slots.values() if slots.is_nested else slots.reshape(-1)).tolist()
        found = []
        for begin, end in itertools.pairwise(laid.begins):
            if runs:
                # The first run begins where the sequence does.
                starts = [i for i in range(begin, end) if x[i] and (i == begin or not x[i - 1])][1:]
            else:
                starts = [i for i in range(begin + 1, end) if x[i] != x[i - 1]]
            edges = itertools.pairwise([begin, *starts, end]) if begin < end else ()
            found.append([sum(a <= place < b for place in laid.places.tolist()) for a, b in edges])
        return found

    def sequences(self, of: type, parts: dict[str, list | None], **others: Any) -> list:
        """Sequences of an oracle, of rows by the names of its fields."""
        mass = self.batch.get("kept_mass")
        parts |= {"mask": self.masks, "mass": None if mass is None else self.rows("log_mass", self.computes)}
        parts["advantages"] = self.of_either(self.drawn.tensors["advantages"], "advantages", self.computes)
        side = "rollout" if mass is None else mass.of
        named = [{name: column and column[s] for name, column in parts.items()} for s in range(self.count)]
        return [of(**fields, renormalized=side, **others) for fields in named]


def sequences_of_correction(call: Call, told: Told) -> list:
    """The sequences of a correction as its oracle takes them."""
    spec, made, versions = call.spec, told.drawn, told.batch.get("versions")
    new, old = (told.rows(name, made.dtypes[0]) for name in ("new", "train"))
    rollout = told.rows("rollout", made.dtypes[1])
    parts = {
        "train": new if call.mode == "bypass" else old,
        "rollout": rollout,
        "versions": None if versions is None else told.of_either(versions.ids, "versions", torch.int64),
        "turns": told.turns,
    }
    sequences = told.sequences(oracle.Sequence, parts, current_version=CURRENT_VERSION)
    pairs = {} if call.mode == "bypass" else {"new/rollout": (new, rollout), "new/old": (new, old)}
    read = {criterion.of for criterion in spec.criteria}
    entropy = told.rows("entropy", made.dtypes[0] if spec.reads_entropy else made.computes)
    surprise = told.rows("surprise", made.computes)
    for s, q in enumerate(sequences):
        q.external = {"surprise": surprise[s], "entropy": entropy[s]}
        q.others = {of: (one[s], other[s]) for of, (one, other) in pairs.items() if of in read}
    return sequences


def answer_of(call: Call, told: Told) -> oracle.Answer:
    """What the oracle answers to the Spec of a call."""
    spec = call.spec
    # Where weights do nothing in a loss, zero ones would not reject.
    if call.loss is not None and use_of(call) == "nothing" and spec.rejected == "zero":
        spec = replace(spec, rejected="both")
    return oracle.correct(sequences_of_correction(call, told), spec, told.groups)


def judge_correction(call: Call, out: rc.Correction | rc.PolicyLoss) -> None:
    """Compare a correction, by itself or in a loss, with the oracle."""
    told = Told(call)
    wanted = answer_of(call, told)
    if call.spec.rejected == "zero":
        wanted = replace(wanted, mask=told.masks, mask_is_the_given=True)
    compare_correction(call.spec, told, out, wanted, repr(call.loss))


def compare_correction(
    spec: rc.Spec,
    told: Told,
    out: rc.Correction | rc.PolicyLoss,
    wanted: oracle.Answer,
    case: str = "",
    computes: torch.dtype | None = None,
) -> None:
    """Compare a correction with the oracle's answer to a Spec whose bounds are numbers, to the rounding of a dtype."""
    made = told.drawn
    # Of what the call brings beyond the Spec there are more metrics; perplexities saturate in the package alone.
    names = oracle_metrics.metrics(wanted, spec)
    named = {name: x for name, x in out.metrics().items() if name in (*names, "tokens_outside", "sequences_padded")}
    named |= {name: x for name, x in names.items() if "ppl" in name and not abs(x) < 1e200}
    case = f"{made.laid.layout} {made.dtypes} {spec!r} {case}"
    compare.correction(spec, out, wanted, told.laid, told.batch.get("mask"), computes or made.computes, case, named)


def sequences_of_loss(call: Call, told: Told, weights: list[list[float]] | None = None) -> list:
    """The sequences of a loss as its oracle takes them; `weights` in place of those of its Spec."""
    loss, made, spec = call.loss, call.drawn, call.spec
    policy = made.dtypes[0]
    scale = call.given.get("scale")
    parts = {
        "new": told.rows("new", policy),
        "old": told.rows("train", policy) if call.mode in ("decoupled", "both") else None,
        "rollout": told.rows("rollout", made.dtypes[1]) if call.mode in ("bypass", "both") else None,
        "ref": None if loss.kl is None else told.rows("ref", policy),
        "weights": told.rows("weights", told.computes) if call.correction == "factors" else None,
        "train_mask": None if call.correction == "nothing" else told.rows("trains", torch.int64),
        "group": told.groups,
        "entropy": None if loss.entropy_bonus is None else told.rows("entropy", policy),
    }
    if spec is not None:
        answer = answer_of(call, told)
        kept = [[float(x != 0) for x in row] for row in answer.mask]
        parts["weights"] = answer.weights if weights is None else weights
        parts["train_mask"] = None if spec.rejected == "zero" else kept
        if use_of(call) == "nothing":
            parts["weights"] = None if spec.rejected == "mask" else kept
    if scale is not None:
        of_tokens = told.of_either(scale, "scale", told.computes)
        parts["scale"] = [
            x if isinstance(x, list) else [x] * n for x, n in zip(of_tokens, told.tokens.lengths, strict=True)
        ]
    ids = told.batch.get("sequence_ids")
    parts["number"] = None if ids is None else ids.tolist()
    sequences = told.sequences(oracle_loss.Sequence, parts)
    if spec is not None and spec.nonfinite == "neutral":
        for q in sequences:
            at_one(q, loss.surrogate)
    return sequences


def at_one(q: Any, surrogate: Any) -> None:
    """Make the ratio of a token 1 where it is none."""
    for t, new in enumerate(q.new):
        base = oracle_loss.base_of(q, surrogate, t)
        if base is not None and not math.isfinite(new - base):
            for row in (q.old, q.rollout):
                if row is not None:
                    row[t] = new
            if q.mass is not None:
                q.mass[t] = 0.0


def judge_loss(call: Call, backend: str) -> None:
    """Make the call of a loss, and compare value, gradient and metrics with the oracle, of its Spec too."""
    told, loss, made, spec = Told(call), call.loss, call.drawn, call.spec
    out, new, entropy = call.lost(backend, loss)
    if spec is not None:
        judge_correction(call, out)
    # Its weights are judged by now: the loss has the rounding of theirs.
    weights = None if spec is None or out.weights is None else told.laid.read(out.weights)
    policy, sequences = made.dtypes[0], sequences_of_loss(call, told, weights)
    mean, total = loss.mean, call.given.get("total")
    if mean.over == "rows":
        mean, total = replace(mean, over="original"), told.count
    weighed = spec is not None and spec.apply and spec.weight is not None and use_of(call) == "ratio"
    objective = Objective(loss.surrogate, loss.kl, loss.regularizer, mean, weights_are_the_ratio=weighed)
    total = None if total is None else float(total)
    leaves = [new] if loss.entropy_bonus is None else [new, entropy]
    gradients = [gradient(out.value, leaf, told) for leaf in leaves]
    case = f"{made.laid.layout} {made.dtypes} {call.mode} {call.correction} {loss!r} {spec!r} {call.given}"
    compare.loss(objective, out, sequences, gradients, policy, case, total, loss.entropy_bonus)


def gradient(value: Tensor, leaf: Any, told: Told) -> tuple[list[list[float]], list[float]]:
    """The gradient of each sequence, and in slots without a token."""
    rows = leaf if isinstance(leaf, list) else [leaf]
    found = torch.autograd.grad(value, rows, retain_graph=True, materialize_grads=True) if rows else []
    slopes = list(found) if isinstance(leaf, list) else found[0]
    return told.laid.read(slopes), told.laid.elsewhere(slopes)
