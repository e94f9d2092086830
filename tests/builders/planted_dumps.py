"""Dumps with planted bugs: a small language model samples them, an engine adds noise, and one thing is done wrong.

So ratios, probabilities and their averages relate to one another as they do in a real run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 64

# Standard deviation of the engine's error in a logit, where a case does not say another one.
NOISE = 0.03


class Model:
    """Logits of every token, those of the trainer and those of an engine with a little noise.

    Args:
        seed: Of everything drawn.
        sequences: How many.
        median: Of their lengths, which are lognormal.
        noise: Standard deviation of the engine's error in a logit; None: NOISE.
        smooth: Correlation of a token's certainty with the next one's.
        sure: Mean logarithm of the certainty.
        certainty: Factor of the certainty by position, or None.
    """

    def __init__(
        self,
        seed: int = 0,
        sequences: int = 40,
        median: int = 150,
        noise: float | None = None,
        smooth: float = 0.0,
        sure: float = 1.3,
        certainty: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        lengths = (median * self.normal(sequences).mul(0.4).exp()).clamp(16, 4 * median).long()
        self.lengths, self.count = lengths, int(lengths.sum())
        self.offsets = torch.tensor([0, *lengths.tolist()]).cumsum(0)
        self.owner = torch.arange(sequences).repeat_interleave(lengths)
        self.position = torch.arange(self.count) - self.offsets[self.owner]
        sharpness = self.normal(self.count)
        for i in range(1, self.count if smooth else 0):
            sharpness[i] = smooth * sharpness[i - 1] + math.sqrt(1 - smooth**2) * sharpness[i]
        scale = (sure + 0.7 * sharpness).exp()
        if certainty is not None:
            scale = scale * certainty(self.position, self.owner)
        self.logits = self.normal(self.count, VOCABULARY) * scale[:, None]
        self.engine = self.logits + (NOISE if noise is None else noise) * self.normal(self.count, VOCABULARY)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def sample(self, logp: Tensor) -> Tensor:
        return torch.multinomial(logp.exp(), 1, generator=self.generator).squeeze(1)

    def columns(self, sampled: Tensor, train: Tensor, rollout: Tensor, **more: Tensor) -> dict[str, Tensor]:
        """Make a dump of sampled tokens from log-probs of the whole vocabulary, [tokens, VOCABULARY]."""
        return {
            "train_logp": at(train, sampled),
            "rollout_logp": at(rollout, sampled),
            "token_ids": sampled,
            "cu_seqlens": self.offsets,
            **more,
        }

    def sampled(self, train: Tensor, rollout: Tensor | None = None, **more: Tensor) -> dict[str, Tensor]:
        """Make a dump of tokens that the engine sampled, or a policy of these log-probs, and logits of the trainer."""
        rollout = self.engine.log_softmax(1) if rollout is None else rollout
        return self.columns(self.sample(rollout), train.log_softmax(1), rollout, **more)

    def healthy(self, **more: Tensor) -> dict[str, Tensor]:
        """Make a dump with the engine's noise and no bug."""
        return self.sampled(self.logits, **more)

    def changed(self, side: str, change: Callable[[Tensor], Tensor], **more: Tensor) -> dict[str, Tensor]:
        """Make a healthy dump, and change the log-probs of one side."""
        columns = self.healthy(**more)
        return columns | {side: change(columns[side])}

    def updated(self, step: float | Tensor) -> Tensor:
        """Return logits of a trainer that is some updates ahead: noise of this standard deviation, in each token's."""
        return self.logits + step * self.normal(self.count, VOCABULARY)

    def in_some(self, share: float) -> Tensor:
        """Choose a share of the sequences; return [tokens] bool."""
        return (self.uniform(len(self.lengths)) < share)[self.owner]


def at(logp: Tensor, sampled: Tensor) -> Tensor:
    return logp.gather(-1, sampled[..., None]).squeeze(-1)


def truncated(logits: Tensor, top_p: float = 1.0, top_k: int = VOCABULARY) -> Tensor:
    """Return renormalized log-probs after top-k and top-p."""
    logp = logits.log_softmax(1)
    ordered, order = logp.sort(1, descending=True)
    before = ordered.exp().cumsum(1) - ordered.exp()
    keep = (before < top_p) & (torch.arange(VOCABULARY) < top_k)
    kept = torch.zeros_like(keep).scatter_(1, order, keep)
    return logp.masked_fill(~kept, -torch.inf).log_softmax(1)


