"""Files of both log-probs that the frameworks' own functions write, recorded once, tiny, with the commits of these.

`by_rank` restates those of slime and miles for any samples and ranks.

`PEERS=FOLDER PYTHONPATH=tests:. python -m builders.record_dumps` cuts the functions out of the checkouts in FOLDER,
runs them on `samples()` and rewrites `tests/diagnose/written`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from conformance.sources import Source, found

FOLDER = Path(__file__).resolve().parents[1] / "diagnose" / "written"
STEP = 3


@dataclass
class Sample:
    """A sequence: a prompt, and a response with its log-probs, each [response]."""

    index: int
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


def samples(count: int = 3) -> list[Sample]:
    """Make sequences of four to six tokens whose numbers are sums of powers of 2."""
    made = []
    for i in range(count):
        n = (4, 6, 5)[i % 3]
        train = -torch.arange(1, n + 1) / 8 - i
        mask = torch.arange(n) % 4 != 2
        sides = train, train - torch.arange(n) / 64
        made.append(Sample(i, [900, 901, 902][: 1 + i % 3], torch.arange(n) + 10 * i, *sides, mask, mask / 2.0))
    return made


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


def by_rank(folder: Path, step: int, samples: Sequence[Sample], parts: int = 1, told: bool = False) -> None:
    """Write a step as the ranks of miles do, `told` with the part that each has, or as slime's without."""
    for rank, part, columns in ranks_of(samples, parts):
        context = {"cp_rank": part, "cp_size": parts, "qkv_format": "thd"} if told else {}
        path = folder / "train_data" / f"{step}_{rank}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"rollout_id": step, "rank": rank, "rollout_data": columns, **context}, path)


def part_of(values: Tensor, sample: Sample, part: int, parts: int) -> Tensor:
    """Return what a rank of context parallelism holds: chunks `part` and `2 parts - 1 - part`, one token early."""
    total, response = sample.lengths
    chunk = -(-total // (2 * parts))
    bounds = [(i * chunk, (i + 1) * chunk) for i in (part, 2 * parts - 1 - part)]
    first = total - response - 1
    held = [values[max(low - first, 0) : max(min(high, total - 1) - first, 0)] for low, high in bounds]
    return values if parts == 1 else torch.cat(held)


def rows_of(values: Sequence[Tensor]) -> Tensor:
    """Pad to [B, T] with zeros."""
    return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)


def nemo(source: Source, folder: Path) -> None:
    own = samples()
    grpo, logger = "nemo_rl/algorithms/grpo.py", "nemo_rl/utils/logger.py"
    write = source.instance(logger, "Logger", ("log_batched_dict_as_jsonl",), base_log_dir=str(folder))
    statements = source.lines(grpo, "grpo_train", "log_data = {}", "logger.log_batched_dict_as_jsonl(")
    full = {name: [sample.behind_prompt(getattr(sample, name)) for sample in own] for name in ("train", "rollout")}
    statements(
        repeated_batch={},
        flat_messages={"content": [f"text {sample.index}" for sample in own]},
        rewards=torch.tensor([float(sample.index % 2) for sample in own]),
        master_config=SimpleNamespace(grpo=SimpleNamespace(use_dynamic_sampling=False)),
        input_lengths=torch.tensor([sample.lengths[0] for sample in own]),
        total_steps=STEP - 1,
        logger=write,
        train_data={
            "input_ids": rows_of([sample.tokens for sample in own]),
            "token_mask": rows_of([sample.behind_prompt(sample.mask.long()) for sample in own]),
            "sample_mask": torch.ones(len(own)),
            "advantages": rows_of([sample.behind_prompt(sample.advantages) for sample in own]),
            "generation_logprobs": rows_of(full["rollout"]),
            "prev_logprobs": rows_of(full["train"]),
        },
    )


def slime(source: Source, folder: Path) -> None:
    parallel = SimpleNamespace(
        is_pipeline_last_stage=lambda **_: True,
        **dict.fromkeys(
            ("get_tensor_model_parallel_rank", "get_context_parallel_rank", "get_data_parallel_src_rank"), lambda **_: 0
        ),
        get_data_parallel_rank=lambda **_: 0,
        get_data_parallel_world_size=lambda **_: 1,
    )
    path, gather = "slime/observability/train_data_utils.py", lambda values, total, response: values
    save = source.cut(path, "save_debug_train_data", mpu=parallel, all_gather_with_cp=gather)
    args = SimpleNamespace(save_debug_train_data=str(folder / "train_data" / "{rollout_id}.pt"))
    with mock.patch("torch.distributed.get_rank", return_value=0):
        save(args, rollout_id=STEP, rollout_data=per_sample(samples()))


