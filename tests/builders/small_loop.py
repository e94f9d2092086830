"""A small RL loop with an engine of its own, and bugs planted in it: the transformer of examples/mismatch_rl.py.

The policy learns to continue synthetic text whose next token hangs on the last one, on the topic that the prompt names
and on the position, so that a wrong position, a foreign context or a missing layer shows. Some GRPO steps follow. The
engine is a copy of the weights in another precision that samples with a cache and reports its own log-probs.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import rollout_corr as rc
from builders.planted_dumps import VOCABULARY, at, truncated

with mock.patch.object(sys, "path", [str(Path(__file__).resolve().parents[2] / "examples"), *sys.path]):
    example: Any = importlib.import_module("mismatch_rl")

# train_logp, rollout_logp [B, T], and what more a Batch or a dump holds.
Columns = dict[str, Tensor]

EMPTY, STOP, BEGIN, TOPICS = 0, 1, 2, (3, 4, 5)
PROMPT, ANSWER = 12, 48
ROW = PROMPT + ANSWER
WIDTH = 48
LESSON_RATE, GRPO_RATE = 6e-3, 6e-4


class Policy(example.Policy):  # type: ignore[misc]  # the example is imported by its path, so it has no types
    """The decoder of the example over another vocabulary, with dropout and positions that a bug may set."""

    dropout = 0.0

    def __init__(self) -> None:
        with mock.patch.multiple(example, TOKENS=VOCABULARY, SEQUENCE=ROW):
            super().__init__(WIDTH)

    def forward(self, tokens: Tensor, caches: Any = None, start: int = 0, positions: Tensor | None = None) -> Tensor:
        """Return log-probs of the next token, [B, T, VOCABULARY]; `tokens` [B, T] begin at position `start`."""
        where = torch.arange(start, start + tokens.shape[1]) if positions is None else positions
        x = self.token(tokens) + self.position(where)
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x = functional.dropout(layer(x, cache), self.dropout)
        return self.head(self.norm(x)).float().log_softmax(-1)


class Routed(nn.Module):
    """Four experts, of which each token takes the one that its router prefers; rounding changes some of the routes."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) / math.sqrt(WIDTH))
        self.down = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) / math.sqrt(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gate, chosen = self.router(x).softmax(-1).max(-1)
        every = torch.einsum("btef,efd->bted", functional.gelu(torch.einsum("btd,edf->btef", x, self.up)), self.down)
        return gate[..., None] * every.take_along_dim(chosen[..., None, None], 2).squeeze(2)


class Text:
    """A teacher: text whose next token hangs on the last token, the topic and the parity of the position."""

    def __init__(self, seed: int, sharp: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.token, self.topic = self.normal(VOCABULARY, 32), self.normal(len(TOPICS), 32)
        self.parity, self.out = self.normal(2, 32), self.normal(32, VOCABULARY)
        self.certainty = (math.log(sharp) + 0.7 * self.normal(VOCABULARY)).exp() / math.sqrt(32)
        self.end = torch.where(torch.rand(VOCABULARY, generator=self.generator) < 0.12, 0.4, 0.005)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw rows [count, ROW], prompts left-padded and answers right-padded with EMPTY, and the answers' mask."""
        begin = PROMPT - torch.randint(3, PROMPT + 1, (count,), generator=generator)
        topic = torch.randint(0, len(TOPICS), (count,), generator=generator)
        rows, now = torch.full((count, ROW), EMPTY), torch.full((count,), EMPTY)
        running = torch.ones(count, dtype=torch.bool)
        mask = torch.zeros(count, ROW, dtype=torch.bool)
        for i in range(ROW):
            mixed = torch.tanh(self.token[now] + self.topic[topic] + self.parity[i % 2])
            logits = (mixed @ self.out) * self.certainty[now, None]
            logits[:, : TOPICS[-1] + 1] = -torch.inf
            now = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
            now = now.where(begin + 1 != i, torch.tensor(TOPICS)[topic]).where(begin != i, BEGIN)
            if i >= PROMPT:
                mask[:, i] = running
                ends = torch.rand(count, generator=generator) < self.end[rows[:, i - 1]]
                now = now.where(~ends, STOP)
                running = running & ~ends
            now = now.where(begin <= i, EMPTY)
            rows[:, i] = now
        return rows.where(mask | (torch.arange(ROW) < PROMPT), EMPTY), mask[:, PROMPT:]


def answers_of(policy: Policy, rows: Tensor, temperature: float = 1.0, **more: Tensor) -> Tensor:
    """Compute log-probs over the vocabulary at the answers of rows as the trainer does, [B, ANSWER, VOCABULARY]."""
    return (policy(rows[:, :-1], **more)[:, PROMPT - 1 :] / temperature).log_softmax(-1)


class Rollout(NamedTuple):
    """Sampled rows [B, ROW], and of their answers [B, ANSWER] the engine's log-probs and the mask."""

    rows: Tensor
    rollout: Tensor
    mask: Tensor


@torch.no_grad()
def sample(
    engine: Policy,
    prompt: Tensor,
    generator: torch.Generator,
    temperature: float = 1.0,
    raw: bool = False,
    **limits: Any,
) -> Rollout:
    """Sample answers; `raw` reports log-probs before temperature and truncation, as vLLM does by default."""
    caches: list[list[Tensor]] = [[] for _ in engine.layers]
    logp, rows, running = engine(prompt, caches)[:, -1], prompt, torch.ones(len(prompt), dtype=torch.bool)
    logps, masks = [], []
    for i in range(ANSWER):
        drawn = truncated(logp / temperature, **limits)
        token = torch.multinomial(drawn.exp(), 1, generator=generator).squeeze(1)
        masks.append(running)
        logps.append(at(logp if raw else drawn, token) * running)
        rows = torch.cat([rows, token.where(running, EMPTY)[:, None]], 1)
        running = running & (token != STOP)
        if i < ANSWER - 1:
            logp = engine(rows[:, -1:], caches, PROMPT + i)[:, -1]
    return Rollout(rows, torch.stack(logps, 1), torch.stack(masks, 1))


def grouped(weight: Tensor, top: float, cast: Callable[[Tensor], Tensor]) -> Tensor:
    """Round a matrix with a scale for each 16 neighbors of a row; vectors stay unchanged."""
    if weight.ndim < 2:
        return weight
    groups = weight.unflatten(-1, (-1, 16))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / top
    return (cast(groups / scale) * scale).flatten(-2)


def eight_bits(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


PRECISIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exact": lambda x: x,
    "bf16": lambda x: x,
    "fp8": lambda x: grouped(x, 448.0, eight_bits),
    "int8": lambda x: grouped(x, 127.0, torch.round),
    "int4": lambda x: grouped(x, 7.0, torch.round),
}


class Loop:
    """A policy after lessons and GRPO steps, its weights at each step, and batches that engines sample from it.

    Args:
        flavor: "plain"; "peaky", with a perplexity of 2; or "routed", a mixture of experts.
        seed: Of everything drawn.
        lessons: Batches of supervised training.
        steps: GRPO steps.
    """

    def __init__(self, flavor: str = "plain", seed: int = 0, lessons: int = 100, steps: int = 12) -> None:
        self.generator = torch.Generator().manual_seed(1000 + seed)
        self.kept: tuple[object, Tensor, Rollout] | None = None
        self.text = Text(seed, 12.0 if flavor == "peaky" else 4.0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy, self.fresh = Policy(), Policy()
            if flavor == "routed":
                for layer in (*self.policy.layers, *self.fresh.layers):
                    layer.up, layer.down = nn.Identity(), Routed()
        optimizer = torch.optim.Adam(self.policy.parameters(), lr=LESSON_RATE)
        rows, mask = self.text.draw(16 * lessons, self.generator)
        for i in range(lessons):
            optimizer.param_groups[0]["lr"] = LESSON_RATE * min(1.0, (i + 1) / 20) * (1.0 - 0.9 * i / lessons)
            some = torch.randint(0, len(rows), (32,), generator=self.generator)
            loss = -at(answers_of(self.policy, rows[some]), rows[some, PROMPT:])[mask[some]].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.past = [copy.deepcopy(self.policy)]
        for _ in range(steps):
            self.step(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make a GRPO step from rollouts of a bf16 engine, rewarded by the share of even tokens."""
        rows, rollout, mask = self.sampled("bf16", rows=64)
        reward = ((rows[:, PROMPT:] % 2 == 0) * mask).sum(1) / mask.sum(1)
        groups = reward.view(-1, 8)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        batch, spec = rc.Batch(mask=mask), rc.Spec(rc.Weight.token(upper=2.0))
        new = at(answers_of(self.policy, rows), rows[:, PROMPT:])
        out = rc.correct(new, rollout, batch, spec=spec)
        optimizer.param_groups[0]["lr"] = GRPO_RATE
        optimizer.zero_grad()
        rc.policy_loss(new, advantages, batch, old_logp=new.detach(), correction=out).value.backward()
        optimizer.step()
        self.past.append(copy.deepcopy(self.policy))

    def engine(self, kind: str, of: Policy | None = None) -> Policy:
        """Copy weights as an engine of this precision has them."""
        made = copy.deepcopy(of or self.policy)
        made.load_state_dict({name: PRECISIONS[kind](x) for name, x in made.state_dict().items()})
        return made if kind == "exact" else made.bfloat16()

    def sampled(self, engine: str | Policy = "bf16", rows: int = 128, **sampling: Any) -> Rollout:
        """Let an engine sample groups of eight answers; the same call after the same draws costs nothing."""
        call = (engine, rows, sampling, self.generator.get_state().tolist())
        if self.kept is not None and self.kept[0] == call:
            self.generator.set_state(self.kept[1])
            return self.kept[2]
        prompt = self.text.draw(rows // 8, self.generator)[0][:, :PROMPT].repeat_interleave(8, 0)
        engine = self.engine(engine) if isinstance(engine, str) else engine
        found = sample(engine, prompt, self.generator, **sampling)
        self.kept = call, self.generator.get_state(), found
        return found

    def some(self, share: float, rows: int = 128) -> Tensor:
        """Choose this share of the rows, [rows, 1] bool."""
        return (torch.randperm(rows, generator=self.generator) < max(1, round(share * rows)))[:, None]

    def healthy(self, kind: str = "bf16", temperature: float = 1.0, age: int = 0, rows: int = 128) -> Columns:
        """Sample a batch, from the weights of some steps ago, and score it without a mistake."""
        engine = self.engine(kind, self.past[-1 - age]) if age else kind
        return self.scored(self.sampled(engine, rows, temperature=temperature), temperature)

    @torch.no_grad()
    def scored(self, sampled: Rollout, temperature: float = 1.0, policy: Policy | None = None, **more: Any) -> Columns:
        """Score sampled answers by the trainer; padding holds 0 on both sides."""
        logp = at(answers_of(policy or self.policy, sampled.rows, temperature, **more), sampled.rows[:, PROMPT:])
        return {"train_logp": logp * sampled.mask, "rollout_logp": sampled.rollout, "mask": sampled.mask}
