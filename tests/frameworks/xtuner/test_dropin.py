"""The drop-in for xtuner beside plain loops: packs, pads, dtypes, merging, and the subclass of its configuration."""

from __future__ import annotations

import copy
import math
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from oracles import peers as oracle_reports
from oracles.xtuner import Fields, by_hand, rows_of
from rollout_corr.frameworks import xtuner
from rollout_corr.frameworks.xtuner import dropin

LENGTHS = [7, 0, 5, 9, 4]
SHIPPED = {
    "rollout_is_level": "token",
    "rollout_is_mode": "both",
    "rollout_is_threshold": (1.5, 0.7),
    "rollout_is_mask_threshold": (1.3, 0.8),
    "rollout_is_veto_threshold": (1.9, 0.5),
}


class Configuration(Fields):
    def compute_rollout_importance_weights_and_metrics(self, old_log_prob, rollout_log_prob, num_tokens, response_mask):
        return "theirs"


def compute_rollout_importance_weights(
    old_log_prob,
    rollout_log_prob,
    num_tokens,
    response_mask,
    rollout_is_level="token",
    rollout_is_mode="truncate",
    rollout_is_threshold=None,
    rollout_is_mask_threshold=None,
    rollout_is_veto_threshold=None,
):
    """xtuner's function, by its signature."""
    return "theirs"


@pytest.fixture
def theirs(monkeypatch):
    """xtuner's module, as far as something is replaced in it."""
    module = ModuleType(dropin.MODULE)
    module.RolloutImportanceSampling = type("RolloutImportanceSampling", (Configuration,), {})
    module.compute_rollout_importance_weights = compute_rollout_importance_weights
    module.merge_rollout_is_metrics = lambda rollout_is_metrics, device="cuda": "theirs"
    root = ModuleType("xtuner")
    root.__version__ = "0.2.0"
    monkeypatch.setitem(sys.modules, "xtuner", root)
    monkeypatch.setitem(sys.modules, dropin.MODULE, module)
    yield module
    dropin.uninstall()
    sys.modules.pop("rollout_corr.frameworks.xtuner.subclass", None)


def pack(seed=0, dtype=torch.float32, mask_dtype=torch.bool, lengths=LENGTHS, pads=(4,)):
    made = torch.Generator().manual_seed(seed)
    rollout = torch.rand(1, sum(lengths), generator=made, dtype=torch.float64).log()
    old = rollout + 0.25 * torch.randn(1, sum(lengths), generator=made, dtype=torch.float64)
    mask = torch.rand(1, sum(lengths), generator=made) < 0.8
    for i in pads:
        mask[:, sum(lengths[:i]) : sum(lengths[: i + 1])] = False
    return old.to(dtype), rollout.to(dtype), torch.tensor(lengths, dtype=torch.int32), mask.to(mask_dtype)


def run(given, **fields):
    switches = {name: fields.pop(name) for name in dropin.SWITCHES if name in fields}
    return dropin.compute_rollout_importance_weights_and_metrics(Configuration(**fields), *given, **switches)


