"""`Spec.explain()` says what will happen: every number and every switch shows in it."""

from __future__ import annotations

import re

from rollout_corr.spec.correction import DROP, REDUCTIONS, STATS, WHEN, Criterion, Spec, Weight

RICH = Spec(
    weight=Weight("product", lower=0.5, upper=2.0, outside="zero", normalize="batch", token_clamp=5.0),
    criteria=(
        Criterion("ratio", over="sequence", reduce="mean", lower=0.999, upper=1.001),
        Criterion("ratio", over="sequence", reduce="min", lower=1e-4, label="veto"),
        Criterion("k1", upper=0.693147, when="negative_advantage", drop="sequence"),
        Criterion("external", over="sequence", reduce="max", name="entropy", lower=-3, upper=4),
        Criterion("binary_kl", upper=0.05),
    ),
    rejected="both",
    clamp=15.0,
    nonfinite="neutral",
    sums_over="kept",
    apply=False,
    report=("verl", "skyrl"),
)


def criterion(**arguments):
    """A valid criterion for these arguments: fills in what the named ones need."""
    if arguments.get("stat") == "external":
        arguments.setdefault("name", "entropy")
    return Criterion(**{"stat": "ratio", "upper": 2.0, **arguments})


def test_explain_names_every_number_and_every_step():
    text = RICH.explain()
    for word in ("0.5", "2", "0.999", "1.001", "0.0001", "0.693147", "0.05", "15", "veto", "entropy", "verl", "skyrl"):
        assert word in text, word
    assert re.search(r"\bproduct\b", text)
    assert re.search(r"[Dd]ry run", text)
    for one in RICH.criteria:
        assert one.label in text
    assert "nothing is changed" in Spec().explain()
    assert "reject" not in Spec().explain()


def test_explain_tells_any_two_specs_apart():
    base = {"weight": Weight("token", upper=2), "criteria": (criterion(),)}
    changes = [
        {},
        {"weight": Weight("product", upper=2)},
        {"weight": Weight("geometric", upper=2)},
        {"weight": Weight("token", upper=3)},
        {"weight": Weight("token", lower=0.5, upper=2)},
        {"weight": Weight("token", upper=2, outside="zero")},
        {"weight": Weight("token", upper=2, normalize="batch")},
        {"weight": Weight("token", upper=2, token_clamp=5)},
        {"weight": None},
        {"criteria": ()},
        {"criteria": (criterion(label="other"),)},
        {"rejected": "zero"},
        {"rejected": "both"},
        {"clamp": 10},
        {"nonfinite": "neutral"},
        {"nonfinite": "propagate"},
        {"apply": False},
        {"detail": "full"},
        {"report": ("verl",)},
    ]
    changes += [{"criteria": (criterion(stat=stat, label="one"),)} for stat in STATS]
    changes += [{"criteria": (criterion(when=when, label="one"),)} for when in WHEN[1:]]
    changes += [{"criteria": (criterion(drop="sequence", label="one"),)}]
    for reduce in REDUCTIONS:
        for drop in DROP:
            one = criterion(over="sequence", reduce=reduce, drop=drop, when="outward", label="one")
            changes += [{"criteria": (one,)}, {"criteria": (one,), "sums_over": "kept"}]
    texts = [Spec(**{**base, **change}).explain() for change in changes]
    for i, text in enumerate(texts):
        assert text not in texts[:i], changes[i]
