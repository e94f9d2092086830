"""What moved between two records, by how much, and whether it was allowed to."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from frozen.records import Group, unpacked

# Differences that are shown.
SHOWN = 20
# Bits of a float64 that stand behind the last one of a narrower dtype.
BEHIND = {"float32": 29, "bfloat16": 45, "float16": 42}


@dataclass
class Findings:
    """What a comparison has found.

    Attributes:
        calls: How many calls both records have, by what came of them.
        groups: How many calls differ, by group.
        moved: How often a statistic or a metric differs, by group and name.
        farthest: The largest relative difference of each of these.
        lines: The first differences, in words.
        red: A difference that nothing allows.
    """

    calls: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    farthest: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    red: bool = False

    def differs(self, key: str, group: str, name: str, apart: float, words: str, allowed: bool) -> None:
        """Note a difference."""
        self.red |= not allowed
        what = f"{group} {name}{' (allowed)' if allowed else ''}"
        self.moved[what] += 1
        self.farthest[what] = max(apart, self.farthest.get(what, 0.0))
        if not allowed and len(self.lines) < SHOWN:
            self.lines.append(f"{key} {group} {name}: {words}")


def main(one: Path, other: Path, allow: list[str]) -> int:
    """Print what differs, and give the exit status: 1 where something moved that was not allowed to."""
    (left, names), (right, more) = read(one), read(other)
    found = compare(left, right, names | more, [Allowed(words) for words in allow])
    for side, missing in ((one, left.keys() - right.keys()), (other, right.keys() - left.keys())):
        if missing:
            print(f"{len(missing)} calls in {side} alone, such as {', '.join(sorted(missing)[:5])}")
    print(", ".join(f"{count} {what}" for what, count in found.calls.most_common()) or "no call in both")
    if found.groups:
        print("calls that differ: " + ", ".join(f"{group} {count}" for group, count in found.groups.most_common()))
    for name, count in found.moved.most_common(SHOWN):
        print(f"  {count:6} x {name}, by {found.farthest[name]:.2e} at most")
    print("\n".join(found.lines) or "no difference that is not allowed")
    return int(found.red or not found.calls)


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


class Allowed:
    """`PATTERN[:REL]`: keys, groups or names that may move, by any amount or within a relative tolerance."""

    def __init__(self, words: str) -> None:
        found = re.fullmatch(r"(.+):([0-9.eE+-]+)", words)
        self._pattern, self._within = (words, math.inf) if found is None else (found[1], float(found[2]))

    def covers(self, key: str, group: str, name: str, apart: float) -> bool:
        """Tell whether a difference may be."""
        return apart <= self._within and any(fnmatchcase(x, self._pattern) for x in (key, group, name))


def compare(left: dict[str, Any], right: dict[str, Any], names: dict[str, list[str]], allow: list[Allowed]) -> Findings:
    """Compare the calls that both records have."""
    found = Findings()
    for key in [key for key in left if key in right]:
        a, b = left[key], right[key]
        if "refused" in a or "refused" in b:
            sides = [side for side, x in (("before", a), ("after", b)) if "refused" in x]
            found.calls[f"refused {' and '.join(sides)}"] += 1
            continue
        if "raised" in a or "raised" in b:
            same = a.get("raised") == b.get("raised")
            found.calls["raised in both" if same else "different"] += 1
            if not same:
                words = " -> ".join(x.get("why", "a result") for x in (a, b))
                covered = any(one.covers(key, "raised", "", math.inf) for one in allow)
                found.differs(key, "raised", "", math.inf, words, covered)
            continue
        before = sum(found.groups.values())
        for group in dict.fromkeys((*a, *b)):
            if a.get(group, ["", ""])[:2] != b.get(group, ["", ""])[:2]:
                found.groups[group] += 1
                _differences(found, key, group, a.get(group), b.get(group), names, allow)
        found.calls["different" if sum(found.groups.values()) > before else "equal"] += 1
    return found


def _differences(
    found: Findings,
    key: str,
    group: str,
    a: Group | None,
    b: Group | None,
    names: dict[str, list[str]],
    allow: list[Allowed],
) -> None:
    """Note what differs in a group of a call."""

    def note(name: str, x: Any, y: Any, apart: float = math.inf, words: str = "") -> None:
        covered = any(one.covers(key, group, name, apart) for one in allow)
        found.differs(key, group, name, apart, f"{x} -> {y}{words}", covered)

    if a is None or b is None:
        note("", *("nothing" if x is None else x[0] for x in (a, b)))
    elif group in ("statistics", "metrics"):
        left, right = (dict(zip(names[x[0]], unpacked(x[2]), strict=True)) for x in (a, b))
        for name in dict.fromkeys((*left, *right)):
            if name not in left or name not in right:
                note(name, left.get(name, "nothing"), right.get(name, "nothing"))
            elif bits(left[name]) != bits(right[name]):
                note(name, left[name], right[name], *_apart(left[name], right[name], 0))
    elif a[0] != b[0] or not (a[2] and b[2]):
        note("", *(f"{x[0]} {x[1]}" for x in (a, b)))
    else:
        behind = next((n for kind, n in BEHIND.items() if a[0].startswith(kind)), 0)
        pairs = [(x, y) for x, y in zip(unpacked(a[2]), unpacked(b[2]), strict=True) if bits(x) != bits(y)]
        x, y = max(pairs, key=lambda pair: _apart(*pair, behind)[0])
        apart, words = _apart(x, y, behind)
        note("", x, y, apart, f"{words}, the farthest of {len(pairs)} values")


def bits(x: float) -> int:
    """The bits of a float as an integer that is ordered as floats are; NaN equals NaN."""
    (held,) = struct.unpack("<q", struct.pack("<d", x))
    return held if held >= 0 else -(2**63) - held - 1


def _apart(a: float, b: float, behind: int) -> tuple[float, str]:
    """The relative difference of two numbers, and in words with the units in the last place."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf, ", not finite"
    largest = max(abs(a), abs(b))
    relative = abs(a - b) / largest if largest else 0.0
    return relative, f", relative {relative:.2e}, {abs(bits(a) - bits(b)) >> behind} ulp"
