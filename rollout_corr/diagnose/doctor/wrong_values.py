"""Causes of wrong values: no log-probs, or those of other tokens, other sequences, other weights."""

from __future__ import annotations

import math

from ...metrics import limits
from ..measure.evidence import FAR, FIRST_TURN, IMPOSSIBLE, OTHER_TURNS, SIDES, Evidence
from ..measure.measurement import Measurement
from ..measure.padding import SHORTEST, Beyond, Filler
from ..measure.pairing import FEWEST_SWAP_TOKENS, OTHER, OWN, SHIFTS
from ..measure.places import Tested
from .cause import DISTRIBUTION, OF_D, SAMPLED, Metrics, Signs, among, cause, counted, percent
from .wrong_policies import is_truncated_later

# Of later turns that no first turn can be compared with.
LATE = (
    "Compare what stands between turns on both sides: template, output of tools. If it is the same, look at what "
    "depends on the position: a sliding window, context-parallel ranks, rope scaling, weights that changed during the "
    "sequence."
)


@cause(
    "error",
    "Nothing was measured, so nothing is healthy. Check which field was read as the mask, and what writes the dump.",
)
def empty(measured: Measurement, metrics: Metrics) -> Signs | None:
    """No valid token: the mask is 0 everywhere, or the dump is empty."""
    if measured.evidence.tokens:
        return None
    said = "0 valid tokens: the mask is 0 everywhere, or there are no sequences"
    return Signs("no valid token", (said,), {"tokens": 0.0}, 1.0)


@cause(
    "error",
    "Pass log-probs: the logarithm of probabilities, the negative of a loss. Where a value is missing, the mask has to "
    "be 0.",
    hides=(*OF_D, "shifted", "swapped", "reordered", "filled"),
)
def not_log_probs(measured: Measurement, metrics: Metrics) -> Signs | None:
    """Values above 0: probabilities, or losses."""
    evidence = measured.evidence
    for side in SIDES:
        positive, above = evidence.positive[side], evidence.above_one[side]
        share = positive / max(1, evidence.tokens)
        value, count = (evidence.repeated[side].most_common(1) or [(0.0, 0)])[0]
        if share <= 1e-3 or (share <= 0.5 and value > 0 and count > 0.9 * positive):
            # A single value above 0 is a placeholder: `filled` reports it.
            continue
        kind = "some values are no log-probs"
        if share > 0.5:
            kind = "negative log-likelihoods" if above > 0.05 * evidence.tokens else "probabilities"
        return Signs(
            f"the {side} log-probs are not log-probs: {kind}",
            (f"{percent(share)} of the {side} values are above 0, {percent(above / evidence.tokens)} above 1",),
            {"above_0_fraction": share, "above_1_fraction": above / evidence.tokens},
            share,
        )
    return None


@cause(
    "error",
    "Whole sequences mean broken logits (an overflow in low precision, a failed collective, an empty prompt): look at "
    "the logits of one such sample. Single tokens mean a filtered token (top-p or top-k leave -inf) or a missing "
    "value.",
)
def nonfinite(measured: Measurement, metrics: Metrics) -> Signs | None:
    """NaN or infinite log-probs at valid tokens, in whole sequences or in single tokens."""
    evidence, bad = measured.evidence, metrics["tokens_nonfinite"]
    if not bad:
        return None
    whole = evidence.all_bad.having
    in_some = among(whole, metrics["sequences"], evidence.places.pattern(evidence.all_bad))
    return Signs(
        f"whole sequences are NaN or infinite{in_some}" if whole else "some log-probs are NaN or infinite",
        (
            f"{bad:.0f} of {counted(metrics['tokens'], 'valid token')}: {evidence.bad['train']} of the train and "
            f"{evidence.bad['rollout']} of the rollout log-probs",
            f"{counted(whole, 'sequence')} entirely, {counted(evidence.rows_bad - whole, 'sequence')} in part",
        ),
        {
            "tokens_nonfinite": bad,
            "train_nonfinite": evidence.bad["train"],
            "rollout_nonfinite": evidence.bad["rollout"],
            "sequences_entirely": whole,
            "sequences_in_part": evidence.rows_bad - whole,
        },
        bad / max(1.0, metrics["tokens"]),
    )


