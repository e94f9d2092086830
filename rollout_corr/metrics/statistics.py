"""Statistics: a small device vector that merges by + and max over chunks, micro-batches and ranks; reading them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ..specs.checked import by_path
from ..specs.choices import REPORTS, MetricNames
from ..specs.correction import Spec
from ..specs.terms import Objective
from . import native, peers, schema
from .extra import Extra
from .labels import LabelSet

if TYPE_CHECKING or dist.is_available():
    from torch.distributed import ProcessGroup

# What `all_reduce` pads to: twenty criteria with detail="full" and all peers' metrics have 1,212 sums and 58 maxima.
SUMS_BLOCK, MAXIMA_BLOCK = 1536, 128


@dataclass(frozen=True, eq=False, repr=False)
class Statistics:
    """The sums and maxima that the metrics of a batch are computed from.

    Attributes:
        spec: The Spec under which they were taken; None for a policy loss without one. Only statistics of equal Specs
            and objectives merge.
        vector: [K + M] float64, the sums and then the maxima.
        objective: Everything that is fixed about the policy loss; None where there was none.
        ranks: [2] float64: the largest digest of Spec and objective among the ranks that these statistics were reduced
            over, and the negated smallest; None before `all_reduce`.
        extra: What else is in them, from fields of the Batch such as `versions`; None: nothing.
    """

    spec: Spec | None
    vector: Tensor
    objective: Objective | None = None
    ranks: Tensor | None = None
    extra: Extra | None = None

    @property
    def _count(self) -> int:
        return len(schema.layout(self.spec, self.objective, self.extra)[0])

    @property
    def sums(self) -> Tensor:
        """[K] float64, additive."""
        return self.vector[: self._count]

    @property
    def maxima(self) -> Tensor:
        """[M] float64, merged by maximum; minima are negated."""
        return self.vector[self._count :]

    @property
    def nothing_kept(self) -> Tensor:
        """0-d bool on the device: no token trains. Reading it on the host waits; `torch.where` does not.

        With `Spec.apply` False every valid token trains. A token with a weight of 0 still counts as one that trains.
        """
        names = schema.layout(self.spec, self.objective, self.extra)[0]
        corrected = "tokens" if self.spec is not None and not self.spec.apply else "tokens_kept"
        counts = [self.vector[names.index(name)] for name in (corrected, "loss_tokens") if name in names]
        return torch.stack(counts).amin() == 0

    def __repr__(self) -> str:
        """Name no value: reading one would wait for the device."""
        schemes = "policy_loss" if self.spec is None else "/".join(self.spec.report)
        sums, maxima = self.sums.shape[0], self.maxima.shape[0]
        return f"Statistics({sums} sums, {maxima} maxima, {schemes}, device={str(self.vector.device)!r})"

    def merge(self, other: Statistics) -> Statistics:
        """Add the statistics of another batch."""
        if not isinstance(other, Statistics):
            raise TypeError(f"other: expected Statistics, got {type(other).__name__}")
        if other.spec != self.spec:
            raise ValueError(f"other: expected statistics of the same Spec {self.spec!r}, got {other.spec!r}")
        if other.objective != self.objective:
            raise ValueError(
                f"other: expected statistics of the same objective {self.objective!r}, got {other.objective!r}"
            )
        if other.extra != self.extra:
            raise ValueError(f"other: expected statistics of the same arguments {self.extra!r}, got {other.extra!r}")
        ours, theirs = self.vector, other.vector
        if (ours.shape, ours.dtype, ours.device) != (theirs.shape, theirs.dtype, theirs.device):
            raise ValueError(f"other.vector: expected {_described(ours)}, got {_described(theirs)}")
        vector = torch.cat([self.sums + other.sums, torch.maximum(self.maxima, other.maxima)])
        ranks = [x for x in (self.ranks, other.ranks) if x is not None]
        return replace(self, vector=vector, ranks=torch.stack(ranks).amax(0) if ranks else None)

    def join(self, loss: Statistics) -> Statistics:
        """Append the statistics of the policy loss of the same tokens to a correction's.

        If the Batch has an entropy, both hold its statistics; the correction's are kept.
        """
        if loss.spec is not None:
            raise ValueError(
                f"loss: expected statistics of a policy loss without a Spec, got those under {loss.spec!r}"
            )
        if loss.extra is None:
            vector = torch.cat([self.sums, loss.sums, self.maxima, loss.maxima])
            return Statistics(self.spec, vector, loss.objective, extra=self.extra)
        from .extra import Extra

        ours, entropy = self.extra or Extra(), loss.extra
        # What stands behind the place of the entropy.
        later = Extra(ages=ours.ages, bounds=ours.bounds)
        parts: list[Tensor] = []
        for own, theirs, names in ((self.sums, loss.sums, Extra.sums), (self.maxima, loss.maxima, Extra.maxima)):
            place, more = own.shape[0] - len(names(later)), len(names(entropy))
            parts += [own[:place], theirs[: 0 if ours.entropy else more], own[place:], theirs[more:]]
        return Statistics(self.spec, torch.cat(parts), loss.objective, extra=ours.followed_by(entropy))

    def followed_by(self, extra: Extra, sums: Tensor, maxima: Tensor) -> Statistics:
        """Append statistics of what a correction was given besides log-probs, in the order of the fields of Extra."""
        extra = extra if self.extra is None else self.extra.followed_by(extra)
        vector = torch.cat([self.sums, sums, self.maxima, maxima])
        return Statistics(self.spec, vector, self.objective, extra=extra)

    def __add__(self, other: Statistics) -> Statistics:
        return self.merge(other)

    @staticmethod
    def sum(parts: Iterable[Statistics]) -> Statistics:
        """Merge any number of statistics, for example one per micro-batch."""
        parts = list(parts)
        if not parts:
            raise ValueError("parts: expected at least one Statistics, got none")
        for place, part in enumerate(parts):
            if not isinstance(part, Statistics):
                hint = "; pass its .statistics" if isinstance(part, HasStatistics) else ""
                raise TypeError(f"parts[{place}]: expected Statistics, got {type(part).__name__}{hint}")
        return reduce(Statistics.merge, parts)

    @staticmethod
    def nothing(
        spec: Spec | None,
        objective: Objective | None = None,
        device: torch.device | str = "cpu",
        extra: Extra | None = None,
    ) -> Statistics:
        """Make the statistics of no batch at all, for a rank that has no micro-batch to merge with the other ranks.

        Args:
            spec: The Spec of the other ranks.
            objective: `objective` of their statistics, where they have one.
            device: Where collectives are to run.
            extra: `extra` of their statistics.
        """
        sums, maxima = (len(names) for names in schema.layout(spec, objective, extra))
        nothing = torch.zeros(sums + maxima, dtype=torch.float64, device=device)
        nothing[sums:] = -torch.inf
        return Statistics(spec, nothing, objective, extra=extra)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Statistics:
        """Copy to another device."""
        return replace(
            self,
            vector=self.vector.to(device, non_blocking=non_blocking),
            ranks=None if self.ranks is None else self.ranks.to(device, non_blocking=non_blocking),
        )

    def of_tokens(self) -> Statistics:
        """Zero the statistics of whole sequences, which the first rank of `Ranks.sequence` alone contributes."""
        if self.spec is None:
            raise ValueError("spec: expected statistics of a correction, got statistics of a policy loss only")
        of_sums, of_maxima = schema.of_whole_sequences(self.spec, self.objective, self.extra)
        copy = replace(self, vector=self.vector.clone())
        for first, last in of_sums:
            copy.sums[first:last] = 0.0
        for first, last in of_maxima:
            copy.maxima[first:last] = -torch.inf
        return copy

    def all_reduce(self, group: ProcessGroup | None = None) -> Statistics:
        """Merge over the ranks of a process group: two collectives, whatever the number of metrics.

        Args:
            group: A torch.distributed process group; None is the default group. Every rank must call this with
                statistics of an equal Spec and objective.

        Raises:
            ValueError: The ranks' Specs or objectives differ; named, rank by rank, on every rank. For tensors on a
                device, which would have to be waited for, the reading of metrics raises instead.
        """
        from . import collectives

        collectives.check_group("group", group)
        digest = schema.digest(self.spec, self.objective, self.extra)
        # Statistics of other Specs have other lengths, which end a process or hang it: all of them are padded alike.
        maxima = _padded(self.maxima, MAXIMA_BLOCK, -torch.inf, (digest, -digest))
        sums = _padded(self.sums, SUMS_BLOCK, 0.0)
        collectives.all_reduce(maxima, group, "Statistics.all_reduce: the maxima", dist.ReduceOp.MAX)
        ranks = maxima[:2]
        if ranks.device.type == "cpu" and ranks[0] != -ranks[1]:
            claims = by_path("Spec", self.spec) | by_path("Objective", self.objective)
            collectives.compare("Statistics.all_reduce", group, claims)
            raise ValueError("Statistics.all_reduce: expected the same statistics on every rank, got others")
        collectives.all_reduce(sums, group, "Statistics.all_reduce: the sums", dist.ReduceOp.SUM)
        of_sums, of_maxima = self.sums.shape[0], self.maxima.shape[0]
        return replace(self, vector=torch.cat([sums[:of_sums], maxima[2 : 2 + of_maxima]]), ranks=ranks)

    def metrics(self, names: MetricNames = "native", prefix: str = "", by: str | None = None) -> dict[str, float]:
        """Compute named floats, in float64 on the host, from one device-to-host copy.

        Args:
            names: "dashboard": the few that docs/dashboard.md tells to look at. "native": all of them. Or a framework's
                naming scheme that `Spec.report` asked for.
            prefix: What every key begins with, such as "mismatch/".
            by: The name of labels: their metrics, under keys such as "environment/math/kl_rollout_train_k3".
        """
        return self.metrics_async().result(names, prefix, by)

    def on_device(self, key: str) -> Tensor:
        """Return a native metric as a 0-d float64 tensor on the device of the statistics, without waiting for it.

        For a learning rate that falls with "weight_ess", say. The number equals the one in `metrics()`.

        Args:
            key: A metric that is a sum, a mean, a spread or an effective sample size; the others read values on the
                host.
        """
        from .on_tensors import metric_on_device

        return metric_on_device(key, (self.spec, self.objective, self.extra), self.vector)

    def explain(self, key: str, by: str | None = None) -> str:
        """Say what a metric is made of: formula, sums with their values, unit, healthy range.

        Args:
            key: A key of `metrics()`, with `by` one of `metrics(by=...)`, or one of a framework in `Spec.report`.
            by: The name of labels.

        Raises:
            ValueError: There is no such metric; the message names those nearest to it.
        """
        return self.metrics_async().explain(key, by)

    def warnings(self) -> list[str]:
        """Say in plain words which metrics deserve a look; never printed."""
        return self.metrics_async().warnings()

    def metrics_async(self) -> PendingMetrics:
        """Start the copy to the host and return at once; read the result when it is wanted."""
        packed = self.vector if self.ranks is None else torch.cat([self.vector, self.ranks])
        return PendingMetrics(self.spec, self.objective, self.extra, packed)


def sum_of(statistics: Statistics, name: str) -> Tensor:
    """A sum that the Spec asks for, 0-d."""
    return statistics.vector[schema.layout(statistics.spec)[0].index(name)]


def _padded(x: Tensor, block: int, value: float, head: tuple[float, ...] = ()) -> Tensor:
    """A copy behind some numbers, filled up to a multiple of a length."""
    used = len(head) + x.shape[0]
    full = x.new_full((-(-used // block) * block,), value)
    for place, number in enumerate(head):
        full[place] = number
    full[len(head) : used] = x
    return full


def _described(x: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


class HasStatistics:
    """A result that carries statistics, and the reading of metrics from them."""

    statistics: Statistics

    @property
    def nothing_kept(self) -> Tensor:
        """0-d bool on the device: no token trains, so the step may be skipped; see docs/troubleshooting.md."""
        return self.statistics.nothing_kept

    def metrics(self, names: MetricNames = "native", prefix: str = "", by: str | None = None) -> dict[str, float]:
        """Compute named floats from one device-to-host copy, each key behind the prefix; see docs/metrics.md."""
        return self.statistics.metrics(names, prefix, by)

    def metrics_async(self) -> PendingMetrics:
        """Start the copy to pinned memory and return at once; `.result()` waits for it, `.done()` does not."""
        return self.statistics.metrics_async()

    def explain(self, key: str, by: str | None = None) -> str:
        """Say what a native metric is made of: formula, sums with their values, unit, healthy range."""
        return self.statistics.explain(key, by)

    def warnings(self) -> list[str]:
        """Say in plain words which metrics deserve a look."""
        return self.statistics.warnings()


class PendingMetrics:
    """Metrics on their way to the host."""

    def __init__(self, spec: Spec | None, objective: Objective | None, extra: Extra | None, packed: Tensor) -> None:
        """Start the copy of sums, maxima and ranks, [N]: a caller may write into them before the result is read."""
        self._spec, self._objective, self._extra = spec, objective, extra
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(packed.device))
        else:
            self._host = packed.to("cpu", copy=True)

    def done(self) -> bool:
        """True where `result` returns without waiting."""
        return self._event is None or bool(self._event.query())

    def values(self) -> dict[str, float]:
        """The statistics of the batch by name, without labels; waits for the copy."""
        names, pick, count = schema.of_the_batch(self._spec, self._objective, self._extra)
        return dict(zip(names, self._numbers(count, pick), strict=True))

    def _numbers(self, count: int, pick: Tensor | None = None) -> list[float]:
        """Read so many sums and maxima, or those at some places: a float for each of them takes its time."""
        if self._event is not None:
            self._event.synchronize()
        host = self._host
        if pick is not None:
            host = torch.cat([host.index_select(0, pick), host[count:]])
            count = pick.shape[0]
        numbers: list[float] = host.tolist()
        if numbers[count:]:
            self._check(*numbers[count:])
        return numbers[:count]

    def _check(self, most: float, least: float) -> None:
        if most != -least:
            raise ValueError(
                "statistics: expected equal Specs and objectives on all ranks that they were reduced over, got some "
                f"that differ from this rank's {self._spec!r}, {self._objective!r}; a Batch with validate=True, "
                "or reducing copies on the CPU, names the ranks"
            )

    def _of_labels(self, by: str) -> tuple[LabelSet, Tensor]:
        """The statistics of every label, [names, labels], sums and then maxima."""
        from .extra import Extra

        extra = Extra() if self._extra is None else self._extra
        labels, spec = extra.named(by), self._spec
        assert spec is not None, "statistics of a loss alone have no labels"
        if self._event is not None:
            self._event.synchronize()
        of_sums, of_maxima = map(len, schema.layout(spec, self._objective, extra))
        sums, maxima, ranks = self._host.tensor_split((of_sums, of_sums + of_maxima))
        if ranks.shape[0]:
            self._check(*ranks.tolist())
        places, many = schema.of_labels(spec, self._objective, extra, labels), len(labels.every)
        return labels, torch.cat([sums[places[0]].view(-1, many), maxima[places[1]].view(-1, many)])

    def result(self, names: MetricNames = "native", prefix: str = "", by: str | None = None) -> dict[str, float]:
        """Compute the metrics of one naming scheme; waits for the copy if it is still under way.

        The keys come in the order of docs/metrics.md, the same for equal Specs.

        Args:
            names: "native": all metrics. "dashboard": the few that docs/dashboard.md tells to look at, in its order; of
                these a Spec without a weight lacks one, a policy loss without a correction ten. Or a framework's naming
                scheme that `Spec.report` asked for; metrics of a policy loss have native names alone.
            prefix: What every key begins with, such as "mismatch/".
            by: The name of labels in `Batch.labels`: the metrics of each.
        """
        if not isinstance(prefix, str):
            raise TypeError(f"prefix: expected a string such as 'mismatch/', got {type(prefix).__name__} {prefix!r}")
        spec = self._spec
        schemes = ("native",) if spec is None else spec.report
        if names not in ("dashboard", *schemes):
            hint = f"; ask for them by Spec(report=('native', {names!r}))" if names in REPORTS else ""
            raise ValueError(
                f"names: expected 'dashboard' or one of {list(schemes)} (Spec.report), got {names!r}{hint}"
            )
        dashboard = names == "dashboard"
        if by is not None:
            if names not in ("native", "dashboard"):
                raise ValueError(
                    f"by: expected None with names={names!r}, got {by!r}: only native metrics exist by label"
                )
            from . import on_tensors

            assert spec is not None
            labels, table = self._of_labels(by)
            by_label = on_tensors.read(labels, spec, table, dashboard)
            return {f"{prefix}{key}": value for key, value in by_label.items()} if prefix else by_label
        values = self.values()
        if spec is not None and names not in ("native", "dashboard"):
            return {f"{prefix}{key}": value for key, value in peers.metrics(values, spec, names).items()}
        metrics = {} if spec is None else (native.dashboard_of if dashboard else native.readers_of)(spec).read(values)
        if self._extra is not None and not dashboard:
            metrics |= {row.key: row.read(values) for row in self._extra.rows(spec)}
        if self._objective is not None:
            from . import loss

            metrics |= (loss.dashboard_of if dashboard else loss.readers_of)(self._objective).read(values)
        return {f"{prefix}{key}": value for key, value in metrics.items()} if prefix else metrics

    def explain(self, key: str, by: str | None = None) -> str:
        """Say what a metric is made of; see `Statistics.explain`."""
        from . import on_tensors, show
        from .labels import outside_of

        labels, table = (None, None) if by is None else self._of_labels(by)
        if labels is None or table is None or key == outside_of(labels):
            rows = on_tensors.rows_of(self._spec, self._objective, self._extra)
            rows = rows if self._spec is None else {**rows, **peers.rows(self._spec)}
            return show.explained(show.row_of(key, rows), key, self.values())
        spec = self._spec
        assert spec is not None
        every = {
            f"{labels.name}/{value}/{row.key}": (row, place)
            for place, value in enumerate(labels.values)
            for row in on_tensors.metrics_of(spec, labels.units)
        }
        row, place = show.row_of(key, every)
        return show.explained(
            row, key, dict(zip(on_tensors.names_of(spec, labels.units), table[:, place].tolist(), strict=True))
        )

    def warnings(self) -> list[str]:
        """Say in plain words which metrics deserve a look."""
        from .warnings import warnings_of, warnings_of_loss

        values = self.values()
        sentences = [] if self._spec is None else warnings_of(values, self._spec)
        if self._extra is not None and self._spec is not None:
            sentences += self._extra.warnings(values)
        return sentences if self._objective is None else sentences + warnings_of_loss(values)
