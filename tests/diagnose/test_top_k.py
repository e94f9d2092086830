"""Top-k log-probs of both sides: bounds that hold the distance of the full distributions, and flips of rank."""

from __future__ import annotations

import json

import pytest
import torch

import rollout_corr as rc
from rollout_corr.diagnose.read.top_k import FIRST_DIFFERS, KL_LOW, ORDER_DIFFERS, TV_HIGH, TV_LOW, bounds

pytestmark = pytest.mark.usefixtures("one_thread")


def policies(noise, scale=3.0, tokens=400, vocabulary=60, seed=0, dtype=torch.float64):
    """Log-probs of both sides over the whole vocabulary, [tokens, vocabulary], one near the other."""
    generator = torch.Generator().manual_seed(seed)
    logits, more = torch.randn(2, tokens, vocabulary, generator=generator, dtype=torch.float64)
    rollout, train = (x.log_softmax(1).to(dtype) for x in (scale * logits, scale * logits + noise * more))
    return rollout, train


def entries_of(rollout, train, k, kind):
    """The k entries as a trainer gives them: of the engine's ids, or its own best ones, in an order of its own."""
    top, ids = rollout.topk(k)
    shuffled = torch.randperm(k, generator=torch.Generator().manual_seed(k))
    if kind == "engine's ids":
        return {"rollout_topk_logp": top, "train_topk_logp": train.gather(1, ids), "topk_ids": ids}
    own, own_ids = (x[:, shuffled] for x in train.topk(k))
    return {"rollout_topk_logp": top, "train_topk_logp": own, "topk_ids": ids, "train_topk_ids": own_ids}


@pytest.mark.parametrize("kind", ["engine's ids", "own ids"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("noise", [0.0, 0.1, 3.0])
@pytest.mark.parametrize("k", [1, 5, 60])
def test_the_bounds_hold_the_distance_of_the_full_distributions(k, noise, dtype, kind):
    rollout, train = policies(noise, dtype=dtype)
    found = bounds(entries_of(rollout, train, k, kind))
    p, q = rollout.double(), train.double()
    tv, kl = 0.5 * (p.exp() - q.exp()).abs().sum(1), (p.exp() * (p - q)).sum(1)
    rounding = 2e-6
    assert (found[TV_LOW] <= tv + rounding).all() and (tv <= found[TV_HIGH] + rounding).all()
    assert (found[KL_LOW] <= kl + rounding).all()
    if k == 60:
        # Everything is known, and the bounds meet.
        torch.testing.assert_close(found[TV_LOW], tv, atol=rounding, rtol=0)
        torch.testing.assert_close(found[TV_HIGH], tv, atol=rounding, rtol=0)
        torch.testing.assert_close(found[KL_LOW], kl, atol=1e-5, rtol=0)
    if kind == "own ids":
        assert torch.equal(found[FIRST_DIFFERS].bool(), p.argmax(1) != q.argmax(1))
        assert torch.equal(found[ORDER_DIFFERS].bool(), (p.topk(k).indices != q.topk(k).indices).any(1))


def test_the_rests_count_by_their_mass():
    """Known by hand: 0.5 against 0.4 known, the rests 0.5 and 0.6."""
    found = bounds({"rollout_topk_logp": torch.tensor([[0.5]]).log(), "train_topk_logp": torch.tensor([[0.4]]).log()})
    assert found[TV_LOW].item() == pytest.approx(0.1) and found[TV_HIGH].item() == pytest.approx(0.6)
    assert found[KL_LOW].item() == pytest.approx(0.02041, abs=1e-5)
    # An entry that is there twice has its mass once, and padding has none.
    twice = torch.tensor([[0.5, 0.2, 0.5, 0.9]]).log()
    ids = torch.tensor([[4, 5, 4, -1]])
    found = bounds({"rollout_topk_logp": twice, "train_topk_logp": twice, "topk_ids": ids})
    assert found[TV_HIGH].item() == pytest.approx(0.3)


nan = torch.nan


@pytest.mark.parametrize(
    ("rollout", "train", "ids", "wanted"),
    [
        ([-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0], None, (0, 0)),
        ([-1.0, -2.0, -3.0], [-2.0, -1.0, -3.0], None, (1, 1)),
        ([-3.0, -1.0, -2.0], [-2.0, -1.0, -3.0], None, (0, 1)),
        ([-1.0, -1.0, -3.0], [-2.0, -1.5, -3.0], None, (0, 0)),  # a tie has no order
        ([-1.0, -2.0, nan], [-1.0, -2.0, -0.5], None, (1, 0)),  # the trainer's likeliest is not the engine's
        ([-1.0, -2.0, -0.1], [-1.0, -2.0, -3.0], [4, 5, -1], (0, 0)),  # padding
        ([-1.0, -2.0, -1.0], [-1.0, -2.0, -1.0], [4, 5, 4], (0, 0)),  # an entry twice
        ([nan, nan, nan], [-1.0, -2.0, -3.0], None, (nan, nan)),
    ],
)
def test_flips_of_rank(rollout, train, ids, wanted):
    entries = {"rollout_topk_logp": torch.tensor([rollout]), "train_topk_logp": torch.tensor([train])}
    found = bounds(entries | ({} if ids is None else {"topk_ids": torch.tensor([ids])}))
    got = torch.cat([found[FIRST_DIFFERS], found[ORDER_DIFFERS]])
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), equal_nan=True)
    assert not found[TV_LOW].item() > 0.5 and not found[TV_HIGH].item() > 1.0


