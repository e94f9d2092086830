"""Bugs planted in the small loop of `builders.small_loop`, each at several sizes from hardly visible to gross."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from builders.planted_dumps import at
from builders.small_loop import ANSWER, BEGIN, EMPTY, PROMPT, ROW, Columns, Loop, answers_of

ROWS = 128


class Bug(NamedTuple):
    """A bug.

    Attributes:
        name: Its description.
        causes: The causes of `doctor` that name it.
        make: Makes columns from a loop and a size.
        sizes: From the smallest, with what they measure.
        unit: What a size is.
        blind: Why nothing can see it; empty where something can.
    """

    name: str
    causes: tuple[str, ...]
    make: Callable[[Loop, Any], Columns]
    sizes: tuple[Any, ...]
    unit: str
    blind: str = ""


# --- masks


def forgotten(loop: Loop, padding: float, zeros: bool = True) -> Columns:
    """Leave the mask out; the trainer's padding holds 0 as the engine's, or log-probs of the padding token."""
    sampled = loop.sampled()
    columns = loop.scored(sampled)
    mask = columns.pop("mask")
    if not zeros:
        columns["train_logp"] = at(answers_of(loop.policy, sampled.rows), sampled.rows[:, PROMPT:])
    length = mask.sum(1)
    cut = next(n for n in range(ANSWER, 0, -1) if 1 - length.clamp(max=n).float().mean() / n <= padding)
    tokens = int(length.clamp(max=cut).sum())
    width = min(ANSWER, round(tokens / ((1.0 - padding) * len(mask))))
    kept = mask[:, :width] & (torch.arange(width) < cut)
    if zeros:
        return {name: x[:, :width] * kept for name, x in columns.items()}
    return {"train_logp": columns["train_logp"][:, :width], "rollout_logp": columns["rollout_logp"][:, :width] * kept}


def whole_rows(loop: Loop) -> Columns:
    """Score prompt and answer as a trainer does that keeps both; the engine has no log-probs of the prompt."""
    sampled = loop.sampled()
    logp = at(loop.policy(sampled.rows[:, :-1]), sampled.rows[:, 1:])
    prompt = torch.zeros(len(logp), PROMPT - 1)
    masks = (prompt.bool(), sampled.mask)
    return {"train_logp": logp, "rollout_logp": torch.cat([prompt, sampled.rollout], 1), "mask": torch.cat(masks, 1)}


def mask_moved(loop: Loop, share: float, by: int) -> Columns:
    columns = whole_rows(loop)
    return columns | {"mask": columns["mask"].roll(by, 1).where(loop.some(share), columns["mask"])}


def prompt_unmasked(loop: Loop, tokens: int) -> Columns:
    columns = whole_rows(loop)
    columns["mask"][:, PROMPT - 1 - tokens : PROMPT - 1] = True
    return columns


# --- values of other tokens


def end_missing(loop: Loop, share: float) -> Columns:
    columns = loop.healthy()
    last = columns["mask"] & (columns["mask"].cumsum(1) == columns["mask"].sum(1, keepdim=True))
    return columns | {"rollout_logp": columns["rollout_logp"].masked_fill(last & loop.some(share), 0.0)}


def shifted(loop: Loop, share: float, by: int) -> Columns:
    columns = loop.healthy()
    moved = columns["rollout_logp"].roll(by, 1).where(loop.some(share), columns["rollout_logp"])
    return columns | {"rollout_logp": moved * columns["mask"]}


def gathered(loop: Loop, share: float) -> Columns:
    """Look the tokens up in the trainer's distribution of the next position."""
    sampled = loop.sampled()
    columns = loop.scored(sampled)
    logp = at(answers_of(loop.policy, sampled.rows).roll(-1, 1), sampled.rows[:, PROMPT:]) * sampled.mask
    return columns | {"train_logp": logp.where(loop.some(share), columns["train_logp"])}


def shuffled(loop: Loop, share: float) -> Columns:
    columns = loop.healthy()
    rows = loop.some(share).squeeze(1).nonzero().squeeze(1)
    order = torch.arange(ROWS)
    order[rows] = rows.roll(1)
    return columns | {"rollout_logp": columns["rollout_logp"][order] * columns["mask"]}


# --- other distributions


def sharper(loop: Loop, temperature: float, trainer: bool = False) -> Columns:
    if trainer:
        return loop.scored(loop.sampled(), temperature)
    return loop.scored(loop.sampled(temperature=temperature))


def raw(loop: Loop, temperature: float, entropy: bool = False) -> Columns:
    """Sample at a temperature, while both sides report log-probs without it."""
    sampled = loop.sampled(temperature=temperature, raw=True)
    logp = answers_of(loop.policy, sampled.rows)
    more = {"entropy": -(logp.exp() * logp).sum(-1) * sampled.mask} if entropy else {}
    return loop.scored(sampled) | more


def cut_off(loop: Loop, limit: float) -> Columns:
    limits = {"top_p": limit} if limit < 1 else {"top_k": limit}
    return loop.scored(loop.sampled(**limits))


