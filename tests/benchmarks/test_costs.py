"""Counts of launches, waits, bytes and temporaries: against counts by hand, and against what ours has cost before."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

import rollout_corr as rc
from benchmarks import report
from benchmarks.cases.batches import both_layouts
from benchmarks.costs import __main__ as costs
from benchmarks.costs import driver, ours, peers, picture, tables
from benchmarks.costs.counting import Cost, Wait, cost_of
from rollout_corr.backends import loss_operators, operators, step
from rollout_corr.backends.loss_task import beyond_kernels
from rollout_corr.frameworks.shared.lookup import every_recipe
from rollout_corr.specs.terms import Objective

pytestmark = pytest.mark.usefixtures("one_thread")

HERE = Path(__file__).parent
RESULTS = json.loads(costs.RESULTS.read_text(encoding="utf-8"))
STEPS = report.counted_steps()


@pytest.fixture(scope="module", autouse=True)
def dynamo():
    """An operation under a mode imports it, which takes seconds the first time."""
    importlib.import_module("torch._dynamo")


# --- counting ---


# 6 launches forward: exp, mul, gt, any, sum, div; 3 backward: div, mul, mul. `expand` and `detach` are views.
LOSS = """
def loss(x, mask):
    y = x.exp() * mask
    if (y.detach() > 2.0).any():
        return y.sum() / 2.0
    return y.sum()