@cause(
    "error",
    "These tokens were not sampled (output of a tool, a template, padding), or their log-probs were lost: mask them, "
    "or fetch the log-probs. Greedy sampling looks like this too: its log-probs are all 0.",
    hides=OF_D,
)
def filled(measured: Measurement, metrics: Metrics) -> Signs | None:
    """One value, again and again, where the other policy gives many: tokens of a tool, lost log-probs.

    Or tokens that one policy calls impossible.
    """
    evidence = measured.evidence
    for side in ("rollout", "train"):
        most = evidence.repeated[side].most_common(3)
        if not most:
            continue
        (value, count), third = most[0], most[2][1] if len(most) == 3 else 1
        if count < max(0.05 * evidence.far, 8 * third):
            continue
        share = count / max(1, evidence.tokens)
        return Signs(
            f"{value:g} stands in place of missing {side} log-probs",
            (
                f"{count} of the {counted(evidence.far, 'token')} with |D| > {FAR:g} have exactly {value:g}; the third "
                f"most frequent value occurs {'once' if third == 1 else f'{third} times'}",
                f"these are {percent(share)} of all valid tokens; the {'train' if side == 'rollout' else 'rollout'} "
                "log-probs vary there",
            ),
            {"value": value, "tokens": count, "tokens_fraction": share},
            share,
        )
    for side in SIDES:
        count = evidence.impossible[side]
        if count < max(
            limits.IMPOSSIBLE_FEWEST, limits.IMPOSSIBLE_SHARE * evidence.finite, 0.5 * evidence.unlikely[side]
        ):
            continue
        share, other = count / evidence.finite, "train" if side == "rollout" else "rollout"
        return Signs(
            f"the {side} log-probs call {percent(share)} of the tokens impossible",
            (
                f"{counted(count, 'token')} of {evidence.finite:,} have a {side} log-prob more than {IMPOSSIBLE:g} "
                f"nats below the {other} log-prob; the largest |D| is {metrics['logratio_abs_max']:.4g}",
            ),
            {"tokens": count, "tokens_fraction": share, "logratio_abs_max": metrics["logratio_abs_max"]},
            share,
            advice="No policy is that far from one that sampled the token. Look for logits that were masked, -1e4 or "
            "-inf, where the token was allowed: top-k, a grammar or an action mask replayed wrongly; or for values "
            "that stand in place of missing log-probs.",
        )
    return None


@cause(
    "error",
    "Pass the mask (--field mask=NAME; in Python mask=), or the lengths. Without it padding counts as tokens that "
    "agree: k3 and every mean are too small, and criteria over sequences keep too much.",
)
def padding(measured: Measurement, metrics: Metrics) -> Signs | None:
    """Log-probs of exactly one value on both sides, mostly 0, fill the ends, or the beginnings, of rows.

    Padding without a mask, or a mask that is too long.
    """
    evidence, sequences = measured.evidence, int(metrics["sequences"])
    for value, filler in evidence.padding.fillers.items():
        beyond = filler.beyond(sequences, evidence.tokens)
        if beyond is not None:
            return _mask_too_long(value, beyond, evidence.tokens, metrics)
        if filler.is_likely(sequences, evidence.tokens):
            return _no_mask(value, filler, evidence, metrics)
    return None


def _no_mask(value: float, found: Filler, evidence: Evidence, metrics: Metrics) -> Signs:
    """Describe runs of one value at the ends of rows."""
    count, share = found.tokens, found.tokens / evidence.tokens
    rest = max(1.0, evidence.finite - count)
    k3 = metrics["kl_rollout_train_k3"] * evidence.finite / rest
    where = "ends" if found.at_end >= found.at_begin else "beginnings"
    return Signs(
        f"{count:,} of {counted(evidence.tokens, 'token')} are exactly {value:g} on both sides, at the {where} of "
        "rows: is the mask missing?",
        (
            f"{found.rows:,} of {counted(metrics['sequences'], 'sequence')} {where[:-1]} with such a run, of "
            f"{count / found.rows:.0f} tokens on average; elsewhere {found.inside:,} tokens are {value:g}, in runs of "
            f"{found.inside / max(1, found.runs):.1f}",
            f"without them k3 is {k3:.2g} nats per token and not {metrics['kl_rollout_train_k3']:.2g} (healthy: below "
            f"{limits.HEALTHY_K3:g})",
        ),
        {
            "value": value,
            "tokens": count,
            "tokens_fraction": share,
            "sequences": found.rows,
            "tokens_0_elsewhere": found.inside,
            "rest_kl_rollout_train_k3": k3,
        },
        share,
    )


