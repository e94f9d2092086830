"""What the oracle of a loss reads of a sequence and of one token: log-ratios, levels, clips, masks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from oracles.numbers import D_RANGE, exp, fsum, larger, log, smaller


@dataclass
class Sequence:
    """One sequence. Lists of one length; None for what is not given. `advantages` may be one number."""

    new: list
    mask: list
    advantages: list | float
    old: list | None = None
    rollout: list | None = None
    ref: list | None = None
    weights: list | None = None
    train_mask: list | None = None
    scale: list | None = None  # factors of all that a token adds
    external: dict = field(default_factory=dict)
    mass: list | None = None  # log of the mass that truncated sampling kept
    renormalized: str = "rollout"
    entropy: list | None = None
    group: int | None = None
    number: int | None = None  # what draws know it by; None: its place in the batch

    def __len__(self):
        return len(self.new)


def base_of(sequence, surrogate, t):
    of = surrogate.of
    if of is None:
        of = "new/old" if sequence.old is not None else "new/rollout"
    base = sequence.old if of == "new/old" else sequence.rollout
    if base is None:
        return None
    if sequence.mass is None or of == "new/old":
        return base[t]
    # new - mass - rollout, or new - (rollout - mass).
    return base[t] + sequence.mass[t] * (1 if sequence.renormalized == "rollout" else -1)


def over_kept_set(sequence, surrogate, t, log_probs):
    """The policy that a ratio to the rollout compares: a log-prob over the tokens that could have been sampled."""
    of = surrogate.of or ("new/old" if sequence.old is not None else "new/rollout")
    if sequence.mass is None or of == "new/old" or sequence.renormalized == "train":
        return log_probs[t]
    return log_probs[t] - sequence.mass[t]


def is_finite(sequence, surrogate, t):
    base = base_of(sequence, surrogate, t)
    needed = [sequence.new[t], advantage(sequence, t)]
    needed += [x for x in (base,) if x is not None]
    needed += [x[t] for x in (sequence.ref, sequence.weights, sequence.scale) if x is not None]
    return all(math.isfinite(x) for x in needed)


def advantage(sequence, t):
    return sequence.advantages[t] if isinstance(sequence.advantages, list) else sequence.advantages


def valid(sequence):
    return [t for t in range(len(sequence)) if sequence.mask[t] != 0]


def known(sequence, surrogate):
    return [t for t in valid(sequence) if is_finite(sequence, surrogate, t)]


def trained(sequence, surrogate):
    return [t for t in known(sequence, surrogate) if sequence.train_mask is None or sequence.train_mask[t] != 0]


def clip(x, low, high):
    return smaller(larger(x, low), high)


def mean(values):
    values = list(values)
    return fsum(values) / len(values) if values else 0.0


def mean_log_ratio(values):
    """The mean of log-ratios, each within the range in which sums take it."""
    return mean(clip(x, -D_RANGE, D_RANGE) for x in values)


def ppo(s, r, a):
    if s.delta is not None:
        r = smaller(r, s.delta)
    loss = larger(-a * r, -a * clip(r, 1 - s.low, 1 + s.high))
    if a < 0 and s.dual is not None:
        loss = smaller(loss, -a * s.dual)
    return loss


def at_level(s, x, all_x):
    """The log-ratio of a token, of its sequence, or of one of the two means of both, each clamped."""
    if s.level == "token":
        return x
    whole = mean_log_ratio(all_x)
    if s.level == "sequence":
        return whole
    x, whole = clip(x, -s.clamp, s.clamp), clip(whole, -s.clamp, s.clamp)
    return (x + whole) / 2 if s.level == "geometric_average" else log((exp(x) + exp(whole)) / 2)


def rec_keeps(s, r, a):
    below, above = r < 1 - s.low, r > 1 + s.high
    if s.mask == "one_side":
        return not ((a > 0 and above) or (a < 0 and below))
    outside = below or above
    if s.mask == "two_side":
        return not outside
    return not outside or (a >= 0 and r <= 1 - s.far_low) or (a <= 0 and r >= 1 + s.far_high)


def vespo_log_ratio(s, all_x, weights):
    """The logarithm of the product of ratios and weights."""
    least = math.log(1e-8)
    parts = [clip(x, -s.clamp, s.clamp) for x in all_x]
    if weights is not None:
        parts += [clip(math.log(w) if w > 0 else least, least, s.clamp) for w in weights]
    return clip(math.fsum(parts), max(least, -s.clamp), s.clamp)


def level_of(s, x, all_x, weights):
    """The log-ratio that a surrogate's ratio is made of."""
    kind = type(s).__name__
    if kind in ("GSPO", "REAL"):
        return mean_log_ratio(all_x)
    if kind == "VESPO":
        return vespo_log_ratio(s, all_x, weights)
    if kind == "DRO" and s.level == "sequence":
        return math.fsum(clip(y, -1024, 1024) for y in all_x)
    return at_level(s, x, all_x) if kind in ("Score", "REC", "AveragePPO") else x
