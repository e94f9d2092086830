"""Dumps with two bugs at once, with a bug in some of their sequences, and with few broken tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from builders.planted_dumps import VOCABULARY, Model, at, over, truncated


def mixed(
    seed: int, engine: float = 1.0, trainer: float = 1.0, step: float = 0.0, top_p: float = 1.0
) -> dict[str, Tensor]:
    """Sample with a temperature and a top-p, and put the trainer some updates ahead and at a temperature of its own."""
    model = Model(seed)
    rollout = truncated(model.engine / engine, top_p=top_p)
    return model.sampled((model.logits + step * model.normal(model.count, VOCABULARY)) / trainer, rollout)


def old_and_sharp(seed: int, engine: float) -> dict[str, Tensor]:
    """Make four weight versions, the older the further off, sampled at a temperature that the trainer does not have."""
    model = Model(seed)
    version = model.owner % 4
    rollout = (model.engine / engine).log_softmax(1)
    noise = (0.02 + 0.4 * (3 - version)).float()
    train = model.logits + noise[:, None] * model.normal(model.count, VOCABULARY)
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
    columns = model.healthy()
    some = model.uniform(model.count) < share
    some |= (model.owner == 3) & (model.position < count)
    columns["train_logp"] = torch.where(some, columns["train_logp"] + by, columns["train_logp"])
    return columns


def scaled(seed: int, change: Callable[[Tensor, Tensor], Tensor], side: str) -> dict[str, Tensor]:
    """Change the log-probs of one side by a function of them and of the length of their sequence."""
    model = Model(seed)
    columns = model.healthy()
    return columns | {side: change(columns[side], model.lengths[model.owner].float())}


# --- one part of several

RANKS = 8


def part(
    seed: int, bug: Callable[[Model, dict[str, Tensor], Tensor], Tensor], block: bool = False
) -> dict[str, Tensor]:
    """Let a bug change the rollout log-probs of one rank of eight: every eighth sequence, or a block of them."""
    model = Model(seed, sequences=80, median=100)
    columns = model.healthy()
    rank = model.owner // (80 // RANKS) if block else model.owner % RANKS
    columns["rollout_logp"] = torch.where(rank == 5, bug(model, columns, rank), columns["rollout_logp"])
    return columns


def shift(model: Model, columns: dict[str, Tensor], rank: Tensor) -> Tensor:
    return columns["rollout_logp"].roll(1)


def no_numbers(model: Model, columns: dict[str, Tensor], rank: Tensor) -> Tensor:
    return torch.full_like(columns["rollout_logp"], math.nan)


def other_weights(model: Model, columns: dict[str, Tensor], rank: Tensor) -> Tensor:
    other = model.engine[torch.randperm(model.count, generator=model.generator)]
    return at(other.log_softmax(1), columns["token_ids"])


def bad_replica(model: Model, columns: dict[str, Tensor], rank: Tensor) -> Tensor:
    noisy = model.engine + 0.8 * model.normal(model.count, VOCABULARY)
    return at(noisy.log_softmax(1), columns["token_ids"])


def halved(model: Model, columns: dict[str, Tensor], rank: Tensor) -> Tensor:
    return 0.5 * columns["rollout_logp"]


def garbage(seed: int, sequences: int, among: int) -> dict[str, Tensor]:
    """Give some sequences the log-probs of random text."""
    model = Model(seed, sequences=among, median=80)
    columns = model.healthy()
    random = -model.uniform(model.count) * 12.0
    bad = (torch.randperm(among, generator=model.generator)[:sequences][:, None] == model.owner).any(0)
    columns["rollout_logp"] = torch.where(bad, random, columns["rollout_logp"])
    return columns


def masked_everywhere(seed: int) -> dict[str, Tensor]:
    model = Model(seed)
    return model.healthy(mask=torch.zeros(model.count, dtype=torch.bool))
