"""Random calls of tests/frozen, judged by the plain loops of tests/oracles: masks and decisions exactly.

A call has any Spec whose bounds are numbers, or any Loss, in any layout, with any dtypes, turns, versions, groups and
kept mass. What each option means has its own tests; here they meet.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc
from builders.batches import Laid, compare_all
from builders.kernel_cases import fenced
from builders.loss_cases import compare
from frozen.calls import Call, correct_call, loss_call
from frozen.generator import CURRENT_VERSION, UNITS, random_loss, random_spec
from oracles import batch_losses
from oracles import correction as oracle
from oracles import loss as oracle_loss
from oracles import metrics as oracle_metrics
from rollout_corr.specs.terms import Objective

# --- drawing ---


def correction(seed: str, units=UNITS, rules: bool = False, **of_batch: Any) -> Call:
    """Draw a correction whose turns are offsets, and whose padding is masked: it would count as tokens."""
    rng = random.Random(seed)
    while True:
        call = correct_call(rng, random_spec(rng, units, rules), **of_batch)
        batch, laid = call.drawn.batch, call.drawn.laid
        turns = batch.get("turns", laid.turn_offsets())
        offsets = isinstance(turns, Tensor) and not turns.is_nested and turns.equal(laid.turn_offsets())
        # The oracle has one entropy, and a call may have two, of other dtypes.
        both = call.spec.reads_entropy and any(criterion.name == "entropy" for criterion in call.spec.criteria)
        if offsets and not both and ("mask" in batch or not laid.layout.padded):
            call.into = False
            return call


def loss(seed: str, name: str, term: bool) -> Call:
    """Draw a loss of a class of surrogates in `frozen.generator.SURROGATES`; with `term` it has a KL.

    It has no Spec, since the step has tests of its own, and no ratio of turns or bonus of the entropy, since the oracle
    has none.
    """
    rng = random.Random(seed)
    while True:
        call = loss_call(rng, replace(random_loss(rng, name), entropy_bonus=None), None)
        right = "mask" in call.drawn.batch or not call.drawn.laid.layout.padded
        right &= not term or call.loss.kl is not None
        right &= call.correction != "correction" and getattr(call.loss.surrogate, "over", "sequence") != "turn"
        if right and not (name == "KLCov" and is_tied(call)):
            return call


def is_tied(call: Call) -> bool:
    """Whether two tokens train alone: their covariances are equal, and rounding decides which KLCov chooses."""
    return len(batch_losses.tokens_of(call.loss.surrogate, sequences_of_loss(call, Told(call)))) == 2


def between_fences(call: Call, device: str, fence: float = math.nan) -> Call:
    """Put every tensor of a call in the middle of garbage on a device."""
    drawn, fields = call.drawn, ("mask", "cu_seqlens", "entropy")
    drawn.tensors = {name: fenced(x, device, fence) for name, x in drawn.tensors.items()}
    drawn.batch |= {name: fenced(drawn.batch[name], device, fence) for name in fields if name in drawn.batch}
    return call


# --- what the oracles are told ---


def _rounded(column, dtype) -> list[float]:
    return torch.tensor(column, dtype=torch.float64).to(dtype).double().tolist()


class Told:
    """The tokens of a call as the oracles take them, rounded to their dtypes, and where they lie."""

    def __init__(self, call: Call) -> None:
        self.drawn, self.batch, self.laid = call.drawn, call.drawn.batch, call.drawn.laid
        self.tokens, self.computes = call.drawn.laid.tokens, call.drawn.computes
        self.count = len(self.tokens.lengths)
        if self.laid.layout.kind == "list":
            self.places = [[(s, t) for t in range(n)] for s, n in enumerate(self.tokens.lengths)]
        else:
            self.places = self.tokens.rows(self.laid.places.tolist())
        self.held = Laid(None, None, self.batch.get("mask"), self.places, self.laid.shape, self.batch.get("cu_seqlens"))

    def rows(self, name: str, dtype: torch.dtype) -> list[list[float]]:
        """A column of tokens."""
        return self.tokens.rows(_rounded(self.tokens.columns[name], dtype))

    def of_either(self, x: Any, name: str, dtype: torch.dtype) -> list:
        """Numbers of tokens, or one of each sequence, as the call has them."""
        each = isinstance(x, Tensor) and not x.is_nested and x.shape == (self.count,) != self.laid.shape
        return _rounded(self.tokens.of_sequences[name], dtype) if each else self.rows(name, dtype)

    @property
    def masks(self) -> list[list[float]]:
        mask, value = self.batch.get("mask"), 1.0
        if mask is not None:
            value = max((x for row in self.held.read(mask) for x in row), key=abs, default=1.0)
        return self.tokens.rows([value * is_valid for is_valid in self.tokens.valid])

    @property
    def groups(self) -> list[int] | None:
        groups = self.batch.get("groups")
        if groups is None:
            return None
        return [s // groups.size for s in range(self.count)] if groups.index is None else groups.index.tolist()

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
    versions, made = told.batch.get("versions"), call.drawn
    parts = {
        "train": told.rows("train", made.dtypes[0]),
        "rollout": told.rows("rollout", made.dtypes[1]),
        "versions": None if versions is None else told.of_either(versions.ids, "versions", torch.int64),
        "turns": told.tokens.turns,
    }
    sequences = told.sequences(oracle.Sequence, parts, current_version=CURRENT_VERSION)
    entropy = told.rows("entropy", made.dtypes[0] if call.spec.reads_entropy else made.computes)
    for q, *columns in zip(sequences, told.rows("surprise", made.computes), entropy, strict=True):
        q.external = dict(zip(("surprise", "entropy"), columns, strict=True))
    return sequences


def judge_correction(call: Call, out: rc.Correction) -> None:
    """Compare a correction with the oracle."""
    told = Told(call)
    compare_correction(
        call.spec, told, out, oracle.correct(sequences_of_correction(call, told), call.spec, told.groups)
    )


def compare_correction(spec: rc.Spec, told: Told, out: rc.Correction, wanted: oracle.Answer) -> None:
    """Compare a correction with an answer of the oracle to a Spec whose bounds are numbers."""
    made = told.drawn
    mask = valid = told.batch.get("mask")
    if mask is None:
        valid = made.laid.tensor([1.0] * len(told.tokens.valid), torch.bool, 1.0)
    kind = next((x.dtype for x in (mask if isinstance(mask, list) else [mask]) if x is not None), torch.bool)
    assert {x.dtype for x in (out.mask if isinstance(out.mask, list) else [out.mask])} <= {kind}
    # Of what the call brings beyond the Spec there are more metrics; perplexities saturate in the package alone.
    names = oracle_metrics.metrics(wanted, spec)
    named = {name: x for name, x in out.metrics().items() if name in (*names, "tokens_outside", "sequences_padded")}
    named |= {name: x for name, x in names.items() if "ppl" in name and not abs(x) < 1e200}
    case = f"{made.laid.layout} {made.dtypes} {spec!r}"
    compare_all(told.held, out, wanted, spec, kind, torch.float32, case, valid, named)


def sequences_of_loss(call: Call, told: Told) -> list:
    """The sequences of a loss as its oracle takes them."""
    loss, made = call.loss, call.drawn
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
    }
    if scale is not None:
        of_tokens = told.of_either(scale, "scale", told.computes)
        parts["scale"] = [
            x if isinstance(x, list) else [x] * n for x, n in zip(of_tokens, told.tokens.lengths, strict=True)
        ]
    ids = told.batch.get("sequence_ids")
    parts["number"] = None if ids is None else ids.tolist()
    return told.sequences(oracle_loss.Sequence, parts)


def judge_loss(call: Call, backend: str) -> None:
    """Make the call of a loss, and compare value, gradient and metrics with the oracle."""
    told, loss, made = Told(call), call.loss, call.drawn
    out, new, _ = call.lost(backend, loss)
    policy, sequences = made.dtypes[0], sequences_of_loss(call, told)
    mean, total = loss.mean, call.given.get("total")
    if mean.over == "rows":
        mean, total = replace(mean, over="original"), told.count
    objective = Objective(loss.surrogate, loss.kl, loss.regularizer, mean=mean)
    total = None if total is None else float(total)

    def gradient(value):
        rows = new if isinstance(new, list) else [new]
        found = torch.autograd.grad(value, rows) if rows else []
        slopes = list(found) if isinstance(new, list) else found[0]
        return told.held.read(slopes), told.held.elsewhere(slopes)

    laid = SimpleNamespace(gradient=gradient)
    case = f"{made.laid.layout} {made.dtypes} {call.mode} {call.correction} {loss!r} {call.given}"
    compare(out, laid, sequences, objective, case, given=total, dtype=policy)
