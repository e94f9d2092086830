"""The limits of the metrics, a row each: for `warnings()`, the docs, `report`, `doctor` and what-if.

A row has two bounds. A run stays within `watch` where nothing is wrong; beyond `alarm` something is broken. Between
them lie runs that differ for a known reason, such as old weights, and small bugs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

# Within `watch`; between `watch` and `alarm`; beyond `alarm`.
State = Literal["healthy", "watch", "alarm"]


class Limit(NamedTuple):
    """The bounds of a metric."""

    key: str
    beyond: Literal["above", "below"]  # the side on which a value is suspect
    watch: float  # the bound of the healthy range
    alarm: float  # beyond it something is broken; 3 times `watch` where nothing better is known
    reason: str  # a clause that says what such a value means
    hint: str  # what to look at or to do

    def state(self, value: float) -> State:
        """Rate a value; NaN, which compares with nothing, is healthy."""
        sign = 1.0 if self.beyond == "above" else -1.0
        if sign * value > sign * self.alarm:
            return "alarm"
        return "watch" if sign * value > sign * self.watch else "healthy"

    @property
    def range(self) -> str:
        """The healthy range as tables show it: "< 0.01"."""
        if self.beyond == "above" and self.watch == 0:
            return "0"
        return f"{'<' if self.beyond == 'above' else '>'} {self.watch:g}"


# The mean of the token ratios is 1 where tokens were sampled from the rollout log-probs. It is suspect by this many
# standard errors and this margin, to which noise of D adds: with a standard deviation of s it makes 1 + s^2 / 2 of it.
RATIO_ERRORS, RATIO_MARGIN, MOST_OF_NOISE = 8.0, 0.002, 0.02
# Where its room exceeds this, the data are too broken, or too few, to call a mean ratio healthy.
RATIO_UNKNOWN = 0.5

# Fewer measured tokens may all be certain, so that their log-probs are equal, or all 0, in a healthy run.
FEWEST_TOKENS = 16

# From this part of the clamp on, a sequence's |sum D| is near it.
NEAR_CLAMP = 0.5

# A largest |D| between watch and alarm is news where that token makes this share of k3: the largest of a million tokens
# of a healthy engine may lie there too.
CARRIES_K3 = 0.1
# So is one where many tokens as far off make half of k3. D^2 / 2 is about k3 for small D, 3 times k3 at -5 and a tenth
# of it at 5, so these are the bounds of the ratio of their means.
HALF_FAR = 0.55, 2.0

# Sequences whose mean |sum of D| is larger, in nats, have products that are chance.
CHANCE_SUM = 1.0

# Correlation of the two probabilities. Below the first bound they are of other tokens or other weights; above the
# second one the tokens are the same, and something smooth differs: a temperature, precision, age.
UNRELATED, RELATED = 0.5, 0.9

# Log-probs of exactly 0 or -1 where the other policy is 1 nat away are fillers if they are so many, this share of the
# tokens, and so many times as many as on the other side: certain tokens that are compared with
# others have them on both. Healthy batches have none.
FILLED_TOKENS, FILLED, FILLED_TIMES = 4, 0.001, 5.0

# A batch has padding that no mask tells from tokens where this share of its rows, and at least two, are padded. A model
# that repeats itself is certain to the end of a row too.
PADDED_SHARE = 0.2

# Tokens were not sampled from the policy whose entropy is given where the mean of entropy + log-prob is so many
# standard errors from 0, this part of the mean entropy, and this many standard deviations of a sequence of mean length:
# the best of eight answers by their own likelihood are 1.4 of these away.
ENTROPY_ERRORS, ENTROPY_MARGIN, ENTROPY_SELECTED = 8.0, 0.05, 1.5
# Beyond so many, and this part, they were sampled elsewhere or selected: which of both, only the reader knows.
ENTROPY_WATCH, ENTROPY_ROUNDED = 5.0, 0.005

# Rejection prefers short answers where the geometric mean length of kept sequences is less than this share of the mean
# length of rejected ones, and the lengths' logarithms are so many standard errors apart.
SHORTER, SHORTER_ERRORS = 0.8, 5.0

# What else makes k3 large.
BUGS = (
    "or a bug: log-probs shifted by a token, gathered at the wrong index or of other weights, a temperature on one side"
)

LIMITS = (
    Limit("kl_rollout_train_k3", "above", 0.01, 0.05,
          "an estimate of KL(rollout, train): engines of one model stay below 0.01, and stale or quantized ones rarely "
          "reach 0.05",
          f"likely causes: a low-precision or an older engine, which a correction is for; {BUGS}"),
    Limit("chi2_train_rollout", "above", 1.0, 3.0,
          "the variance of the token ratios: above 1 weights keep less than half of the batch, above 3 less "
          "than a quarter",
          "importance weights leave a small effective sample size"),
    Limit("logratio_abs_max", "above", 5.0, 10.0,
          "the largest difference of a token: beyond 10 nats one side calls impossible what the other expects",
          "look for single broken tokens, and for placeholders (0, -1, -9999) at tokens that the mask should leave "
          "out; a veto rejects their sequences"),
    Limit("tokens_kept_fraction", "below", 0.9, 0.5,
          "the share that trains: below one half, what trains is no longer the batch that was sampled",
          "compare each criterion's bounds with its LABEL/mean and LABEL/std; rc.suggest gives bounds that keep "
          "healthy data"),
    Limit("weight_ess", "below", 0.5, 0.3,
          "the effective sample size: the share of the tokens that is left after the bounds of the weight",
          "lower the upper bound, or find the cause of the mismatch"),
    Limit("sequence_weight_ess", "below", 0.5, 0.3,
          "the effective sample size over sequences",
          "lower the upper bound, or take token or geometric weights in place of products"),
    Limit("tokens_nonfinite", "above", 0.0, 0.0, "valid tokens with NaN or infinity", "look for broken logits, and for "
          "tokens for which the engine returned no log-prob"),
    Limit("tokens_outside", "above", 0.0, 0.0, "valid tokens that belong to no sequence", "cu_seqlens holds "
          "cumulative offsets, not lengths: [0, 10, 20], not [10, 10]"),
    Limit("logratio_abs_mean", "above", 0.11, 0.25, "the mean difference of a token: noise of k3 0.01 "
          "has 0.11, of k3 0.05 0.25", "as for `kl_rollout_train_k3`"),
    Limit("sequence_chi2_train_rollout", "above", 10.0, 30.0, "the variance of product ratios",
          "take token or geometric ratios"),
    Limit("sequence_log_ppl_diff_abs_mean", "above", 0.02, 0.06, "how far the mean D of a sequence is from 0",
          "watch its trend: it grows with stale weights"),
)  # fmt: skip

# Grows with the length or the number of sequences of healthy data too: tiles and tables show it, `warnings()` does not.
NOT_WARNED = {"logratio_abs_mean", "sequence_chi2_train_rollout", "sequence_log_ppl_diff_abs_mean"}

BY_KEY = {limit.key: limit for limit in LIMITS}

# --- the bounds of the doctor's causes

# k3 of a healthy engine stays below the first. Two engines, or old and new weights, that differ in a healthy run are
# worth a warning beyond the second, else a note. Older weights and low precision stay below the third.
HEALTHY_K3 = BY_KEY["kl_rollout_train_k3"].watch
MATTERS_K3, BROKEN_K3 = 0.1 * HEALTHY_K3, 2.0 * BY_KEY["kl_rollout_train_k3"].alarm

# A group of tokens is suspect if its mean |D| is GROUP_TIMES the mean of equally likely tokens and at least
# GROUP_MATTERS nats. First tokens beyond the third are other tokens; below, it may be the text.
GROUP_TIMES, GROUP_MATTERS, SURELY_OTHER = 2.0, 5e-3, 10.0

# |D| of first tokens is carried by at least so many, (sum |D|)^2 / sum D^2: the samples of one prompt begin alike, and
# a router that takes another expert there moves them all. Of turns they are this share too, up to the last number: a
# temperature in a few sequences moves their first tokens most.
STARTS_FEWEST, STARTS_SHARE, STARTS_MOST = 10, 0.15, 30.0

# |D| of first tokens is so many times the rest of their own sequences', at equal probability. Where the prompt
# is another one it is 2 and more; where some sequences are off throughout, so are their first tokens: 0.9 to 1.
STARTS_OWN = 1.5

# Tokens that one policy calls impossible are no outliers if they are so many, and this share of all.
IMPOSSIBLE_FEWEST, IMPOSSIBLE_SHARE = 5, 1e-3

# Where less than half of the sequences are scaled, they are at least so many and the logarithm of their factor deviates
# by at most this. Under a temperature the log-probs of sure tokens are nearly multiples too, by a factor that varies.
SCALED_FEWEST, SCALED_ALIKE = 4, 0.02

# A slope is away from 0 if it is so many standard errors away, and at least this. The groups that are far off are left
# out of it; a mean of ratios has a heavy tail. A mean is positive by so many, where something else is sure.
SLOPE_ERRORS, SLOPE_LEAST, SIGN_ERRORS = 6.0, 0.02, 3.0

# A temperature is named where it explains this share of the mismatch, and is the cause where it explains most of it:
# true ones explain 0.81 and more, other bugs up to 0.72. A wider interval is said by its ends alone.
TEMPERATURE_PART, TEMPERATURE_MOST, TEMPERATURE_WIDE = 0.3, 0.78, 0.3

# What a penalty takes from tokens that repeat goes to all others: D of those that repeat is above 0 by this part of
# what the others are below it.
PENALTY_LIFTED = 0.27

# A penalty explains this share of the squares of D. True ones explain 0.08 and more, other bugs up to 0.005.
PENALTY_PART = 0.02

# Two passes of the trainer vary where they are this part, in squares, of their distance from the engine apart, and
# equally far from it but for this factor. A pass that has learned as much is 1.5 times as far.
PASSES_VARY, PASSES_ALIKE = 0.5, 1.3

# Truncation lifts no token: only the engine's noise makes D positive. It makes up at most this share of sum |D|, and 99
# of a hundred D stay below the second number, unless ratios lack more than a trainer without its context explains. It
# keeps the likely tokens, so D is hardly anywhere below the third: -4.3 with 2 of 512 even tokens.
TRUNCATED_UPWARDS, TRUNCATED_LIFTED, TRUNCATED_LEAST = 0.3, 0.5, -5.0

# Log-probs that differ by a constant correlate by more.
CONSTANT_RELATED = 0.8

# Single tokens are the cause if they are at most this share of all. Where they carry nearly all of k3, they may be
# more, and less far off.
OUTLIERS_RARE, OUTLIERS_LESS_RARE, OUTLIERS_NEARLY_ALL = 0.01, 0.03, 0.97


def healthy(key: str) -> str:
    """The healthy range of a metric that has a limit, as tables show it."""
    return BY_KEY[key].range


def largest_state(metrics: Mapping[str, float], measured: float) -> State:
    """Rate the largest |D| of so many tokens: between watch and alarm tokens so far off have to make much of k3."""
    state, k3 = BY_KEY["logratio_abs_max"].state(metrics["logratio_abs_max"]), metrics["kl_rollout_train_k3"]
    if state != "watch" or k3 <= 0.0:
        return state
    largest = max(math.expm1(d) - d for d in (metrics["logratio_min"], metrics["logratio_max"]))
    halves = 0.5 * (metrics["logratio_std"] ** 2 + metrics["logratio_mean"] ** 2) / k3
    few = largest >= CARRIES_K3 * k3 * measured or not HALF_FAR[0] < halves < HALF_FAR[1]
    return "watch" if few else "healthy"


def ratio_room(ratio_std: float, measured: float) -> float:
    """The largest distance from 1 of the mean ratio of so many tokens that the rollout policy sampled."""
    noise = min(0.5 * ratio_std * ratio_std, MOST_OF_NOISE)
    return RATIO_ERRORS * ratio_std / math.sqrt(max(1.0, measured)) + RATIO_MARGIN + noise


def ratio_state(ratio_mean: float, ratio_std: float, measured: float) -> State | None:
    """Rate the mean ratio of so many tokens; None where their spread hides it."""
    room = ratio_room(ratio_std, measured)
    away = abs(ratio_mean - 1.0)
    if away > room:
        return "watch" if away <= 3.0 * room else "alarm"
    return "healthy" if room <= RATIO_UNKNOWN else None


def sampler_error(squares: float, cross: float, lengths: float, gap: float, tokens: float) -> float:
    """The standard error of a mean over tokens whose sequences are what was sampled.

    Args:
        squares, cross, lengths: Sums over sequences of e^2, n e and n^2, where e is the sum over n tokens.
        gap: The mean: the sum of e divided by the sum of n.
        tokens: The sum of n.
    """
    return math.sqrt(max(0.0, squares - 2.0 * gap * cross + gap * gap * lengths)) / max(1.0, tokens)


def sampler_state(gap: float, error: float, entropy: float, sequences: float, complete: bool = False) -> State:
    """Rate the mean of entropy + log-prob, with its standard error by `sampler_error`.

    watch: another policy sampled the tokens, or the likelier ones of several answers were kept. alarm: selection alone
    does not explain it; where every answer of a prompt is there, `complete`, it explains nothing.
    """
    away = abs(gap)
    if away <= max(ENTROPY_WATCH * error, ENTROPY_ROUNDED * entropy):
        return "healthy"
    errors = max(ENTROPY_ERRORS, ENTROPY_SELECTED * math.sqrt(sequences))
    return "alarm" if complete or away > max(errors * error, ENTROPY_MARGIN * entropy) else "watch"


def prefers_short(ratio: float, errors: float) -> bool:
    """Tell from the ratio of two mean lengths, kept over rejected, and its standard errors whether length decides."""
    return ratio < SHORTER and errors < -SHORTER_ERRORS
