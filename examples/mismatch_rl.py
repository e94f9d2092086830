"""Why to correct: a tiny transformer learns to sort by RL from rollouts of an older int4 copy of itself.

    pip install /path/to/rollout-corr matplotlib rich
    python mismatch_rl.py            # mismatch_results.py next to it; minutes on one CPU core, seconds with --tiny

Six runs from the same start, for each of several seeds: rollouts without a mismatch; with one, uncorrected; and
with four corrections. The policy gets a list of digits and writes it sorted; the reward is 1 if all of it is right,
else 0. Some supervised lessons teach it half of the task, then GRPO takes over: groups of samples, normalized rewards,
two PPO steps per rollout. Rollouts and their log-probs come from a copy that is some steps old, with every matrix
rounded to a few bits and one scale per row. The script writes a picture, a table, and all curves as JSON.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from mismatch_results import Curves, about, at_end, live_table, picture, table_of, write
from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional

import rollout_corr as rc

STOP, GO, EMPTY, TOKENS = 10, 11, 12, 13  # 0 to 9 are the digits
LONGEST = 8
SEQUENCE = 2 * LONGEST + 2

# Measures the mismatch in every run alike, and changes nothing.
WATCH = rc.Spec(weight=rc.Weight.token(), apply=False)

# The defaults of the frameworks, except for the geometric bounds: SkyRL's 0.99 to 1.01 suit long answers. Here 1.1 to
# the power of seven tokens, the usual length, is about 2, the bound of the product.
ARMS = {
    "no mismatch": rc.spec("verl.disabled"),  # its rollouts come from the policy itself
    "uncorrected": rc.spec("verl.disabled"),
    "token truncation": rc.spec("verl.decoupled_token_is"),
    "TIS + suggest": rc.Spec(weight=rc.TIS(2.0)),
    "sequence rejection": rc.spec("skyrl.product_mask"),
    "geometric masking": rc.spec("skyrl.geometric_mask", low=1 / 1.1, high=1.1),
}
# As README does it: after the first `Setting.every` steps, `rc.suggest` adds bounds of rejection, once.
SUGGESTED = "TIS + suggest"

# A run of fewer steps shows noise: in docs/trust.md the curves part after about so many.
SHORTEST = 60
# Of n paired differences of one sign, an exact test of signs gives p = 2 / 2^n: 0.06 for five, 0.03 for six.
FEWEST_SEEDS = 6


@dataclass(frozen=True)
class Setting:
    """Everything that a run depends on except its arm and its seed."""

    lengths: tuple[int, int] = (4, 8)  # of the lists; at most LONGEST
    bits: int = 4
    stale: int = 4
    steps: int = 120
    prompts: int = 16
    group: int = 8
    width: int = 48
    lessons: int = 95  # batches of supervised training before RL
    rate: float = 7e-4
    every: int = 10  # steps between two points of a curve
    tests: int = 256  # lists that a point's reward is measured on


TINY = Setting(
    lengths=(1, 2), bits=3, stale=2, steps=6, prompts=4, group=4, width=32, lessons=60, rate=3e-3, every=2, tests=64
)


class Layer(nn.Module):
    """A pre-norm layer of the transformer, with a cache for sampling."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.before(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        if cache is not None:
            if cache:
                k, v = (torch.cat([past, now], 2) for past, now in zip(cache, (k, v), strict=True))
            cache[:] = [k, v]
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Policy(nn.Module):
    """A decoder of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(TOKENS, width), nn.Embedding(SEQUENCE, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS, bias=False)

    def forward(self, tokens: Tensor, caches: Sequence[list[Tensor] | None] | None = None, start: int = 0) -> Tensor:
        """Return log-probs of the next token, [B, T, TOKENS]; `tokens` [B, T] begin at position `start`."""
        x = self.token(tokens) + self.position.weight[start : start + tokens.shape[1]]
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x = layer(x, cache)
        return self.head(self.norm(x)).log_softmax(-1)


def draw(count: int, generator: torch.Generator, lengths: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Draw lists of digits, left-padded, and the right answers, right-padded: both [count, LONGEST + 1]."""
    digits = torch.randint(0, 10, (count, LONGEST), generator=generator)
    length = torch.randint(lengths[0], lengths[1] + 1, (count, 1), generator=generator)
    inside = torch.arange(LONGEST) >= LONGEST - length
    end = torch.full((count, 1), GO)
    prompt = torch.cat([digits.where(inside, EMPTY), end], 1)
    answer = torch.cat([digits.where(inside, EMPTY).sort(1).values, torch.full_like(end, EMPTY)], 1)
    return prompt, torch.where(torch.arange(LONGEST + 1) == length, STOP, answer)


