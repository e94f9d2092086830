"""The cause that `exact` asks for: two log-probs of a token that are not the same bits."""

from __future__ import annotations

from ..measure.bits import Bits
from ..measure.measurement import Measurement
from . import wrong_values
from .cause import Metrics, Signs, cause, counted, percent
from .in_common import in_common, sentence

NOTHING = (
    "the differences have nothing in common that chance does not explain: not a place along the sequence, a turn, a "
    "prefix, a token, a file, a row, a length, a version, a step, or a label of --by"
)


@cause(
    "error",
    "Name more columns that tell the samples apart, --by rank, replica, batch_size or expert, and add prompt_lengths, "
    "cached_tokens and token_ids to the dump; the first difference says where to compare the two passes.",
    asked="--exact",
)
def not_exact(measured: Measurement, metrics: Metrics) -> Signs | None:
    """With `--exact`: the two log-probs of some token are not the same bits."""
    bits = measured.bits
    if bits is None or not bits.differing:
        return None
    found = in_common(bits, measured.label_names)
    shared = percent(bits.differing / bits.tokens)
    title = (
        f"{bits.differing:,} of {counted(bits.tokens, 'token')} ({shared}) differ, in {bits.affected:,} of "
        f"{counted(bits.sequences, 'sequence')}"
    )
    said = [f"in common: {sentence(one)}" for one in found]
    advice = " ".join(dict.fromkeys(one.advice for one in found)) or None
    known = [each.name for each in (wrong_values.nonfinite, wrong_values.bfloat16) if each.recognize(measured, metrics)]
    if known and not found:
        said = [f"what [{known[0]}] says below makes tokens differ"]
        advice = "Fix that first, and compare again."
    numbers = {
        "tokens_differing": float(bits.differing),
        "tokens_differing_fraction": bits.differing / bits.tokens,
        "sequences_differing": float(bits.affected),
        "ulps_max_of_dtype": float(bits.ulps),
    }
    # Of all findings it is what was asked for, and stands first.
    return Signs(title, (_first(bits), *(said or [NOTHING])), numbers, 1.0, advice=advice)


def _first(bits: Bits) -> str:
    first = bits.first
    assert first is not None
    far = "not finite" if first.ulps is None else f"{_steps(first.ulps, first.dtype)} apart"
    largest = f"; the largest distance is {_steps(bits.ulps, bits.dtype)}" if bits.ulps > (first.ulps or 0) else ""
    return (
        f"the first: {first.file}, record {first.record}, position {first.position}: train {first.train_logp:.9g}, "
        f"rollout {first.rollout_logp:.9g}, {far}{largest}"
    )


def _steps(ulps: int, dtype: str) -> str:
    return counted(ulps, "ulp") + ("" if dtype == "float32" else f" of {dtype}")
