"""The benchmark's own logic: bytes are counted right, a wrong result is never timed, the page is what the results say.

Nothing here measures a time.
"""

from __future__ import annotations

import logging
import sys

import pytest
import torch

from builders.batches import one_thread
from builders.benchmark_folder import load

pytestmark = pytest.mark.usefixtures("benchmarks")


@pytest.fixture(scope="module")
def inputs(benchmarks):
    return load("cases").make_inputs(24, 300)


def outcomes(inputs, workload, layout="padded"):
    """What ours and the hand-written version give."""
    contenders = load("contenders")
    chosen = (contenders.OURS, contenders.BY_HAND)
    found = contenders.contenders(inputs, layout, workload)
    return {who.name: who.call() for who in found if who.name in chosen}


# --- inputs and bytes -------------------------------------------------------------------------------------------------


def test_inputs(inputs):
    assert inputs.mask.dtype == torch.int64 and inputs.train.dtype == torch.float32
    assert torch.equal(inputs.mask.sum(1), inputs.lengths)
    assert inputs.lengths.min() >= 30 and inputs.lengths.max() <= 300
    rows = zip(inputs.train, inputs.lengths.tolist(), strict=True)
    assert torch.equal(inputs.packed_train, torch.cat([row[:n] for row, n in rows]))
    assert inputs.cu_seqlens.tolist() == [0, *inputs.lengths.cumsum(0).tolist()]
    again = load("cases").make_inputs(24, 300)
    assert torch.equal(again.train, inputs.train) and torch.equal(again.rollout, inputs.rollout)


def test_a_batch_of_verls_driver_is_a_quarter_full():
    cases = load("cases")
    assert (1024, 8192) in cases.SHAPES
    assert cases.make_inputs(1024, 8192).tokens / (1024 * 8192) == pytest.approx(0.25, abs=0.01)


def test_required_bytes(inputs):
    cases = load("cases")
    slots, tokens = 24 * 300, inputs.tokens
    assert cases.required_bytes(inputs, "padded", cases.METRICS_ONLY) == slots * (4 + 4 + 8)
    assert cases.required_bytes(inputs, "padded", cases.WEIGHTS_AND_REJECTION) == slots * (4 + 4 + 8 + 4 + 8)
    assert cases.required_bytes(inputs, "packed", cases.METRICS_ONLY) == tokens * (4 + 4)
    assert cases.required_bytes(inputs, "packed", cases.WEIGHTS_AND_REJECTION) == tokens * (4 + 4 + 4 + 1)


def test_account_by_hand():
    """A survives, B overlaps C, C's address is used again by D, and something older is freed."""
    memory = load("memory")
    events = [
        (0, 0xA, 100),  # survives
        (1, 0xB, 10),
        (2, 0xC, 20),
        (3, 0xC, -20),
        (4, 0xF, -500),  # was there before the call
        (5, 0xC, 25),  # reuses the address: 10 + 25 is the peak
        (6, 0xB, -10),
        (7, 0xC, -25),
        (8, 0xC, 5),  # survives, at an address that was a temporary's
    ]
    expected = memory.Memory(temporaries=35, outputs=105)
    assert memory.account(memory.Allocation(*event) for event in events) == expected
    shuffled = [memory.Allocation(*events[i]) for i in (4, 8, 0, 6, 2, 1, 7, 3, 5)]
    assert memory.account(shuffled) == expected
    assert memory.account([]) == memory.Memory(0, 0)


def test_measure_sees_what_an_op_allocates():
    """Two temporaries of 4 MiB at a time, one output of 1 MiB; nothing of what was there before."""
    memory = load("memory")
    given = torch.ones(1 << 20)

    def call():
        a = given * 2.0
        b = a + 1.0
        del a
        return (b * 3.0)[: 1 << 18].clone()

    found = memory.measure(call)
    assert found.outputs == 1 << 20
    assert 8 << 20 <= found.temporaries < (8 << 20) + 4096
    kept = memory.measure(lambda: given)
    assert kept.outputs == 0 and kept.temporaries == 0


# --- the gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_by_hand_is_right(inputs, layout):
    cases = load("cases")
    for workload in cases.WORKLOADS:
        load("gate").check(inputs, workload, outcomes(inputs, workload, layout))