def slime_by_rank(source: Source, folder: Path) -> None:
    save = source.cut("slime/utils/train_dump_utils.py", "save_debug_train_data")
    args = SimpleNamespace(save_debug_train_data=str(folder / "train_data" / "{rollout_id}_{rank}.pt"))
    for rank, _, columns in ranks_of(samples(), 1):
        with mock.patch("torch.distributed.get_rank", return_value=rank):
            save(args, rollout_id=STEP, rollout_data=columns)


def miles(source: Source, folder: Path) -> None:
    save = source.cut("miles/utils/train_dump_utils.py", "save_debug_train_data_for_rank")
    path = str(folder / "train_data" / "{rollout_id}_{rank}.pt")
    args = SimpleNamespace(save_debug_train_data=path, qkv_format="thd")
    for rank, part, columns in ranks_of(samples(), 2):
        save(args, rollout_id=STEP, rollout_data=columns, rank=rank, cp_rank=part, cp_size=2)


def miles_loss(source: Source, folder: Path) -> None:
    own = samples()
    dump = source.cut("miles/backends/training_utils/debug_dump.py", "maybe_dump_policy_loss_debug")
    dump.__globals__["_POLICY_LOSS_DUMP_COUNTER"] = STEP
    dump(
        args=SimpleNamespace(dump_details=str(folder)),
        batch={
            "total_lengths": [sample.lengths[0] for sample in own],
            "response_lengths": [sample.lengths[1] for sample in own],
        },
        train_log_probs=[sample.train - 0.0625 for sample in own],
        old_log_probs=[sample.train for sample in own],
        rollout_log_probs=[sample.rollout for sample in own],
        advantages=[sample.advantages for sample in own],
        local_loss_masks=[sample.mask for sample in own],
        ppo_kl=torch.zeros(15),
        pg_loss=torch.zeros(15),
    )


def prime_rl(source: Source, folder: Path) -> None:
    path = "src/prime_rl/trainer/rl/token_export.py"
    methods = ("export", "_export_dir", "_export_file", "_write")
    state = {"_closed": False, "_initialized_files": set(), "_sequences_by_file": {}, "_pending_stable_dirs": set()}
    root = Source(source.framework, source.version, source.root / "src", source.kind)
    exporter = root.instance(
        path.removeprefix("src/"), "TokenExporter", methods, rank=0, output_dir=folder / "token_exports", **state
    )
    own = samples()
    micro_batch = {
        "input_ids": torch.cat([sample.tokens for sample in own])[None],
        "position_ids": torch.cat([torch.arange(sample.lengths[0]) for sample in own])[None],
        "loss_mask": torch.cat([sample.behind_prompt(sample.mask) for sample in own])[None],
        "advantages": torch.cat([sample.behind_prompt(sample.advantages) for sample in own])[None],
        "inference_logprobs": torch.cat([sample.behind_prompt(sample.rollout) for sample in own])[None],
        "env_names": ["math"] * sum(sample.lengths[0] for sample in own),
    }
    train = torch.cat([sample.behind_prompt(sample.train) for sample in own])[None]
    output = {"logprobs": train, "entropy": -train}
    exporter.export(STEP, 0, micro_batch, output, [sample.lengths[0] for sample in own], None)


# Folder and writer of each framework; the folder of its checkout, and what tells that its code is there.
WRITERS: dict[str, tuple[Callable[[Source, Path], None], str, str]] = {
    "nemo": (nemo, "nemo-rl", "nemo_rl"),
    "slime": (slime, "slime", "slime/observability"),
    "slime_by_rank": (slime_by_rank, "slime", "slime/utils/train_dump_utils.py"),
    "miles_in_parts": (miles, "miles", "miles"),
    "miles_loss": (miles_loss, "miles", "miles"),
    "prime_rl": (prime_rl, "prime-rl", "src/prime_rl"),
}


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    commits = {}
    for name, (write, checkout, package) in WRITERS.items():
        sources = found(name.partition("_")[0], None, package, checkout)
        assert sources, f"no checkout {checkout} with {package} under PEERS"
        with redirect_stdout(StringIO()):
            write(sources[0], FOLDER / name)
        commits[name] = {"repository": checkout, "commit": sources[0].version}
    (FOLDER / "commits.json").write_text(json.dumps(commits, indent=1) + "\n")


if __name__ == "__main__":
    main()
