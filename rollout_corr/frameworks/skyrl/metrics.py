"""SkyRL's metrics: the keys of SkyRL a956457 (2026-08-21), by its formulas.

SkyRL's quirks are kept: the spread and the minimum of the ratio run over all slots of the batch, with 0 at masked ones,
and shares of sequences are of all rows, empty ones included. The token mask sees what the outlier mask has left, the
weight and the sequence mask what both have left. What is NaN there, the spread of a single slot, is 0 here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...definition.bounds import outside
from ...definition.correction import Outcome
from ...definition.facts import Named
from ...definition.findings import Findings
from ...definition.tokens import Tokens
from ...metrics.collect import totals
from ...metrics.peers import Columns, Interval
from ...specs.caches import cached
from ...specs.correction import Criterion, Spec
from ...specs.statistics import log_bound
from ..shared.metrics import beyond_one, prefixed, with_empty

SEQUENCE_MASKS = ("geo_sequence_mask", "product_sequence_mask")
MASKS = ("outlier", "token_mask", *SEQUENCE_MASKS)
SIDES = ("over_high", "under_low")

# Every rank of `Ranks.sequence` counts its own slots.
LOCAL_SUMS = ("skyrl/slots",)


def _masks(spec: Spec) -> dict[str, Criterion]:
    """SkyRL's masks among the criteria, by label."""
    return {criterion.label: criterion for criterion in spec.criteria if _is_mask(criterion)}


def _is_mask(criterion: Criterion) -> bool:
    over = "sequence" if criterion.label in SEQUENCE_MASKS else "token"
    return criterion.label in MASKS and (criterion.stat, criterion.over) == ("ratio", over)


def columns(spec: Spec, names: Sequence[str]) -> Columns:
    """Names of the statistics. No maxima: SkyRL's extrema are those of D."""
    of_sequences = []
    for own, criterion in zip(names, spec.criteria, strict=True):
        if role(criterion) == "token_mask":
            of_sequences += ["token_mask", "token_mask_tested"]
        elif role(criterion) is not None:
            of_sequences += [f"{own}/{side}" for side in SIDES]
        if role(criterion) == "outlier":
            of_sequences += ["outlier"]
    if spec.weight is not None and spec.weight.high is not None:
        of_sequences += ["clipped", "clippable"]
    return Columns(sequence_sums=tuple(of_sequences), call_sums=("rows", "slots")).prefixed("skyrl")


def role(criterion: Criterion) -> str | None:
    """Which mask a criterion is."""
    if not _is_mask(criterion):
        return None
    return "sequence_mask" if criterion.over == "sequence" else criterion.label


def intervals(spec: Spec, names: Sequence[str]) -> dict[str, Interval]:
    """The bounds of what each mask tests, and the cap of the weight."""
    found: dict[str, Interval] = {}
    for own, criterion in zip(names, spec.criteria, strict=True):
        if role(criterion) in ("outlier", "sequence_mask"):
            found[f"skyrl/{own}"] = log_bound(criterion.low), log_bound(criterion.high)
    if spec.weight is not None:
        found["skyrl/log"] = None, log_bound(spec.weight.high)
    return found


# --- on the device ---


def collect(block: Findings, spec: Spec) -> tuple[Named, Named]:
    """Sums of some whole sequences. Only of those with a measured token: `metrics` adds the others."""
    sums: Named = {}
    rows: Named = {}
    lost: Tensor | None = None  # what the token mask took from each sequence
    for outcome, facts in zip(block.decision.outcomes, block.facts.criteria, strict=True):
        if not _is_mask(outcome.criterion):
            continue
        if outcome.criterion.label == "token_mask":
            lost = facts.tokens
            continue
        if outcome.criterion.label == "outlier":
            rows["outlier"] = facts.tokens > 0
        for side, which in zip(SIDES, _beyond(outcome, block.tokens), strict=True):
            rows[f"{outcome.criterion.label}/{side}"] = which
    if lost is not None:
        for name, tokens in (("token_mask", lost), ("token_mask_tested", block.n_measured)):
            rows[name] = torch.where(rows["outlier"], 0, tokens) if "outlier" in rows else tokens
    if block.weighing is not None and spec.weight is not None and spec.weight.high is not None:
        above, survivors = log_bound(spec.weight.high), block.decision.n
        clipped = outside(block.weighing.log_ratio, None, above)[0]
        if spec.weight.per_token:
            among = block.decision.survivors
            found = block.tokens.count(clipped if among is None else clipped & among)
            rows["clipped"], rows["clippable"] = torch.where(survivors > 0, found, 0), survivors
        else:
            rows["clipped"], rows["clippable"] = clipped & (survivors > 0), survivors > 0
    if rows:
        sums.update(totals(rows, None))
    return prefixed("skyrl", sums), {}