def dump_of(noise=0.5, k=5):
    rollout, train = policies(noise, dtype=torch.float32)
    sampled = torch.multinomial(rollout.exp(), 1, generator=torch.Generator().manual_seed(1))
    logps = {"train_logp": train.gather(1, sampled)[:, 0], "rollout_logp": rollout.gather(1, sampled)[:, 0]}
    return logps, entries_of(rollout, train, k, "own ids")


def test_files_and_tensors_of_every_layout_agree(tmp_path, capsys):
    logps, entries = dump_of()
    offsets = torch.arange(0, 401, 40)
    mask = torch.arange(400) % 7 > 0
    columns = logps | entries | {"mask": mask}
    wanted = {name: float(x[mask].mean()) for name, x in bounds(entries).items()}
    records = [{name: x[a : a + 40].tolist() for name, x in columns.items()} for a in offsets[:-1].tolist()]
    (tmp_path / "x.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    torch.save(columns | {"cu_seqlens": offsets}, tmp_path / "packed.pt")
    torch.save({name: x.view(10, 40, *x.shape[1:]) for name, x in columns.items()}, tmp_path / "padded.pt")
    torch.save(
        {name: x[None] for name, x in (columns | {"cu_seqlens": offsets}).items() if name != "cu_seqlens"}
        | {"cu_seqlens": offsets},
        tmp_path / "row.pt",
    )
    found = [rc.doctor(path) for path in sorted(tmp_path.iterdir())]
    found.append(rc.doctor(*logps.values(), mask=mask, cu_seqlens=offsets, **entries))
    lists = {name: list(x.split(40)) for name, x in columns.items()}
    found.append(rc.doctor(lists.pop("train_logp"), lists.pop("rollout_logp"), mask=lists.pop("mask"), **lists))
    assert len(found) == 6
    for one in found:
        metrics = one.metrics()
        assert metrics["topk_tokens"] == int(mask.sum())
        assert [metrics[f"{name}_{'fraction' if 'differs' in name else 'mean'}"] for name in wanted] == pytest.approx(
            list(wanted.values()), rel=1e-5
        )
        assert "the likeliest token differs in" in " ".join(repr(one).split())
    report = rc.report(tmp_path / "x.jsonl")
    assert "topk_kl_rollout_train_low_mean" in repr(report) and "topk_order_differs_fraction" in report.html()
    plain = rc.report(*logps.values(), cu_seqlens=offsets)
    both = rc.report(tmp_path / "x.jsonl", compare=plain.diagnoses[0])
    assert "topk" not in repr(plain) and "topk_tokens" not in plain.metrics() and both.html()


def test_many_entries_are_read_a_part_at_a_time(monkeypatch):
    _, entries = dump_of()
    whole = bounds(entries)
    monkeypatch.setattr("rollout_corr.diagnose.read.top_k.MOST_PAIRS", 100)
    for name, x in bounds(entries).items():
        torch.testing.assert_close(x, whole[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x | {"topk_ids": x["topk_ids"][:, :4]},
            r"topk_ids: expected as many entries as rollout_topk_logp, k = 5; got k = 4",
        ),
        (
            lambda x: {**x, "rollout_topk_logp": x["rollout_topk_logp"][:, :3]},
            r"topk_ids: expected as many .*k = 3; got k = 5",
        ),
        (lambda x: {name: x[name] for name in x if name != "topk_ids"}, "train_topk_ids: expected topk_ids"),
        (
            lambda x: {"rollout_topk_logp": x["rollout_topk_logp"], "train_topk_logp": x["train_topk_logp"][:, :2]},
            "k = 5, or train_topk_ids next to it; got k = 2",
        ),
        (lambda x: x | {"topk_ids": x["topk_ids"][:9]}, r"topk_ids.*: expected shape \[400, 'k'\].*, got \[9, 5\]"),
        (lambda x: {name: y.repeat(1, 300) for name, y in x.items()}, "expected at most 1,024 entries .*, got 1,500"),
        (lambda x: x | {"topk_ids": x["topk_ids"][:, 0]}, r"topk_ids.*: expected shape \[400, 'k'\].*, got \[400\]"),
    ],
)
@pytest.mark.parametrize("in_memory", [True, False])
def test_wrong_shapes_are_named(change, message, in_memory, tmp_path):
    logps, entries = dump_of()
    entries, offsets = change(entries), torch.tensor([0, 400])
    torch.save(logps | entries | {"cu_seqlens": offsets}, tmp_path / "x.pt")
    given, more = (logps.values(), entries | {"cu_seqlens": offsets}) if in_memory else ([tmp_path / "x.pt"], {})
    with pytest.raises(ValueError, match=message):
        rc.doctor(*given, **more)


def test_records_with_wrong_entries_are_read_without_them(tmp_path):
    logps, entries = dump_of()
    record = {name: x[:9].tolist() for name, x in (logps | entries).items()}
    ragged = record | {"topk_ids": [row[: 1 + i % 3] for i, row in enumerate(record["topk_ids"])]}
    narrow = record | {"rollout_topk_logp": [row[:2] for row in record["rollout_topk_logp"]]}
    one = {name: x[:1] for name, x in record.items()}
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in (record, ragged, narrow, one)))
    found = rc.doctor(path)
    assert [(each.record, each.field) for each in found.source.problems.shown] == [
        (1, "topk_ids"),
        (1, "rollout_topk_logp"),
        (2, "rollout_topk_logp"),
    ]
    assert found.tokens == 28 and found.metrics()["topk_tokens"] == 10
