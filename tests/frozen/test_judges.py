"""Random calls of the generator, judged by the plain loops of tests/oracles: masks and decisions exactly.

A Spec of any kind whose bounds are numbers, in any layout, with any dtypes, turns, versions, groups and kept mass. What
each option means has its own tests; here they meet. `python -m frozen` compares many more, with an older checkout.
"""

from __future__ import annotations

import random

import pytest
import torch

import rollout_corr as rc
from builders.batches import Laid, compare_all, run_as
from builders.kernel_cases import FEW, INTERPRETED, shaped
from frozen.calls import Call, correct_call
from frozen.generator import CURRENT_VERSION, UNITS, random_spec
from oracles import correction as oracle
from oracles import metrics as oracle_metrics

pytestmark = [*INTERPRETED, pytest.mark.usefixtures("one_thread")]


def drawn(seed: str, units=UNITS) -> Call:
    """A call whose turns are offsets, and whose padding is masked: it would count as tokens."""
    rng = random.Random(seed)
    while True:
        call = correct_call(rng, random_spec(rng, units, rules=False))
        batch, laid = call.drawn.batch, call.drawn.laid
        turns = batch.get("turns", laid.turn_offsets())
        offsets = isinstance(turns, torch.Tensor) and turns.equal(laid.turn_offsets())
        # The oracle has one entropy, and a call may have two, of other dtypes.
        both = call.spec.reads_entropy and any(criterion.name == "entropy" for criterion in call.spec.criteria)
        if offsets and not both and ("mask" in batch or not laid.layout.padded):
            call.into = False
            return call


def sequences_of(call: Call) -> list[oracle.Sequence]:
    """The tokens of a call as the oracle takes them, rounded to their dtypes."""
    made, batch, tokens = call.drawn, call.drawn.batch, call.drawn.laid.tokens
    count, computes = len(tokens.lengths), made.computes

    def rounded(column, dtype):
        return torch.tensor(column, dtype=torch.float64).to(dtype).double().tolist()

    def rows(name, dtype):
        return tokens.rows(rounded(tokens.columns[name], dtype))

    def of_either(x, name, dtype):
        """Numbers of tokens, or one of each sequence."""
        each = isinstance(x, torch.Tensor) and not x.is_nested and x.shape == (count,) != made.laid.shape
        return rounded(tokens.of_sequences[name], dtype) if each else rows(name, dtype)

    mask = batch.get("mask")
    value = max((x for row in read(made.laid, mask) for x in row), key=abs, default=1.0) if mask is not None else 1.0
    masks = tokens.rows([value * is_valid for is_valid in tokens.valid])
    versions, mass = batch.get("versions"), batch.get("kept_mass")
    parts = {
        "train": rows("train", made.dtypes[0]),
        "rollout": rows("rollout", made.dtypes[1]),
        "mask": masks,
        "advantages": of_either(made.tensors["advantages"], "advantages", computes),
        "versions": None if versions is None else of_either(versions.ids, "versions", torch.int64),
        "mass": None if mass is None else rows("log_mass", computes),
        "turns": tokens.turns,
    }
    surprise, entropy = (
        rows("surprise", computes),
        rows("entropy", made.dtypes[0] if call.spec.reads_entropy else computes),
    )
    return [
        oracle.Sequence(
            **{name: None if column is None else column[s] for name, column in parts.items()},
            external={"surprise": surprise[s], "entropy": entropy[s]},
            renormalized="rollout" if mass is None else mass.of,
            current_version=CURRENT_VERSION,
        )
        for s in range(count)
    ]


def places_of(laid) -> list[list]:
    """Where the tokens of each sequence lie, as `Laid` has it."""
    if laid.layout.kind == "list":
        return [[(s, t) for t in range(n)] for s, n in enumerate(laid.tokens.lengths)]
    return laid.tokens.rows(laid.places.tolist())


def read(laid, x) -> list[list[float]]:
    return Laid(None, None, None, places_of(laid), laid.shape).read(x)


def judge(call: Call, out: rc.Correction) -> None:
    made, batch = call.drawn, call.drawn.batch
    groups = batch.get("groups")
    index = None
    if groups is not None:
        count = len(made.laid.tokens.lengths)
        index = groups.index.tolist() if groups.index is not None else [s // groups.size for s in range(count)]
    wanted = oracle.correct(sequences_of(call), call.spec, index)
    mask = valid = batch.get("mask")
    held = Laid(None, None, mask, places_of(made.laid), made.laid.shape, batch.get("cu_seqlens"))
    if mask is None:
        valid = made.laid.tensor([1.0] * len(made.laid.tokens.valid), torch.bool, 1.0)
    kind = next((x.dtype for x in (mask if isinstance(mask, list) else [mask]) if x is not None), torch.bool)
    # Of what the call brings beyond the Spec there are more metrics; perplexities saturate in the package alone.
    names = oracle_metrics.metrics(wanted, call.spec)
    named = {name: x for name, x in out.metrics().items() if name in (*names, "tokens_outside", "sequences_padded")}
    named |= {name: x for name, x in names.items() if "ppl" in name and not abs(x) < 1e200}
    case = f"{made.laid.layout} {made.dtypes} {call.spec!r}"
    compare_all(held, out, wanted, call.spec, kind, torch.float32, case, valid, named)


def corrected(call: Call, backend: str) -> rc.Correction:
    tensors, batch = call.drawn.tensors, rc.Batch(**call.drawn.batch)
    more = {"spec": call.spec, "advantages": tensors["advantages"], "backend": backend}
    return rc.correct(tensors["train"], tensors["rollout"], batch, **more)


@pytest.mark.parametrize("seed", range(60))
def test_plain_torch(seed):
    call = drawn(f"judged {seed}")
    with run_as(("blocks", "small blocks", "whole")[seed % 3]):
        judge(call, corrected(call, "torch"))


@pytest.mark.parametrize("seed", range(6))
def test_interpreted_kernels(seed, device):
    call = drawn(f"interpreted {seed}", ("token", "sequence", "turn"))
    with shaped(FEW):
        judge(call, corrected(call, "triton"))
