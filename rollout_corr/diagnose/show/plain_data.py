"""Results as plain data, for `--json`."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from ..best_settings import verdict_of
from ..doctor.diagnosis import Diagnosed, is_healthy
from ..doctor.in_common import in_common
from ..read.dump import Source
from ..what_if import WhatIf


def _plain(value: Any) -> Any:
    """Convert to what JSON has: NaN and infinity become None, tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _data(source: Source, **found: Any) -> dict[str, Any]:
    """Return results together with what was read and what could not be read."""
    problems = {"count": source.problems.count, "shown": [problem._asdict() for problem in source.problems.shown]}
    return dict(
        _plain({"file": source.where, "fields": source.fields, "unused": source.unused, "problems": problems, **found})
    )


def report(diagnosis: Diagnosed) -> dict[str, Any]:
    """Return all results of `report`."""
    measured = diagnosis.measured
    return _data(
        diagnosis.source,
        metrics=measured.metrics(),
        warnings=measured.mismatch_warnings(),
        findings=[asdict(finding) for finding in diagnosis.findings],
        profiles={axis: [asdict(row) for row in rows] for axis, rows in measured.profiles().items()},
        worst=[asdict(token) for token in measured.worst],
        worst_sequences=[asdict(sequence) for sequence in measured.worst_sequences],
    )


def doctor(diagnosis: Diagnosed) -> dict[str, Any]:
    """Return all results of `doctor`, with the metrics that conditions may name."""
    return _data(
        diagnosis.source,
        healthy=is_healthy(diagnosis.findings),
        findings=[asdict(finding) for finding in diagnosis.findings],
        mistakes=[asdict(mistake) for mistake in diagnosis.mistakes],
        metrics=diagnosis.measured.metrics(),
        **_exact(diagnosis),
    )


def _exact(diagnosis: Diagnosed) -> dict[str, Any]:
    """Return the first difference and what all have in common, where they were asked for."""
    bits = diagnosis.measured.bits
    if bits is None:
        return {}
    found = [asdict(one) for one in in_common(bits, diagnosis.measured.label_names)]
    return {"exact": {"first": None if bits.first is None else asdict(bits.first), "in_common": found}}


def what_if(source: Source, tried: WhatIf, sequences: float | None = None) -> dict[str, Any]:
    """Return all results of `what-if`."""
    verdict = verdict_of(tried, sequences)
    count = verdict.sequences
    settings = [
        {
            **{name: getattr(one.setting, name) for name in ("name", "same", "family")},
            "spec": one.setting.spec.to_dict(),
            "config": one.setting.config,
            "worth": one.worth(count),
            **{name: value for name, value in vars(one).items() if name != "setting"},
            "selected": [asdict(each) for each in one.selected],
        }
        for one in verdict.results
    ]
    first = [
        {"name": one.setting.name, "config": one.setting.config}
        | {name: getattr(one, name) for name in ("worth", "does", "reason", "alike")}
        for one in verdict.best
    ]
    suggestion = tried.suggestion()
    bounds = None
    if suggestion is not None:
        bounds = {"sentences": suggestion.sentences, "rejected": suggestion.rejected, "spec": suggestion.spec.to_dict()}
    return _data(
        source,
        verdict={"state": verdict.state, "title": verdict.title, "sentences": verdict.sentences},
        sequences=count,
        framework=tried.framework,
        best=first,
        suggestion=bounds,
        settings=settings,
        left_out=tried.left_out,
        findings=[asdict(finding) for finding in tried.findings()],
    )
