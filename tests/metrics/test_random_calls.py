"""Metrics of random calls, whole, by label and as tensors, next to the loops of tests/oracles."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders import compare, judges
from builders.judges import Told
from builders.rounding import near
from frozen.generator import LABELS, SURROGATES
from frozen.runners import run_as
from oracles import correction as oracle
from oracles import metrics as oracle_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

# `make test-all` has as many again, twenty times.
BLOCKS = [*range(2), *(pytest.param(block, marks=pytest.mark.slow) for block in range(2, 40))]
# Of a label of tokens these are the metrics; all others are of sequences.
OF_TOKENS = {
    "tokens", "tokens_nonfinite", "tokens_clamped", "tokens_kept", "tokens_kept_fraction", "tokens_differing",
    "tokens_differing_fraction", "logratio_mean", "logratio_abs_mean", "logratio_std", "logratio_abs_max",
    "logratio_min", "logratio_max", "kl_rollout_train_k1", "kl_rollout_train_k2", "kl_rollout_train_k3", "ratio_mean",
    "ratio_std", "chi2_train_rollout",
}  # fmt: skip
# What no label has.
OF_BATCHES = "^age_|entropy|_p[0-9.]+$|_beyond_|weight_divisor|sequences_undivided|^tokens_(newer|stale)|^[^/]*turn"
SIGNS, AGES = ("negative", "zero", "positive"), ("0", "1", "2+")


def labels_of(call, told, sequences):
    """By name the labels of a call, and the ids of its tokens, or of its sequences, as loops know them."""
    tokens, of_sequences = told.tokens, told.tokens.of_sequences["labels"]
    found = {
        "kind": (rc.Labels(call.drawn.column("labels", torch.int64), LABELS), tokens.rows(tokens.columns["labels"]))
    }
    found["task"] = rc.Labels(torch.tensor(of_sequences).long(), LABELS), of_sequences
    advantages = [q.advantages for q in sequences]
    signs = [[sign(x) for x in row] if isinstance(row, list) else sign(row) for row in advantages]
    found["advantage"] = rc.Labels(), signs
    turns = [len(row) for row in tokens.turns]
    # Labels of turns need their offsets.
    if "turns" in told.batch and told.turns is tokens.turns and sum(turns) not in (told.count, len(tokens.valid)):
        kinds = iter(i % 3 for i in range(sum(turns)))
        of_turns = [[kind for n in row for kind in [next(kinds)] * n] for row in tokens.turns]
        numbers = torch.arange(sum(turns)) % 3
        found["turn"] = rc.Labels(numbers if told.count % 2 else numbers[:, None], LABELS), of_turns
    if "versions" in told.batch:
        ages = [
            [age(q.age(t)) for t in range(len(q))] if isinstance(q.versions, list) else age(q.age(0)) for q in sequences
        ]
        found["age"] = rc.Labels(names=AGES), ages
    return found


def sign(advantage):
    """The place of its name; NaN's is behind the others."""
    return 3 if math.isnan(advantage) else 1 + (advantage > 0) - (advantage < 0)


def age(versions):
    """The place of its name; a version of the future has none."""
    return min(int(versions), 2)


def tokens_of(answer, ids, place):
    """The answer as if only the tokens of a label were valid."""
    of = oracle_metrics.of_label(answer, ids, place)
    rows = zip(of.raw, of.bounded, strict=True)
    return replace(of, units=[[x for x in zip(*row, strict=True) if x[0] is not None] for row in rows])


def sequences_of(answer, ids, place):
    """The answer to the sequences of a label."""

    def some(one):
        lists = {name: x for name, x in vars(one).items() if isinstance(x, list) and name != "outcomes"}
        return {name: [x[s] for s, own in enumerate(ids) if own == place] for name, x in lists.items()}

    return replace(answer, **some(answer), outcomes=[replace(one, **some(one)) for one in answer.outcomes])


@pytest.mark.parametrize("block", BLOCKS)
def test_metrics_by_label(block):
    """Labels of tokens, turns and sequences, of ages and of the signs of advantages; what has no label is counted."""
    for seed in range(30 * block, 30 * block + 30):
        call = judges.correction(f"labels {seed}")
        told, spec = Told(call), replace(call.spec, report=("native",), nonfinite=("reject", "neutral")[seed % 2])
        sequences = judges.sequences_of_correction(call, told)
        # [S] could be [N]; and the smallest log-ratio before a token may be -9999, which float32 adds to 3 digits.
        if len(sequences) in (0, len(told.tokens.valid)) or (spec.weight and spec.weight.reduce == "min"):
            continue
        labels = labels_of(call, told, sequences)
        call.drawn.batch["labels"] = {name: one for name, (one, _) in labels.items()}
        with run_as(("blocks", "small blocks", "whole")[seed % 3]):
            out = call.corrected(spec, "torch")
        answer = oracle.correct(sequences, spec, told.groups)
        judges.compare_correction(spec, told, out, answer)
        for name, (_, ids) in labels.items():
            found, names = out.metrics(by=name), {"advantage": SIGNS, "age": AGES}.get(name, LABELS)
            of_tokens = any(isinstance(x, list) for x in ids)
            for place, label in enumerate(names):
                part = (tokens_of if of_tokens else sequences_of)(answer, ids, place)
                wanted = oracle_metrics.metrics(part, spec)
                prefix, case = f"{name}/{label}/", f"{seed} {name} {label} {spec!r}"
                mine = {key.removeprefix(prefix): x for key, x in found.items() if key.startswith(prefix)}
                if of_tokens:
                    assert mine.keys() >= OF_TOKENS, case
                    assert not any(re.search("sequence|ppl", key) for key in mine if "/" not in key), case
                else:
                    assert all(re.search(OF_BATCHES, key) for key in wanted.keys() - mine.keys()), case
                # Perplexities saturate in the package alone.
                mine = {key: x for key, x in mine.items() if abs(wanted[key]) < 1e200}
                compare.compare_metrics(spec, mine, wanted, part, call.drawn.computes, case)
            valid = [[bool(token) for token in row] for row in answer.tokens]
            if of_tokens:
                outside = sum(
                    is_valid and i not in range(3)
                    for one in zip(ids, valid, strict=True)
                    for i, is_valid in zip(*one, strict=True)
                )
            else:
                outside = sum(any(row) and i not in range(3) for i, row in zip(ids, valid, strict=True))
            assert found[f"{name}/{'tokens' if of_tokens else 'sequences'}_outside"] == outside


@pytest.mark.parametrize("block", BLOCKS)
def test_metrics_as_tensors(block):
    """All that are made of sums and extrema, of losses and merged statistics too, and without a read of any value."""
    for seed in range(15 * block, 15 * block + 15):
        call = judges.correction(f"tensors {seed}", rules=True, extras=0.5)
        lost = judges.loss(f"tensors {seed}", list(SURROGATES)[seed % len(SURROGATES)], False)
        one, (of_loss, _, _) = call.corrected(call.spec, "torch").statistics, lost.lost("torch", lost.loss)
        for statistics in (one, one + one, of_loss.statistics):
            without_values = statistics.to("meta")
            for key, value in statistics.metrics().items():
                if re.search("correlation$|_p[0-9.]+$|/(lower|upper)_m..$|^surrogate_ratio_m..$", key):
                    continue  # no sums, and refused as such
                found = statistics.on_device(key)
                assert found.shape == () and found.dtype == torch.float64
                assert found.item() == near(value, size=0.0), (seed, key)
                assert without_values.on_device(key).is_meta
