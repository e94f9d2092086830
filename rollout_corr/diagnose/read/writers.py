"""A table of the files in which frameworks write log-probs: their contents, and the options that write them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from .traces import TRAINER, UNSEAL

# Bytes of a file that are looked at to recognize it.
LOOKED_AT = 1 << 16

# The log-probs in a file: of both policies, of the engine alone, or none but texts and rewards; a pickle is not opened,
# and what is sealed with zstd has to be decompressed.
Sides = Literal["both", "rollout", "none", "pickled", "sealed"]


@dataclass(frozen=True, eq=False)
class Writer:
    """A kind of file that a framework writes."""

    framework: str  # its name as messages say it; two where the files of both are alike
    switch: str  # what makes the framework write it
    files: str  # pattern of the end of the path, with `/`; its groups `step` and `rank` are numbers
    sides: Sides = "both"  # the log-probs that are in it
    # Fields that come first for a role, where a file has several of its names.
    roles: Mapping[str, str] = field(default_factory=dict)
    # Of a .jsonl file, fields that its first record has to have: the name alone says too little.
    keys: frozenset[str] = frozenset()
    by_rank: bool = False  # each rank writes a file of a step, with its samples or its part of them
    traces: bool = False  # its records are of traces, whose other side is in the stream of episodes
    both: str = ""  # of a file without both sides, what gives them; "": the framework's drop-in does

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The pattern of the end of a path."""
        return re.compile(rf"(?:^|/){self.files}$")


SLIME = "--save-debug-train-data or --dump-details"
ANNOTATIONS = "the annotations of the trainer, whose file monitor has to be on too"
# Fields of the first record of .jsonl files whose names say too little.
VERL, AREAL = frozenset({"input", "output", "score", "step"}), frozenset({"task_id", "head_version", "completion"})

# Of the kinds that a folder has, the first one with both sides is read.
WRITERS = (
    Writer("nemo", "not env.should_log_nemo_gym_responses", r"train_data_step(?P<step>\d+)\.jsonl(?:\.gz)?"),
    Writer(
        "prime_rl",
        "monitors.file",
        r"traces/annotations/(?:[^/]+/\d+|[^/]+)\.jsonl",
        keys=frozenset({"trace_id", TRAINER}),
        traces=True,
    ),
    # Until August 2026.
    Writer("prime_rl", "trainer.enable_token_export", r"token_exports/step_(?P<step>\d+)/rank_\d+\.jsonl"),
    Writer("slime", SLIME, r"train_data/(?P<step>\d+)\.pt"),
    Writer("skyrl", "trainer.dump_data_batch", r"dumped_data/global_step_\d+_training_input\.pkl", "pickled"),
    # slime wrote the same until August 2026.
    Writer("miles", SLIME, r"train_data/(?P<step>\d+)_(?P<rank>\d+)\.pt", by_rank=True),
    Writer(
        "miles",
        "--dump-details",
        r"policy_loss_debug/rank_(?P<rank>\d+)_call_(?P<step>\d+)\.pt",
        # The others are those of the loss: in the first update of a step the same values again.
        roles={"train_logp": "old_log_probs"},
    ),
    Writer(
        "slime or miles",
        "--save-debug-rollout-data or --dump-details",
        r"rollout_data/(?:eval_)?\d+\.pt",
        "rollout",
        both=SLIME,
    ),
    Writer("verl", "actor_rollout_ref.rollout.skip", r"\d+/gen_batch\.dp", "rollout"),
    Writer("verl", "trainer.rollout_data_dir", r"\d+\.jsonl", "none", keys=VERL),
    Writer("areal", "rollout.dump_to_file", r"\d+/\d+\.jsonl", "none", keys=AREAL),
    Writer("trl", "log_completions", r"completions/completions_\d+\.parquet", "none"),
    Writer("xtuner", "always on", r"train_rollout_\d+\.jsonl", "none"),
    Writer("xtuner", "debug_rollout", r"debug_rollout_\d+\.pt", "rollout"),
    Writer(
        "torchtitan",
        "log_logprobs of the recorder",
        r"rollout_samples\.jsonl",
        "rollout",
        both="rc.dump in the trainer",
    ),
    Writer(
        "prime_rl",
        "the file monitor",
        r"rollouts/step_\d+/.+/traces\.jsonl",
        "none",
        both="trainer.enable_token_export",
    ),
    Writer(
        "prime_rl", "the file monitor", r"traces/(?:stream|annotations/[^/]+)/\d+\.jsonl\.zst", "sealed", both=UNSEAL
    ),
    Writer(
        "prime_rl",
        "the file monitor",
        r"traces/stream(?:/\d+)?\.jsonl",
        "rollout",
        both=ANNOTATIONS,
    ),
    Writer(
        "prime_rl",
        "the file monitor",
        r"traces/(?:annotations/.+|stream\.index)\.jsonl",
        "none",
        both=ANNOTATIONS,
    ),
)


def writer_of(file: Path) -> tuple[Writer | None, int | None]:
    """Recognize the writer of a file and its step by the path, as far as that says it."""
    path = Path(os.path.abspath(file)).as_posix()
    for writer in WRITERS:
        found = writer.pattern.search(path)
        if found and _has_keys(file, writer.keys):
            step = found.groupdict().get("step")
            return writer, None if step is None else int(step)
    return None, None


def _has_keys(file: Path, keys: frozenset[str]) -> bool:
    """Look for keys in the first record of a .jsonl file."""
    head = beginning(file).partition("\n")[0] if keys else ""
    return all(json.dumps(key) in head for key in keys)


def beginning(file: Path) -> str:
    """Return the first letters of a file, none if it cannot be read or is none: a pipe would be waited for."""
    if not file.is_file():
        return ""
    try:
        with file.open("rb") as opened:
            return opened.read(LOOKED_AT).decode("utf-8", "replace")
    except OSError:
        return ""