@torch.no_grad()
def sample(policy: Policy, prompt: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sample at temperature 1; return answers, the log-probs they were sampled with, and their mask, all [B, T]."""
    caches: list[list[Tensor]] = [[] for _ in policy.layers]
    next_logp, running = policy(prompt, caches)[:, -1], torch.ones(len(prompt), 1, dtype=torch.bool)
    answers, logps, masks = [], [], []
    for i in range(LONGEST + 1):
        token = torch.multinomial(next_logp.exp(), 1, generator=generator)
        masks.append(running)
        logps.append(next_logp.gather(1, token))
        answers.append(token.where(running, EMPTY))
        running = running & (token != STOP)
        if i < LONGEST:
            next_logp = policy(answers[-1], caches, prompt.shape[1] + i)[:, -1]
    return torch.cat(answers, 1), torch.cat(logps, 1), torch.cat(masks, 1)


def logp_of(policy: Policy, prompt: Tensor, answer: Tensor) -> Tensor:
    """Compute the log-probs of answers as the trainer does, [B, T]."""
    logp = policy(torch.cat([prompt, answer[:, :-1]], 1))[:, prompt.shape[1] - 1 :]
    return logp.gather(2, answer[..., None]).squeeze(2)


def reward_of(given: Tensor, wanted: Tensor) -> Tensor:
    """Return 1 where the whole answer is right, else 0, [B]."""
    return (given == wanted).all(1).float()


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Round a matrix to integers of `bits` bits with a scale per row; vectors stay unchanged."""
    if weight.ndim < 2:
        return weight
    top = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True) / top
    return (weight / scale).round().clamp(-top, top) * scale


