"""Dumps of any samples in the layouts of NeMo RL and miles, restated from the files in `tests/diagnose/written`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from builders.diagnose_cases import chunks_of


@dataclass
class Sample:
    """A sequence: a prompt, and a response with its log-probs, each [response]."""

    index: int
    step: int
    prompt: list[int]
    ids: Tensor
    train: Tensor
    rollout: Tensor
    mask: Tensor
    advantages: Tensor

    @property
    def tokens(self) -> Tensor:
        return torch.cat([torch.tensor(self.prompt), self.ids])

    @property
    def lengths(self) -> tuple[int, int]:
        """Of prompt and response together, and of the response."""
        return len(self.prompt) + len(self.ids), len(self.ids)

    def behind_prompt(self, response: Tensor) -> Tensor:
        """Put zeros of the prompt before values of the response."""
        return torch.cat([response.new_zeros(len(self.prompt)), response])


def samples_of(columns: dict[str, Tensor]) -> list[Sample]:
    """Cut columns into samples, each behind a prompt of three to seven tokens."""
    found: list[Sample] = []
    for chunk in chunks_of(columns):
        ids, advantages, steps = (chunk.columns.get(name) for name in ("token_ids", "advantages", "steps"))
        for start, stop in pairwise(chunk.offsets.tolist()):
            of, i, count = slice(start, stop), len(found), stop - start
            found.append(
                Sample(
                    index=i,
                    step=1 if steps is None or not count else int(steps[start]),
                    prompt=list(range(900, 903 + i % 5)),
                    # Healthy dumps need no ids, and those that are all alike would be a repetition.
                    ids=torch.arange(count) if ids is None else ids[of],
                    train=chunk.train[of],
                    rollout=chunk.rollout[of],
                    mask=torch.ones(count, dtype=torch.bool) if chunk.mask is None else chunk.mask[of],
                    advantages=torch.full((count,), 0.5 * (i % 3) - 0.5) if advantages is None else advantages[of],
                )
            )
    return found


def nemo(folder: Path, step: int, samples: Sequence[Sample]) -> None:
    width = max(sample.lengths[0] for sample in samples)

    def row(values: Tensor) -> list[list[float]]:
        return [torch.cat([values, values.new_zeros(width - len(values))]).tolist()]

    path = folder / f"train_data_step{step}.jsonl"
    with path.open("w") as file:
        for i, sample in enumerate(samples):
            record = {
                "content": [f"text {sample.index}"],
                "rewards": [float(sample.index % 2)],
                "input_lengths": [sample.lengths[0]],
                "token_ids": row(sample.tokens),
                "token_loss_mask": row(sample.behind_prompt(sample.mask.long())),
                "sample_loss_mask": [1.0],
                "advantages": row(sample.behind_prompt(sample.advantages)),
                "generation_logprobs": row(sample.behind_prompt(sample.rollout)),
                "prev_logprobs": row(sample.behind_prompt(sample.train)),
                "idx": i,
            }
            file.write(json.dumps(record) + "\n")


def per_sample(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return the columns of slime and miles."""
    return {
        "tokens": [sample.tokens for sample in samples],
        "total_lengths": [sample.lengths[0] for sample in samples],
        "response_lengths": [sample.lengths[1] for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rewards": [float(sample.index % 2) for sample in samples],
        "loss_masks": [sample.mask.int() for sample in samples],
        "log_probs": [sample.train for sample in samples],
        "rollout_log_probs": [sample.rollout for sample in samples],
        "advantages": [sample.advantages for sample in samples],
    }


def ranks_of(samples: Sequence[Sample], parts: int) -> Iterator[tuple[int, int, dict[str, list[Any]]]]:
    """Give what two ranks of data parallelism hold, each with `parts` of context parallelism: rank, part, columns."""
    for data in range(2):
        own = [sample for sample in samples if sample.index % 2 == data]
        for part in range(parts):
            columns = per_sample(own)
            for name in ("log_probs", "rollout_log_probs", "advantages"):
                columns[name] = [part_of(x, sample, part, parts) for x, sample in zip(columns[name], own, strict=True)]
            yield data * parts + part, part, columns


def by_rank(folder: Path, step: int, samples: Sequence[Sample], parts: int = 1, **about: Any) -> None:
    for rank, part, columns in ranks_of(samples, parts):
        context = {"cp_rank": part, "cp_size": parts} if about else {}
        saved = {"rollout_id": step, "rank": rank, "rollout_data": columns, **context, **about}
        torch.save(saved, made(folder / "train_data") / f"{step}_{rank}.pt")


def part_of(values: Tensor, sample: Sample, part: int, parts: int) -> Tensor:
    """Return what a rank of context parallelism holds: chunks `part` and `2 parts - 1 - part`, one token early."""
    total, response = sample.lengths
    chunk = -(-total // (2 * parts))
    bounds = [(i * chunk, (i + 1) * chunk) for i in (part, 2 * parts - 1 - part)]
    first = total - response - 1
    held = [values[max(low - first, 0) : max(min(high, total - 1) - first, 0)] for low, high in bounds]
    return values if parts == 1 else torch.cat(held)


def miles_in_parts(folder: Path, step: int, samples: Sequence[Sample]) -> None:
    by_rank(folder, step, samples, parts=2, qkv_format="thd")


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


Layout = Callable[[Path, int, Sequence[Sample]], None]
LAYOUTS: dict[str, Layout] = {"nemo": nemo, "miles_in_parts": miles_in_parts}


def write(layout: Layout, folder: Path, samples: Sequence[Sample]) -> Path:
    """Write a job's dumps, a step each."""
    for step in dict.fromkeys(sample.step for sample in samples):
        layout(folder, step, [sample for sample in samples if sample.step == step])
    return folder