@pytest.mark.parametrize("mode", ["truncate", "mask", "both"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_mask_and_metrics(level, mode):
    fields = SHIPPED | {"rollout_is_level": level, "rollout_is_mode": mode}
    for seed in range(4):
        given = pack(seed, torch.float64)
        rows = rows_of(*given)
        weights, mask, mismatch, importance = run(given, **fields)
        expected = by_hand(rows, level, mode, (1.5, 0.7), (1.3, 0.8), (1.9, 0.5))
        torch.testing.assert_close(weights[0], torch.tensor(expected[0], dtype=torch.float64), rtol=1e-12, atol=0.0)
        assert mask[0].tolist() == expected[1] and mask.dtype == torch.float32
        arguments = {"mode": mode, "upper": 1.5, "lower": 0.7, "mask": (0.8, 1.3), "veto": (0.5, 1.9)}
        wanted = oracle_reports.xtuner(rows, level=level, **arguments)
        assert set(mismatch) | set(importance) == set(wanted) and set(mismatch) & set(importance) == {"mismatch/valid"}
        assert mismatch | importance == pytest.approx(wanted, rel=1e-9, abs=1e-12)
        assert mismatch["mismatch/valid"] is importance["mismatch/valid"] is True


def test_function_is_the_method():
    given = pack()
    weights, mask, _, importance = run(given, **SHIPPED)
    found = dropin.compute_rollout_importance_weights(*given, **SHIPPED)
    assert torch.equal(found[0], weights) and torch.equal(found[1], mask) and found[2] == importance
    # A list of lengths, and offsets in int64, are the same.
    old, rollout, num_tokens, mask = given
    for lengths in (num_tokens.tolist(), num_tokens.long()):
        assert torch.equal(run((old, rollout, lengths, mask), **SHIPPED)[0], weights)


def test_without_threshold_all_is_off():
    given = pack()
    weights, mask, mismatch, importance = run(given, rollout_is_veto_threshold=(20.0, 0.0))
    assert weights is None and mask is given[3] and importance == {} and len(mismatch) == 13
    assert dropin.compute_rollout_importance_weights(*given) == (None, given[3], {})


@pytest.mark.parametrize(
    ("dtype", "mask_dtype", "weights", "mask"),
    [
        (torch.float32, torch.bool, torch.float32, torch.float32),
        (torch.bfloat16, torch.int64, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64, torch.float64),
    ],
)
def test_dtypes(dtype, mask_dtype, weights, mask):
    found = run(pack(0, dtype, mask_dtype), **SHIPPED)
    geometric = run(pack(0, dtype, mask_dtype), **SHIPPED | {"rollout_is_level": "geometric"})[0]
    assert geometric.dtype == (weights if mask_dtype.is_floating_point else torch.float32)
    assert (found[0].dtype, found[1].dtype) == (weights, mask)
    assert found[0].shape == found[1].shape == (1, sum(LENGTHS))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_pack_of_padding(level):
    """xtuner's sentinels, and no exception."""
    found = run(pack(pads=range(5)), **SHIPPED | {"rollout_is_level": level})
    assert not found[0].any() and not found[1].any() and found[2]["mismatch/valid"] is False
    extrema = (found[3]["mismatch/rollout_is_max"], found[3]["mismatch/rollout_is_min"])
    assert extrema == ((-math.inf, math.inf) if level == "token" else (1.0, 1.0))


def test_mismatch_over_sequences():
    """Each sequence's own perplexity, and the mean over those with a valid token."""
    given = pack(dtype=torch.float64)
    found = run(given, **SHIPPED, mismatch_over="sequence")[2]
    logs = [(o, r) for o, r in oracle_reports.mean_logs(rows_of(*given)) if (o, r) != (0.0, 0.0)]
    assert len(logs) == 3
    gaps = [r - o for o, r in logs]
    expected = {
        "training_ppl": oracle_reports.average(math.exp(-o) for o, _ in logs),
        "rollout_log_ppl": oracle_reports.average(-r for _, r in logs),
        "log_ppl_diff_max": max(gaps),
        "log_ppl_diff_min": min(gaps),
        "log_ppl_abs_diff": oracle_reports.average(map(abs, gaps)),
        "ppl_ratio": oracle_reports.average(map(math.exp, gaps)),
    }
    assert {key: found[f"mismatch/mismatch_{key}"] for key in expected} == pytest.approx(expected, rel=1e-10)
    as_pack = run(given, **SHIPPED)[2]
    assert found.keys() == as_pack.keys()
    assert as_pack["mismatch/mismatch_log_ppl_diff_max"] == as_pack["mismatch/mismatch_log_ppl_diff_min"]


def test_pads_can_be_left_out():
    """With "skip", sequences of padding change no metric."""
    given = pack()
    lengths = [7, 5, 9]
    chosen = torch.cat([torch.arange(7), torch.arange(7, 12), torch.arange(12, 21)])
    alone = (given[0][:, chosen], given[1][:, chosen], torch.tensor(lengths), given[3][:, chosen])
    fields = SHIPPED | {"rollout_is_level": "sequence"}
    expected = run(alone, **fields)[3]
    assert run(given, **fields, empty_rows="skip")[3] == pytest.approx(dict(expected), rel=1e-12)
    assert run(given, **fields)[3] != expected


def test_nonfinite():
    """A token that is NaN takes its sequence along, and one outside the mask does nothing."""
    old, rollout, num_tokens, mask = pack()
    expected = run((old, rollout, num_tokens, mask), **SHIPPED)
    old = old.clone()
    old[~mask] = math.nan
    found = run((old, rollout, num_tokens, mask), **SHIPPED)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1]) and found[2:] == expected[2:]
    old[mask.nonzero(as_tuple=True)[0][:1], mask.nonzero(as_tuple=True)[1][:1]] = math.nan
    found = run((old, rollout, num_tokens, mask), **SHIPPED)
    assert not found[0][0, :7].any() and not found[1][0, :7].any()
    assert all(math.isfinite(value) for value in (found[2] | found[3]).values())
    assert run((old, rollout, num_tokens, mask), **SHIPPED, nonfinite="propagate")[0].isnan().any()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"rollout_is_level": "word"}, ValueError, "rollout_is_level: expected one of"),
        ({"rollout_is_threshold": (0.8, 1.2)}, ValueError, r"expected \(upper, lower\) with upper > lower"),
        ({"rollout_is_mask_threshold": 2.0}, TypeError, "rollout_is_mask_threshold: expected a pair"),
    ],
)
def test_wrong_configuration(change, kind, message):
    with pytest.raises(kind, match=message):
        run(pack(), **SHIPPED | change)