# --- the log-probs are of different distributions


def renormalized(
    seed: int, with_mass: bool = False, certainty: Callable[[Tensor, Tensor], Tensor] | None = None, **limits: Any
) -> dict[str, Tensor]:
    model = Model(seed, certainty=certainty)
    rollout = truncated(model.engine, **limits)
    sampled = model.sample(rollout)
    mass = {"log_mass": at(model.engine.log_softmax(1), sampled) - at(rollout, sampled)} if with_mass else {}
    return model.columns(sampled, model.logits.log_softmax(1), rollout, **mass)


def temperature(seed: int, engine: float, reported: float, trainer: float) -> dict[str, Tensor]:
    model = Model(seed)
    sampled = model.sample((model.engine / engine).log_softmax(1))
    return model.columns(sampled, (model.logits / trainer).log_softmax(1), (model.engine / reported).log_softmax(1))


def raw(seed: int, sampled_at: float = 1.0, top_p: float = 1.0) -> dict[str, Tensor]:
    """Give raw log-probs on both sides, and the entropy of the policy that they are of, whatever sampled."""
    model = Model(seed)
    sampled = model.sample(truncated(model.engine / sampled_at, top_p=top_p))
    train, rollout = model.logits.log_softmax(1), model.engine.log_softmax(1)
    return model.columns(sampled, train, rollout, entropy=-(train.exp() * train).sum(1))


def updated(seed: int, step: float, **model_arguments: Any) -> dict[str, Tensor]:
    """Put the trainer some updates ahead."""
    model = Model(seed, **model_arguments)
    return model.sampled(model.updated(step))


def flattened(seed: int, noise: float, scale: float) -> dict[str, Tensor]:
    """Perturb a trained model, which makes it less sure: an adapter on one side, attention across samples."""
    model = Model(seed)
    other = scale * model.logits + noise * model.normal(model.count, VOCABULARY) * model.logits.std(1, keepdim=True) / 3
    return model.sampled(other)


def sharpened(seed: int, factor: float) -> dict[str, Tensor]:
    """Make the trainer surer of the likeliest token in some contexts, as training does."""
    model = Model(seed)
    some = (model.uniform(model.count) < 0.3).float()[:, None]
    likeliest = torch.nn.functional.one_hot(model.logits.argmax(1), VOCABULARY)
    return model.sampled(model.logits + factor * some * likeliest)


def rare_tokens_biased(seed: int, bias: float) -> dict[str, Tensor]:
    """Let the engine overrate rare tokens, as low precision does."""
    model = Model(seed)
    logp = model.engine.log_softmax(1)
    rollout = (logp + bias * (1.0 - logp.exp()) * model.normal(model.count, VOCABULARY).abs()).log_softmax(1)
    return model.sampled(model.logits, rollout)


def other_weights(seed: int, **model_arguments: Any) -> dict[str, Tensor]:
    model = Model(seed, **model_arguments)
    return model.sampled(model.logits[torch.randperm(model.count, generator=model.generator)])


def untrained_head(seed: int) -> dict[str, Tensor]:
    model = Model(seed)
    return model.sampled(0.05 * model.normal(model.count, VOCABULARY))


def coarse(seed: int) -> dict[str, Tensor]:
    """Make unrelated policies whose log-probs have few different values."""
    columns = other_weights(seed)
    return columns | {name: columns[name].mul(2.0).round().div(2.0) for name in ("train_logp", "rollout_logp")}


# --- the log-probs are of different tokens


def shifted(seed: int, by: int, share: float = 1.0, **model_arguments: Any) -> dict[str, Tensor]:
    model = Model(seed, **model_arguments)
    return model.changed("rollout_logp", lambda x: torch.where(model.in_some(share), x.roll(by), x))


