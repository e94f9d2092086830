"""Names of labels in a dump: of the ids of `environment` those under `environment/names`, in the order of the ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Names that are read, and letters of each. They come from a file, and are shown.
MOST_NAMES, LONGEST_NAME = 4096, 60

Names = dict[str, tuple[str, ...]]


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