def test_wrong_tensors():
    old, rollout, num_tokens, mask = pack()
    with pytest.raises(ValueError, match=r"old_log_prob: expected shape \[1, S\], packed, got \[2, 25\]"):
        run((old.expand(2, -1), rollout, num_tokens, mask), **SHIPPED)
    with pytest.raises(ValueError, match=r"num_tokens: expected 25 tokens together .*, got 21"):
        run((old, rollout, num_tokens[:-1], mask), **SHIPPED)
    with pytest.raises(ValueError, match=r"rollout_logp: expected shape \[1, 25\]"):
        run((old, rollout[:, 1:], num_tokens, mask), **SHIPPED)


# --- merging ---


@pytest.fixture
def two_ranks(monkeypatch):
    """Collectives as if another rank had handed in `others`; what was reduced is counted."""
    calls, others = [], []

    def all_reduce(x, op=None, group=None):
        calls.append(op)
        other = others[len(calls) - 1].to(x.dtype) if others else None
        if other is not None:
            x.copy_(torch.maximum(x, other) if op == torch.distributed.ReduceOp.MAX else x + other)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return SimpleNamespace(calls=calls, others=others)


def test_merges_in_two_collectives(two_ranks):
    packs = [run(pack(seed), **SHIPPED)[3] for seed in range(3)] + [run(pack(9, pads=range(5)), **SHIPPED)[3]]
    merged = dropin.merge_rollout_is_metrics(packs, "cpu")
    assert len(two_ranks.calls) == 2 and list(merged) == [key for key in packs[0] if key != "mismatch/valid"]
    for key, value in merged.items():
        of_packs = [metrics[key] for metrics in packs[:3]]
        expected = max(of_packs) if "max" in key else min(of_packs) if "min" in key else sum(of_packs) / 3
        assert value == pytest.approx(expected, rel=1e-6), key


def test_merges_with_another_rank(two_ranks):
    mine, other = {"a": 1.0, "a_max": 2.0, "a_min": 3.0}, {"a": 4.0, "a_max": 7.0, "a_min": 2.0}
    two_ranks.others[:] = [torch.tensor([1.0, other["a"]]), torch.tensor([other["a_max"], -other["a_min"]])]
    assert dropin.merge_rollout_is_metrics([mine, mine], "cpu") == {"a": 2.0, "a_max": 7.0, "a_min": 2.0}


def test_merges_nothing(two_ranks):
    nothing = run(pack(pads=range(5)), **SHIPPED)[3]
    assert set(dropin.merge_rollout_is_metrics([nothing], "cpu").values()) == {0.0}
    assert set(dropin.pool_rollout_is_metrics([nothing], "cpu").values()) == {0.0}
    two_ranks.calls.clear()
    assert dropin.merge_rollout_is_metrics([{}, {}], "cpu") == {} and two_ranks.calls == []


def test_pools(two_ranks):
    """The packs' tokens and sequences together: the number of one pack that holds them all."""
    given = [pack(seed, torch.float64) for seed in range(3)]
    together = tuple(torch.cat(parts, dim=-1) for parts in zip(*given, strict=True))
    of_packs = [run(x, **SHIPPED, mismatch_over="sequence") for x in given]
    whole = run(together, **SHIPPED, mismatch_over="sequence")
    for which in (2, 3):
        pooled = dropin.pool_rollout_is_metrics([found[which] for found in of_packs], "cpu")
        expected = {key: value for key, value in whole[which].items() if key != "mismatch/valid"}
        assert pooled == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert len(two_ranks.calls) == 4
    with pytest.raises(TypeError, match="rollout_is_metrics: expected what the replaced method returned"):
        dropin.pool_rollout_is_metrics([of_packs[0][3], dict(of_packs[1][3])], "cpu")


# --- in xtuner ---