def wrong_weight(outcome):
    outcome.weights[0, 3] *= 1.001
    return outcome


def weight_at_padding(outcome):
    outcome.weights[:, -1] += 1e-3
    return outcome


def half_weights(outcome):
    return outcome._replace(weights=outcome.weights.half())


def no_weights(outcome):
    return outcome._replace(weights=None)


def wrong_mask(outcome):
    outcome.mask[outcome.mask.sum(1).argmax(), 2] = 0
    return outcome


def mask_at_padding(outcome):
    return outcome._replace(mask=torch.ones_like(outcome.mask))


def wrong_metric(outcome):
    return outcome._replace(metrics={**outcome.metrics, "d_std": outcome.metrics["d_std"] * 1.01})


def missing_metric(outcome):
    return outcome._replace(metrics={key: value for key, value in outcome.metrics.items() if key != "ppl_ratio"})


def nan_metric(outcome):
    return outcome._replace(metrics={**outcome.metrics, "weight_ess": float("nan")})


WRONG = (
    wrong_weight,
    weight_at_padding,
    half_weights,
    no_weights,
    wrong_mask,
    mask_at_padding,
    wrong_metric,
    missing_metric,
    nan_metric,
)


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__)
def test_gate_rejects(inputs, spoil):
    """Every kind of wrong result, in the one who is compared."""
    gate, cases, contenders = load("gate"), load("cases"), load("contenders")
    found = outcomes(inputs, cases.WEIGHTS_AND_REJECTION)
    found[contenders.BY_HAND] = spoil(found[contenders.BY_HAND])
    with pytest.raises(gate.WrongResult, match=contenders.BY_HAND):
        gate.check(inputs, cases.WEIGHTS_AND_REJECTION, found)


def test_gate_rejects_ours(inputs):
    """We are compared too, not believed."""
    gate, cases, contenders = load("gate"), load("cases"), load("contenders")
    found = outcomes(inputs, cases.WEIGHTS_AND_REJECTION)
    found[contenders.OURS] = wrong_weight(found[contenders.OURS])
    with pytest.raises(gate.WrongResult):
        gate.check(inputs, cases.WEIGHTS_AND_REJECTION, found)


def test_gate_allows_either_side_of_a_bound(inputs):
    """Only where the mean of D lies within 1e-6 of a bound: here it is put there, and then 1e-5 away."""
    gate, cases, contenders = load("gate"), load("cases"), load("contenders")
    bound = cases.log_bounds(cases.GEOMETRIC)[1]
    for distance, accepted in ((1e-8, True), (1e-5, False)):
        train, rollout = inputs.packed_train.double(), inputs.packed_rollout.double()
        first = slice(0, int(inputs.lengths[0]))
        train[first] += bound - distance - (train[first] - rollout[first]).mean()
        # float64, so that the mean stays where it is put.
        moved = cases.Inputs(
            inputs.train, inputs.rollout, inputs.mask, inputs.lengths, train, rollout, inputs.cu_seqlens
        )
        found = outcomes(inputs, cases.WEIGHTS_AND_REJECTION)
        mask = found[contenders.OURS].mask.clone()
        mask[0] = torch.where(mask[0].any(), 0, inputs.mask[0])
        found = {name: outcome._replace(metrics={}) for name, outcome in found.items()}
        found[contenders.BY_HAND] = found[contenders.BY_HAND]._replace(mask=mask)
        if accepted:
            gate.check(moved, cases.WEIGHTS_AND_REJECTION, found)
        else:
            with pytest.raises(gate.WrongResult, match="the mask differs"):
                gate.check(moved, cases.WEIGHTS_AND_REJECTION, found)


def test_nothing_is_timed_after_a_wrong_result(inputs, monkeypatch):
    cpu, cases, contenders, gate = load("cpu"), load("cases"), load("contenders"), load("gate")

    def two(*arguments):
        ours, by_hand = (
            who for who in contenders.contenders(*arguments) if who.name in (contenders.OURS, contenders.BY_HAND)
        )
        return [ours, contenders.Contender(by_hand.name, lambda: wrong_weight(by_hand.call()))]

    def timed(*_):
        raise AssertionError("timed")

    monkeypatch.setattr(cpu, "contenders", two)
    monkeypatch.setattr(cpu, "take_turns", timed)
    threads = torch.get_num_threads()
    with pytest.raises(gate.WrongResult):
        cpu.one_case(inputs, "padded", cases.WEIGHTS_AND_REJECTION, threads, None, rounds=1, budget=1.0, memories={})


