"""What the doctor looks at beside the report's numbers: what belongs to what, which values repeat, what is odd."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from rollout_corr.diagnose.measure.profiles import PROBABILITY_BINS, Profile, probability_bins
from rollout_corr.diagnose.read.block import ValidTokens

# Shifts of the rollout log-probs that are tried, in tokens.
SHIFTS = (-2, -1, 0, 1, 2)
# A sequence says something about a shift from this many pairs on.
FEWEST_PAIRS = 24
# Sequences of a block, and tokens of each, that are compared with one another for swapped rows.
SWAP_ROWS, SWAP_TOKENS = 64, 32

# A log-prob may be above 0 by rounding, but not by this.
ROUNDING = 1e-3
# A token whose |D| is beyond this is far off: the other policy thinks less than a third as much of it.
FAR = 1.0
# Values that repeat are counted among tokens that are far off; this many different ones are remembered.
MOST_VALUES = 256

# D is cut here where it enters averages that one token must not decide.
CUT = 20.0

TURN_OFFSETS = 8
OTHER_TURNS, FIRST_TURN = TURN_OFFSETS, TURN_OFFSETS + 1


class Excess:
    """|D| of groups of tokens against what tokens of the same probability have elsewhere.

    Unsure tokens differ more than sure ones, whatever the group. So a group is compared at equal probability.
    """

    def __init__(self) -> None:
        self.profile = Profile()

    def add(self, groups: Tensor, rollout: Tensor, d: Tensor) -> None:
        """Add tokens: [M] int64 groups >= 0, [M] log-probs, [M] D."""
        self.profile.add(groups * PROBABILITY_BINS + probability_bins(rollout), d.clamp(-CUT, CUT))

    def table(self) -> tuple[Tensor, Tensor]:
        """[groups, probabilities] tokens and sums of |D|."""
        sums = self.profile.sums
        groups = -(-sums.shape[0] // PROBABILITY_BINS)
        whole = torch.cat([sums, sums.new_zeros(groups * PROBABILITY_BINS - sums.shape[0], sums.shape[1])])
        whole = whole.view(groups, PROBABILITY_BINS, sums.shape[1])
        return whole[:, :, 0], whole[:, :, 2]

    def over(self, of: list[int], base: list[int]) -> float:
        """The groups' mean |D| over the base's at the same probabilities; 1 where there is nothing to compare."""
        count, magnitude = self.table()
        of, base = ([i for i in some if i < count.shape[0]] for some in (of, base))
        usual = magnitude[base].sum(0) / count[base].sum(0)
        here, tokens = magnitude[of].sum(0), count[of].sum(0)
        known = usual.isfinite() & (tokens > 0)
        expected = float((usual * tokens)[known].sum())
        return float(here[known].sum()) / expected if expected > 0 else 1.0

    def tokens(self, of: list[int]) -> int:
        """How many tokens the groups have."""
        count, _ = self.table()
        return int(count[[i for i in of if i < count.shape[0]]].sum())


class Evidence:
    """Tallies over blocks, for the doctor."""

    def __init__(self) -> None:
        self.sequences = 0
        # Sequences in which the two log-probs could be compared, and those in which a shift fits better than none.
        self.paired = 0
        self.shifted = dict.fromkeys(SHIFTS, 0)
        self.swap_tested = self.swapped = 0
        # Sums of m, D, m^2, D^2, m D, where m is the mean of the two log-probs; and of both log-probs and squares.
        self.moments = torch.zeros(10, dtype=torch.float64)
        self.by_mean = Profile()
        self.positive = {"train": 0, "rollout": 0}
        self.above_one = {"train": 0, "rollout": 0}
        self.in_bfloat16 = {"train": 0, "rollout": 0}
        self.fractional = {"train": 0, "rollout": 0}
        self.bad = {"train": 0, "rollout": 0}
        self.rows_bad = self.rows_all_bad = 0
        self.equal = 0
        self.tokens = self.finite = self.far = 0
        self.repeated: dict[str, Counter[float]] = {"train": Counter(), "rollout": Counter()}
        self.turns, self.positions = Excess(), Excess()
        self.columns = {"versions": Excess(), "steps": Excess()}
        self.values: dict[str, dict[int, int]] = {"versions": {}, "steps": {}}
        self.policies: dict[str, float] = {}

    def add(self, tokens: ValidTokens) -> None:
        """Add a block."""
        self.sequences += int((tokens.lengths > 0).sum())
        self.tokens += tokens.d.numel()
        self._add_values(tokens)
        self._add_pairs(tokens)
        self._add_swaps(tokens)
        self._add_moments(tokens)
        self._add_groups(tokens)
        self._add_third(tokens)

    def _add_values(self, tokens: ValidTokens) -> None:
        finite, d = tokens.finite, tokens.d
        self.finite += int(finite.sum())
        self.equal += int((finite & (d == 0)).sum())
        far = finite & (d.abs() > FAR)
        self.far += int(far.sum())
        for name, logp in (("train", tokens.train), ("rollout", tokens.rollout)):
            self.bad[name] += int((~logp.isfinite()).sum())
            self.positive[name] += int((logp > ROUNDING).sum())
            self.above_one[name] += int((logp > 1.0 + ROUNDING).sum())
            bits = logp.float().contiguous().view(torch.int32)
            # A power of two says nothing about where it has been.
            fractional = logp.isfinite() & ((bits & 0x7FFFFF) != 0)
            self.fractional[name] += int(fractional.sum())
            self.in_bfloat16[name] += int((fractional & ((bits & 0xFFFF) == 0)).sum())
            values, counts = logp[far].unique(return_counts=True)
            most = counts.topk(min(MOST_VALUES, counts.numel())).indices
            tally = self.repeated[name]
            tally.update(dict(zip(values[most].tolist(), counts[most].tolist(), strict=True)))
            if len(tally) > 2 * MOST_VALUES:
                self.repeated[name] = Counter(dict(tally.most_common(MOST_VALUES)))
        if not bool(finite.all()):
            count = tokens.lengths.shape[0]
            bad = torch.bincount(tokens.owner[~finite], minlength=count)
            self.rows_bad += int((bad > 0).sum())
            self.rows_all_bad += int(((bad == tokens.lengths) & (bad > 0)).sum())

    def _add_pairs(self, tokens: ValidTokens) -> None:
        """Correlation within each sequence of train[t] and rollout[t - shift]."""
        train, rollout = (x.double().clamp(-CUT, CUT).where(tokens.finite, 0.0) for x in (tokens.train, tokens.rollout))
        finite, owner, count = tokens.finite, tokens.owner, tokens.lengths.shape[0]
        found = {}
        n_least = None
        for shift in SHIFTS:
            a = slice(max(shift, 0), train.shape[0] + min(shift, 0))
            b = slice(max(-shift, 0), train.shape[0] - max(shift, 0))
            use = finite[a] & finite[b] & (owner[a] == owner[b])
            x, y, own = train[a][use], rollout[b][use], owner[a][use]
            found[shift], n = _correlations(x, y, own, count)
            n_least = n if n_least is None else torch.minimum(n_least, n)
        assert n_least is not None  # there are shifts
        usable = (n_least >= FEWEST_PAIRS) & torch.stack(list(found.values())).isfinite().all(0)
        self.paired += int(usable.sum())
        for shift in SHIFTS:
            if shift:
                others = torch.stack([found[other] for other in SHIFTS if other != shift]).amax(0)
                better = (found[shift] > 0.7) & (1.0 - found[shift] < 0.25 * (1.0 - others))
                self.shifted[shift] += int((usable & better).sum())

    def _add_swaps(self, tokens: ValidTokens) -> None:
        """Whether sequences look like one another's partners rather than like their own."""
        starts = tokens.lengths.cumsum(0) - tokens.lengths
        long = (tokens.lengths >= SWAP_TOKENS).nonzero().squeeze(1)[:SWAP_ROWS]
        if long.numel() < 2:
            return
        index = starts[long][:, None] + torch.arange(SWAP_TOKENS)
        rows = [x.double().clamp(-CUT, CUT)[index] for x in (tokens.train, tokens.rollout)]
        usable = tokens.finite[index].all(1)
        rows = [x - x.mean(1, keepdim=True) for x in rows]
        norms = [x.norm(dim=1) for x in rows]
        usable &= (norms[0] > 1e-3) & (norms[1] > 1e-3)
        if int(usable.sum()) < 2:
            return
        a, b = ((x / norm[:, None])[usable] for x, norm in zip(rows, norms, strict=True))
        fit = a @ b.T
        own = fit.diagonal()
        best = fit.clone().fill_diagonal_(-1.0).amax(1)
        self.swap_tested += own.numel()
        self.swapped += int(((own < 0.6) & (best > 0.9)).sum())

    def _add_moments(self, tokens: ValidTokens) -> None:
        finite = tokens.finite
        train, rollout = (x[finite].double().clamp(-CUT, CUT) for x in (tokens.train, tokens.rollout))
        d, middle = train - rollout, 0.5 * (train + rollout)
        self.moments += torch.stack(
            [
                torch.tensor(float(d.numel()), dtype=torch.float64),
                *(x.sum() for x in (middle, d, middle * middle, d * d, middle * d)),
                *(x.sum() for x in (train, rollout, train * train, rollout * rollout)),
            ]
        )
        self.by_mean.add(probability_bins(middle), d)

    def _add_groups(self, tokens: ValidTokens) -> None:
        finite = tokens.finite
        rollout, d = tokens.rollout[finite], tokens.d[finite]
        starts = tokens.turn_starts
        at = torch.arange(starts.shape[0])
        offset = at - torch.where(starts, at, 0).cummax(0).values if at.numel() else at
        group = torch.where(tokens.turns == 0, FIRST_TURN, offset.clamp(max=OTHER_TURNS))
        self.turns.add(group[finite], rollout, d)
        self.positions.add((tokens.position[finite] + 1).double().log2().long(), rollout, d)
        for name, excess in self.columns.items():
            values = tokens.column(name)
            if values is None:
                continue
            known = values[finite] >= 0
            unique, index = values[finite][known].unique(return_inverse=True)
            seen = self.values[name]
            groups = torch.tensor([seen.setdefault(value, len(seen)) for value in unique.tolist()], dtype=torch.int64)
            if groups.numel():
                excess.add(groups[index], rollout[known], d[known])

    def _add_third(self, tokens: ValidTokens) -> None:
        new = tokens.column("new_logp")
        if new is None:
            return
        new = new.to(tokens.train.dtype)
        use = tokens.finite & new.isfinite()
        train, rollout, new = (x[use].double().clamp(-CUT, CUT) for x in (tokens.train, tokens.rollout, new))
        found = {
            "tokens": float(train.numel()),
            "new_train": float((new - train).abs().sum()),
            "new_rollout": float((new - rollout).abs().sum()),
            "train_rollout": float((train - rollout).abs().sum()),
        }
        self.policies = {name: self.policies.get(name, 0.0) + value for name, value in found.items()}

    @property
    def fit(self) -> dict[str, float]:
        """D against the mean of the two log-probs: correlation and slope; and the spread of both log-probs."""
        n, m, d, m2, d2, md, train, rollout, train2, rollout2 = self.moments.tolist()
        if n < 2:
            return dict.fromkeys(("slope", "correlation", "train_std", "rollout_std", "train_mean", "explained"), 0.0)
        var_m, var_d = m2 / n - (m / n) ** 2, d2 / n - (d / n) ** 2
        covariance = md / n - m * d / n**2
        spread = math.sqrt(max(var_m * var_d, 0.0))
        return {
            "slope": covariance / var_m if var_m > 0 else 0.0,
            "correlation": covariance / spread if spread > 0 else 0.0,
            "train_mean": train / n,
            "train_std": math.sqrt(max(train2 / n - (train / n) ** 2, 0.0)),
            "rollout_std": math.sqrt(max(rollout2 / n - (rollout / n) ** 2, 0.0)),
            "explained": self._explained(),
        }

    def _explained(self) -> float:
        """The part of D's second moment that its mean at each probability makes up."""
        sums = self.by_mean.sums
        count, d, d2 = sums[:, 0], sums[:, 1], sums[:, 3]
        total = float(d2.sum())
        return float((d * d / count.clamp(min=1.0)).sum()) / total if total > 0 else 0.0

    def log_prob_correlation(self) -> float:
        """Pearson correlation of the two log-probs."""
        n, _, _, m2, _, _, train, rollout, train2, rollout2 = self.moments.tolist()
        if n < 2:
            return 0.0
        # m^2 = (t^2 + 2 t r + r^2) / 4, so the sum of t r is known.
        product = 0.5 * (4.0 * m2 - train2 - rollout2)
        variances = (train2 / n - (train / n) ** 2) * (rollout2 / n - (rollout / n) ** 2)
        covariance = product / n - train * rollout / n**2
        return covariance / math.sqrt(variances) if variances > 1e-12 else 0.0


def _correlations(x: Tensor, y: Tensor, owner: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[count] Pearson correlations within each sequence, NaN where one side is constant; and [count] pairs."""

    def total(values: Tensor) -> Tensor:
        return torch.bincount(owner, values, minlength=count)

    n = torch.bincount(owner, minlength=count)
    some = n.clamp(min=1)
    x = x - (total(x) / some)[owner]
    y = y - (total(y) / some)[owner]
    variances = total(x * x) * total(y * y)
    floor = 1e-6 * some.double().square()
    return torch.where(variances > floor, total(x * y) / variances.clamp(min=1e-300).sqrt(), torch.nan), n
