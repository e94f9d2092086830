"""Labels with the kernels: what a call without labels gives to the bit, and the metrics of each label."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import rollout_corr as rc
from builders.batches import LAYOUTS, lay_out, moved, random_sequences, spoil
from builders.kernel_cases import FEW, INTERPRETED, between_fences, bits, flat, same, shaped, watched
from rollout_corr.metrics.schema import layout as columns

pytestmark = INTERPRETED


def of_labels(out):
    """The statistics of each label, by their names in a batch."""
    statistics, found = out.statistics, {}
    names = itertools.chain(*columns(statistics.spec, extra=statistics.extra))
    values = statistics.sums.tolist() + statistics.maxima.tolist()
    for name, value in zip(names, values, strict=True):
        label, _, own = name.partition("/")
        if "=" in label:
            found.setdefault(label, {})[own] = value
    return found


def assert_same_labels(out, reference, case):
    """Require counts and extrema as the reference has them, float sums up to the rounding of their terms."""
    found, wanted = of_labels(out), of_labels(reference)
    assert list(found) == list(wanted) and len(found) > 2, case
    for label, mine in found.items():
        wrong = {name: (x, wanted[label][name]) for name, x in mine.items() if not same(name, x, wanted[label])}
        assert not wrong, f"{label} {wrong}: {case}"


C, W = rc.Criterion, rc.Weight
SPEC = rc.Spec(
    W.token(lower=0.7, upper=1.3), (C("k3", upper=0.1), C("ratio", "sequence", "mean", lower=0.8, upper=1.3))
)
NAMES = {"environment": ["math", "code", "never"]}


@pytest.mark.parametrize("of_tokens", [True, False])
def test_labels_of_sequences_and_of_tokens(of_tokens, device):
    layout, rng = LAYOUTS[of_tokens], random.Random(of_tokens)
    laid = lay_out(spoil(random_sequences(1, (5, 1, 9, 0, 7, 17, 1, 30)), 1), layout, torch.float32)
    ids = torch.tensor([rng.choice((0, 1, 1, 2, -1, 9)) for _ in range(8)])
    labels = {"environment": laid.versions if of_tokens else ids}
    given = {"labels": labels, "label_names": NAMES}
    on_device = given | {"labels": {name: moved(x, device) for name, x in labels.items()}}
    with shaped(FEW), watched():
        fenced = between_fences(laid, device)
        plain = fenced.correct(SPEC, backend="triton")
        out = fenced.correct(SPEC, backend="triton", **on_device)
    assert_same_bits(out, plain)
    assert_same_labels(out, laid.correct(SPEC, **given), layout)


def test_labels_by_the_sign_of_the_advantage(device):
    sequences = random_sequences(2, (5, 1, 9, 0, 7, 17))
    laid, given = lay_out(sequences, "padded_right", torch.float32), {"labels": {"advantage": None}}
    with shaped(FEW):
        out = between_fences(laid, device).correct(SPEC, backend="triton", **given)
    assert_same_labels(out, laid.correct(SPEC, **given), "signs")
    counts = [out.metrics(by="advantage")[f"advantage/{name}/tokens"] for name in ("negative", "zero", "positive")]
    valid = [a for q in sequences for a, m in zip(q.advantages, q.mask, strict=True) if m]
    assert counts == [sum(a < 0 for a in valid), valid.count(0.0), sum(a > 0 for a in valid)] and counts[0] > 0


def assert_same_bits(out, plain):
    """Require what a call without labels gives: results and statistics of the batch."""
    held = columns(plain.statistics.spec)
    for one, other in zip(flat(out.weights) + flat(out.mask), flat(plain.weights) + flat(plain.mask), strict=True):
        assert bits(one).equal(bits(other))
    assert out.keep.equal(plain.keep)
    for kind, names in zip(("sums", "maxima"), held, strict=True):
        mine, wanted = (getattr(x.statistics, kind) for x in (out, plain))
        assert bits(mine[: len(names)]).equal(bits(wanted)) and len(mine) > len(names) == len(wanted)
