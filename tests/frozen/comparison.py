"""What moved between two records, by how much, and whether it was allowed to."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from frozen.records import unpacked

# Differences that are shown.
SHOWN = 20


class Moved(NamedTuple):
    """A number, or what a call ended in, that two records have differently.

    Attributes:
        key: The call.
        group: "weights", "statistics" and so on; "raised" where one of them failed.
        name: Of a statistic or a metric; else "".
        apart: The relative difference; infinite where there is none.
        words: Both, in words.
    """

    key: str
    group: str
    name: str
    apart: float
    words: str


def main(one: Path, other: Path, allow: list[str]) -> int:
    """Print what differs, and give the exit status: 1 where something moved that was not allowed to."""
    (left, names), (right, more) = read(one), read(other)
    both = [key for key in left if key in right]
    for side, missing in ((one, left.keys() - right.keys()), (other, right.keys() - left.keys())):
        if missing:
            print(f"{len(missing)} calls in {side} alone, such as {', '.join(sorted(missing)[:5])}")
    moved = {key: list(differences(key, left[key], right[key], names | more)) for key in both}
    found = [each for every in moved.values() for each in every]
    print(f"{sum(not every for every in moved.values())} equal, {sum(map(bool, moved.values()))} different")
    count = Counter(f"{each.group} {each.name}" for each in found)
    for what, many in count.most_common(SHOWN):
        print(f"  {many:6} x {what}, by {max(x.apart for x in found if f'{x.group} {x.name}' == what):.2e} at most")
    red = [each for each in found if not any(allowed(each, words) for words in allow)]
    print("\n".join(f"{x.key} {x.group} {x.name}: {x.words}" for x in red[:SHOWN]) or "nothing that is not allowed")
    return int(bool(red) or not both)


def read(path: Path) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The calls of a record by key, and its lists of names."""
    calls, names = {}, {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            key, *held = json.loads(line)
            if key == "names":
                names[held[0]] = held[1]
            else:
                (calls[key],) = held
    return calls, names


def allowed(moved: Moved, words: str) -> bool:
    """Whether `PATTERN[:REL]` covers a difference: of a key, a group or a name, within a relative tolerance."""
    found = re.fullmatch(r"(.+):([0-9.eE+-]+)", words)
    pattern, within = (words, math.inf) if found is None else (found[1], float(found[2]))
    return moved.apart <= within and any(fnmatchcase(x, pattern) for x in (moved.key, moved.group, moved.name))


def differences(key: str, a: dict[str, Any], b: dict[str, Any], names: dict[str, list[str]]) -> Iterator[Moved]:
    """What two records of a call have differently; a call that one of them refuses has nothing to compare."""
    if "refused" in a or "refused" in b:
        return
    if "raised" in a or "raised" in b:
        if a.get("raised") != b.get("raised"):
            yield Moved(key, "raised", "", math.inf, " -> ".join(x.get("why", "a result") for x in (a, b)))
        return
    for group in dict.fromkeys((*a, *b)):
        x, y = a.get(group, ["nothing", "", ""]), b.get(group, ["nothing", "", ""])
        if x[:2] == y[:2]:
            continue
        named = group in ("statistics", "metrics")
        if named or (x[0] == y[0] and x[2] and y[2]):
            before, after = (numbers(one, names if named else None) for one in (x, y))
            for name in dict.fromkeys((*before, *after)):
                one, other = before.get(name, "nothing"), after.get(name, "nothing")
                if "nothing" in (one, other) or bits(one) != bits(other):
                    apart = relative(one, other)
                    yield Moved(key, group, name if named else "", apart, f"{one} -> {other}, relative {apart:.2e}")
        else:
            yield Moved(key, group, "", math.inf, f"{x[0]} {x[1]} -> {y[0]} {y[1]}")


def numbers(group: list[str], names: dict[str, list[str]] | None) -> dict[str, float]:
    """The numbers of a group by name, or by place."""
    values = unpacked(group[2])
    return dict(zip(map(str, range(len(values))) if names is None else names[group[0]], values, strict=True))


def bits(x: float) -> int:
    """The bits of a float as an integer that is ordered as floats are; NaN equals NaN."""
    (held,) = struct.unpack("<q", struct.pack("<d", x))
    return held if held >= 0 else -(2**63) - held - 1


def relative(a: Any, b: Any) -> float:
    """The relative difference of two numbers; infinite where one of them is none or not finite."""
    if not (isinstance(a, float) and isinstance(b, float) and math.isfinite(a) and math.isfinite(b)):
        return math.inf
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if largest else 0.0