def swapped(seed: int) -> dict[str, Tensor]:
    """Shuffle the rows of a padded batch on one side."""
    model = Model(seed, median=100)
    columns = model.healthy()
    width = int(model.lengths.max())
    rows = len(model.lengths)
    padded = {}
    inside = torch.arange(width) < model.lengths[:, None]
    for name in ("train_logp", "rollout_logp"):
        padded[name] = model.normal(rows, width).abs().neg().masked_scatter(inside, columns[name])
    padded["rollout_logp"] = padded["rollout_logp"][torch.randperm(rows, generator=model.generator)]
    return padded


def reordered(seed: int, order: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Put the trainer's log-probs of each sequence into another order."""
    model = Model(seed)
    return model.changed("train_logp", lambda x: torch.cat([order(row) for row in x.split(model.lengths.tolist())]))


def zigzag(row: Tensor) -> Tensor:
    """Deal the quarters of a sequence to two ranks, and join those of each rank."""
    a, b, c, d, *rest = row.split(max(1, len(row) // 4))
    return torch.cat([a, d, b, c, *rest])


def chunks_reversed(row: Tensor) -> Tensor:
    """Join chunks of 8 tokens that arrive backwards."""
    return torch.cat([chunk.flip(0) for chunk in row.split(8)])


def siblings(seed: int) -> dict[str, Tensor]:
    """Let groups of four samples begin with the same hundred tokens, as a common prompt would."""
    model = Model(seed, median=200)
    columns = model.healthy()
    first = model.offsets[:-1][torch.arange(len(model.lengths)) // 4 * 4][model.owner] + model.position
    common = (model.position < 100) & (first < model.count)
    for name in ("train_logp", "rollout_logp"):
        columns[name] = torch.where(common, columns[name][first.clamp(max=model.count - 1)], columns[name])
    return columns


def retokenized(seed: int, tokens: int, harder: float | None = None, first: bool = False) -> dict[str, Tensor]:
    """Make turns of 30 tokens, with 10 of a tool between them, whose first tokens the trainer reads as others."""

    def start_of(position: Tensor) -> Tensor:
        return (position % 40 < 3) & (position >= 40)

    def certainty(position: Tensor, _: Tensor) -> Tensor:
        return torch.where(start_of(position), harder, 5.0)

    model = Model(seed, certainty=None if harder is None else certainty)
    columns = model.healthy(mask=model.position % 40 < 30)
    begin = (model.position % 40 < tokens) & ((model.position >= 40) | first)
    if first:
        begin &= model.position < 40
    wrong = model.normal(model.count, VOCABULARY) * 3.0
    wrong_logp = at(wrong.log_softmax(1), columns["token_ids"])
    columns["train_logp"] = torch.where(begin, wrong_logp, columns["train_logp"])
    return columns


def other_context(seed: int) -> dict[str, Tensor]:
    """Make turns of 30 tokens; the trainer reads all but the first behind other text."""
    model = Model(seed)
    columns = model.healthy(mask=model.position % 40 < 30)
    other = model.logits[torch.randperm(model.count, generator=model.generator)]
    later = at(other.log_softmax(1), columns["token_ids"])
    columns["train_logp"] = torch.where(model.position >= 40, later, columns["train_logp"])
    return columns


# --- the values are no log-probs


def padded(
    seed: int, left: bool = False, hidden: bool = False, value: float = 0.0, **model_arguments: Any
) -> dict[str, Tensor]:
    """Pad a healthy batch with zeros, or another value, with or without the mask that hides them."""
    model = Model(seed, **model_arguments)
    columns = model.healthy()
    place = torch.arange(int(model.lengths.max()))
    inside = (place.flip(0) if left else place) < model.lengths[:, None]
    found = {
        name: torch.full(inside.shape, value).masked_scatter(inside, columns[name])
        for name in ("train_logp", "rollout_logp")
    }
    return found | ({"mask": inside} if hidden else {})


def certain_ends(seed: int, tokens: int, length: int = 0) -> dict[str, Tensor]:
    """End sequences with some certain tokens, of probability 1 in float32; 0: sequences of any lengths."""
    model = Model(seed, sequences=60)
    columns = model.healthy()
    left = model.lengths[model.owner] - model.position
    run = 1 + (tokens * 2 * model.uniform(len(model.lengths))).long()
    for name in ("train_logp", "rollout_logp"):
        columns[name] = torch.where(left <= run[model.owner], 0.0, columns[name])
    if length:
        use = (model.lengths >= length)[model.owner] & (left <= length)
        columns = {name: columns[name][use].view(-1, length) for name in ("train_logp", "rollout_logp")}
    return columns


def filled(seed: int, value: float, share: float = 0.1, side: str = "rollout_logp") -> dict[str, Tensor]:
    """Fill runs of ten valid tokens with one value."""
    model = Model(seed)

    def runs() -> Tensor:
        return (model.uniform(model.count // 10 + 1) < share).repeat_interleave(10)[: model.count]

    return model.changed(side, lambda x: torch.where(runs(), value, x))


def broken(seed: int, rows: float = 0.0, tokens: float = 0.0, masked: bool = False) -> dict[str, Tensor]:
    model = Model(seed)
    columns = model.healthy()
    bad = model.in_some(rows) | (model.uniform(model.count) < tokens)
    columns["train_logp"] = torch.where(bad, math.nan, columns["train_logp"])
    if masked:
        columns["mask"] = ~bad
    return columns


def not_logs(seed: int, change: Callable[[Tensor], Tensor], side: str = "rollout_logp") -> dict[str, Tensor]:
    return Model(seed).changed(side, change)


def in_bfloat16(seed: int, side: str = "rollout_logp") -> dict[str, Tensor]:
    return not_logs(seed, lambda logp: logp.bfloat16().float(), side)


def partly_bfloat16(seed: int) -> dict[str, Tensor]:
    model = Model(seed)
    some = partial(model.uniform, model.count)
    return model.changed("rollout_logp", lambda x: torch.where(some() < 0.1, x.bfloat16().float(), x))


def copied(seed: int, share: float = 1.0) -> dict[str, Tensor]:
    model = Model(seed)
    columns = model.healthy()
    same = model.uniform(model.count) < share
    columns["train_logp"] = torch.where(same, columns["rollout_logp"], columns["train_logp"])
    return columns


# --- the mismatch grows


def over(seed: int, noise: Callable[[Model], Tensor], **model_arguments: Any) -> tuple[Model, dict[str, Tensor]]:
    """Add noise to every logit of the trainer, of a size that depends on the token."""
    model = Model(seed, **model_arguments)
    rollout = model.engine.log_softmax(1)
    train = model.updated(noise(model)[:, None])
    return model, model.columns(model.sample(rollout), train.log_softmax(1), rollout)


def over_steps(seed: int, noise: Callable[[Tensor], Tensor], steps: int = 20, **more: object) -> dict[str, Tensor]:
    _, columns = over(seed, lambda model: noise(model.owner * steps // 80), sequences=80, median=80, **more)
    columns["steps"] = torch.arange(80) * steps // 80
    return columns


def over_positions(seed: int, noise: Callable[[Tensor], Tensor], **more: object) -> dict[str, Tensor]:
    return over(seed, lambda model: noise(model.position.double()).float(), median=400, sequences=20, **more)[1]


def over_versions(seed: int, noise: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Make tokens of four weight versions; the last one is the trainer's."""

    def version(model: Model) -> Tensor:
        return model.owner % 4

    model, columns = over(seed, lambda model: noise(3.0 - version(model)))
    columns["versions"] = 100 + version(model)
    return columns


def long_sequences(seed: int, median: int, noise: float, bias: float) -> dict[str, Tensor]:
    """Make long sequences directly from D: a whole vocabulary for each token would take too long."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (median * torch.randn(12, generator=generator).mul(0.2).exp()).long()
    n = int(lengths.sum())
    rollout = -torch.empty(n).exponential_(generator=generator)
    d = (noise * torch.randn(n, generator=generator) - bias) * (1.0 - rollout.exp())
    return {"train_logp": rollout + d, "rollout_logp": rollout, "lengths": lengths}


# --- three policies


def three(seed: int, engine: float, again: float, first: float = 0.0) -> dict[str, Tensor]:
    """Add a second pass of the trainer, with noise of its own, as the first pass may have."""
    model = Model(seed, noise=engine)
    columns = model.healthy()
    if first:
        columns["train_logp"] = at(model.updated(first).log_softmax(1), columns["token_ids"])
    return columns | {"new_logp": at(model.updated(again).log_softmax(1), columns["token_ids"])}


# --- two bugs at once, few broken tokens, one part of several


def mixed(
    seed: int, engine: float = 1.0, trainer: float = 1.0, step: float = 0.0, top_p: float = 1.0
) -> dict[str, Tensor]:
    """Sample with a temperature and a top-p, and put the trainer some updates ahead and at a temperature of its own."""
    model = Model(seed)
    rollout = truncated(model.engine / engine, top_p=top_p)
    return model.sampled(model.updated(step) / trainer, rollout)


def old_and_sharp(seed: int, engine: float) -> dict[str, Tensor]:
    """Make four weight versions, the older the further off, sampled at a temperature that the trainer does not have."""
    model = Model(seed)
    version = model.owner % 4
    rollout = (model.engine / engine).log_softmax(1)
    train = model.updated((0.02 + 0.4 * (3 - version)).float()[:, None])
    return model.sampled(train, rollout, versions=100 + version)


def every_other(seed: int, noise: float, **model_arguments: int) -> dict[str, Tensor]:
    """Give every other sequence an engine of older weights."""
    return over(seed, lambda model: torch.where(model.owner % 2 == 0, 0.02, noise), **model_arguments)[1]


def penalized(seed: int, penalty: float) -> dict[str, Tensor]:
    """Lower the engine's logits of tokens that the sequence had before."""
    model = Model(seed)
    sampled = torch.empty(model.count, dtype=torch.int64)
    had = torch.zeros(len(model.lengths), VOCABULARY)
    for at_position in range(int(model.lengths.max())):
        row = (model.lengths > at_position).nonzero().squeeze(1)
        slot = model.offsets[row] + at_position
        model.engine[slot] -= penalty * had[row]
        sampled[slot] = model.sample(model.engine[slot].log_softmax(1))
        had[row, sampled[slot]] = 1.0
    return model.columns(sampled, model.logits.log_softmax(1), model.engine.log_softmax(1))


def off_tokens(seed: int, by: float, share: float = 0.0, count: int = 0) -> dict[str, Tensor]:
    """Move some tokens of the trainer: a share of all, or a few at the start of one sequence."""
    model = Model(seed, sequences=300, median=80)
    few = (model.owner == 3) & (model.position < count)
    return model.changed("train_logp", lambda x: torch.where((model.uniform(model.count) < share) | few, x + by, x))


def scaled(seed: int, change: Callable[[Tensor, Tensor], Tensor], side: str) -> dict[str, Tensor]:
    """Change the log-probs of one side by a function of them and of the length of their sequence."""
    model = Model(seed)
    return model.changed(side, lambda x: change(x, model.lengths[model.owner].float()))


RANKS = 8


def part(seed: int, bug: Callable[[Model, dict[str, Tensor]], Tensor], block: bool = False) -> dict[str, Tensor]:
    """Let a bug change the rollout log-probs of one rank of eight: every eighth sequence, or a block of them."""
    model = Model(seed, sequences=80, median=100)
    columns = model.healthy()
    rank = model.owner // (80 // RANKS) if block else model.owner % RANKS
    columns["rollout_logp"] = torch.where(rank == 5, bug(model, columns), columns["rollout_logp"])
    return columns


def of_others(model: Model, columns: dict[str, Tensor]) -> Tensor:
    other = model.engine[torch.randperm(model.count, generator=model.generator)]
    return at(other.log_softmax(1), columns["token_ids"])


def bad_replica(model: Model, columns: dict[str, Tensor]) -> Tensor:
    noisy = model.engine + 0.8 * model.normal(model.count, VOCABULARY)
    return at(noisy.log_softmax(1), columns["token_ids"])


def garbage(seed: int, sequences: int, among: int) -> dict[str, Tensor]:
    """Give some sequences the log-probs of random text."""
    model = Model(seed, sequences=among, median=80)

    def change(x: Tensor) -> Tensor:
        random = -model.uniform(model.count) * 12.0
        return torch.where(
            torch.isin(model.owner, torch.randperm(among, generator=model.generator)[:sequences]), random, x
        )

    return model.changed("rollout_logp", change)


def masked_everywhere(seed: int) -> dict[str, Tensor]:
    model = Model(seed)
    return model.healthy(mask=torch.zeros(model.count, dtype=torch.bool))