def _beyond(outcome: Outcome, tokens: Tokens) -> list[Tensor]:
    """Two [S] bools: above the upper bound and below the lower one; of tokens, whether any is."""
    criterion = outcome.criterion
    found = outside(outcome.value, log_bound(criterion.low), log_bound(criterion.high))
    chosen = [which if outcome.among is None else which & outcome.among for which in found]
    return chosen if criterion.over == "sequence" else [tokens.count(which) > 0 for which in chosen]


def per_call(sums: Named, maxima: Named, spec: Spec) -> tuple[Named, Named]:
    """The number of rows and of slots, empty and masked ones included."""
    return prefixed("skyrl", {name: sums[name] for name in ("rows", "slots")}), {}


# --- on the host ---

N, ROWS, SLOTS = "'tokens_measured'", "'skyrl/rows'", "'skyrl/slots'"
# A masked slot has the ratio 0, which lies 1 below the center.
MASKED = f"({SLOTS} - {N})"


@cached(maxsize=64)
def formulas(spec: Spec) -> Mapping[str, str]:
    """SkyRL's keys, as its correction returns them: without the prefix that its trainer puts before them."""
    # A log-ratio as SkyRL clamps it, from both sides, before exp.
    largest, smallest = (
        f"exp(larger(smaller({d}, {spec.clamp!r}), -{spec.clamp!r}))" for d in ("'max_d'", "-'-min_d'")
    )
    found = {
        "is_ratio_mean": f"1.0 + 'ratio' / {N} if {N} else 0.0",
        "is_ratio_std": f"unbiased_std('ratio' - {MASKED}, 'ratio2' + {MASKED}, {SLOTS})",
        "is_ratio_max": f"{largest} if {N} else 0.0",
        "is_ratio_min": f"{smallest} if {MASKED} < smaller({N}, 1) else 0.0",
    }
    for label, criterion in _masks(spec).items():
        if label == "token_mask":
            found["token_mask_ratio"] = "'skyrl/token_mask' / 'skyrl/token_mask_tested'"
            continue
        above, below = (f"'skyrl/{label}/{side}'" for side in SIDES)
        if label == "outlier":
            name, rejected = "outlier_seq", "'skyrl/outlier'"
        else:
            # Where nothing is left the ratio is 1, and SkyRL tests it like any other.
            empty, beyond = f"({ROWS} - '{label}/units')", beyond_one(criterion.low, criterion.high)
            above, below = (with_empty(x, empty, counts) for x, counts in zip((above, below), beyond, strict=True))
            name, rejected = label, f"({above} + {below})"
        found[f"{name}_masked_ratio"] = f"{rejected} / {ROWS}"
        found[f"{name}_over_high_ratio"] = f"{above} / {ROWS}"
        found[f"{name}_under_low_ratio"] = f"{below} / {ROWS}"
    if spec.weight is not None and spec.weight.high is not None:
        if spec.weight.per_token:
            found["tis_token_clip_high_ratio"] = "'skyrl/clipped' / 'skyrl/clippable'"
        else:
            clipped = with_empty("'skyrl/clipped'", f"({ROWS} - 'skyrl/clippable')", spec.weight.high < 1.0)
            found["tis_seq_clip_high_ratio"] = f"{clipped} / {ROWS}"
    return found
