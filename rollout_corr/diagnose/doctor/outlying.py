"""The cause of a mismatch that a few tokens or sequences make, while all others agree."""

from __future__ import annotations

from collections.abc import Sequence

from ...metrics import limits
from ..measure.by_sequence import CARRIES, BySequence, FarOff, Part, WorstSequence
from ..measure.measurement import Measurement
from .cause import POLICIES, WORST, Metrics, Signs, among, cause, counted, percent
from .wrong_policies import between

# Records that are named.
SHOWN = 5


@cause(
    "warning",
    "Look at these sequences first: broken text, a request that failed and was retried, other weights on one replica. "
    "Forced tokens look like this too: min_tokens, logit bias, an EOS added at the length limit. A veto (no token's "
    "ratio below 1e-4) rejects sequences with a broken token; a geometric criterion rejects sequences that are off "
    "everywhere.",
    hides=("not_the_sampler", *POLICIES),
    views=(WORST,),
)
def outliers(measured: Measurement, metrics: Metrics) -> Signs | None:
    """A few sequences or tokens carry most of k3, and the others agree: broken samples, or one rank of several."""
    found = measured.evidence.by_sequence
    part = found.part()
    if part is not None:
        return _sequences(found, part, measured.evidence.places.pattern(found.apart(part)))
    agree = metrics["kl_rollout_train_k3"] < limits.HEALTHY_K3
    very, rather = found.far
    counts = very.k3 >= CARRIES * found.k3 or (agree and limits.largest_state(metrics, found.tokens) != "healthy")
    if 0 < very.tokens <= limits.OUTLIERS_RARE * found.tokens and counts:
        return _tokens(found, very, metrics)
    if (
        rather.tokens <= limits.OUTLIERS_LESS_RARE * found.tokens
        and rather.k3 >= limits.OUTLIERS_NEARLY_ALL * found.k3
        and not agree
    ):
        return _tokens(found, rather, metrics)
    groups = found.groups()
    return None if groups is None else _two_groups(*groups, metrics)


def _two_groups(worse: int, sequences: int, times: float, metrics: Metrics) -> Signs:
    k3 = metrics["kl_rollout_train_k3"]
    return Signs(
        f"{worse} of {counted(sequences, 'sequence')} differ {times:.1f} times as much as the others: two engines, or "
        "two weight versions?",
        (
            f"sequences fall into two groups by |D| at equal probability, {times:.1f} times apart; k3 over both is "
            f"{k3:.2g} nats per token (healthy: below {limits.HEALTHY_K3:g})",
        ),
        {"sequences": worse, "sequences_fraction": worse / sequences, "times": times},
        worse / sequences,
        severity=None if k3 > limits.MATTERS_K3 else "note",
        also=("different_policies",) if k3 >= limits.HEALTHY_K3 else (),
    )


def _tokens(found: BySequence, far: FarOff, metrics: Metrics) -> Signs:
    share = far.k3 / found.k3
    rest = (found.k3 - far.k3) / max(1, found.tokens - far.tokens)
    return Signs(
        f"{counted(far.tokens, 'token')} of {found.tokens:,} ({percent(far.tokens / found.tokens)}) "
        f"{'carries' if far.tokens == 1 else 'carry'} {percent(share)} of k3, in "
        f"{counted(far.sequences, 'sequence')}",
        (
            f"these have |D| > {far.beyond:g}; the largest is {metrics['logratio_abs_max']:.3g}",
            _records(found, far.sequences),
            f"without them k3 is {rest:.2g} nats per token (healthy: below {limits.HEALTHY_K3:g})",
        ),
        {
            "tokens": far.tokens,
            "tokens_fraction": far.tokens / found.tokens,
            "sequences": far.sequences,
            "logratio_abs_max": metrics["logratio_abs_max"],
            "k3_fraction": share,
            "rest_kl_rollout_train_k3": rest,
        },
        share,
        severity="note" if rest >= limits.HEALTHY_K3 else None,
        also=("different_policies",) if rest >= limits.HEALTHY_K3 else (),
    )


def _cooler(found: BySequence, part: Part) -> tuple[str, ...]:
    """Say that a temperature explains the sequences that stand apart, or nothing."""
    slope = found.levels_sharpness.of_levels(part.lowest_bin).found()
    if slope.share < limits.TEMPERATURE_MOST or abs(slope.slope) < max(0.1, limits.SLOPE_ERRORS * slope.error):
        return ()
    low, high = slope.interval()
    return (
        f"there a temperature explains {percent(slope.share)} of it: the engine's is {between(low, high)} times the "
        "trainer's. Look for a sampling temperature of its own that these sequences have",
    )


def _sequences(found: BySequence, part: Part, pattern: str | None) -> Signs:
    carry = f"{'carries' if part.sequences == 1 else 'carry'} {percent(part.k3_share)} of k3"
    cooler = _cooler(found, part)
    of_all = f"{part.sequences} of {counted(found.sequences, 'sequence')} {carry}"
    return Signs(
        f"the policies differ{among(part.sequences, found.sequences, pattern)}"
        if pattern
        else f"{of_all}: {_numbers(found.worst[: part.sequences])}",
        (
            f"{of_all}: there |D| averages {part.logratio_abs_mean:.2g} (a token counts at most 1), in all others "
            f"{part.rest_logratio_abs_mean:.2g}; their k3 is {part.rest_k3:.2g} nats per "
            f"token (healthy: below {limits.HEALTHY_K3:g})",
            _records(found, part.sequences),
            *cooler,
        ),
        {
            "sequences": part.sequences,
            "sequences_fraction": part.sequences / found.sequences,
            "logratio_abs_mean": part.logratio_abs_mean,
            "k3_fraction": part.k3_share,
            "rest_logratio_abs_mean": part.rest_logratio_abs_mean,
            "rest_kl_rollout_train_k3": part.rest_k3,
        },
        part.k3_share,
        severity="note" if part.rest_k3 >= limits.HEALTHY_K3 else None,
        also=("different_policies",) if part.rest_k3 >= limits.HEALTHY_K3 else (),
    )


def _numbers(worst: Sequence[WorstSequence]) -> str:
    """Name records."""
    return f"record{'s' if len(worst) > 1 else ''} {', '.join(_names(worst[:SHOWN]))}"


def _names(worst: Sequence[WorstSequence]) -> list[str]:
    """Name each record by its number; records of several files by their steps too, or else by the files."""
    if len({one.file for one in worst}) < 2:
        return [str(one.record) for one in worst]
    apart = len({(one.step, one.record) for one in worst}) == len(worst) and all(one.step is not None for one in worst)
    return [f"{one.record} of {f'step {one.step}' if apart else one.file}" for one in worst]


def _records(found: BySequence, sequences: int) -> str:
    """Name the worst sequences."""
    worst = found.worst[:sequences]
    shown = ", ".join(
        f"{name} ({percent(one.k3 / found.k3)} of k3, {counted(one.tokens, 'token')}, largest |D| "
        f"{one.logratio_abs_max:.3g})"
        for name, one in zip(_names(worst[:SHOWN]), worst, strict=False)
    )
    return f"the worst {'record is' if len(worst) == 1 else 'records are'} {shown}"