"""


# Of 1,000 float32: launches, kinds of waits, bytes read, bytes written, bytes of temporaries.
COUNTED = {
    "add": (lambda x: x + 1.0, 1, [], 4000, 4000, 0),
    "in place": (lambda x: x.add_(x), 1, [], 4000, 4000, 0),
    "fill": (lambda x: x.fill_(1.0), 1, [], 0, 4000, 0),
    "a view": (lambda x: x.view(10, 100)[3], 0, [], 0, 0, 0),
    "empty": (lambda x: torch.empty_like(x), 0, [], 0, 0, 0),
    "of dtypes": (lambda x: torch.promote_types(x.dtype, torch.bfloat16), 0, [], 0, 0, 0),
    "one temporary": (lambda x: (x + 1.0) * 2.0, 2, [], 8000, 8000, 4000),
    "expanded": (lambda x: x[:1].expand(1000) + 1.0, 1, [], 4, 4000, 0),
    "item": (lambda x: x.sum().item(), 1, ["item"], 4000, 4, 4),
    "bool": (lambda x: bool(x[0] > 0), 1, ["item"], 4, 1, 1),
    "equal": (lambda x: torch.equal(x, x), 1, ["item"], 8000, 0, 0),
    "nonzero": (lambda x: x.nonzero(), 1, ["shape"], 4000, 8000, 0),
    "by a mask": (lambda x: x[x > 0.5], 2, ["shape"], 4000 + 5000, 1000 + 4000, 1000),
    "a number at a mask": (lambda x: x.masked_fill_(x > 2.0, 0.0), 2, [], 4000 + 5000, 1000 + 4000, 1000),
    "picked": (lambda x: x[torch.arange(3, device=x.device)], 2, [], 24 + 12, 24 + 12, 24),
    "tolist": (lambda x: x.tolist(), 0, ["copy to the host"], 0, 0, 0),
    "to the host": (lambda x: x.cpu().sum(), 0, ["copy to the host"], 0, 0, 0),
    "from the host": (lambda x: torch.tensor(2.0, device=x.device) * x, 1, ["copy from the host"], 4004, 4000, 0),
    "on the host": (lambda x: torch.tensor([1.0, 2.0]).sum().item(), 0, [], 0, 0, 0),
}


@pytest.mark.parametrize("name", COUNTED)
def test_an_operation_costs_what_it_does(name):
    call, launches, waits, read, written, temporaries = COUNTED[name]
    x = torch.ones(1000)
    found = cost_of(lambda: call(x), HERE)
    assert (found.launches, [wait.what for wait in found.waits]) == (launches, waits)
    assert (found.read, found.written, found.temporaries) == (read, written, temporaries)
    assert all(wait.place.startswith("test_costs.py:") for wait in found.waits)


def test_what_others_compute_is_not_counted():
    """Forward and backward of the function named; what its caller computes before, and the backward of that, is not."""
    x, mask, names = torch.ones(10, requires_grad=True), torch.ones(10), {}
    exec(compile(LOSS, "/elsewhere/loss.py", "exec"), names)

    def call():
        return torch.autograd.grad(names["loss"](x.sin(), mask.neg().abs()), x)

    found = cost_of(call, Path("/elsewhere"), ("loss",))
    assert (found.launches, found.waits) == (9, [Wait("item", "loss.py:4")])
    assert cost_of(call, Path("/elsewhere"), ("other",)) == cost_of(call, Path("/nowhere")) == Cost()


def test_two_frameworks_by_hand():
    """TRL: old - rollout, * mask (int64), exp, clamp.

    OpenRLHF, `seq-mask-tis`: the ratio's logarithm; 4 of a masked mean; exp, >=, <=, &; exp; * and * of the loss; a
    difference and 4 of a masked mean.
    """
    rows = [row for row in RESULTS["rows"] if row["what"] == peers.CORRECTION]
    for shape in costs.SHAPES:
        of_shape = {row["who"]: row for row in rows if row["shape"] == list(shape)}
        trl, openrlhf, slots = of_shape["TRL"], of_shape["OpenRLHF"], shape[0] * shape[1]
        assert (trl["launches"], openrlhf["launches"]) == (4, 1 + 4 + 4 + 1 + 2 + 5)
        assert trl["waits"] == openrlhf["waits"] == 0
        assert (trl["read"], trl["written"]) == ((8 + 12 + 4 + 4) * slots, 16 * slots)


def test_every_framework_is_recorded_with_its_lines():
    assert {row["who"] for row in RESULTS["rows"]} >= {peer.name for peer in peers.PEERS}
    for row in RESULTS["rows"]:
        assert row["waits"] == sum(int(place.rpartition("(")[2].rstrip(")")) for place in row["places"])
        assert all(".py:" in place for place in row["places"]), row["places"]


def test_without_a_compiler_the_host_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(driver.NoCompiler, match="expected a C compiler"):
        driver.library(tmp_path / "built")


# --- ours ---


def nothing(launch):
    """Run no kernel: launches alone are counted."""
    return 0, 0


@pytest.fixture(scope="module")
def smallest():
    """Batches of the smallest size, when the kernels have been imported."""
    batches = both_layouts(*costs.SHAPES[0])
    ours.on_kernels(batches["padded"], nothing)
    return batches


def test_ours_costs_no_more_than_before(smallest):
    """Launches, waits, bytes and temporaries; the bytes of kernels are counted by `make bench-tiny`."""
    found = list(costs.rows_of_ours(costs.SHAPES[0], smallest, nothing))
    assert costs.grown(found, RESULTS["rows"]) == []
    for row in found:
        (place,) = row["places"]
        assert re.fullmatch(r"copy to the host, metrics/statistics\.py:\d+ \(1\)", place), row


def planted(what, operation):
    """The kernels of corrections or of losses, and an operation on what they have read."""
    module, table = {
        peers.CORRECTION: (operators, "backends.run.CORRECTIONS"),
        peers.LOSS: (loss_operators, "api.policy_loss.LOSSES"),
    }[what]
    run = module.run_fused

    def more(read, *others):
        found = run(read, *others)
        operation(read.first)
        return found

    return mock.patch.dict(f"rollout_corr.{table}", kernels=more)


@pytest.mark.parametrize(
    ("what", "operation", "counts"),
    [
        (peers.CORRECTION, lambda x: x.clone(), {"launches", "temporaries"}),
        (peers.LOSS, lambda x: x.view(-1)[0].item(), {"waits"}),
    ],
)
def test_what_is_planted_is_found(what, operation, counts, smallest):
    with planted(what, operation):
        said = costs.grown(list(costs.rows_of_ours(costs.SHAPES[0], smallest, nothing)), RESULTS["rows"])
    assert {line.split(": ")[1].split()[0] for line in said} >= counts
    # A temporary of the correction alone may lie below the most that its loss takes.
    assert {what} <= {line.split(", ")[2] for line in said} <= {what, peers.BOTH}


@pytest.mark.slow
def test_what_inductor_makes_of_two_results():
    """One kernel for both of D: exp(D) and the sum of D read each input once. A sort comes between two kernels."""
    from benchmarks.costs.compiled import scheduled

    x, y = torch.empty(2, 1000, device="meta")
    assert scheduled(lambda x, y: ((x - y).exp(), (x - y).sum()), [x, y]) == Cost(1, [], 8000, 4004)
    assert scheduled(lambda x: (x.exp().sort()[0] * 2.0,), [x]).launches == 3


@pytest.mark.slow
def test_what_inductor_makes_of_forward_and_backward():
    """One kernel each: the sum reads x and y, and its gradient in x reads y and the scalar from above."""
    from benchmarks.costs.compiled import Backend

    backend = Backend()
    x, y = torch.ones(2, 1000)
    backend.of(lambda x, y: (x * y).sum())(x.requires_grad_(), y).backward()
    assert backend.cost() == Cost(2, [], 8000 + 4004, 4 + 4000)
    assert x.grad.equal(y) and backend.cost() == Cost()


# --- a whole step ---


def test_ways_to_run_a_step_are_compared():
    """In one pass nothing is dearer than as two calls, and verl, TRL and torch.compile are dearer than that."""
    rows = {(row["who"], row["layout"]): row for row in STEPS["rows"]}
    for layout in ("packed", "padded"):
        for more in ("", tables.WITH_VETO):
            one, two = (rows[f"{who}{more}", layout] for who in (tables.ONE_PASS, tables.TWO_CALLS))
            names = ("launches", "read", "written", "sectors", "instructions", "peak")
            assert all(one[name] < two[name] for name in names)
    moved = {who: row["read"] + row["written"] for (who, layout), row in rows.items() if layout == "padded"}
    assert moved[tables.ONE_PASS] < min(moved[who] for who in ("verl", "TRL", f"{tables.BY_HAND}, six metrics"))


def test_the_picture_shows_the_counts_of_today():
    again = "draw it again: python -m benchmarks.costs.picture"
    assert picture.picture(STEPS) == picture.PICTURE.read_text(encoding="utf-8"), again


# A Spec and a Loss that need two calls, what `two_calls` says of them, and the words for it on the page.
TWO_CALLS = [
    (rc.Spec(detail="full"), rc.Loss(), '`detail="full"`'),
    (rc.Spec(report=("verl",)), rc.Loss(), "`report`"),
    (rc.Spec(rc.Weight("turn", "sum")), rc.Loss(), "over turns"),
    (rc.Spec(rc.Weight.token(normalize="batch")), rc.Loss(), "`Weight.normalize`"),
    (rc.Spec(), rc.Loss(rc.ClipCov()), "`ClipCov`"),
    (rc.Spec(), rc.Loss(rc.PPO(), kl=rc.KL("k3", 0.01, mean=rc.Mean("sequence"))), "`KL(mean=...)`"),
]


def test_the_page_of_the_kernels_lists_what_stays_two_calls():
    _, _, page = report.KERNELS.read_text(encoding="utf-8").partition("| two calls | with |")
    said = {step.two_calls(spec, Objective(loss.surrogate, loss.kl)) for spec, loss, _ in TWO_CALLS}
    source = inspect.getsource(step.two_calls.__wrapped__)
    assert said == set(re.findall(r'return "(.*)"', source)), "a reason that nothing here asks for"
    assert all(words in page.partition("\n\n")[0] for *_, words in TWO_CALLS)


# --- ours on the kernels, by name ---

# A correction takes so many launches at most, and a loss with its backward.
OF_CORRECTION, OF_LOSS = 4, 3
# By name: torch searches for where turns begin among sequences, in two operations.
MORE_OF_CORRECTION = {"roll.segment": 5}
# By name: a KL with a mean of its own is a loss of its own; the ratio of turns needs the turns again.
MORE_OF_RECIPE = {"skyrl.grpo": 10, "roll.segment": 14}
NEW, OLD, ROLLOUT, REF = -torch.rand(4, 4, 64, generator=torch.Generator().manual_seed(0))
NEW.requires_grad_()
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5])


@pytest.fixture(scope="module")
def launched():
    with ours.as_on_a_device(nothing) as found:
        yield found


def batch_of(spec, packed=False, **more):
    if packed:
        more["cu_seqlens"] = torch.arange(0, 257, 64)
    if spec is not None and spec.reads_versions:
        more["versions"] = rc.Versions(torch.tensor([3, 6, 7, 7]), 7)
    if spec is not None and spec.measures_turns:
        more["turns"] = "runs"
    return rc.Batch(mask=torch.ones(256 if packed else (4, 64), dtype=torch.bool), **more)


def logps(packed):
    """Log-probs of old, rollout and reference policies, and of the one that trains."""
    return [x.reshape(-1) if packed else x for x in (OLD, ROLLOUT, REF, NEW)]


def with_backward(loss):
    return loss, torch.autograd.grad(loss.value, NEW)


def on_kernels(spec):
    return operators.beyond_kernels(spec) is None and all(x.of == "train/rollout" for x in spec.criteria)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", [name for name in rc.spec_names() if on_kernels(rc.spec(name))])
def test_a_preset_takes_four_launches_and_its_loss_three(name, packed, launched):
    """Both at once take no more, or three where one pass over the tokens does both. Nothing waits."""
    spec, (old, rollout, _, new) = rc.spec(name), logps(packed)
    batch = batch_of(spec, packed)
    advantages = ADVANTAGES if any(x.when != "any" for x in spec.criteria) else None

    def correction():
        return rc.correct(old, rollout, batch, spec=spec, advantages=advantages, backend="triton")

    found = correction()
    cost = ours.cost_on_kernels(correction, launched)
    assert 2 <= cost.launches <= MORE_OF_CORRECTION.get(name, OF_CORRECTION) and not cost.waits
    loss = ours.cost_on_kernels(
        lambda: with_backward(rc.policy_loss(new, ADVANTAGES, batch, old_logp=old, correction=found, backend="triton")),
        launched,
    )
    assert loss.launches == OF_LOSS and not loss.waits
    both = ours.cost_on_kernels(
        lambda: with_backward(
            rc.policy_loss(new, ADVANTAGES, batch, old_logp=old, rollout_logp=rollout, spec=spec, backend="triton")
        ),
        launched,
    )
    launches = cost.launches + loss.launches
    if not spec.reads_versions and step.two_calls(spec, Objective(rc.PPO())) is None:
        launches = OF_LOSS + 2 * step.settles(spec, Objective(rc.PPO()), spec.rejected)
    assert both.launches == launches and not both.waits


def test_an_advantage_that_a_row_repeats_is_not_copied(launched):
    old, *_, new = logps(packed=False)
    repeated = ADVANTAGES[:, None].expand(4, 64)
    cost = ours.cost_on_kernels(
        lambda: with_backward(rc.policy_loss(new, repeated, batch_of(None), old_logp=old, backend="triton")), launched
    )
    assert cost.launches == OF_LOSS


def is_on_kernels(recipe):
    surrogate, spec = recipe.loss.surrogate, recipe.spec
    if spec is not None and operators.beyond_kernels(spec) is not None:
        return False
    return beyond_kernels(surrogate, scaled=False) is None and not surrogate.sees_batch


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", [name for name in every_recipe() if is_on_kernels(rc.recipe(name))])
def test_a_recipe_takes_three_launches_and_four_for_its_correction(name, packed, launched):
    """Nothing waits."""
    made, needs = rc.recipe(name), every_recipe()[name].needs
    policies = dict(zip(("old_logp", "rollout_logp", "ref_logp", "new_logp"), logps(packed), strict=True))
    batch = batch_of(made.spec, packed, **made.batch)

    def loss():
        given = {needed: policies[needed] for needed in ("new_logp", *needs)}
        return with_backward(
            rc.policy_loss(
                advantages=ADVANTAGES, batch=batch, loss=made.loss, spec=made.spec, backend="triton", **given
            )
        )

    found = ours.cost_on_kernels(loss, launched)
    most = MORE_OF_RECIPE.get(name, OF_LOSS if made.spec is None else OF_CORRECTION + OF_LOSS)
    assert 3 <= found.launches <= most and not found.waits