# --- turns and tables -------------------------------------------------------------------------------------------------


def test_nobody_always_follows_the_same_neighbour():
    order = []
    calls = [lambda name=name: order.append(name) for name in "abc"]
    samples = load("cpu").take_turns(calls, 40, lambda: order.append("-"))
    rounds = "".join(order).split("-")[1:]
    assert all(sorted(turns) == ["a", "b", "c"] for turns in rounds)
    assert len(set(rounds)) == 6
    assert [len(taken.wall) for taken in samples] == [40] * 4


def test_rounds_fit_the_budget():
    cpu = load("cpu")
    assert cpu.rounds_for(1.0, 12.5) == 12
    assert cpu.rounds_for(100.0, 20.0) == cpu.FEWEST
    assert cpu.rounds_for(0.0, 20.0) == cpu.MOST


def results_of(**changed):
    """Results of a run whose answers are easy: ours 2 ms, by hand 6, verl 20 or absent."""
    contenders = load("contenders")

    def row(name, wall, temporaries=0):
        times = {"wall_ms": wall, "cpu_ms": wall, "system_ms": 0.0, "faults": 3, "first_ms": 9.0}
        return {"name": name, "note": "", **times, "temporaries": temporaries, "outputs": 0}

    rows = [
        row(contenders.OURS, [1.0, 2.0, 30.0], 2 << 20),
        {"name": contenders.COMPILED, "note": "absent: no compiler"},
        row(contenders.BY_HAND, [5.0, 6.0, 7.0]),
        row(contenders.VERL, [19.0, 20.0, 21.0], 10 << 20),
    ]
    case = {
        "pages": "default", "shape": [2048, 8192], "layout": "padded", "workload": "metrics only", "threads": 1,
        "slots": 10, "tokens": 5, "required_bytes": 4_000_000, "calibration_ms": [1.0, 1.1, 1.2], "rows": rows,
    }  # fmt: skip
    machine = {
        "cpu": "a processor", "cores": 2, "caches": {"L2": "1024K"}, "system": "Linux x86_64", "python": "3.11.7",
        "torch": "2.13.0", "vectors": "AVX512", "verl": "0.9.1", "allocator": {},
    }  # fmt: skip
    return {
        "date": "2026-01-01", "commit": "c" * 40, "dirty": True, "machine": machine, "import_ms": [20.0, 60.0, 30.0],
        "cases": [case], "blocks": [], **changed,
    }  # fmt: skip


def test_tables_say_medians_and_ratios():
    report = load("report")
    results = results_of()
    page = report.page(results, None)
    assert "| 2048 x 8192 | padded | metrics only | 2.00 | 6.00 | 20.0 | 2.00 | 3 | 33% |" in page
    assert "| 2048 x 8192 | padded | metrics only | 10.0 x | 10.0 x | 3.0 x |" in page
    assert "| rollout-corr, metrics only, 2048 x 8192 | >= 6 x verl | 10.0 x | yes |" in page
    assert "| peak temporaries, metrics only, 2048 x 8192 | <= 0.1 of verl's | 0.200 | no |" in page
    assert "| import rollout_corr, after torch | <= 50 ms | 30 ms | yes |" in page
    assert "rollout-corr, compiled: absent: no compiler." in page
    assert f"commit {'c' * 12} with uncommitted changes" in page


def test_terminal_without_rich(monkeypatch):
    results = results_of()
    monkeypatch.setitem(sys.modules, "rich.console", None)
    plain = load("tables").drawn(load("cpu_tables").all_tables(results), load("cpu_tables").absent(results))
    assert "2048 x 8192  padded  metrics only  2.00" in plain
    assert "rollout-corr, compiled: absent: no compiler" in plain