def test_install(theirs):
    given, made = pack(), theirs.RolloutImportanceSampling(**SHIPPED)
    assert made.compute_rollout_importance_weights_and_metrics(*given) == "theirs"
    assert dropin.install().active
    before = copy.deepcopy(vars(made))
    found = made.compute_rollout_importance_weights_and_metrics(
        old_log_prob=given[0], rollout_log_prob=given[1], num_tokens=given[2], response_mask=given[3]
    )
    assert torch.equal(found[0], run(given, **SHIPPED)[0]) and vars(made) == before
    assert theirs.merge_rollout_is_metrics([{}], "cpu") == {}
    dropin.install(merge="pooled", mismatch_over="sequence")
    found = made.compute_rollout_importance_weights_and_metrics(*given)
    assert found[2] == run(given, **SHIPPED, mismatch_over="sequence")[2]
    assert theirs.merge_rollout_is_metrics.__wrapped__([{}]) == "theirs"
    dropin.uninstall()
    assert made.compute_rollout_importance_weights_and_metrics(*given) == "theirs"


def test_subclass(theirs):
    """xtuner's configuration with our method and the switches as fields; nothing is replaced."""
    made = xtuner.RolloutImportanceSampling(**SHIPPED, mismatch_over="sequence", empty_rows="skip")
    assert isinstance(made, theirs.RolloutImportanceSampling) and xtuner.RolloutImportanceSampling is type(made)
    assert pickle.loads(pickle.dumps(type(made))) is type(made)
    found = made.compute_rollout_importance_weights_and_metrics(*pack())
    expected = run(pack(), **SHIPPED, mismatch_over="sequence", empty_rows="skip")
    assert torch.equal(found[0], expected[0]) and found[2:] == expected[2:]
    with pytest.raises(ValueError, match="mismatch_over: expected one of"):
        xtuner.RolloutImportanceSampling(mismatch_over="word").compute_rollout_importance_weights_and_metrics(*pack())


@pytest.mark.parametrize("level", ["max", "geometric", "kl3"])
def test_vetoes_of_the_pull_request(theirs, level):
    """Only sequences whose mean advantage is negative, by the largest ratio, the mean of D or the mean of k3."""
    given = pack(3, torch.float64)
    advantages = torch.tensor([-1.0, 1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    bounds = {"max": (1.4, 0.7), "geometric": (1.02, 0.98), "kl3": (0.02, 0.0)}[level]
    fields = {"rollout_is_threshold": (5.0, 0.1), "rollout_is_veto_threshold": bounds, "rollout_is_veto_level": level}
    only = xtuner.RolloutImportanceSampling(**fields, rollout_is_veto_negative_adv_only=True)
    mask = only.compute_rollout_importance_weights_and_metrics(*given, advantages=advantages)[1]
    everyone = xtuner.RolloutImportanceSampling(**fields).compute_rollout_importance_weights_and_metrics(*given)[1]
    upper, lower = bounds
    vetoed = []
    for row in oracle_reports.deltas(rows_of(*given)):
        value = {
            "max": all(lower <= math.exp(d) <= upper for d in row),
            "geometric": lower <= math.exp(oracle_reports.average(row)) <= upper,
            "kl3": oracle_reports.average(math.expm1(d) - d for d in row) <= upper,
        }[level]
        vetoed.append(bool(row) and not value)
    assert any(vetoed), "a veto that no row fails tests nothing"
    kept = [bool(x.any()) for x in everyone.split(LENGTHS, dim=1)]
    assert kept == [not v and bool(row) for v, row in zip(vetoed, oracle_reports.deltas(rows_of(*given)), strict=True)]
    kept_negative = [bool(x.any()) for x in mask.split(LENGTHS, dim=1)]
    assert kept_negative == [
        bool(row) and not (v and a < 0)
        for v, a, row in zip(vetoed, advantages.tolist(), oracle_reports.deltas(rows_of(*given)), strict=True)
    ]


def test_says_what_it_does(caplog, monkeypatch):
    monkeypatch.setattr(dropin.DROP_IN, "_said", set())
    for _ in range(2):
        run(pack(), **SHIPPED)
        run(pack(), rollout_is_veto_threshold=(20.0, 0.0))
    yes, no = (record.getMessage() for record in caplog.records)
    assert "active: yes, rollout_is_level 'token', rollout_is_mode 'both', threshold (1.5, 0.7), veto (1.9, 0.5)" in yes
    assert "active: no, metrics only: rollout_is_threshold is None, which switches the mask and the veto off too" in no
