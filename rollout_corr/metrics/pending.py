"""Metrics on their way to the host, and the reading of them."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_corr.metrics import loss, native, peers, schema
from rollout_corr.metrics.extra import Extra
from rollout_corr.metrics.warnings import warnings_of, warnings_of_loss
from rollout_corr.spec.choices import REPORTS
from rollout_corr.spec.correction import Spec
from rollout_corr.spec.loss import Objective


class PendingMetrics:
    """Metrics on their way to the host."""

    def __init__(self, spec: Spec | None, objective: Objective | None, extra: Extra | None, packed: Tensor) -> None:
        """Start the copy.

        Args:
            spec: The Spec of the statistics.
            objective: Their loss.
            extra: Their further columns.
            packed: [N], sums, maxima and ranks; of CPU tensors nobody else may write into it.
        """
        self._spec, self._objective, self._extra = spec, objective, extra
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(packed.device))
        else:
            self._host = packed.cpu()

    def done(self) -> bool:
        """Tell whether `result` would return without waiting."""
        return self._event is None or bool(self._event.query())

    def values(self) -> dict[str, float]:
        """Read the statistics of the batch by name, those of single labels left out; waits for the copy."""
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
                "statistics: expected equal Specs and objectives on all ranks that they were reduced over, got others "
                f"than this rank's {self._spec!r}, {self._objective!r}; validate=True in `correct` and `policy_loss`, "
                "or reducing copies on the CPU, names the ranks"
            )

    def _by(self, by: str) -> dict[str, float]:
        """Compute the metrics of each label."""
        extra = Extra() if self._extra is None else self._extra
        one, spec = extra.named(by), self._spec
        assert spec is not None, "statistics of a loss alone have no labels"
        from rollout_corr.metrics.label_metrics import read

        if self._event is not None:
            self._event.synchronize()
        places = schema.of_labels(spec, self._objective, extra, one)
        sums, maxima, ranks = self._host.tensor_split((places.of_sums, places.length))
        if ranks.shape[0]:
            self._check(*ranks.tolist())
        return read(one, spec, sums[places.sums], maxima[places.maxima])

    def result(self, names: str = "native", prefix: str = "", by: str | None = None) -> dict[str, float]:
        """Compute the metrics of one naming scheme; waits for the copy if it is still under way.

        The keys come in the order of docs/metrics.md, the same for equal Specs.

        Args:
            names: A naming scheme that `Spec.report` asked for. Those of a policy loss go by their native names.
            prefix: What every key begins with, such as "mismatch/".
            by: The name of labels, given as `labels` to the call: the metrics of each, and in each key whether it
                counts, or is a mean of, tokens or sequences.
        """
        if not isinstance(prefix, str):
            raise TypeError(f"prefix: expected a string such as 'mismatch/', got {type(prefix).__name__} {prefix!r}")
        spec = self._spec
        schemes = ("native",) if spec is None else spec.report
        if names not in schemes:
            hint = f"; ask for them by Spec(report=('native', {names!r}))" if names in REPORTS else ""
            raise ValueError(f"names: expected one of {list(schemes)} (Spec.report), got {names!r}{hint}")
        if by is not None:
            if names != "native":
                raise ValueError(
                    f"by: expected None beside names={names!r}, got {by!r}: labels have native metrics alone"
                )
            by_label = self._by(by)
            return {f"{prefix}{key}": value for key, value in by_label.items()} if prefix else by_label
        values = self.values()
        if spec is not None and names != "native":
            return {f"{prefix}{key}": value for key, value in peers.metrics(values, spec, names).items()}
        found = {} if spec is None else native.readers_of(spec).read(values)
        if self._extra is not None:
            found |= self._extra.read(values, spec)
        if self._objective is not None:
            found |= loss.readers_of(self._objective).read(values)
        return {f"{prefix}{key}": value for key, value in found.items()} if prefix else found

    def warnings(self) -> list[str]:
        """Say in plain words which metrics deserve a look."""
        values = self.values()
        found = [] if self._spec is None else warnings_of(values, self._spec)
        if self._extra is not None and self._spec is not None:
            found += self._extra.warnings(values)
        return found if self._objective is None else found + warnings_of_loss(values)
