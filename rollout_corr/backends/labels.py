"""Labels of the sequences, turns or tokens of a batch, read: ids, and the name of each label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..definition.sequences import Packed
from ..metrics.labels import SEQUENCES, TOKENS, Labeled, LabelSet, Units
from ..specs.caches import cached
from ..specs.validate import shown
from .batch import INTEGERS, Reader, checked_tensor
from .staleness import read_versions

if TYPE_CHECKING:
    from .given import Labels, Versions

# Labels that need no ids: the ages of versions, and the signs of advantages.
AGE_LABEL, ADVANTAGE_LABEL = "age", "advantage"
SIGNS = ("negative", "zero", "positive")


def read_labels(
    read: Reader,
    labels: Mapping[str, Labels],
    versions: Versions | None,
    turns: Tensor | None,
    advantages: Tensor | None,
    per_sequence: bool,
    split: bool = False,
) -> tuple[Labeled, ...]:
    """Check the labels of a call and the names that go with them. An id that names none is no error: it is counted.

    Turns and advantages have been read, these [S] where `per_sequence`; `versions` give the ages if "age" has no ids.
    With `split` each sequence lies on several ranks, so that a shape which tokens have too is theirs.
    """
    made = {name for name in (AGE_LABEL, ADVANTAGE_LABEL) if name in labels and labels[name].ids is None}
    found = [_labeled(read, turns, name, one.names, one.ids, split) for name, one in labels.items() if name not in made]
    if AGE_LABEL in made:
        found.append(_ages(read, labels[AGE_LABEL].names, versions))
    if ADVANTAGE_LABEL in made:
        found.append(_signs(advantages, per_sequence, labels[ADVANTAGE_LABEL].names))
    return tuple(found)


def _labeled(read: Reader, turns: Tensor | None, name: object, names: object, given: object, split: bool) -> Labeled:
    argument = f"labels[{name!r}]"
    if not isinstance(given, Tensor) and not isinstance(given, list):
        raise TypeError(f"{argument}: expected a tensor or a list of tensors, got {type(given).__name__}")
    if not isinstance(given, Tensor) or given.is_nested:
        ids, units = read.per_token_or_sequence(argument, given, INTEGERS)[0], TOKENS
    elif tuple(given.shape) in ((read.count,), (read.count, 1)) and not (split and given.shape == read.first.shape):
        # Tested before the shape of tokens: sequences of one token each have the same shape.
        ids, units = checked_tensor(argument, given.reshape(-1), INTEGERS), SEQUENCES
        if ids.device != read.device:
            raise ValueError(f"{argument}: expected device {read.device}, got {ids.device}")
    elif turns is not None and _is_of_turns(argument, given, turns.shape[0] - 1, read, split):
        ids, units = _of_turns(read, turns, checked_tensor(argument, given.reshape(-1), INTEGERS)), TOKENS
    else:
        ids, units = read.per_token_or_sequence(argument, given, INTEGERS)[0], TOKENS
    return Labeled(_named(name, names, units), ids)


def _is_of_turns(argument: str, given: Tensor, turns: int, read: Reader, split: bool) -> bool:
    """Return whether labels are those of turns, by their shape, which tokens must not have too.

    Ranks have the same turns and each its tokens: [U] may be the shape of the tokens on one of them alone.
    """
    shape, packed = tuple(given.shape), read.offsets is not None
    if shape == (turns, 1):
        return shape != tuple(read.shape)
    found = shape == (turns,) and shape != tuple(read.first.shape)
    if found and split and packed:
        raise ValueError(
            f"{argument}: expected shape [{turns}, 1] (per turn) with ranks.sequence, where {list(shape)} can also "
            "be the shape of a rank's tokens"
        )
    return found


def _of_turns(read: Reader, turns: Tensor, ids: Tensor) -> Tensor:
    """Give every token the label of its turn."""
    return Packed(turns.to(ids.device, torch.int64), read.first.numel()).spread(ids).view(read.first.shape)


def _ages(read: Reader, names: object, versions: Versions | None) -> Labeled:
    """Make labels of ages; a last name such as "4+" is of all older ones too."""
    if versions is None:
        raise ValueError(f"labels[{AGE_LABEL!r}]: expected ids, or versions= to make ages of, got neither")
    found = read_versions(read, versions)
    labels = _named(AGE_LABEL, names, SEQUENCES if found.per_sequence else TOKENS)
    ages = found.ages()
    return Labeled(labels, ages.clamp(max=len(labels.values) - 1) if labels.values[-1].endswith("+") else ages)


def _signs(advantages: Tensor | None, per_sequence: bool, names: object) -> Labeled:
    """Make labels of the signs of the advantages; NaN has none."""
    if advantages is None:
        raise ValueError(
            f"labels[{ADVANTAGE_LABEL!r}]: expected ids, or advantages= of the call to take signs of, got neither"
        )
    if names != ():
        raise ValueError(f"labels[{ADVANTAGE_LABEL!r}].names: expected none without ids, got {shown(names)}")
    ids = torch.where(advantages.isnan(), len(SIGNS), advantages.sign().long() + 1)
    return Labeled(_named(ADVANTAGE_LABEL, SIGNS, SEQUENCES if per_sequence else TOKENS), ids)


def _named(name: object, values: object, units: Units) -> LabelSet:
    if not isinstance(name, str) or not name or "/" in name or "=" in name:
        raise ValueError(f"labels: expected names that are strings without '/' and '=', got {shown(name)}")
    if isinstance(values, int) and not isinstance(values, bool) and values > 0:
        return _counted(name, values, units)
    if isinstance(values, (str, int)) or not isinstance(values, (list, tuple)) or not values:
        raise ValueError(f"labels[{name!r}].names: expected a list of names or a count above 0, got {shown(values)}")
    for value in values:
        if not isinstance(value, str) or not value or "/" in value or value in ("?", "outside"):
            raise ValueError(f"labels[{name!r}].names: expected strings without '/', got {shown(value)}")
    if len(set(values)) < len(values):
        raise ValueError(f"labels[{name!r}].names: expected different names, got {list(values)}")
    return LabelSet(name, tuple(values), units)


@cached(maxsize=64)
def _counted(name: str, count: int, units: Units) -> LabelSet:
    return LabelSet(name, tuple(map(str, range(count))), units)