def _mask_too_long(value: float, beyond: Beyond, tokens: int, metrics: Metrics) -> Signs:
    """Describe a value at one end of nearly all rows; a few of them may be certain tokens of a template."""
    late = beyond.at == "end"
    many = counted(beyond.length, "token")
    moved = f"or {many} {'late' if late else 'early'}"
    title = f"nearly every row {'ends' if late else 'begins'} with {many} of log-prob exactly {value:g} on both sides"
    said = (
        f"{beyond.rows:,} of {counted(metrics['sequences'], 'sequence')}, {percent(beyond.zeros / tokens)} of the "
        f"tokens; elsewhere {counted(beyond.elsewhere, 'token')} of {tokens - beyond.zeros:,} are {value:g} on both "
        "sides",
    )
    numbers = {
        "value": value,
        "tokens": beyond.zeros,
        "tokens_fraction": beyond.zeros / tokens,
        "sequences": beyond.rows,
        "run_length": beyond.length,
        "tokens_0_elsewhere": beyond.elsewhere,
    }
    repair = (
        f"Compare the mask with the lengths of the answers: its {'last' if late else 'first'} token has to be the "
        f"{'last' if late else 'first'} that was sampled."
    )
    if beyond.length >= SHORTEST:
        return Signs(f"{title}: the mask is too long, {moved}", said, numbers, beyond.zeros / tokens, advice=repair)
    certain = "an end-of-sequence token" if late else "a first token"
    return Signs(
        f"{title}: the mask is too long, {moved}, or both policies are certain of {certain}",
        said,
        numbers,
        beyond.zeros / tokens,
        severity="note",
        advice=f"Look at the ids of these tokens: if they are padding, the mask is wrong. {repair} If they were "
        "sampled, nothing is wrong.",
    )


@cause(
    "warning",
    "Unless engine and trainer are built to agree bit by bit, one was copied from the other, and no correction has an "
    "effect: check which policy each field holds, and whether a bypass mode is on. If they are built that way, "
    "--fail-if 'findings > identical' lets it pass.",
)
def identical(measured: Measurement, metrics: Metrics) -> Signs | None:
    """Both log-probs are the same bits: nothing is measured, unless engine and trainer agree bit by bit."""
    evidence = measured.evidence
    if measured.bits is not None or evidence.finite < 50 or evidence.equal < evidence.finite:
        return None
    said = f"D is exactly 0 for all {counted(evidence.finite, 'token')}"
    return Signs("both log-probs are the same bits", (said,), {"tokens": evidence.finite}, 1.0)


@cause(
    "note",
    "This alone makes D wrong by up to 1/512 of the log-prob. Compute the log-softmax in float32 and store its result "
    "in float32.",
    views=(DISTRIBUTION,),
)
def bfloat16(measured: Measurement, metrics: Metrics) -> Signs | None:
    """Log-probs were rounded to bfloat16: a note."""
    evidence = measured.evidence
    share = {side: evidence.in_bfloat16[side] / max(1, evidence.fractional[side]) for side in SIDES}
    coarse = [
        s for s in SIDES if evidence.fractional[s] >= 50 and evidence.in_bfloat16[s] > 0.99 * evidence.fractional[s]
    ]
    if not coarse:
        return None
    return Signs(
        f"the {' and '.join(coarse)} log-probs were rounded to bfloat16",
        tuple(f"{percent(share[side])} of the {side} log-probs are exact in bfloat16" for side in coarse),
        {f"{side}_exact_fraction": share[side] for side in coarse},
        1.0,
    )


def _is_rare(having: int, tested: int) -> bool:
    """Return whether chance gives so many of those tested a sign."""
    return having < max(2, 0.05 * tested)


def _in_some(measured: Measurement, found: Tested) -> str | None:
    """Say in which of the tested sequences a sign is; None: in so few that it may be chance."""
    if _is_rare(found.having, found.tested):
        return None
    return among(found.having, found.tested, measured.evidence.places.pattern(found))


