"""The cause of a mismatch that some labels have and the others lack: an environment, a source, a replica."""

from __future__ import annotations

from collections.abc import Sequence

from ...metrics.limits import HEALTHY_K3
from ..measure.by_label import ByLabel, IllLabel
from ..measure.measurement import Measurement
from ..read.fields import name_of
from .cause import Metrics, Signs, cause, counted, percent

# Labels that are named.
SHOWN = 5


@cause(
    "warning",
    "Look at how these samples are made: their chat template, the output of tools in their mask, the replica and the "
    "weights that served them. Other findings say what is wrong; doctor on these samples alone shows more.",
    hides=("outliers", "different_policies"),
    asked="--by",
)
def label(measured: Measurement, metrics: Metrics) -> Signs | None:
    """With `--by NAME`: some labels differ far more than the others at equal probability.

    Or they have all non-finite values.
    """
    titles: list[str] = []
    evidence: list[str] = []
    share, explained = 0.0, False
    numbers: dict[str, float] = {}
    for name, tally in measured.evidence.labels.items():
        ill, broken = tally.ill(), tally.broken()
        names = measured.label_names.get(name, ())
        if ill:
            verb = "differs" if len(ill) == 1 else "differ"
            titles.append(f"{_named(name, [one.label for one in ill], names)} {verb} far more than the others")
            evidence += [_numbers(name, one, names) for one in ill[:SHOWN]]
            share = max(share, 1.0 - 1.0 / ill[0].times)
            explained = explained or ill[0].rest_k3 < HEALTHY_K3
            numbers |= {f"{name}/{one.label}/times": one.times for one in ill}
        if broken:
            titles.append(
                f"{_named(name, broken, names)} {'has' if len(broken) == 1 else 'have'} all the non-finite values"
            )
            evidence += [_broken(name, one, tally, names) for one in broken[:SHOWN]]
            share = max(share, 0.5)
            numbers |= {f"{name}/{one}/tokens_nonfinite": float(tally.bad[tally.places[one]]) for one in broken}
    if not titles:
        return None
    also = () if explained else ("outliers", "different_policies")
    return Signs("; ".join(titles), tuple(evidence), numbers, share, also=also)


def _named(name: str, labels: list[int], names: Sequence[str]) -> str:
    """Name labels of a column: `environment 1, 3`."""
    more = f" and {len(labels) - SHOWN} more" if len(labels) > SHOWN else ""
    return f"{name} {', '.join(name_of(names, one) for one in labels[:SHOWN])}{more}"


def _numbers(name: str, one: IllLabel, names: Sequence[str]) -> str:
    return (
        f"{name} {name_of(names, one.label)}: |D| averages {one.logratio_abs_mean:.3g} (a token counts at most 1) over "
        f"{counted(one.sequences, 'sequence')}, {one.times:.1f} times that of equally likely tokens of the labels that "
        f"agree best ({one.rest_logratio_abs_mean:.3g})"
    )


def _broken(name: str, one: int, tally: ByLabel, names: Sequence[str]) -> str:
    bad, all_bad = int(tally.bad[tally.places[one]]), max(1, int(tally.bad.sum()))
    return f"{name} {name_of(names, one)}: {counted(bad, 'token')} not finite, {percent(bad / all_bad)} of all such"
