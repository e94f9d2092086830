"""Agreement of routers, against sets in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

import rollout_corr as rc
from builders.rounding import assert_near, near


def routes(rng, tokens=40, layers=3, experts=4, unlike=0.2):
    """Choices of both engines: the second shuffles, exchanges some experts, and forgets a few choices."""
    train = [[rng.sample(range(16), experts) for _ in range(layers)] for _ in range(tokens)]
    rollout = [[rng.sample(choice, experts) for choice in token] for token in train]
    for token in rollout:
        for choice in token:
            if rng.random() < unlike:
                choice[rng.randrange(experts)] = 16 + rng.randrange(4)
            if rng.random() < 0.05:
                choice[0] = -1
    return train, rollout


def wanted(train, rollout, valid):
    shares, alike, whole, by_layer = [], [], [], {}
    for token, other, counts in zip(train, rollout, valid, strict=True):
        if not counts:
            continue
        found = []
        for layer, (a, b) in enumerate(zip(token, other, strict=True)):
            if min(*a, *b) < 0:
                found.append(None)
                continue
            shares.append(len({*a} & {*b}) / len(a))
            by_layer.setdefault(layer, []).append(shares[-1])
            found.append({*a} == {*b})
        alike += [x for x in found if x is not None]
        if None not in found:
            whole.append(all(found))
    lowest = min((sum(x) / len(x), layer) for layer, x in by_layer.items())
    return {
        "route_choices": len(shares),
        "route_overlap_mean": sum(shares) / len(shares),
        "route_same_fraction": sum(alike) / len(alike),
        "route_tokens_same_fraction": sum(whole) / len(whole),
        "route_layer_overlap_min": lowest[0],
        "route_layer_overlap_argmin": lowest[1],
    }


@pytest.mark.parametrize("seed", range(3))
def test_beside_sets(seed):
    rng = random.Random(seed)
    train, rollout = routes(rng, unlike=rng.choice((0.0, 0.2, 1.0)))
    valid = [rng.random() < 0.8 for _ in train]
    a, b = (torch.tensor(x, dtype=dtype) for x, dtype in ((train, torch.int64), (rollout, torch.int16)))
    mask = torch.tensor(valid)
    found = rc.route_agreement(a, b, mask)
    assert found.metrics() == near(wanted(train, rollout, valid))
    padded = rc.route_agreement(a.view(5, 8, 3, 4), b.view(5, 8, 3, 4), mask.view(5, 8).float())
    halves = rc.route_agreement(a[:7], b[:7], mask[:7]) + rc.route_agreement(a[7:], b[7:], mask[7:])
    assert torch.equal(padded.sums, found.sums)
    assert_near(halves.sums, found.sums)
    assert found.overlap().min().item() == near(found.metrics()["route_layer_overlap_min"])


def test_replayed_routes_agree():
    train, _ = routes(random.Random(0))
    made = torch.tensor(train)
    found = rc.route_agreement(made, made.flip(-1)).metrics("moe/")
    assert (found["moe/route_overlap_mean"], found["moe/route_tokens_same_fraction"]) == (1.0, 1.0)


def test_no_value_is_read():
    routed = torch.zeros(4, 2, 3, dtype=torch.int32, device="meta")
    assert rc.route_agreement(routed, routed, torch.ones(4, device="meta")).sums.shape == (8,)


def test_weights_beside_plain_python():
    rng = random.Random(5)
    train, rollout = routes(rng)
    pairs = [[{e: rng.choice((0.25, 0.5)) for e in choice} for choice in token] for token in train]
    others = [
        [{e: pairs[t][at].get(e, 0.125) + rng.choice((0.0, 0.0, 0.125)) for e in c} for at, c in enumerate(token)]
        for t, token in enumerate(rollout)
    ]
    a, b = torch.tensor(train), torch.tensor(rollout)
    w, v = (
        torch.tensor(
            [
                [[of[e] for e in c] for c, of in zip(token, found, strict=True)]
                for token, found in zip(x, y, strict=True)
            ]
        )
        for x, y in ((train, pairs), (rollout, others))
    )
    gaps, apart = [], []
    for i in range(len(train)):
        for mine, its in zip(pairs[i], others[i], strict=True):
            if min(*mine, *its) >= 0:
                gaps.append(sum(abs(mine.get(e, 0.0) - its.get(e, 0.0)) for e in {*mine, *its}) / 2)
                if {*mine} == {*its}:
                    apart.append(mine != its)
    found = rc.route_agreement(a, b, train_weights=w, rollout_weights=v)
    metrics = (found + found).metrics()
    assert metrics["route_weight_gap_mean"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-12)
    assert metrics["route_weights_differing_fraction"] == sum(apart) / len(apart)
    assert rc.route_agreement(a, a, train_weights=w, rollout_weights=w).metrics()["route_weight_gap_mean"] == 0.0