@cause(
    "error",
    "Logits at t predict token t + 1. Either the labels are shifted by one on one side only, or one side counts a "
    "first token (BOS, the last of the prompt) that the other does not.",
    hides=(*OF_D, "swapped", "reordered"),
)
def shifted(measured: Measurement, metrics: Metrics) -> Signs | None:
    """The log-probs fit one or two tokens earlier or later, in all sequences or in some."""
    evidence, pairing = measured.evidence, measured.evidence.pairing
    total, tested, noun = sum(pairing.shifted.values()), pairing.paired, "sequence"
    late, later = pairing.later_shifted, pairing.later_paired
    where = ""
    if later:
        noun = "turn"
        first_turns = (total - late) / max(1, tested - later)
        if late >= 2 and first_turns < 0.2 * late / later:
            total, tested, where = late, later, " in later turns"
    if _is_rare(total, tested):
        return None
    shift = max((s for s in SHIFTS if s), key=lambda s: pairing.shifted[s])
    correlation = evidence.fit["log_prob_correlation"]
    by_shift = ", ".join(f"by {-s:+d} in {n}" for s, n in pairing.shifted.items() if n)
    in_some = among(total, tested, evidence.places.pattern(pairing.shift), noun)
    return Signs(
        f"the rollout log-probs are {counted(abs(shift), 'token')} {'late' if shift < 0 else 'early'}{where}{in_some}",
        (
            f"in {total} of {counted(tested, noun)}{' after the first' * bool(where)} they fit train_logp better when "
            f"moved ({by_shift})",
            f"unmoved, the two log-probs correlate by {correlation:.2f} over all tokens",
        ),
        {
            "moved_by": -shift,
            "sequences": total,
            "sequences_tested": tested,
            "correlation": correlation,
        },
        total / max(1, tested),
    )


@cause(
    "error",
    "One side was sorted, shuffled or balanced over ranks after the log-probs were computed: join both sides by an id "
    "before any reordering.",
    hides=(*OF_D, "reordered"),
)
def swapped(measured: Measurement, metrics: Metrics) -> Signs | None:
    """The log-probs fit another sequence."""
    found = measured.evidence.pairing.swapped
    in_some = _in_some(measured, found)
    if in_some is None:
        return None
    fit = (
        f"fit the rollout log-probs of another sequence (correlation above {OTHER:g}) and not their own (below {OWN:g})"
    )
    if found is not measured.evidence.pairing.swap:
        fit = (
            f"are nearer to the rollout log-probs of another sequence than a tenth of the distance to their own, over "
            f"the first {FEWEST_SWAP_TOKENS} tokens"
        )
    return Signs(
        f"train and rollout log-probs of different sequences are paired{in_some}",
        (f"in {found.having} of {counted(found.tested, 'sequence')} the train log-probs {fit}",),
        {"sequences": found.having, "sequences_tested": found.tested},
        found.having / found.tested,
    )


@cause(
    "error",
    "Tokens of a sequence were put together in another order on one side: context parallelism that deals out chunks "
    "in a zigzag, chunks of a stream that were joined backwards, a shift by more than two tokens. Compare the order of "
    "the token ids on both sides.",
    hides=OF_D,
)
def reordered(measured: Measurement, metrics: Metrics) -> Signs | None:
    """A sequence has the same log-probs on both sides, in another order."""
    found = measured.evidence.pairing.order
    in_some = _in_some(measured, found)
    if in_some is None:
        return None
    return Signs(
        f"the tokens of a sequence are in another order on one side{in_some}",
        (
            f"in {found.having} of {counted(found.tested, 'sequence')} the two log-probs correlate by less than "
            f"{OWN:g}, and sorted by size they agree",
            f"over all tokens they correlate by {measured.evidence.fit['log_prob_correlation']:.2f}; mean |D| is "
            f"{metrics['logratio_abs_mean']:.3g}",
        ),
        {"sequences": found.having, "sequences_tested": found.tested},
        found.having / found.tested,
    )


@cause(
    "error",
    "Pass natural logarithms of single tokens: no mean over the sequence, no division by its length, no log2 or log10.",
    hides=OF_D,
)
def scale(measured: Measurement, metrics: Metrics) -> Signs | None:
    """Within a sequence, one side is a multiple of the other: divided by the length, or logarithms to another base."""
    found = measured.evidence.by_sequence
    scaled, tested = found.scale.having, found.scale.tested
    in_some = _in_some(measured, found.scale)
    if in_some is None:
        return None
    factor, deviation = found.factor()
    divided = found.divided()
    alike = scaled >= limits.SCALED_FEWEST and deviation <= limits.SCALED_ALIKE
    # Truncation makes a few nearly even sequences multiples too: the others differ as much then.
    part = alike and found.scaled_stand_out(limits.GROUP_TIMES)
    if scaled < 0.5 * tested and divided is None and not part:
        return None
    title = f"the train log-probs are {factor:.3g} times the rollout log-probs"
    if divided is not None:
        title = f"the {divided} log-probs were divided by the length of their sequence"
    elif deviation > 0.25:
        title = "within each sequence, the train log-probs are a multiple of the rollout log-probs"
    return Signs(
        f"{title}{in_some}",
        (
            f"in {scaled} of {counted(tested, 'sequence')} the train log-probs are a multiple of the rollout log-probs",
            f"the factor train / rollout is {factor:.4g}; in two thirds of them it lies between "
            f"{factor / math.exp(deviation):.3g} and {factor * math.exp(deviation):.3g}",
        ),
        {
            "factor": factor,
            "factor_spread": math.expm1(deviation),
            "sequences": scaled,
            "sequences_tested": tested,
        },
        scaled / tested,
    )


