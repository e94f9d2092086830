"""Recorded masks, decisions and counts come out again; the generator reaches every option; a difference is told."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

import rollout_corr as rc
from frozen import __main__ as program
from frozen import record
from frozen.calls import Call, correct_call, shown
from frozen.generator import KINDS, LaidOut, Layout, Tokens, random_loss, random_spec
from rollout_corr.specs import choices, terms
from rollout_corr.specs.batch_losses import OF_BATCH
from rollout_corr.specs.surrogates import SURROGATES

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore::RuntimeWarning:triton.runtime.interpreter", "ignore:invalid value encountered:RuntimeWarning"
    ),
]


@pytest.mark.parametrize("part", program.THIN)
def test_masks_decisions_and_counts_are_as_recorded(part):
    recorded = [line for line in program.DIGESTS.read_text().splitlines() if line.startswith(f"{part}/")]
    wrong = sorted(set(program.digests(part)) ^ set(recorded))
    assert not wrong, (
        "other masks, decisions or counts, or other cases: tests/frozen/README.md says how to see which, and "
        f"`python -m frozen digests` writes the file anew: {wrong}"
    )


# --- the generator ---


def test_every_option_of_a_spec_is_drawn():
    specs = [random_spec(random.Random(seed), of_loss=True) for seed in range(500)]
    assert all(rc.Spec.from_dict(spec.to_dict()) == spec and spec.explain() for spec in specs)
    weights = [spec.weight for spec in specs if spec.weight is not None]
    criteria = [criterion for spec in specs for criterion in spec.criteria]
    assert {x.stat for x in criteria} == set(choices.STATS)
    assert {(x.over, x.reduce) for x in criteria if x.reduce} == {
        (over, reduce) for over in ("turn", "sequence", "prefix") for reduce in choices.REDUCTIONS
    }
    assert {x.when for x in criteria} == set(choices.WHEN)
    assert {x.drop for x in criteria} == set(choices.DROP)
    assert {x.of for x in criteria} == set(choices.POLICIES)
    assert {x.within for x in criteria} == {x.within for x in weights} == set(choices.STRETCHES)
    assert {x.over for x in weights} == set(choices.UNITS)
    assert {x.outside for x in weights} == set(choices.OUTSIDE)
    assert {x.normalize for x in weights} == {None, *choices.NORMALIZE}
    assert {x.growth for x in weights} == {x.growth for x in criteria} == {None, *choices.GROWTH}
    assert {x.rejected for x in specs} == set(choices.REJECTED)
    assert {x.nonfinite for x in specs} == set(choices.NONFINITE)
    assert {x.sums_over for x in specs} == set(choices.SUMS_OVER)
    assert {x.detail for x in specs} == set(choices.DETAIL)
    assert {scheme for x in specs for scheme in x.report} == set(choices.REPORTS)
    assert {type(bound).__name__ for x in (*weights, *criteria) for bound in (x.lower, x.upper)} == {
        "NoneType", "float", "Quantile", "TopK", "Bottom", "MeanBelow", "KeepESS",
    }  # fmt: skip


def test_every_option_of_a_loss_is_drawn():
    losses = [random_loss(random.Random(seed)) for seed in range(500)]
    assert {type(x.surrogate) for x in losses} == {*SURROGATES, *OF_BATCH}
    assert {(x.mean.of, x.mean.over) for x in losses} >= {
        ("token", "original"), ("token", "kept"), ("sequence", "original"), ("sequence", "kept"), ("sequence", "rows"),
        ("sequence_sum", "rows"), ("sum", "original"),
    }  # fmt: skip
    kls = [x.kl for x in losses if x.kl is not None]
    assert {x.kind for x in kls} == set(terms.KL_KINDS) and {x.gradient for x in kls} == {None, *terms.KL_KINDS}
    assert {x.weight for x in kls} == {None, *terms.KL_WEIGHTS} and {x.scope for x in kls} == set(terms.SCOPES)
    assert any(x.regularizer for x in losses) and any(x.entropy_bonus for x in losses)


def test_few_batches_are_empty_and_few_lose_everything():
    found = Counter()
    for seed in range(200):
        rng = random.Random(seed)
        call = correct_call(rng, rc.Spec(rc.Weight.token(), (rc.Criterion("abs", upper=0.1),)), extras=0.0)
        metrics = rc.correct(
            call.drawn.tensors["train"], call.drawn.tensors["rollout"], rc.Batch(**call.drawn.batch), spec=call.spec
        ).metrics()
        found["empty"] += metrics["tokens"] == 0
        found["cut"] += 0 < metrics["tokens_kept"] < metrics["tokens"]
    assert found["empty"] < 30 and found["cut"] > 100, found


@pytest.mark.parametrize("kind", sorted(set(KINDS)))
@pytest.mark.parametrize("lie", ["contiguous", "slice", "step"])
def test_tokens_lie_where_the_layout_says(kind, lie):
    tokens = Tokens([3, 0, 2], [True] * 5, {}, {}, [[1, 0, 2], [0], [2]])
    laid = LaidOut(tokens, Layout(kind, lie), random.Random(0))
    x, numbers = laid.tensor([1.0, 2.0, 3.0, 4.0, 5.0], torch.float32, -7.0), [[1.0, 2.0, 3.0], [], [4.0, 5.0]]
    rows = [row.tolist() for row in x] if kind == "list" else None
    if kind == "jagged":
        rows = [row.tolist() for row in x.unbind()]
    elif rows is None:
        flat = x.reshape(-1).tolist()
        rows = [[n for n in flat[a:b] if n != -7.0] for a, b in zip(laid.begins, laid.begins[1:], strict=False)]
        assert (x.stride(-1) == 2) == (lie == "step") and (x.storage_offset() == 1) == (lie == "slice")
    assert rows == numbers
    if laid.layout.packed:
        begin = laid.begins[0]
        assert laid.cu_seqlens.tolist() == [begin, begin + 3, begin + 3, begin + 5]
        assert laid.turn_offsets().tolist() == [begin, begin + 1, begin + 1, begin + 3, begin + 3, begin + 5]


# --- the records ---


def recorded(**changed):
    one = {
        "call": "a",
        "exact": "b",
        "mask": shown(torch.tensor([True, False])),
        "weights": shown(torch.tensor([1.0, float("nan"), -0.0])),
        "statistics": {"ratio": "3ff0000000000000"},
    }
    return one | changed


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mask", shown(torch.tensor([True, True])), "c: mask[1] of 1 bool in 2: 0x0.0p+0 (0) -> 0x1.000000000"),
        ("weights", shown(torch.tensor([1.0, float("nan"), 0.0])), "c: weights[2] of 1 float32 in 3: -0x0.0p+0 (-0) -"),
        ("weights", None, "c: weights: float32 3 0000803f0000c07f00000080 -> None"),
        ("statistics", {"ratio": "3ff0000000000001"}, "c: statistics ratio: 0x1.0000000000000p+0 (1) -> 0x1.000"),
        ("statistics", {}, "c: statistics ratio: 3ff0000000000000 -> None"),
        ("refused", "ValueError spec", "c: refused: None -> ValueError spec"),
    ],
)  # fmt: skip
def test_a_difference_is_told(name, value, said, tmp_path, capsys):
    head = {"commit": "x", "machine": "m", "complete": True, "parts": ["c"]}
    for file, one in (("old", recorded()), ("new.gz", recorded(**{name: value}))):
        record.write(tmp_path / file, head, [("c", one)])
    assert program.main(["compare", str(tmp_path / "old"), str(tmp_path / "old")]) == 0
    assert program.main(["compare", str(tmp_path / "old"), str(tmp_path / "new.gz")]) == 1
    assert said in capsys.readouterr().out


def test_another_machine_compares_what_is_exact_and_a_missing_case_is_told(tmp_path, capsys):
    head = {"commit": "x", "machine": "m", "complete": True, "parts": ["c"]}
    record.write(tmp_path / "old", head, [("c/1", recorded()), ("c/2", recorded())])
    record.write(tmp_path / "new", head | {"machine": "n"}, [("c/1", recorded(weights=None))])
    record.write(tmp_path / "quick", head | {"complete": False}, [("c/1", recorded())])
    assert program.main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    assert "c/2: only in the old record" in capsys.readouterr().out
    assert program.main(["compare", str(tmp_path / "quick"), str(tmp_path / "old")]) == 0


def test_a_call_is_told_by_what_it_is_given():
    def drawn(seed: int) -> Call:
        return correct_call(random.Random(seed), rc.Spec(), layout=Layout("packed"), extras=0.0)

    one, same, other = drawn(0), drawn(0), drawn(0)
    other.drawn.batch["cu_seqlens"] = one.drawn.batch["cu_seqlens"].long()
    assert one.digest() == same.digest() != other.digest() != drawn(1).digest()
