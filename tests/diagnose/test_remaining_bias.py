"""The bias that remains, for policies whose every sequence can be listed, so that each mean is known exactly."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from rollout_corr.diagnose.read.chunk import Chunk, ValidTokens
from rollout_corr.diagnose.remaining_bias import NORMAL_95, RemainingBias, norm_of

VOCABULARY, LONGEST = 4, 5
SETTINGS = {
    "none": rc.Spec(),
    "truncated": rc.Spec(rc.Weight.token(upper=1.2)),
    "icepop": rc.Spec(rc.Weight.token(lower=0.8, upper=1.25, outside="zero")),
    "geometric": rc.Spec(None, (rc.Criterion("ratio", "sequence", "mean", 1 / 1.1, 1.1),)),
    "product": rc.Spec(rc.Weight.product(upper=1.2)),
    "exact": rc.Spec(rc.Weight.token()),
}


class Policies:
    """An engine and a trainer with a table of log-probs for every prefix; token 0 ends a sequence."""

    def __init__(self, seed, noise):
        generator = torch.Generator().manual_seed(seed)
        self.engine, self.trainer, self.advantages = [], [], []

        def grow(prefix, engine, trainer):
            if prefix and (prefix[-1] == 0 or len(prefix) == LONGEST):
                self.engine.append(engine)
                self.trainer.append(trainer)
                self.advantages.append([float(sum(prefix) % 3 - 1)] * len(prefix))
                return
            logits, apart = torch.randn(2, VOCABULARY, generator=generator, dtype=torch.float64)
            tables = [x.log_softmax(0).tolist() for x in (logits, logits + noise * apart)]
            for token in range(VOCABULARY):
                grow((*prefix, token), [*engine, tables[0][token]], [*trainer, tables[1][token]])

        grow((), [], [])
        self.shares = torch.tensor([math.exp(sum(logps)) for logps in self.engine], dtype=torch.float64)
        assert float(self.shares.sum()) == pytest.approx(1.0)

    def tokens(self, sequences):
        """The valid tokens of a chunk of sequences, by their numbers."""

        def packed(of):
            return torch.tensor([x for i in sequences for x in of[i]], dtype=torch.float64)

        offsets = torch.tensor([0, *(len(self.engine[i]) for i in sequences)]).cumsum(0)
        columns = {"advantages": packed(self.advantages)}
        chunk = Chunk(packed(self.trainer), packed(self.engine), None, offsets, offsets[1:], "x", columns)
        return ValidTokens.of(chunk)

    def biases(self):
        """The bias of every setting: sums over all sequences, each by its probability."""
        tokens = self.tokens(range(len(self.engine)))
        share = self.shares[tokens.owner]
        lengths = tokens.lengths[tokens.owner].double()
        mean = (torch.bincount(tokens.owner, tokens.rollout) / tokens.lengths)[tokens.owner]
        f = torch.stack([tokens.rollout, mean, lengths.log(), tokens.column("advantages")])
        f = f - (share * f).sum(1, keepdim=True) / share.sum()
        spread = (share * f) @ f.T / share.sum()
        found = {}
        for name, weights in applied(tokens).items():
            ratio = ratios_of(tokens)["product" if name == "product" else "token"]
            one, exact = ((f * share * w).sum(1) / (share * w).sum() for w in (weights, ratio))
            found[name] = math.sqrt(float((one - exact) @ torch.linalg.solve(spread, one - exact)))
        return found

    def drawn(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        return self.tokens(torch.multinomial(self.shares, count, True, generator=generator).tolist())


def ratios_of(tokens):
    totals = torch.bincount(tokens.owner, tokens.d.double(), minlength=tokens.lengths.shape[0])
    return {"token": tokens.d.exp(), "product": totals.exp()[tokens.owner]}


def applied(tokens, names=tuple(SETTINGS)):
    """The weights of settings, 0 where a token is rejected."""
    offsets = tokens.chunk.offsets
    outs = {n: rc.correct(tokens.train, tokens.rollout, cu_seqlens=offsets, spec=SETTINGS[n]) for n in names}
    return {n: out.mask.double() if out.weights is None else out.weights * out.mask for n, out in outs.items()}


def estimated(tokens, names=tuple(SETTINGS)):
    ratios = ratios_of(tokens)
    biases = RemainingBias(len(names), ("token", "product"))
    functions = biases.begin(tokens, ratios)
    for i, weights in enumerate(applied(tokens, names).values()):
        biases.add(i, functions, weights)
    return {name: biases.bias(i, "product" if name == "product" else "token") for i, name in enumerate(names)}


def covered(policies, count, seeds, names):
    """How often the interval of each setting holds its bias, and how often it ends above 0."""
    truth = policies.biases()
    held, above = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for seed in range(seeds):
        for name, found in estimated(policies.drawn(count, 1000 + seed), names).items():
            held[name] += found.low <= truth[name] <= found.high
            above[name] += found.low > 0.0
    return held, above


def test_intervals_hold_the_bias():
    """57 of 60 are expected; fewer than 51 have a probability of 0.2 %. They are not so wide that they hold 0."""
    held, above = covered(Policies(1, 0.3), 250, 60, ("icepop", "geometric"))
    assert min(held.values()) >= 51, held
    assert min(above.values()) >= 55, above


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.03, 0.15, 0.5])
def test_intervals_of_95_percent_hold_the_bias_in_95_percent(noise):
    """95 +- 2 %, and the error of 600 draws, 0.9 %. Measured: 93 to 96 %, the least at a k3 beyond the alarm."""
    names = tuple(name for name, bias in Policies(1, noise).biases().items() if bias > 1e-9)
    held, _ = covered(Policies(1, noise), 1000, 600, names)
    assert all(0.93 - 0.009 <= hits / 600 <= 0.97 + 0.009 for hits in held.values()), held


def test_the_estimate_is_the_bias_of_the_whole():
    """Many sequences: each estimate is as near as its interval says, exact ratios have no bias, and chunks add up."""
    policies = Policies(2, 0.5)
    truth, found = policies.biases(), estimated(policies.drawn(5_000, 0))
    for name, bias in found.items():
        assert bias.low - 1e-9 <= bias.value <= bias.high
        assert abs(bias.value - truth[name]) <= 2.0 * (bias.high - bias.low) + 1e-9, name
        assert bias.high - bias.low < 0.2, name
    assert found["exact"] == (0.0, 0.0, 0.0) and truth["exact"] == 0.0
    assert truth["none"] > 0.02 and truth["icepop"] > 0.1


def test_noise_is_no_bias_and_a_common_factor_neither():
    """Weights of 1 where ratios are noise; ratios that follow the log-prob; half of every weight."""
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(400 * 50, generator=generator, dtype=torch.float64)
    noise = 0.05 * torch.randn(rollout.shape, generator=generator, dtype=torch.float64)
    offsets = torch.arange(0, 400 * 50 + 1, 50)
    found = []
    for train in (rollout + noise, rollout + 0.2 * rollout):
        tokens = ValidTokens.of(Chunk(train, rollout, None, offsets, offsets[1:], "x"))
        biases = RemainingBias(2, ("token",))
        functions = biases.begin(tokens, {"token": tokens.d.exp()})
        biases.add(0, functions, torch.ones_like(rollout))
        biases.add(1, functions, torch.full_like(rollout, 0.5))
        found.append(biases.bias(0, "token"))
        assert biases.bias(1, "token") == pytest.approx(found[-1])
    assert found[0].low == 0.0 and found[0].high < 2e-3
    # The standard deviation of the log-prob is 1 / sqrt(12), and that of D a fifth of it.
    assert found[1].value == pytest.approx(0.2 / math.sqrt(12), rel=0.05) and found[1].low > 0.05


SAME = {
    "one token less in one of many": [512] * 127 + [511],
    "one token less in one of a few": [20_000] * 15 + [19_999],
    "equal lengths": [64] * 40,
    "one sequence": [50],
    "two sequences": [50, 49],
}


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("lengths", SAME.values(), ids=SAME)
@pytest.mark.parametrize("chunks", [1, 2])
def test_functions_that_hardly_differ_leave_a_finite_bias(lengths, constant, chunks):
    """Most replicates lack the odd sequence: the variance of its function there is rounding, of either sign."""
    generator = torch.Generator().manual_seed(0)
    biases = RemainingBias(1, ("token",))
    half = -(-len(lengths) // chunks)
    for part in filter(None, (lengths[:half], lengths[half:])):
        rollout = torch.full((sum(part),), -0.7)
        if not constant:
            rollout = -torch.rand(rollout.shape, generator=generator)
        train = rollout + 0.05 * torch.randn(rollout.shape, generator=generator)
        offsets = torch.tensor([0, *part]).cumsum(0)
        tokens = ValidTokens.of(Chunk(train, rollout, None, offsets, offsets[1:], "x"))
        biases.add(0, biases.begin(tokens, {"token": tokens.d.exp()}), torch.ones_like(rollout))
    bias = biases.bias(0, "token")
    assert 0.0 <= bias.low <= bias.value <= bias.high < 0.5


def test_all_rejected_has_no_bias_to_tell():
    tokens = Policies(0, 0.1).drawn(10, 0)
    biases = RemainingBias(1, ("token",))
    biases.add(0, biases.begin(tokens, ratios_of(tokens)), torch.zeros_like(tokens.d))
    assert biases.bias(0, "token") == (math.inf,) * 3


def test_the_interval_is_that_of_its_score():
    """One component: the ends are where the squared estimate is NORMAL_95 of its standard deviations away."""
    replicates = torch.tensor([[-1.0], [1.0], [-1.0], [1.0]], dtype=torch.float64)
    v = 4.0 / 3.0
    for estimate in (0.0, 1.0, 3.0, 10.0):
        found = norm_of(torch.tensor([estimate], dtype=torch.float64), replicates)
        assert found.value == pytest.approx(math.sqrt(max(0.0, estimate**2 - v)))
        for end in (found.low, found.high):
            if end > 0.0:
                deviation = math.sqrt(4.0 * v * end**2 + 2.0 * v**2) if estimate else math.sqrt(2.0) * v
                assert abs(estimate**2 - end**2 - v) == pytest.approx(NORMAL_95 * deviation)
