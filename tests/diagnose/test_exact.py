"""`doctor(..., exact=True)` and `doctor --exact`: which bits differ, where first, and what the differences share."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

import rollout_corr as rc
from builders.planted_bits import BY, KINDS, RANDOM, Dump, found_in, is_right, planted, table
from rollout_corr.cli.main import main
from rollout_corr.definition.tokens import ulps


def planted_dump(differs=None, seed=0):
    dump = Dump(seed, 96, 60)
    if differs is not None:
        dump.differs = differs(dump)
    return dump.columns()


def diagnosed(columns, **more):
    given = dict(columns)
    logps = given.pop("train_logp"), given.pop("rollout_logp")
    batch = rc.Batch(cu_seqlens=given.pop("cu_seqlens"), turns=given.pop("turns"))
    del given["versions"]
    return rc.doctor(*logps, batch, by=BY, exact=True, **given, **more)


def one_rank(dump):
    return (dump.rank == 3)[dump.owner] & (dump.uniform(dump.count) < 0.5)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_a_planted_ulp_is_localised(kind):
    found, wanted, _ = planted(kind.plants[-1], 3, (160, 150, 0.5, 0.0), kind.without)
    assert is_right(found, wanted), found
    assert found[0].share == 1.0 and found[0].bits >= 10.0


@pytest.mark.slow
def test_the_table_is_fresh():
    text = table()
    assert text in Path(__file__).with_name("README.md").read_text(encoding="utf-8"), "python -m builders.planted_bits"
    right, wrong = re.findall(r"([\d.]+) (?:%\)|of \d+ dumps whose)", text)
    assert float(right) >= 95.0 and wrong == "0"


@pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM)
def test_random_differences_have_nothing_in_common(make):
    for setting in ((64, 100), (160, 60)):
        dump = Dump(1, *setting)
        differs = make(dump)
        assert differs.any() and found_in(dump, differs) == []


def test_a_rank_and_a_place_within_it_are_two_findings():
    dump = Dump(0, 160, 150)
    found = found_in(dump, (dump.rank == 3)[dump.owner] & ((dump.position + dump.prompts[dump.owner]) % 16 == 0))
    assert [(one.kind, one.at, one.page) for one in found] == [("label", 3, None), ("page", 0, 16)]


@pytest.mark.parametrize("seed", range(3))
def test_the_counts_are_of_the_border_that_is_named(seed):
    """Random tokens behind position 61 differ: 60 is the roundest border near, and makes another set than the best."""
    generator = torch.Generator().manual_seed(seed)
    position = torch.arange(200)
    rollout = -torch.rand(40, 200, generator=generator) - 0.1
    differs = (position >= 61) & (torch.rand(40, 200, generator=generator) < 0.03)
    (one,) = rc.doctor(rollout.where(~differs, rollout - 1e-6), rollout, exact=True).in_common
    there = position >= one.at
    assert (one.kind, one.size, one.differing) == ("position", 40 * int(there.sum()), int(differs[:, there].sum()))
    assert one.at % 4 == 0 and f"from position {one.at} on" == one.says


def test_the_first_difference_and_the_counts():
    columns = planted_dump(one_rank)
    found = diagnosed(columns)
    differs = columns["train_logp"] != columns["rollout_logp"]
    owner = torch.arange(96).repeat_interleave(columns["cu_seqlens"].diff())
    first, place = found.first_difference, int(differs.nonzero()[0])
    assert (first.record, first.ulps) == (int(owner[place]), 1)
    assert first.position == place - int(columns["cu_seqlens"][first.record])
    assert (first.train_logp, first.rollout_logp) == (columns["train_logp"][place], columns["rollout_logp"][place])
    (finding,) = (one for one in found.findings if one.name == "not_exact")
    assert finding.numbers == {
        "tokens_differing": float(differs.sum()),
        "tokens_differing_fraction": float(differs.double().mean()),
        "sequences_differing": float(owner[differs].unique().numel()),
        "ulps_max_of_dtype": 1.0,
    }
    assert not found.healthy and "rank 3" in repr(found) and "1 ulp apart" in repr(found)
    (shared,) = found.in_common
    assert (shared.kind, shared.of, shared.at, shared.unit) == ("label", "rank", 3, "sequences")
    assert found.to_dict()["exact"]["in_common"][0]["says"] == "rank 3"


def test_equal_bits_are_healthy_where_they_are_asked_for():
    columns = planted_dump()
    columns["train_logp"] = columns["train_logp"].clone()
    found = diagnosed(columns)
    assert found.findings == () and "exact: the two log-probs of all" in repr(found)
    del columns["turns"], columns["versions"]
    logps = columns.pop("train_logp"), columns.pop("rollout_logp")
    plain = rc.doctor(*logps, cu_seqlens=columns["cu_seqlens"])
    assert [one.name for one in plain.findings] == ["identical"]
    assert plain.first_difference is None and plain.in_common == () and "exact" not in plain.to_dict()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_not_finite_differs_even_where_both_sides_hold_it(bad):
    logp = torch.full((2, 40), -1.0)
    logp[1, 5] = bad
    found = rc.doctor(logp, logp.clone(), exact=True)
    assert found.first_difference.ulps is None and "not finite" in " ".join(repr(found).split())
    assert found.measured.bits.differing == 1 and found.first_difference.position == 5


def test_a_side_in_bfloat16_is_what_differences_have_in_common():
    columns = planted_dump()
    columns["rollout_logp"] = columns["train_logp"].bfloat16().float()
    finding = diagnosed(columns).findings[0]
    assert finding.name == "not_exact" and finding.evidence[1] == "what [bfloat16] says below makes tokens differ"
    assert finding.advice == "Fix that first, and compare again."


@pytest.mark.parametrize(
    ("dtype", "in_float32"),
    [(torch.float16, 3 << 13), (torch.bfloat16, 3 << 16), (torch.float32, 3), (torch.float64, 0)],
)
def test_ulps_are_steps_of_the_dtype(dtype, in_float32):
    """The finding counts in the dtype of the dump, and says so; the metric counts in float32."""
    one = torch.tensor([-1.0, -0.0, 1e-3], dtype=dtype)
    other = one
    for _ in range(3):
        other = torch.nextafter(other, torch.tensor(-5.0, dtype=dtype))
    assert ulps(one, one, dtype).tolist() == [0, 0, 0]
    assert ulps(one, other, dtype).tolist() == ulps(other.double(), one.double(), dtype).tolist() == [3, 3, 3]
    assert ulps(torch.zeros(1), -torch.zeros(1), dtype).tolist() == [0]
    logps = one[None], one.where(torch.arange(3) != 0, other)[None]
    found = rc.doctor(*logps, exact=True)
    (finding,) = (each for each in found.findings if each.name == "not_exact")
    assert finding.numbers["ulps_max_of_dtype"] == 3.0
    name = str(dtype).removeprefix("torch.")
    assert found.first_difference.dtype == name
    said = "3 ulps apart" if dtype == torch.float32 else f"3 ulps of {name} apart"
    assert said in " ".join(repr(found).split())
    assert rc.correct(*logps, spec=rc.Spec(detail="full")).metrics()["logp_ulps_max"] == in_float32


def test_the_command(tmp_path, capsys):
    path = tmp_path / "dump.pt"
    torch.save(planted_dump(one_rank), path)
    by = [word for name in BY for word in ("--by", name)]
    assert main(["doctor", str(path)]) == 0
    capsys.readouterr()
    assert main(["doctor", "--exact", str(path), *by, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["exact"]["first"]["file"] == str(path) and found["exact"]["in_common"][0]["at"] == 3
    assert main(["doctor", "--exact", str(path), "--fail-if", "logratio_abs_max > 1"]) == 1
    torch.save(planted_dump(), path)
    assert main(["doctor", "--exact", str(path)]) == 0


@pytest.mark.parametrize(("sizes", "ill", "wanted"), [([16] * 8, [5], "file"), ([12, 24] * 4, [1, 3, 5, 7], 24)])
def test_files_are_replicas_or_batches(sizes, ill, wanted, tmp_path):
    for i, size in enumerate(sizes):
        dump = Dump(i, size, 40)
        dump.differs = (dump.uniform(dump.count) < 0.5) & (i in ill)
        torch.save(dump.columns(), tmp_path / f"{i}.pt")
    (shared,) = rc.doctor(tmp_path, exact=True).in_common
    found = (shared.kind, shared.at)
    assert found == (("file", str(tmp_path / "5.pt")) if wanted == "file" else ("batch_size", wanted))


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        ((X, X), {}, "exact: expected two log-probs to compare, got one tensor as both"),
        ((X, X + 1), {"mask": X}, "exact: expected valid tokens to compare, got none in tensors"),
        (("x.pt",), {"field": {"train_logp": "a", "rollout_logp": "a"}}, "got one tensor as both"),
    ],
)
def test_nothing_to_compare_is_an_error(arguments, more, message):
    with pytest.raises(ValueError, match=message):
        rc.doctor(*arguments, exact=True, **more)