@cause(
    "warning",
    "Keep the token ids that the engine sampled and append to them; do not decode a conversation and tokenize it "
    "again. Where whole turns are off, compare what stands before them on both sides: template, output of tools.",
    hides=("wrong_weights", "temperature", "renormalized", "penalties", "positions", *SAMPLED),
    views=("turn", "position"),
)
def turn_starts(measured: Measurement, metrics: Metrics) -> Signs | None:
    """Later turns, or their first tokens, differ far more than equally likely tokens.

    Retokenization, or a chat template.
    """
    turns = measured.evidence.turns
    first_turn, later = [FIRST_TURN], list(range(OTHER_TURNS + 1))
    whole = 0.0
    if min(turns.tokens(first_turn), turns.tokens(later)) >= 50:
        whole = turns.over(later, first_turn)
    best, times = 0, 0.0
    for last in range(3):
        first = list(range(last + 1))
        if turns.tokens(first) < 20:
            continue
        found = turns.over(first, list(range(4, OTHER_TURNS + 1)))
        if found > times:
            best, times = last + 1, found
    also: tuple[str, ...] = ()
    if whole >= 2.0 * limits.GROUP_TIMES and times < 1.5 * limits.GROUP_TIMES:
        best, times = len(later), whole
        at_one = measured.evidence.at_one_place([1, 2, 3, 4], [0])
        also = ("positions",) if math.isinf(at_one[0]) else ()
    else:
        at_one = measured.evidence.at_one_place([1, 2, 3][:best], [0, 4])
    # Else first turns that reach as far differ as much: it is the place, and not the turn.
    if min(times, *at_one) < 1.5 * limits.GROUP_TIMES:
        return None
    count, magnitude = turns.table()
    tokens = turns.tokens(later[:best])
    here = float(magnitude[:best].sum())
    if here / tokens < 4 * limits.GROUP_MATTERS:
        return None
    squares = float(turns.groups()[:best, :, 3].sum())
    if (
        best < len(later)
        and here * here < max(limits.STARTS_FEWEST, min(limits.STARTS_MOST, limits.STARTS_SHARE * tokens)) * squares
    ):
        return None
    share = float(magnitude[:best].sum() / magnitude.sum())
    which = "token" if best == 1 else f"{best} tokens"
    title = "turns begin with other tokens than the engine sampled: retokenization or a chat template"
    said, than = f"the first {which} of each later turn", "equally likely later tokens"
    if best == len(later):
        title = "later turns are off and the first is not: other text stands between turns in the trainer"
        if also:
            title = "later turns are off, or late positions: no first turn reaches as far"
        said, than = "all tokens of later turns", "equally likely tokens of the first turn"
    return Signs(
        title,
        (
            f"{said}: mean |D| {here / tokens:.3g}, {times:.1f} times that of {than} ({counted(tokens, 'token')})",
            f"{percent(tokens / float(count.sum()))} of the tokens, and {percent(share)} of sum |D|",
        ),
        {
            "first_tokens": best,
            "tokens": tokens,
            "logratio_abs_mean": here / tokens,
            "times": times,
            "tokens_fraction": tokens / float(count.sum()),
            "logratio_abs_fraction": share,
        },
        share,
        "error" if times >= limits.SURELY_OTHER else None,
        also,
        LATE if also else None,
    )