def test_without_verl():
    """Its column is missing, nothing else is."""
    report, contenders = load("report"), load("contenders")
    results = results_of()
    results["cases"][0]["rows"][-1] = {"name": contenders.VERL, "note": "absent: verl is not installed"}
    page = report.page(results, None)
    assert "verl: absent: verl is not installed." in page
    assert "| 2048 x 8192 | padded | metrics only | 2.00 | 6.00 | 2.00 | 3 | 33% |" in page
    assert ">= 6 x verl" not in page


def test_pages_kept_is_a_table_of_its_own():
    """It repeats a case; neither the promises nor the other tables count it."""
    report = load("report")
    results = results_of()
    case = results["cases"][0]
    results["cases"].append(
        {**case, "pages": "kept", "rows": [*case["rows"][:3], {**case["rows"][3], "wall_ms": [8.0]}]}
    )
    before, after = report.page(results_of(), None), report.page(results, None)
    title = "## How many times as fast, 1 thread, pages kept"
    assert title not in before
    kept = after.partition(title)[2].partition("##")[0]
    assert "| 2048 x 8192 | padded | metrics only | 4.0 x |" in kept
    assert after.replace(title + kept, "") == before


def test_json_comes_back(tmp_path):
    report = load("report")
    results = results_of()
    path = tmp_path / "cpu.json"
    path.write_text(load("tables").to_json(results), encoding="utf-8")
    assert report.load(path) == results
    assert report.load(tmp_path / "none.json") is None


def test_page_is_made_from_the_results():
    report = load("report")
    assert report.PAGE.read_text(encoding="utf-8") == report.page(report.load(), report.load(report.GPU_RESULTS)), (
        "run python -m benchmarks.report"
    )


def test_readme_has_the_committed_speeds():
    """README's table is made like the page; the numbers of a made-up result are where they belong."""
    report, front = load("report"), load("front")
    readme = report.README.read_text(encoding="utf-8")
    assert front.put(readme, report.load()) == readme, "run python -m benchmarks.report"
    made = front.put(f"before\n{front.BEGIN}old\n{front.END}\nafter", results_of())
    assert "| 2048 x 8192, metrics only | 20.0 | 6.00 | 2.00 | - |" in made and f"commit {'c' * 12}." in made
    assert "| milliseconds a call, 1 thread | verl |" in made and "old" not in made
    assert made.startswith("before\n") and made.endswith("\nafter")
    with pytest.raises(ValueError, match="page: expected <!-- made by"):
        front.put("no comments", results_of())


# --- the drop-ins -----------------------------------------------------------------------------------------------------


def test_dropins_names_who_is_absent(monkeypatch, capsys, caplog):
    """A framework that cannot be imported is named; one that can has a line with both times."""
    caplog.set_level(logging.NOTSET, logger="rollout_corr")  # the command sets it, and this sets it back
    dropins = load("dropins")
    calls = []

    def present(given):
        yield dropins.Row("toy", "a call", lambda: calls.append("theirs"), lambda: calls.append("ours"))

    def absent(given):
        raise ImportError("No module named 'gone'")
        yield

    monkeypatch.setattr(dropins, "FRAMEWORKS", {"toy": present, "gone": absent})
    with one_thread():
        dropins.main(["--sequences", "2", "--width", "8", "--rounds", "3"])
    printed = capsys.readouterr().out
    assert "gone: absent, No module named 'gone'" in printed and "| toy | a call |" in printed
    assert calls.count("theirs") == calls.count("ours") == 4


def test_dropins_call_both(inputs, monkeypatch):
    """The same arguments for the framework's function and for ours; the framework's own comes first."""
    dropins = load("dropins")
    given = []
    theirs = type("Functions", (), {"apply_rejection_sampling": staticmethod(lambda *args: given.append(args))})
    monkeypatch.setattr(dropins.importlib, "import_module", lambda name: theirs)
    monkeypatch.setattr(dropins.areal, "apply_rejection_sampling", lambda *args: given.append(args))
    rows = list(dropins.of_areal(inputs))
    assert [row.what for row in rows] == ["ratio, token", "ratio, sequence"]
    rows[1].theirs()
    rows[1].ours()
    assert len(given) == 2 and all(a is b for a, b in zip(*given, strict=True)) and given[0][-1].level == "sequence"
