"""Signatures of values that are wrong: no log-probs, or those of other tokens, other sequences, other weights."""

from __future__ import annotations

from rollout_corr.diagnose.doctor.verdict import MATTERS, TIMES, Verdict, percent
from rollout_corr.diagnose.measure.evidence import FAR, OTHER_TURNS, SHIFTS
from rollout_corr.diagnose.measure.measuring import Measured

# First tokens that differ by more than this from others as likely are other tokens; by less, it may be the text.
SURELY = 10.0


def not_log_probs(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """Values above 0, which no log-prob has."""
    evidence = measured.evidence
    for side in ("train", "rollout"):
        positive, above = evidence.positive[side], evidence.above_one[side]
        share = positive / max(1, evidence.tokens)
        value, count = (evidence.repeated[side].most_common(1) or [(0.0, 0)])[0]
        if share <= 1e-3 or (share <= 0.5 and value > 0 and count > 0.9 * positive):
            # One value above 0 is a filling.
            continue
        kind = "some are no log-probs"
        if share > 0.5:
            kind = "negative log-likelihoods" if above > 0.05 * evidence.tokens else "probabilities"
        return Verdict(
            "not_log_probs",
            "error",
            f"the {side} log-probs are not log-probs: {kind}",
            (f"{percent(share)} of the {side} values are above 0, {percent(above / evidence.tokens)} above 1",),
            "Hand over log-probs: the logarithm of probabilities, the negative of a loss. Where a value is missing, "
            "the mask has to be 0.",
            share,
        )
    return None


def nonfinite(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """NaN or infinite log-probs where the mask says that a token counts."""
    evidence = measured.evidence
    bad = metrics["tokens_nonfinite"]
    if not bad:
        return None
    rows = f"{evidence.rows_all_bad} sequences have nothing else, {evidence.rows_bad - evidence.rows_all_bad} have some"
    whole = evidence.rows_all_bad > 0
    return Verdict(
        "nonfinite",
        "error",
        "whole sequences are NaN or infinite" if whole else "some log-probs are NaN or infinite",
        (
            f"{bad:.0f} of {metrics['tokens']:.0f} valid tokens: {evidence.bad['train']} in the trainer's, "
            f"{evidence.bad['rollout']} in the engine's log-probs",
            rows,
        ),
        "Whole rows mean broken logits (an overflow in low precision, a failed collective, an empty prompt): look at "
        "the logits of one such sample. Single tokens mean a filtered token (top-p or top-k leave -inf) or a missing "
        "value.",
        bad / max(1.0, metrics["tokens"]),
    )


def filled(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """One value that stands where the other policy says something else each time."""
    evidence = measured.evidence
    for side in ("rollout", "train"):
        most = evidence.repeated[side].most_common(3)
        if not most:
            continue
        (value, count), third = most[0], most[2][1] if len(most) == 3 else 1
        if count < 5 or count < 0.05 * evidence.far or count < 8 * third:
            continue
        other = "trainer" if side == "rollout" else "engine"
        return Verdict(
            "filled",
            "error",
            f"the {side} log-probs are filled with {value:g} where there were none",
            (
                f"{count} of the {evidence.far} tokens with |D| > {FAR:g} have exactly {value:g}; the third most "
                f"frequent value occurs {third} times",
                f"{percent(count / max(1, evidence.tokens))} of all valid tokens, to which the {other} gives other "
                "values",
            ),
            "These tokens were not sampled (a tool's answer, a template, padding), or their log-probs got lost on "
            "the way: mask them, or fetch them. Greedy sampling looks like this too: its log-probs are all 0.",
            count / max(1, evidence.tokens),
        )
    return None


def copied(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """Not one token differs."""
    evidence = measured.evidence
    if evidence.finite < 50 or evidence.equal < evidence.finite:
        return None
    return Verdict(
        "copied",
        "note",
        "both log-probs are the same bits",
        (f"D is exactly 0 for all {evidence.finite} tokens",),
        "Unless engine and trainer are built to agree bit by bit, one was copied from the other, and every "
        "correction does nothing: check which policy each field holds, and bypass modes.",
        1.0,
    )


def bfloat16(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """Log-probs went through bfloat16."""
    evidence = measured.evidence
    coarse = [
        side
        for side in ("train", "rollout")
        if evidence.fractional[side] >= 50 and evidence.in_bfloat16[side] > 0.99 * evidence.fractional[side]
    ]
    if not coarse:
        return None
    return Verdict(
        "bfloat16",
        "note",
        f"the {' and '.join(coarse)} log-probs were rounded to bfloat16",
        tuple(
            f"{percent(evidence.in_bfloat16[side] / evidence.fractional[side])} of the {side} log-probs are bfloat16 "
            "numbers"
            for side in coarse
        ),
        "That alone makes D wrong by up to 1/512 of the log-prob. Take the log-softmax in float32 and keep its "
        "result so.",
        1.0,
    )


def shifted(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """The log-probs fit when one side is moved by a token or two."""
    evidence = measured.evidence
    total = sum(evidence.shifted.values())
    if total < max(2, 0.05 * evidence.paired):
        return None
    shift = max((s for s in SHIFTS if s), key=lambda s: evidence.shifted[s])
    where = f"{abs(shift)} token{'s' if abs(shift) > 1 else ''} {'late' if shift < 0 else 'early'}"
    return Verdict(
        "shifted",
        "error",
        f"the rollout log-probs come {where}",
        (
            f"in {total} of {evidence.paired} sequences they fit train_logp better when moved "
            f"({', '.join(f'{-s:+d}: {n}' for s, n in evidence.shifted.items() if s)})",
            f"as they are, the two correlate by {evidence.log_prob_correlation():.2f} over all tokens",
        ),
        "Logits at t predict token t + 1: gather labels shifted by one on one side only, or a first token (BOS, the "
        "last of the prompt) that one side counts and the other does not.",
        total / max(1, evidence.paired),
    )


def swapped(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """A sequence's log-probs stand beside another one's."""
    evidence = measured.evidence
    if evidence.swapped < max(2, 0.05 * evidence.swap_tested):
        return None
    return Verdict(
        "swapped",
        "error",
        "sequences stand beside the wrong partners",
        (
            f"{evidence.swapped} of {evidence.swap_tested} sequences fit another one's rollout log-probs (correlation "
            "above 0.9) and not their own (below 0.6)",
        ),
        "One side was sorted, shuffled or balanced over ranks after the log-probs were taken: join them by an id, "
        "before any reordering.",
        evidence.swapped / evidence.swap_tested,
    )


def wrong_weights(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """Both are log-probs, of models that have nothing to do with one another."""
    evidence, fit = measured.evidence, measured.evidence.fit
    correlation = evidence.log_prob_correlation()
    if evidence.finite < 50 or metrics["d_abs_mean"] < 0.5 or correlation > 0.5:
        return None
    flat = [
        name
        for name, other in (("train", "rollout"), ("rollout", "train"))
        if fit[f"{name}_std"] < 0.2 * fit[f"{other}_std"]
    ]
    guess = "weights that were never loaded or synchronised"
    if flat:
        guess = f"the {flat[0]} side is all but constant: a head that is not trained, or not tied to the embedding"
    return Verdict(
        "wrong_weights",
        "error",
        f"the two policies are unrelated: {guess}",
        (
            f"log-probs correlate by {correlation:.2f}, mean |D| is {metrics['d_abs_mean']:.2f} nats, the mean ratio "
            f"of probabilities {metrics['ratio_mean']:.3g}",
            f"standard deviation of the log-probs: train {fit['train_std']:.2f}, rollout {fit['rollout_std']:.2f}; "
            f"mean train log-prob {fit['train_mean']:.2f}",
            "no shift and no other sequence fits better",
        ),
        "Compare one prompt's logits in trainer and engine right after the weights are sent: names that were "
        "skipped, a tied lm_head, another checkpoint, another chat template or tokenizer.",
        1.0 - max(0.0, correlation),
    )


def turn_starts(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """Tokens right after a turn begins differ more than others as likely."""
    turns = measured.evidence.turns
    best, tokens = 0, 1.0
    times = 0.0
    for last in range(3):
        of = list(range(last + 1))
        if turns.tokens(of) < 20:
            continue
        found = turns.over(of, list(range(4, OTHER_TURNS + 1)))
        if found > times:
            best, times, tokens = last + 1, found, turns.tokens(of)
    count, magnitude = turns.table()
    if times < 1.5 * TIMES or float(magnitude[:best].sum()) / tokens < 4 * MATTERS:
        return None
    share = float(magnitude[:best].sum() / magnitude.sum())
    return Verdict(
        "turn_starts",
        "error" if times >= SURELY else "warning",
        "turns begin with other tokens than the engine sampled: retokenisation or a chat template",
        (
            f"the first {best} token{'s' if best > 1 else ''} of a turn after the first: mean |D| "
            f"{float(magnitude[:best].sum()) / tokens:.3g}, {times:.1f} times that of later tokens of the same "
            f"probability ({tokens:.0f} tokens)",
            f"they are {percent(tokens / float(count.sum()))} of the tokens and have {percent(share)} of sum |D|",
        ),
        "Keep the token ids that the engine sampled, and append to them; do not decode a conversation and tokenize "
        "it again.",
        share,
    )


def sequence_starts(measured: Measured, metrics: dict[str, float]) -> Verdict | None:
    """The first token of a sequence differs more than others as likely."""
    positions = measured.evidence.positions
    count, magnitude = positions.table()
    if positions.tokens([0]) < 20:
        return None
    times = positions.over([0], list(range(2, count.shape[0])))
    here = float(magnitude[0].sum() / count[0].sum())
    if times < 1.5 * TIMES or here < 4 * MATTERS:
        return None
    share = float(magnitude[0].sum() / magnitude.sum())
    return Verdict(
        "sequence_starts",
        "error" if times >= SURELY else "warning",
        "sequences begin with a token that the two policies see differently: the end of the prompt",
        (
            f"mean |D| of first tokens is {here:.3g}, {times:.1f} times that of tokens from position 3 on of the same "
            f"probability ({positions.tokens([0])} tokens)",
            f"they have {percent(share)} of sum |D|",
        ),
        "Compare the prompts' token ids on both sides: a BOS that is added twice or never, a generation prompt that "
        "the template adds on one side, a mask that begins one token early.",
        share,
    )