def stale(loop: Loop, age: int, versions: bool = False) -> Columns:
    """Sample from older weights: all of one age, or groups of ages from 0 to this one whose versions are given."""
    last = len(loop.past) - 1
    if not versions:
        return loop.scored(loop.sampled(loop.engine("bf16", loop.past[last - age])))
    parts = []
    for lag in (0, age // 3, 2 * age // 3, age):
        part = loop.scored(loop.sampled(loop.engine("bf16", loop.past[last - lag]), rows=ROWS // 4))
        parts.append(part | {"versions": torch.full((ROWS // 4,), last - lag)})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def not_loaded(loop: Loop, names: tuple[str, ...]) -> Columns:
    engine, fresh = copy.deepcopy(loop.policy), loop.fresh.state_dict()
    held = {name: fresh[name] if name.startswith(names) else x for name, x in engine.state_dict().items()}
    engine.load_state_dict(held)
    return loop.scored(loop.sampled(loop.engine("bf16", engine)))


def head_lost(loop: Loop, share: float) -> Columns:
    """Take rows of the engine's head from the embedding in place of the trained head, as a wrong tie does."""
    engine = copy.deepcopy(loop.policy)
    rows = slice(int((1.0 - share) * len(engine.head.weight)), None)
    engine.head.weight.data[rows] = engine.token.weight.data[rows] * 0.1
    return loop.scored(loop.sampled(loop.engine("bf16", engine)))


def adapted(loop: Loop, size: float) -> Columns:
    """Train with a low-rank adapter that the engine lacks."""
    policy = copy.deepcopy(loop.policy)
    for weight in policy.parameters():
        if weight.ndim == 2 and weight.shape[0] > 64:
            left, right = (torch.randn(n, 4, generator=loop.generator) for n in weight.shape)
            weight.data += size * weight.std() * (left @ right.T) / 2.0
    return loop.scored(loop.sampled(), policy=policy)


def dropped(loop: Loop, dropout: float) -> Columns:
    policy = copy.deepcopy(loop.policy)
    policy.dropout = dropout
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return loop.scored(loop.sampled(), policy=policy)


# --- other contexts


def moved_positions(loop: Loop, most: int) -> Columns:
    """Count the trainer's positions from the first token of the prompt, at most so many too low."""
    sampled = loop.sampled()
    padding = (sampled.rows[:, :PROMPT] == EMPTY).sum(1, keepdim=True).clamp(max=most)
    positions = (torch.arange(ROW - 1) - padding).clamp(min=0)
    return loop.scored(sampled, positions=positions)


def two_begins(loop: Loop, share: float) -> Columns:
    """Put a second begin token before the prompt that the trainer reads, which moves all positions by one."""
    sampled = loop.sampled()
    rows, some = sampled.rows.clone(), loop.some(share)
    before = (rows[:, :PROMPT] == EMPTY).sum(1) - 1
    some &= (before >= 0)[:, None]
    rows[some.squeeze(1), before[some.squeeze(1)]] = BEGIN
    positions = (torch.arange(ROW - 1) + some.long()).clamp(max=ROW - 1)
    return loop.scored(sampled._replace(rows=rows), positions=positions)


def packed(loop: Loop, rows: int) -> Columns:
    """Let the trainer's attention reach over all rows of a pack; positions begin anew in each."""
    sampled = loop.sampled()
    packs = sampled.rows.view(-1, rows * ROW)
    logp = loop.policy(packs, positions=torch.arange(ROW).repeat(rows)).view(ROWS, ROW, -1)
    train = at(logp[:, PROMPT - 1 : -1], sampled.rows[:, PROMPT:]) * sampled.mask
    return loop.scored(sampled) | {"train_logp": train}


# --- no log-probs


def changed(loop: Loop, share: float, change: Callable[[Tensor], Tensor], sides: int = 1) -> Columns:
    """Change one side, or both, in this share of the rows."""
    columns, some = loop.healthy(), loop.some(share)
    for side in ("rollout_logp", "train_logp")[:sides]:
        columns[side] = change(columns[side]).where(some & columns["mask"], columns[side])
    return columns


def filled(loop: Loop, share: float, value: float) -> Columns:
    """Fill tokens with one value; a share of 0 is a single one."""
    columns = loop.healthy()
    drawn = torch.rand(columns["mask"].shape, generator=loop.generator).where(columns["mask"], 2.0)
    lost = drawn < max(share, float(drawn.min()) + 1e-9)
    return columns | {"rollout_logp": columns["rollout_logp"].masked_fill(lost, value)}


def identical(loop: Loop, share: float) -> Columns:
    columns = loop.healthy()
    return columns | {"train_logp": columns["rollout_logp"].where(loop.some(share), columns["train_logp"])}


def bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def bug(
    name: str,
    causes: str,
    make: Callable[..., Columns],
    sizes: tuple[Any, ...],
    unit: str,
    blind: str = "",
    **more: Any,
) -> Bug:
    return Bug(name, tuple(causes.split()), lambda loop, size: make(loop, size, **more), sizes, unit, blind)


SHARES = (0.02, 0.1, 0.3, 1.0)
OF_ROWS, OF_TOKENS = "share of the sequences", "share of the tokens; 0 is one token"
DIFFERENT = "different_policies not_the_sampler outliers"

BUGS = (
    bug("mask forgotten, padding 0 on both sides", "padding", forgotten, (0.05, 0.2, 0.5), "share of padding"),
    bug("mask forgotten, trainer scores the padding", "padding filled", forgotten, (0.05, 0.2, 0.5), "share of padding",
        zeros=False),
    bug("mask one late", "padding filled", mask_moved, SHARES, OF_ROWS, by=1),
    bug("mask one early", "filled sequence_starts", mask_moved, SHARES, OF_ROWS, by=-1),
    bug("prompt in the mask", "filled sequence_starts", prompt_unmasked, (1, 3, 11), "tokens of the prompt"),
    bug("end token 0 in the engine", "filled", end_missing, SHARES, OF_ROWS),
    bug("engine one late", "shifted", shifted, SHARES, OF_ROWS, by=1),
    bug("engine one early", "shifted", shifted, SHARES, OF_ROWS, by=-1),
    bug("trainer gathers one off", "shifted wrong_weights", gathered, SHARES, OF_ROWS),
    bug("rows shuffled", "swapped", shuffled, (0.05, 0.1, 0.3, 1.0), OF_ROWS),
    bug("temperature in the engine alone", "temperature", sharper, (0.99, 0.97, 0.95, 0.9, 0.7), "temperature"),
    bug("temperature in the trainer alone", "temperature", sharper, (0.99, 0.97, 0.95, 0.9, 0.7), "temperature",
        trainer=True),
    bug("raw log-probs under a temperature", "", raw, (0.9, 0.7), "temperature",
        blind="both sides agree on a policy that did not sample; pass entropy"),
    bug("raw log-probs under a temperature, entropy given", "raw_log_probs", raw, (0.95, 0.9, 0.7), "temperature",
        entropy=True),
    bug("top-p", "renormalized", cut_off, (0.999, 0.99, 0.95, 0.9), "top-p"),
    bug("top-k", "renormalized", cut_off, (50, 30, 20, 5), "k"),
    bug("old weights", DIFFERENT, stale, (1, 3, 6, 12), "steps"),
    bug("old weights, versions given", "stale", stale, (3, 6, 12), "steps", versions=True),
    bug("weights not loaded", f"wrong_weights {DIFFERENT}", not_loaded,
        (("layers.1.before",), ("layers.1.down",), ("layers.1",), ("",)), "modules"),
    bug("head tied to the embedding", f"wrong_weights renormalized {DIFFERENT}", head_lost, (0.02, 0.1, 0.5, 1.0),
        "share of the vocabulary"),
    bug("adapter missing in the engine", DIFFERENT, adapted, (0.1, 0.2, 0.4, 0.8),
        "norm of the adapter over the norm of the weights"),
    bug("dropout in the trainer", f"temperature {DIFFERENT}", dropped, (0.003, 0.01, 0.05, 0.2), "rate"),
    bug("positions of left padding", DIFFERENT, moved_positions, (1, 3, 9), "positions too low"),
    bug("two begin tokens", f"{DIFFERENT} sequence_starts", two_begins, SHARES, OF_ROWS),
    bug("attention across a pack", DIFFERENT, packed, (2, 4, 8), "rows of a pack"),
    bug("negative log-likelihoods", "not_log_probs", changed, SHARES, OF_ROWS, change=torch.neg),
    bug("negative log-likelihoods on both sides", "not_log_probs", changed, SHARES, OF_ROWS, change=torch.neg, sides=2),
    bug("probabilities", "not_log_probs", changed, SHARES, OF_ROWS, change=torch.exp),
    bug("0 in place of log-probs", "filled", filled, (0, 0.003, 0.02, 0.1), OF_TOKENS, value=0.0),
    bug("-1 in place of log-probs", "filled", filled, (0, 0.003, 0.02, 0.1), OF_TOKENS, value=-1.0),
    bug("-9999 in place of log-probs", "filled outliers", filled, (0, 0.003, 0.02, 0.1), OF_TOKENS, value=-9999.0),
    bug("NaN in the engine", "nonfinite", filled, (0, 0.003, 0.1), OF_TOKENS, value=float("nan")),
    bug("log-probs in bfloat16", "bfloat16", changed, (0.3, 1.0), OF_ROWS, change=bfloat16),
    bug("log-probs in bfloat16 on both sides", "bfloat16", changed, (0.3, 1.0), OF_ROWS, change=bfloat16, sides=2),
    bug("the engine's log-probs on both sides", "identical", identical, (0.5, 1.0), OF_ROWS),
)  # fmt: skip
