"""Statistics of labels, beside the reference's."""

from __future__ import annotations

import itertools

from builders.kernel_cases import same
from rollout_corr.metrics.schema import layout as columns


def of_labels(out):
    """The statistics of each label, by their names in a batch."""
    statistics, found = out.statistics, {}
    names = itertools.chain(*columns(statistics.spec, extra=statistics.extra))
    values = statistics.sums.tolist() + statistics.maxima.tolist()
    for name, value in zip(names, values, strict=True):
        label, _, own = name.partition("/")
        if "=" in label:
            found.setdefault(label, {})[own] = value
    return found


def assert_same_labels(out, reference, case):
    """Require counts and extrema as the reference has them, float sums up to the rounding of their terms."""
    found, wanted = of_labels(out), of_labels(reference)
    assert list(found) == list(wanted) and len(found) > 2, case
    for label, mine in found.items():
        wrong = {name: (x, wanted[label][name]) for name, x in mine.items() if not same(name, x, wanted[label])}
        assert not wrong or "propagate" in case, f"{label} {wrong}: {case}"