@functools.cache
def warm_start(seed: int, width: int, lessons: int, lengths: tuple[int, int]) -> Policy:
    """Return the policy from which RL starts: half-taught by supervised lessons."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Policy(width)
    generator, optimizer = torch.Generator().manual_seed(seed), torch.optim.Adam(policy.parameters())
    for i in range(lessons):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (i + 1) / 20) * (1.0 - 0.9 * i / lessons)
        prompt, answer = draw(128, generator, lengths)
        loss = -logp_of(policy, prompt, answer)[answer != EMPTY].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


def reward_on_fresh_lists(policy: Policy, setting: Setting) -> float:
    """Return the mean reward of the fp32 policy on lists it was not trained on, the same ones at every call."""
    prompt, wanted = draw(setting.tests, torch.Generator().manual_seed(12345), setting.lengths)
    answer, _, _ = sample(policy, prompt, torch.Generator().manual_seed(54321))
    return reward_of(answer, wanted).mean().item()


def train(
    arm: str, seed: int, setting: Setting, tick: Callable[[], object] = lambda: None
) -> Iterator[dict[str, float]]:
    """Train by RL from the half-taught policy of a seed; yield a point every `setting.every` steps."""
    spec, mismatch = ARMS[arm], arm != "no mismatch"
    start = warm_start(seed, setting.width, setting.lessons, setting.lengths)
    policy, sampler = copy.deepcopy(start), copy.deepcopy(start)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), betas=(0.9, 0.95))
    past: deque[dict[str, Tensor]] = deque(maxlen=setting.stale + 1)
    seen: list[dict[str, float]] = []
    for step in range(setting.steps):
        past.append({name: value.clone() for name, value in policy.state_dict().items()})
        copied = {name: rounded(x, setting.bits) for name, x in past[0].items()} if mismatch else past[-1]
        sampler.load_state_dict(copied)

        lists = draw(setting.prompts, generator, setting.lengths)
        prompt, wanted = (x.repeat_interleave(setting.group, 0) for x in lists)
        answer, rollout_logp, mask = sample(sampler, prompt, generator)
        groups = reward_of(answer, wanted).view(-1, setting.group)
        centered = groups - groups.mean(1, keepdim=True)
        advantages = (centered / (groups.std(1, keepdim=True) + 1e-4)).flatten()

        with torch.no_grad():
            old_logp = logp_of(policy, prompt, answer)
        batch = rc.Batch(mask=mask)
        if arm == SUGGESTED and step == setting.every - 1:
            spec = replace(spec, criteria=rc.suggest(old_logp, rollout_logp, batch).spec.criteria)
        out = rc.correct(old_logp, rollout_logp, batch, spec=spec)
        for rows in torch.randperm(len(prompt), generator=generator).chunk(2):
            new_logp, weights = logp_of(policy, prompt[rows], answer[rows]), out.weights
            weights = None if weights is None else weights[rows]
            factors = rc.Factors(weights, out.mask[rows])
            loss = rc.policy_loss(
                new_logp, advantages[rows], mask=mask[rows], old_logp=old_logp[rows], correction=factors
            )
            optimizer.param_groups[0]["lr"] = setting.rate * min(1.0, (step + 1) / 10)
            optimizer.zero_grad()
            loss.value.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()

        watched = rc.correct(old_logp, rollout_logp, batch, spec=WATCH).metrics()
        kept = out.metrics()["tokens_kept_fraction"]
        seen.append({"kl": watched["kl_rollout_train_k3"], "ess": watched["weight_before_bounds_ess"], "kept": kept})
        tick()
        if (step + 1) % setting.every == 0:
            point = {name: fmean(x[name] for x in seen) for name in seen[0]} | {
                "reward": reward_on_fresh_lists(policy, setting)
            }
            yield {"step": step + 1} | {name: round(x, 6) for name, x in point.items()}
            seen.clear()


def too_short(setting: Setting, seeds: int) -> str:
    """Return why the numbers of a run mean nothing; empty where they may mean something."""
    reasons = []
    if setting.steps < SHORTEST:
        reasons.append(f"{setting.steps} steps, and the runs part after some {SHORTEST}")
    if seeds < FEWEST_SEEDS:
        reasons.append(f"{seeds} seeds, and with fewer than {FEWEST_SEEDS} no difference can have a p below 0.05")
    return f"too short to mean anything: {'; '.join(reasons)}" if reasons else ""


def run(arms: Sequence[str], seeds: Sequence[int], setting: Setting) -> Curves:
    """Train all arms from all seeds. A terminal shows a table and a bar; a pipe gets a line per seed."""
    console = Console(stderr=True)
    bar = Progress(console=console)
    task = bar.add_task("training", total=len(arms) * len(seeds) * setting.steps)
    curves: Curves = {arm: [] for arm in arms}
    with Live(console=console, get_renderable=lambda: Group(live_table(curves), bar), transient=True):
        for seed in seeds:
            for arm in arms:
                curves[arm].append([])
                for point in train(arm, seed, setting, lambda: bar.advance(task)):
                    curves[arm][-1].append(point)
                if not console.is_terminal:
                    finished = sum(map(len, curves.values()))
                    print(f"{finished} of {len(arms) * len(seeds)} runs done", file=sys.stderr, flush=True)
            line = ", ".join(f"{arm} {at_end(runs[-1], 'reward'):.3f}" for arm, runs in curves.items())
            print(f"int{setting.bits}, {setting.stale} steps old, seed {seed}: {line}", flush=True)
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, help="number of seeds (6; 2 with --tiny)")
    parser.add_argument("--steps", type=int, help="training steps (120)")
    parser.add_argument("--bits", type=int, help="bits of the weights that sample (4)")
    parser.add_argument("--stale", type=int, help="age of these weights, in steps (4)")
    parser.add_argument("--arms", default=",".join(ARMS), help="runs, separated by commas (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("mismatch_rl"), help="folder to write to (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="try everything in seconds; the numbers mean nothing")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    arms = asked.arms.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arms: expected some of {list(ARMS)}, got {unknown}")
    setting = TINY if asked.tiny else Setting()
    changed = {name: getattr(asked, name) for name in ("steps", "bits", "stale")}
    setting = replace(setting, **{name: value for name, value in changed.items() if value is not None})
    count = (2 if asked.tiny else 6) if asked.seeds is None else asked.seeds
    if min(count - 1, setting.steps - setting.every, setting.bits - 2, setting.stale) < 0:
        parser.error(f"expected --seeds >= 1, --steps >= {setting.every}, --bits >= 2 and --stale >= 0")
    short = too_short(setting, count)
    if short:
        print(short, file=sys.stderr)
    began = time.monotonic()
    curves = run(arms, range(count), setting)
    start = [
        reward_on_fresh_lists(warm_start(seed, setting.width, setting.lessons, setting.lengths), setting)
        for seed in range(count)
    ]
    found = {"about": about(setting, range(count), time.monotonic() - began), "start": start, "curves": curves}
    write(asked.out, "results", found, table_of(found))
    picture(found, asked.out / "curves.svg")
    print(f"{asked.out / 'curves.svg'} drawn")
    if short:
        print(short)


if __name__ == "__main__":
    main()
