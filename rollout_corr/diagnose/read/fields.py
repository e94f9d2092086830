"""Choose the field of each role in a file: by the names that frameworks use, or as the user says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .chunk import MISSING_INTEGER
from .columns import described
from .problems import DumpError, Problem

# What a field holds: log-probs, which keep their dtype; flags; where sequences begin; whole numbers, -1 where there is
# none; numbers, NaN where there is none; texts of tokens; or labels of a column that the user names.
Kind = Literal["logp", "mask", "offsets", "whole", "number", "texts", "label"]


class Role(NamedTuple):
    """A meaning that a field of a dump may have, such as "train_logp"."""

    kind: Kind
    names: Sequence[str]  # as frameworks call it, by preference
    per_token: bool = False  # never one value for a whole sequence


def _role(kind: Kind, names: str, per_token: bool = False) -> Role:
    return Role(kind, names.split(), per_token)


# Of old and current log-probs, a correction compares the old ones.
ROLES = {
    "train_logp": _role(
        "logp",
        "train_logp train_logps train_logprob train_logprobs train_log_prob train_log_probs trainer_logp "
        "trainer_logprobs training_logprobs old_logp old_logps old_logprobs old_log_prob old_log_probs "
        "old_per_token_logps prev_logprobs prox_logp proximal_logprobs action_log_probs actor_log_probs "
        "policy_logprobs per_token_logps log_prob log_probs logprobs logps logp",
        per_token=True,
    ),
    "rollout_logp": _role(
        "logp",
        "rollout_logp rollout_logps rollout_logprob rollout_logprobs rollout_log_prob rollout_log_probs "
        "sampling_logprobs sampling_per_token_logps generation_logprobs inference_logprobs infer_logp infer_logprobs "
        "infer_log_probs behavior_logprobs behavior_log_probs behav_logp engine_logprobs vllm_logprobs "
        "sglang_logprobs",
        per_token=True,
    ),
    "mask": _role(
        "mask",
        "mask response_mask loss_mask loss_masks action_mask completion_mask token_mask token_loss_mask "
        "local_loss_mask assistant_mask valid attention_mask",
        per_token=True,
    ),
    "sequence_mask": _role("mask", "sequence_mask sample_loss_mask sample_mask"),
    "cu_seqlens": _role("offsets", "cu_seqlens cu_seq_lens offsets"),
    "lengths": _role("offsets", "lengths seqlens seq_lens response_lengths"),
    "token_ids": _role("whole", "token_ids tokens responses response_ids completion_ids output_ids input_ids"),
    "texts": _role("texts", "texts token_texts token_strings"),
    "advantages": _role("number", "advantages advantage"),
    "rewards": _role("number", "rewards reward scores score token_level_rewards token_level_scores"),
    "turns": _role("whole", "turns turn_ids turn_id turn"),
    "versions": _role("whole", "versions version weight_versions weight_version policy_versions policy_version"),
    "steps": _role("whole", "steps step global_step global_steps"),
    "log_mass": _role("number", "log_mass kept_log_mass"),
    "prompt_lengths": _role("whole", "prompt_lengths prompt_length prompt_len"),
    "cached_tokens": _role("whole", "cached_tokens num_cached_tokens"),
    "group_index": _role("whole", "group_index group_indices group_ids group_id"),
    "entropy": _role("number", "entropy entropies entropys token_entropy old_entropy"),
    "new_logp": _role("logp", "new_logp new_logprobs new_log_probs curr_logprobs log_probs logprobs", per_token=True),
}
REQUIRED = ("train_logp", "rollout_logp")
# Names of labels that are read, and letters of each. They come from a file, and are shown.
MOST_NAMES, LONGEST_NAME = 4096, 60
# Names that a message lists, and letters that it shows of each.
MOST_LISTED, LONGEST_SHOWN = 50, 100


def role_of(name: str) -> Role:
    """Return a role; of a column of labels, the role of labels."""
    return ROLES.get(name, Role("label", ()))


def floating_of(role: str) -> torch.dtype:
    """Return the floating dtype of numbers: float32 has not all whole numbers above 2^24."""
    return torch.float64 if role_of(role).kind in ("whole", "label") else torch.float32


def kept(role: str, values: Tensor) -> Tensor:
    """Return the values of a role in the dtype that a chunk has them in."""
    kind = role_of(role).kind
    if kind == "mask":
        return values != 0
    if kind == "logp" and values.is_floating_point():
        return values
    if kind != "whole":
        return values.to(floating_of(role))
    if values.is_floating_point():
        # What int64 cannot hold is unknown.
        values = values.double()
        values = values.where(values.abs() < 2.0**63, MISSING_INTEGER)
    return values.to(torch.int64)


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
            if role not in ROLES:
                raise DumpError(f"field {role!r}: expected one of {list(ROLES)}, got {role!r}")


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
    for role, (kind, aliases, _) in ROLES.items() if wanted.guess else ():
        if role in chosen or (kind == "offsets" and any(role_of(other).kind == kind for other in chosen)):
            continue
        taken = {name for other, name in chosen.items() if other in ROLES}
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
        if any(part.lower() in ROLES["mask"].names for part in name.split(".")[:-1]):
            raise Problem(file, None, name, "as mask: expected values, got a mapping").error()
    return {role: chosen[role] for role in (*ROLES, *wanted.by) if role in chosen}


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
