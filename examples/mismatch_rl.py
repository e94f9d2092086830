"""A run that shows why: a tiny transformer learns to sort by RL, from rollouts of an int4 copy that is some steps old.

    pip install rollout-corr matplotlib rich
    python mismatch_rl.py            # some minutes on one CPU core; --tiny takes seconds

Five runs from the same start, for each of several seeds: rollouts without a mismatch; with one, uncorrected; and
corrected in three ways. The policy gets a list of digits and writes it sorted; the reward is 1 if all of it is right,
else 0. It starts half-taught, then GRPO takes over: groups of samples, normalised rewards, two PPO steps a rollout.
Rollouts and their log-probs come from a copy of some steps ago with every matrix rounded to a few bits, a scale per
row. Written: a picture, a table, and all curves as JSON.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import platform
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import rollout_corr as rc

STOP, GO, EMPTY, TOKENS = 10, 11, 12, 13  # 0 to 9 are the digits
LONGEST = 8
CPUS = Path("/proc/cpuinfo")
SEQUENCE = 2 * LONGEST + 2

Points = dict[str, list[list[dict[str, float]]]]  # {arm: a list per seed of points}

# The same measurement in every run, whatever that run does about it.
WATCH = rc.Spec(weight=rc.Weight("token"), apply=False)

# The frameworks' own defaults, but for the geometric bounds: SkyRL's 0.99 to 1.01 are meant for long answers, and here
# 1.1 to the power of the usual seven tokens is the product's 2.
ARMS = {
    "no mismatch": rc.preset("verl.disabled"),  # its rollouts come from the policy itself
    "uncorrected": rc.preset("verl.disabled"),
    "token truncation": rc.preset("verl.decoupled_token_is"),
    "sequence rejection": rc.preset("skyrl.product_mask"),
    "geometric masking": rc.preset("skyrl.geometric_mask", low=1 / 1.1, high=1.1),
}
MEASURES = {
    "reward": "reward, fresh lists, fp32",
    "kl": "mismatch KL (k3) per token",
    "ess": "ESS of the token ratios",
    "kept": "tokens kept",
}


@dataclass(frozen=True)
class Setting:
    """All that a run depends on besides its arm and its seed."""

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


class Block(nn.Module):
    """A layer of the transformer, before-norm, with a cache for sampling."""

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
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS, bias=False)

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None = None, start: int = 0) -> Tensor:
        """Log-probs of the next token, [B, T, TOKENS]; `tokens` begin at position `start`."""
        x = self.token(tokens) + self.position.weight[start : start + tokens.shape[1]]
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache)
        return self.head(self.norm(x)).log_softmax(-1)


def draw(count: int, generator: torch.Generator, lengths: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Lists of digits, filled up on the left, and the answers, filled up on the right: two [count, LONGEST + 1]."""
    digits = torch.randint(0, 10, (count, LONGEST), generator=generator)
    length = torch.randint(lengths[0], lengths[1] + 1, (count, 1), generator=generator)
    inside = torch.arange(LONGEST) >= LONGEST - length
    end = torch.full((count, 1), GO)
    prompt = torch.cat([digits.where(inside, EMPTY), end], 1)
    answer = torch.cat([digits.where(inside, EMPTY).sort(1).values, torch.full_like(end, EMPTY)], 1)
    return prompt, torch.where(torch.arange(LONGEST + 1) == length, STOP, answer)


