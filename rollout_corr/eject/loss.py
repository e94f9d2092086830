"""A recipe as a program: correction and loss in one function, whose gradient autograd of the definition gives."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple
from unittest import mock

import torch

from ..api.policy_loss import policy_loss
from ..backends import loss_blocks, run, whole
from ..backends.given import Batch
from ..definition import loss as definition
from ..metrics import loss as loss_metrics
from ..metrics import native, rows, schema
from ..specs.correction import Spec
from ..specs.loss import Loss
from ..specs.terms import Objective
from ..specs.thresholds import float32_at_least, float32_at_most, log_of
from .host import written
from .program import (
    COLUMNS,
    KEPT,
    OWN,
    ROWS,
    SEQUENCES,
    TOKENS,
    Program,
    assembled,
    bounds_of,
    external_inputs,
    names_of_statistics,
    refuse_details,
)
from .record import CannotEject, Node, Recorder

# Formulas of surrogates, whose local variables give names too.
SPECS = f"{__name__.partition('.')[0]}.specs"


class Wanted(NamedTuple):
    """A loss to write."""

    spec: Spec | None  # the correction; None: there is none
    loss: Loss
    needs: tuple[str, ...]  # besides new_logp: "old_logp", "rollout_logp", "ref_logp"


def compared_by(wanted: Wanted) -> tuple[str, str]:
    """The names of the log-probs that a correction in a loss compares."""
    return "old_logp" if "old_logp" in wanted.needs else "new_logp", "rollout_logp"


def refuse(wanted: Wanted) -> None:
    """Refuse what one function cannot do without reading values, or is no part of a recipe."""
    loss, spec = wanted.loss, wanted.spec
    if spec is not None:
        refuse_details(spec)
    if loss.surrogate.sees_batch:
        raise CannotEject(
            f"loss: expected a surrogate of tokens, got {loss.surrogate!r}, which looks at the whole batch"
        )
    if loss.entropy_bonus is not None:
        raise CannotEject(f"loss: expected no entropy bonus, got {loss.entropy_bonus!r}; add it to the loss yourself")
    if loss.kl is not None and loss.kl.mean is not None:
        raise CannotEject(f"loss: expected a KL with the mean of the loss, got {loss.kl!r}")
    if loss.surrogate.mean_unit == "turn" or (spec is not None and spec.measures_turns):
        raise CannotEject("loss: expected no turns")
    if spec is not None and (external_inputs(spec) or spec.asks_batch or spec.reads_versions):
        raise CannotEject("spec: expected log-probs and advantages alone, got more that its criteria or weights read")


class Traced(NamedTuple):
    """The tensors of a loss by the names that the file has for them; None: there is none."""

    objective: Objective
    base: str | None  # that new_logp is compared with
    ref: str | None  # the reference policy's
    spec: Spec | None  # of the correction
    train: str | None  # the trainer's log-probs in the correction
    factors: str | None  # the correction's "weights" multiply the loss, or "kept", 1 where its mask is not 0
    trains: bool  # the correction's mask says what trains


class _Captured:
    """The parts of a loss before it is divided."""

    def __init__(self) -> None:
        self.total = self.divisor = self.statistics = self.of_correction = torch.zeros(0)
        self.task: Any = None
        self.batch: Any = None
        self.spec: Spec | None = None
        self.weights: Any = None
        self.named: dict[str, Any] = {}

    def read(self, plain: Any) -> Any:
        """Remember the tokens of the loss."""

        def call(*given: Any) -> Any:
            found = plain(*given)
            self.named |= {
                "trains": found.counted, "usable": found.everywhere, "all_finite": found.known, "n_trained": found.n,
                "new_log_ratio": found.tokens.clamped, "new_d": found.x, "advantage": found.tokens.advantages,
                "factor": found.tokens.weights, "new": found.new,
            }  # fmt: skip
            return found

        return call

    def statistics_of(self, plain: Any) -> Any:
        """Remember the loss of the surrogate."""

        def call(*given: Any) -> Any:
            loss = given[4]
            self.named |= {"surrogate": loss.value, "cut_low": loss.low, "cut_high": loss.high, "cut_dual": loss.dual}
            return plain(*given)

        return call

    def result(self, plain: Any) -> Any:
        """Remember what `loss_blocks._result` divides."""

        def call(found: Any, task: Any) -> Any:
            result = plain(found, task)
            self.total, self.divisor, self.statistics = found[0], result.divisor, result.statistics
            self.task = task
            return result

        return call

    def corrected(self, plain: Any) -> Any:
        """Remember the statistics of the correction."""

        def call(*given: Any) -> Any:
            result = plain(*given)
            self.of_correction, self.weights = result.statistics.vector, result.weights
            self.batch, self.spec = given[1], given[2]
            return result

        return call

    def traced(self, recorder: Recorder) -> Traced:
        """Name the tensors."""

        def name_of(x: torch.Tensor | None) -> str | None:
            if x is None:
                return None
            node = recorder.node_of(x)
            while node.op != "input":
                node = next(node.inputs())
            return str(node.args[0])

        task, spec = self.task, self.spec
        factors = None if task.weights is None else "weights" if task.weights is self.weights else "kept"
        train = None if spec is None else name_of(self.batch.train)
        given = name_of(task.base), name_of(task.ref), spec, train, factors
        return Traced(task.objective, *given, task.trains is not None)


def program_of_loss(
    wanted: Wanted, layout: str, metrics_wanted: str, more: Collection[str] = ()
) -> tuple[Program, Traced]:
    """Trace the definition of a loss, and of the correction in it; also give what its tensors' names are to it."""
    refuse(wanted)
    spec, loss = wanted.spec, wanted.loss
    recorder, captured = Recorder(KEPT, (*OWN, SPECS)), _Captured()
    inputs = _example(wanted, layout)
    for name, x in inputs.items():
        recorder.input(name, x)
    inputs["new_logp"].requires_grad_()
    batch = Batch(mask=inputs["mask"], cu_seqlens=inputs.get("cu_seqlens"))
    whole_batch = dict.fromkeys(run.CORRECTIONS, whole.run_whole)
    with (
        mock.patch.object(torch.compiler, "is_compiling", return_value=True),
        mock.patch.dict(run.CORRECTIONS, whole_batch),
        mock.patch.object(loss_blocks, "_result", captured.result(loss_blocks._result)),
        mock.patch.object(definition, "read", captured.read(definition.read)),
        mock.patch.object(definition, "statistics", captured.statistics_of(definition.statistics)),
        mock.patch.object(run, "_finished", captured.corrected(run._finished)),
        recorder,
    ):
        logps: dict[str, Any] = {name: inputs[name] for name in wanted.needs} | {"spec": spec}
        out = policy_loss(inputs["new_logp"], inputs["advantages"], batch, loss, backend="torch", **logps)
    for name, x in captured.named.items():
        if id(x) in recorder.known:
            recorder.node_of(x).names.insert(0, name)
    if not captured.total.requires_grad:
        raise CannotEject("loss: expected one with a gradient")
    objective = captured.task.objective
    of_sums: list[str] = [*loss_metrics.sum_names(objective)]
    statistics: dict[str, Node] = {}
    called: dict[str, str] = {}
    if spec is not None:
        called = names_of_statistics(spec)
        sums, maxima = schema.layout(spec)
        statistics |= zip((*sums, *maxima), recorder.node_of(captured.of_correction).args[0], strict=True)
        of_sums += sums
    names = (*loss_metrics.sum_names(objective), *loss_metrics.max_names())
    statistics |= zip(names, recorder.node_of(captured.statistics).args[0], strict=True)
    called |= {name: name.replace("-min_", "negated_min_") for name in names}
    for name, node in statistics.items():
        node.names.insert(0, called[name])
    some = [] if spec is None else list(native.metrics_of(spec))
    of_loss = loss_metrics.metrics_of(objective)
    if metrics_wanted == "dashboard":
        some = list(native.on_dashboard(some))
        keys = loss_metrics.dashboard_of(objective).keys
        of_loss = [row for row in of_loss if row.key in keys]
    every = [] if metrics_wanted == "none" else [*some, *of_loss]
    texts = {name: f"v.{text}" for name, text in called.items()}
    metrics = written(lambda v: {row.key: row.read(v) for row in every}, texts, [rows, native, loss_metrics])
    metrics.used |= set(more)
    named = {"total": captured.total, "divisor": captured.divisor}
    order: tuple[str, ...] = ("total", "divisor")
    if spec is not None:
        order += ("weights", "mask", "keep")
        # Where nothing is rejected, the mask is the caller's own.
        given = {"weights": out.weights, "mask": None if out.mask is inputs["mask"] else out.mask, "keep": out.keep}
        named |= {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    bounds = ({} if spec is None else bounds_of(spec)) | bounds_of_loss(loss)
    order += ("numbers",)
    program = assembled(
        recorder, layout, tuple(inputs), metrics, called, named, order, statistics, of_sums, bounds, False,
        compared_by(wanted),
    )  # fmt: skip
    return program, captured.traced(recorder)


def bounds_of_loss(loss: Loss) -> dict[str, float]:
    """The numbers of a loss, by the names of constants."""
    found = {"NEW_RATIO_CLAMP": loss.surrogate.clamp}
    for name, x in loss.surrogate.numbers.items():
        found[name.upper()] = x
        if 0.0 < x < math.inf:
            found[f"LOG_{name.upper()}_UP"] = float32_at_least(log_of(x))
            found[f"LOG_{name.upper()}_DOWN"] = float32_at_most(log_of(x))
    if loss.kl is not None:
        found["KL_COEF"] = loss.kl.coef
    return found


def _example(wanted: Wanted, layout: str) -> dict[str, torch.Tensor]:
    shape = (TOKENS,) if layout == "packed" else (ROWS, COLUMNS)
    random = torch.Generator().manual_seed(0)
    inputs = {"new_logp": -torch.rand(shape, generator=random), "advantages": torch.randn(shape, generator=random)}
    inputs["mask"] = torch.rand(shape, generator=random) > 0.25
    if layout == "packed":
        ends = torch.randint(0, TOKENS, (SEQUENCES - 1,), generator=random).sort().values
        inputs["cu_seqlens"] = torch.cat([torch.tensor([0]), ends, torch.tensor([TOKENS])])
    for name in wanted.needs:
        inputs[name] = -torch.rand(shape, generator=random)
    return inputs
