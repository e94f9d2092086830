"""Choose the field of each role in a file: by the names that frameworks use, or as the user says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .columns import described
from .problems import DumpError, Problem

# By preference: of old and current log-probs, a correction compares the old ones.
ALIASES: dict[str, tuple[str, ...]] = {
    "train_logp": (
        *("train_logp", "train_logps", "train_logprob", "train_logprobs", "train_log_prob", "train_log_probs"),
        *("trainer_logp", "trainer_logprobs", "training_logprobs", "old_logp", "old_logps", "old_logprobs"),
        *("old_log_prob", "old_log_probs", "old_per_token_logps", "prev_logprobs", "prox_logp", "proximal_logprobs"),
        *("action_log_probs", "actor_log_probs", "policy_logprobs", "per_token_logps", "log_prob", "log_probs"),
        *("logprobs", "logps", "logp"),
    ),
    "rollout_logp": (
        *("rollout_logp", "rollout_logps", "rollout_logprob", "rollout_logprobs", "rollout_log_prob"),
        *("rollout_log_probs", "sampling_logprobs", "sampling_per_token_logps", "generation_logprobs"),
        *("inference_logprobs", "infer_logp", "infer_logprobs", "infer_log_probs", "behavior_logprobs"),
        *("behavior_log_probs", "behav_logp", "engine_logprobs", "vllm_logprobs", "sglang_logprobs"),
    ),
    "mask": (
        *("mask", "response_mask", "loss_mask", "loss_masks", "action_mask", "completion_mask", "token_mask"),
        *("token_loss_mask", "local_loss_mask", "assistant_mask", "valid", "attention_mask"),
    ),
    "sequence_mask": ("sequence_mask", "sample_loss_mask", "sample_mask"),
    "cu_seqlens": ("cu_seqlens", "cu_seq_lens", "offsets"),
    "lengths": ("lengths", "seqlens", "seq_lens", "response_lengths"),
    "token_ids": ("token_ids", "tokens", "responses", "response_ids", "completion_ids", "output_ids", "input_ids"),
    "texts": ("texts", "token_texts", "token_strings"),
    "advantages": ("advantages", "advantage"),
    "rewards": ("rewards", "reward", "scores", "score", "token_level_rewards", "token_level_scores"),
    "turns": ("turns", "turn_ids", "turn_id", "turn"),
    "versions": ("versions", "version", "weight_versions", "weight_version", "policy_versions", "policy_version"),
    "steps": ("steps", "step", "global_step", "global_steps"),
    "log_mass": ("log_mass", "kept_log_mass"),
    "prompt_lengths": ("prompt_lengths", "prompt_length", "prompt_len"),
    "cached_tokens": ("cached_tokens", "num_cached_tokens"),
    "group_index": ("group_index", "group_indices", "group_ids", "group_id"),
    "entropy": ("entropy", "entropies", "entropys", "token_entropy", "old_entropy"),
    "new_logp": ("new_logp", "new_logprobs", "new_log_probs", "curr_logprobs", "log_probs", "logprobs"),
}
REQUIRED = ("train_logp", "rollout_logp")
LOG_PROBS = (*REQUIRED, "new_logp")
OFFSETS = ("cu_seqlens", "lengths")
MASKS = ("mask", "sequence_mask")
# Names of labels that are read, and letters of each. They come from a file, and are shown.
MOST_NAMES, LONGEST_NAME = 4096, 60
# Names that a message lists, and letters that it shows of each.
MOST_LISTED, LONGEST_SHOWN = 50, 100

INTEGERS = ("token_ids", "turns", "versions", "steps", "prompt_lengths", "cached_tokens", "group_index")


def floating_of(role: str) -> torch.dtype:
    """Return the floating dtype of a column: what the user names may be labels, which float32 cannot hold above 2^24.

    Log-probs are apart: they keep their own.
    """
    return torch.float32 if role in ALIASES and role not in INTEGERS else torch.float64


def listing(names: Sequence[str]) -> str:
    """List names, the first ones if there are many, each cut where it is long."""
    shown = [name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}..." for name in names[:MOST_LISTED]]
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(shown) + more


def last_part(name: str) -> str:
    """Return the name of a nested field without its prefix of mappings."""
    return name.rpartition(".")[2]


# Names of labels, in the order of the ids, by the names of their fields.
Names = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class ChosenFields:
    """The fields that the user names."""

    roles: Mapping[str, str] = field(default_factory=dict)  # names of fields by role, where the guess is wrong
    by: tuple[str, ...] = ()  # names of further columns by which D is shown
    guess: bool = True  # fields of other roles are found by the names that frameworks use
    # Names of fields by role that are looked for before the others, in a file of a known framework.
    first: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role in self.roles:
            if role not in ALIASES:
                raise DumpError(f"field {role!r}: expected one of {list(ALIASES)}, got {role!r}")


def choose(
    names: Iterable[str],
    wanted: ChosenFields,
    file: str,
    fits: Callable[[str, str], bool] = lambda role, name: True,
    values: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Choose the field of each role that a file has.

    Args:
        names: The fields of the file; nested ones with dots, such as `batch.old_log_probs`.
        wanted: The fields that the user names; the others are guessed.
        file: Path of the file, for messages.
        fits: Takes a role and a field; guesses skip fields for which it returns False.
        values: What the fields hold, for a message that says what they look like.

    Raises:
        DumpError: A field that the user names is missing, or no field is known for a required role.
    """
    names = list(names)
    chosen: dict[str, str] = {}
    for role, name in (*wanted.roles.items(), *zip(wanted.by, wanted.by, strict=True)):
        found = [known for known in names if name in (known, last_part(known))]
        if not found:
            there = listing(names) if values is None else described(values)
            raise Problem(file, None, name, f"as {role}: there is no such field; there are {there}").error()
        chosen[role] = found[0]
    by_last_part: dict[str, list[str]] = {}
    for name in names:
        by_last_part.setdefault(last_part(name).lower(), []).append(name)
    for role, aliases in ALIASES.items() if wanted.guess else ():
        if role in chosen or (role in OFFSETS and any(other in chosen for other in OFFSETS)):
            continue
        taken = {name for other, name in chosen.items() if other in ALIASES}
        for alias in (*((wanted.first[role],) if role in wanted.first else ()), *aliases):
            found = [name for name in by_last_part.get(alias, ()) if name not in taken]
            found = [name for name in found if role in REQUIRED or fits(role, name)]
            if found:
                chosen[role] = found[0]
                break
    for role in REQUIRED:
        if role not in chosen:
            there = described(values) if values is not None else listing(names)
            what = (
                f"no field has a known name for {role}; name one: --field {role}=NAME, in Python "
                f"field={{{role!r}: NAME}}. There are {there or 'no fields'}"
            )
            raise Problem(file, None, role, what).error()
    # A mapping named as a mask was flattened into other names. Without it, tokens that it hides would count.
    for name in names if wanted.guess and "mask" not in chosen else ():
        if any(part.lower() in ALIASES["mask"] for part in name.split(".")[:-1]):
            raise Problem(file, None, name, "as mask: expected values, got a mapping").error()
    return {role: chosen[role] for role in (*ALIASES, *wanted.by) if role in chosen}


def names_in(fields: Mapping[str, Any], by: Iterable[str]) -> Names:
    """Find the names of the labels that were asked for, among the fields of a record or of a file of tensors."""
    found: Names = {}
    for name in by:
        given = fields.get(f"{name}/names")
        if not isinstance(given, (list, tuple)) or len(given) > MOST_NAMES:
            continue
        if all(isinstance(text, str) for text in given):
            found[name] = tuple("".join(filter(str.isprintable, text))[:LONGEST_NAME] for text in given)
    return found


def name_of(names: Sequence[str], value: float) -> str:
    """Name a label: by its number where it has no name."""
    # Six digits would give neighbors among large numbers, such as steps beyond a million, one name.
    if not float(value).is_integer():
        return f"{value:g}"
    place = int(value)
    return names[place] if 0 <= place < len(names) and names[place] else str(place)