@cause(
    "error",
    "Check first that both sides list their sequences in one order. Then compare the logits of one prompt in trainer "
    "and engine right after the weights are sent: parameters that were skipped, a tied lm_head, another checkpoint, "
    "another chat template or tokenizer; or log-probs gathered at the wrong logits.",
    hides=("sequence_starts", "temperature", "renormalized", "penalties", "positions", *SAMPLED),
)
def wrong_weights(measured: Measurement, metrics: Metrics) -> Signs | None:
    """Log-probs that do not correlate, at any shift; a head that was not trained or tied."""
    evidence, fit = measured.evidence, measured.evidence.fit
    correlation = evidence.fit["log_prob_correlation"]
    if evidence.by_sequence.part() is not None:
        # In some sequences alone: `outliers` says in which.
        return None
    # Probabilities stay alike where a model is only damaged, though its log-probs no longer correlate. One that is off
    # at most tokens and worse than their counts is no damaged model: blanks, or other sure tokens, make it alike.
    alike = correlation - 0.2
    if metrics["logratio_p50"] > -0.5 or not evidence.is_worse_than_counts():
        alike = max(alike, metrics["prob_correlation"])
    if evidence.finite < 50 or metrics["logratio_abs_mean"] < 0.5 or alike > 0.3:
        return None
    flat = [
        name
        for name, other in (("train", "rollout"), ("rollout", "train"))
        if fit[f"{name}_std"] < 0.2 * fit[f"{other}_std"]
    ]
    guess = "weights that were never loaded or synchronized"
    if flat:
        guess = f"the {flat[0]} log-probs hardly vary: a head that is not trained, or not tied to the embedding"
    return Signs(
        f"the two policies are unrelated: {guess}",
        (
            f"the log-probs correlate by {correlation:.2f}, mean |D| is {metrics['logratio_abs_mean']:.2f} nats, the "
            f"mean ratio exp(D) is {metrics['ratio_mean']:.3g}",
            f"the standard deviation of the train log-probs is {fit['train_std']:.2f}, of the rollout log-probs "
            f"{fit['rollout_std']:.2f}; the mean train log-prob is {fit['train_mean']:.2f}",
            _not_moved(measured),
        ),
        {
            "correlation": correlation,
            "logratio_abs_mean": metrics["logratio_abs_mean"],
            "ratio_mean": metrics["ratio_mean"],
            "train_std": fit["train_std"],
            "rollout_std": fit["rollout_std"],
            "train_mean": fit["train_mean"],
        },
        1.0 - max(0.0, correlation),
    )


def _not_moved(measured: Measurement) -> str:
    """Say which other pairings were tried."""
    pairing = measured.evidence.pairing
    tried = [name for name, tested in (("shift", pairing.paired), ("other sequence", pairing.swapped.tested)) if tested]
    untried = (
        ""
        if pairing.swapped.tested
        else (f"other sequences were not compared: these are shorter than {FEWEST_SWAP_TOKENS} tokens, or a single one")
    )
    said = " and ".join(f"no {name}" for name in tried)
    return "; ".join(filter(None, (said and f"{said} fits better", untried)))


@cause(
    "warning",
    "Compare the token ids of the prompts on both sides: a BOS that is added twice or never, a generation prompt that "
    "the template adds on one side, a mask that begins one token early.",
    hides=("temperature", "renormalized", *SAMPLED),
    views=("position",),
)
def sequence_starts(measured: Measurement, metrics: Metrics) -> Signs | None:
    """The first token of a sequence differs far more than equally likely ones: the end of the prompt."""
    positions = measured.evidence.positions
    count, magnitude = positions.table()
    if positions.tokens([0]) < 20:
        return None
    times = positions.over([0], list(range(2, count.shape[0])))
    here = float(magnitude[0].sum() / count[0].sum())
    if measured.evidence.by_sequence.starts_over_rest() < limits.STARTS_OWN:
        return None
    # First tokens are often the least sure, so truncation takes most from them.
    if times < 1.5 * limits.GROUP_TIMES or here < 4 * limits.GROUP_MATTERS or is_truncated_later(measured, metrics):
        return None
    squares = float(positions.groups()[0, :, 3].sum())
    if float(magnitude[0].sum()) ** 2 < limits.STARTS_FEWEST * squares:
        return None
    share = float(magnitude[0].sum() / magnitude.sum())
    return Signs(
        "the two policies disagree on the first token of sequences: check the end of the prompt",
        (
            f"first tokens: mean |D| {here:.3g}, {times:.1f} times that of equally likely tokens from position 3 on "
            f"({counted(positions.tokens([0]), 'token')})",
            f"they make up {percent(share)} of sum |D|",
        ),
        {"tokens": positions.tokens([0]), "logratio_abs_mean": here, "times": times, "logratio_abs_fraction": share},
        share,
        "error" if times >= limits.SURELY_OTHER else None,
    )