@torch.no_grad()
def sample(policy: Policy, prompt: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Answers at temperature 1, what the sampler gave each token, and which tokens are part of the answer."""
    caches: list[list[Tensor]] = [[] for _ in policy.blocks]
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
    """Log-probs of the tokens of answers, as the trainer computes them, [B, T]."""
    logp = policy(torch.cat([prompt, answer[:, :-1]], 1))[:, prompt.shape[1] - 1 :]
    return logp.gather(2, answer[..., None]).squeeze(2)


def reward_of(given: Tensor, wanted: Tensor) -> Tensor:
    """1 where the whole answer is right, [B]."""
    return (given == wanted).all(1).float()


def rounded(weight: Tensor, bits: int) -> Tensor:
    """A matrix as integers of so many bits with a scale per row, multiplied out again; a vector as it is."""
    if weight.ndim < 2:
        return weight
    top = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True) / top
    return (weight / scale).round().clamp(-top, top) * scale


@functools.cache
def taught(seed: int, width: int, lessons: int, lengths: tuple[int, int]) -> Policy:
    """Where RL starts: a policy after some supervised lessons."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Policy(width)
    generator, optimiser = torch.Generator().manual_seed(seed), torch.optim.Adam(policy.parameters())
    for i in range(lessons):
        optimiser.param_groups[0]["lr"] = 3e-3 * min(1.0, (i + 1) / 20) * (1.0 - 0.9 * i / lessons)
        prompt, answer = draw(128, generator, lengths)
        loss = -logp_of(policy, prompt, answer)[answer != EMPTY].mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return policy


def tested(policy: Policy, setting: Setting) -> float:
    """The reward of the policy as it is, fp32, on fresh lists: always the same ones, by generators of its own."""
    prompt, wanted = draw(setting.tests, torch.Generator().manual_seed(12345), setting.lengths)
    answer, _, _ = sample(policy, prompt, torch.Generator().manual_seed(54321))
    return reward_of(answer, wanted).mean().item()


def train(
    spec: rc.Spec, seed: int, setting: Setting, mismatch: bool = True, tick: Callable[[], object] = lambda: None
) -> Iterator[dict[str, float]]:
    """RL from the half-taught policy of this seed. Yields a point of the curves every `setting.every` steps."""
    start = taught(seed, setting.width, setting.lessons, setting.lengths)
    policy, sampler = copy.deepcopy(start), copy.deepcopy(start)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(policy.parameters(), betas=(0.9, 0.95))
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
        centred = groups - groups.mean(1, keepdim=True)
        advantages = (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()

        with torch.no_grad():
            old_logp = logp_of(policy, prompt, answer)
        out = rc.correct(old_logp, rollout_logp, mask, spec=spec)
        for rows in torch.randperm(len(prompt), generator=generator).chunk(2):
            new_logp, weights = logp_of(policy, prompt[rows], answer[rows]), out.weights
            weights = None if weights is None else weights[rows]
            given = {"old_logp": old_logp[rows], "weights": weights, "train_mask": out.mask[rows]}
            loss = rc.policy_loss(new_logp, advantages[rows], mask[rows], **given)
            optimiser.param_groups[0]["lr"] = setting.rate * min(1.0, (step + 1) / 10)
            optimiser.zero_grad()
            loss.value.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimiser.step()

        watched = rc.correct(old_logp, rollout_logp, mask, spec=WATCH).metrics()
        kept = out.metrics()["tokens_kept_fraction"]
        seen.append({"kl": watched["kl_k3"], "ess": watched["weight_raw_ess"], "kept": kept})
        tick()
        if (step + 1) % setting.every == 0:
            point = {name: fmean(x[name] for x in seen) for name in seen[0]} | {"reward": tested(policy, setting)}
            yield {"step": step + 1} | {name: round(x, 6) for name, x in point.items()}
            seen.clear()


def ended(run: Sequence[Mapping[str, float]], measure: str) -> float:
    """A measure of one run: the mean over the last quarter of its points."""
    return fmean(point[measure] for point in run[-max(1, len(run) // 4) :])


def chance(differences: Sequence[float]) -> float:
    """How likely signs by chance make the mean at least so far from 0: all 2^n of them, so it is exact."""
    size = abs(sum(differences)) - 1e-12
    signs = itertools.product((1, -1), repeat=len(differences))
    return fmean(abs(sum(s * x for s, x in zip(row, differences, strict=True))) >= size for row in signs)


def spread(values: Sequence[float]) -> float:
    """The standard error of the mean."""
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def rows_of(points: Points) -> list[list[str]]:
    """The table: a row per arm, as `table_of` heads it."""
    rows = []
    for arm, runs in points.items():
        reward = [ended(run, "reward") for run in runs]
        against = "-"
        if arm != "uncorrected" and "uncorrected" in points:
            gains = [x - ended(other, "reward") for x, other in zip(reward, points["uncorrected"], strict=True)]
            p = chance(gains)
            wins = f"{sum(x > 0 for x in gains)} of {len(gains)} seeds"
            against = f"{fmean(gains):+.3f} ({'within noise, ' if p > 0.05 else ''}p = {p:.3f}, better in {wins})"
        rest = [f"{fmean(ended(run, name) for run in runs):.3f}" for name in ("kl", "ess", "kept")]
        rows.append([arm, f"{fmean(reward):.3f} +- {spread(reward):.3f}", against, *rest])
    return rows


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", caption]) + "\n"


def about(setting: Setting, seeds: Sequence[int], seconds: float) -> dict[str, Any]:
    """Where, when and how the numbers were made."""
    root = Path(__file__).resolve().parent.parent
    asks = ("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    # A copy in somebody else's repository has another's commit.
    ours = shutil.which("git") and Path(rc.__file__).resolve().parent.parent == root
    commit = ours and subprocess.run(asks, capture_output=True, text=True, check=False).stdout.strip()
    lines = CPUS.read_text().splitlines() if CPUS.exists() else []
    named = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    made = {"version": f"commit {commit}" if commit else f"rollout-corr {rc.__version__}", "torch": torch.__version__}
    made |= {"cpu": named[0] if named else platform.machine(), "date": time.strftime("%Y-%m-%d")}
    return made | {"minutes": round(seconds / 60, 1), "seeds": list(seeds), "setting": asdict(setting)}


def caption_of(found: Mapping[str, Any]) -> str:
    """What was run, where and when."""
    made, x = found["about"], found["about"]["setting"]
    what = f"{len(made['seeds'])} seeds, {x['steps']} steps; rollouts: int{x['bits']}, {x['stale']} steps old"
    return f"{what}; {made['cpu']}, one thread, torch {made['torch']}, {made['date']}, {made['version']}."


def picture(found: Mapping[str, Any], path: Path) -> None:
    """The four curves, as SVG: mean over seeds, and a band of one standard error to each side."""
    # Names instead of random identifiers, and text as text: the same numbers make the same small file.
    with rc_context({"svg.hashsalt": "rollout-corr", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(7.2, 4.8))
        axes = figure.subplots(2, 2)
        for (measure, title), ax in zip(MEASURES.items(), axes.flat, strict=True):
            for name, runs in found["curves"].items():
                steps = [point["step"] for point in runs[0]]
                columns = [[run[i][measure] for run in runs] for i in range(len(steps))]
                mean, band = [fmean(x) for x in columns], [spread(x) for x in columns]
                ax.plot(steps, mean, label=name, linewidth=1.2)
                edges = ([m + sign * b for m, b in zip(mean, band, strict=True)] for sign in (-1, 1))
                ax.fill_between(steps, *edges, alpha=0.2, linewidth=0)
            ax.set_title(title, fontsize=8)
            ax.set_ylim(bottom=0.0)
            ax.grid(alpha=0.3)
            ax.set_xlabel("steps")
        axes[0][0].axhline(fmean(found["start"]), color="black", linewidth=0.8, linestyle=":", label="before RL")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="upper center", ncols=3, frameon=False)
        figure.text(0.01, 0.005, caption_of(found), fontsize=5)
        figure.tight_layout(rect=(0.0, 0.02, 1.0, 0.92))
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def live(points: Points, bar: Progress) -> Group:
    """What a terminal shows while it runs."""
    table = Table()
    for column in ("run", "seeds", "step", *MEASURES):
        table.add_column(column, justify="left" if column == "run" else "right")
    for arm, runs in points.items():
        last = [run[-1] for run in runs if run]
        means = [f"{fmean(point[name] for point in last):.3f}" if last else "-" for name in MEASURES]
        table.add_row(arm, str(len(last)), str(last[-1]["step"]) if last else "-", *means)
    return Group(table, bar)


def run(arms: Sequence[str], seeds: Sequence[int], setting: Setting) -> Points:
    """All arms from all seeds. A terminal sees a table and a bar; a pipe, a line per seed."""
    console = Console(stderr=True)
    bar = Progress(console=console)
    task = bar.add_task("training", total=len(arms) * len(seeds) * setting.steps)
    points: Points = {arm: [] for arm in arms}
    with Live(console=console, get_renderable=lambda: live(points, bar), transient=True):
        for seed in seeds:
            for arm in arms:
                points[arm].append([])
                for point in train(ARMS[arm], seed, setting, arm != "no mismatch", lambda: bar.advance(task)):
                    points[arm][-1].append(point)
            line = ", ".join(f"{arm} {ended(runs[-1], 'reward'):.3f}" for arm, runs in points.items())
            print(f"int{setting.bits}, {setting.stale} steps old, seed {seed}: {line}", flush=True)
    return points


def write(out: Path, name: str, found: Mapping[str, Any], table: str) -> None:
    """The numbers and their table, as files; the table on the screen too."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(table, encoding="utf-8")
    print(f"\n{table}\n{out / name}.json and .md written")


def table_of(found: Mapping[str, Any]) -> str:
    """results.md from results.json."""
    head = ["run", "reward at the end", "against uncorrected", "mismatch KL", "ESS", "tokens kept"]
    before = ["before RL", f"{fmean(found['start']):.3f} +- {spread(found['start']):.3f}", *"----"]
    return markdown(head, [before, *rows_of(found["curves"])], caption_of(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, help="how many (6; 2 with --tiny)")
    parser.add_argument("--steps", type=int, help="of training (120)")
    parser.add_argument("--bits", type=int, help="of the weights that sample (4)")
    parser.add_argument("--stale", type=int, help="how many steps old they are (4)")
    parser.add_argument("--arms", default=",".join(ARMS), help="separated by commas (all of them: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("mismatch_rl"), help="folder to write to (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="everything once, in seconds: no result")
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
    began = time.monotonic()
    curves = run(arms, range(count), setting)
    start = [tested(taught(seed, setting.width, setting.lessons, setting.lengths), setting) for seed in range(count)]
    found = {"about": about(setting, range(count), time.monotonic() - began), "start": start, "curves": curves}
    write(asked.out, "results", found, table_of(found))
    picture(found, asked.out / "curves.svg")
    print(f"{asked.out / 'curves.svg'} drawn")


if __name__ == "__main__":
    main()
