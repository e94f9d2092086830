"""Files of records: a line a case, and what differs between two of them."""

from __future__ import annotations

import gzip
import json
import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

HEAD = "frozen"


def write(path: Path, head: dict[str, Any], cases: Iterable[tuple[str, dict[str, Any]]]) -> int:
    """Write a head and cases; count them. A name that ends in .gz is compressed."""
    with _opened(path, "wt") as file:
        file.write(json.dumps({HEAD: head}) + "\n")
        number = 0
        for key, record in cases:
            file.write(json.dumps({"case": key, **record}) + "\n")
            number += 1
    return number


def read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read the head and the cases by key."""
    with _opened(path, "rt") as file:
        head, *lines = map(json.loads, file)
    return head[HEAD], {line.pop("case"): line for line in lines}


def _opened(path: Path, mode: str) -> Any:
    return gzip.open(path, mode, encoding="utf-8") if path.suffix == ".gz" else open(path, mode, encoding="utf-8")


class Difference(NamedTuple):
    """One quantity of one case; numbers are shown as they are, and how far they are apart."""

    case: str
    quantity: str
    old: str
    new: str
    apart: float | None  # relative to the old number; None: no numbers


def differences(case: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[Difference]:
    """Compare the records of a case: only what a call was given, if that differs."""
    if old.get("call") != new.get("call"):
        old, new = ({"call": x.get("call")} for x in (old, new))
    for name in {**old, **new}:
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            for key in {**a, **b}:
                if a.get(key) != b.get(key):
                    yield Difference(case, f"{name} {key}", *_of_numbers(a.get(key), b.get(key)))
        elif a != b:
            yield Difference(case, *_of_tensors(name, a, b))


def _of_numbers(a: Any, b: Any) -> tuple[str, str, float | None]:
    """Two numbers, as 16 hexadecimal digits or as they are."""
    values = [_number(x) for x in (a, b)]
    if None in values:
        return str(a), str(b), None
    first, second = (float(x) for x in values if x is not None)
    return *(f"{x.hex()} ({x:.9g})" for x in (first, second)), _apart(first, second)


def _number(x: Any) -> float | None:
    if isinstance(x, str) and len(x) == 16:
        return struct.unpack(">d", bytes.fromhex(x))[0]
    return float(x) if isinstance(x, (int, float)) else None


def _apart(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    apart = abs(a - b) / abs(a) if a else math.inf
    return math.inf if math.isnan(apart) else apart


def _of_tensors(name: str, a: Any, b: Any) -> tuple[str, str, str, float | None]:
    """Two tensors: the first place where they differ, and the largest distance."""
    if isinstance(a, str) and isinstance(b, str) and len(a) == len(b):
        (kind, shape, before), (_, other_shape, after) = _flat(a), _flat(b)
        if shape == other_shape and before is not None and after is not None and before.shape == after.shape:
            size = before.element_size()
            unequal = (before.view(torch.uint8).view(-1, size) != after.view(torch.uint8).view(-1, size)).any(1)
            places = unequal.nonzero().flatten().tolist()
            if places:
                apart = max(_apart(float(before[i]), float(after[i])) for i in places)
                where = f"{name}[{places[0]}] of {len(places)} {kind} in {shape}"
                return where, *(_shown(float(x[places[0]])) for x in (before, after)), apart
    return name, _short(a), _short(b), None


def _shown(x: float) -> str:
    return f"{x.hex()} ({x:.9g})"


def _short(x: Any) -> str:
    text = str(x)
    return text if len(text) < 100 else f"{text[:97]}..."


def _flat(text: str) -> tuple[str, str, torch.Tensor | None]:
    """The dtype, the shapes and all numbers of what `calls.shown` wrote; None where it wrote a digest."""
    parts = [part.removeprefix("jagged ").split(" ") for part in text.split(" | ")]
    if any(len(part) != 3 or part[0] == "None" for part in parts):
        return "", "", None
    kind, shapes = parts[0][0], " ".join(part[1] for part in parts)
    of_bytes = bytes.fromhex("".join(part[2] for part in parts))
    dtype = getattr(torch, kind, None)
    if dtype is None or not of_bytes:
        return kind, shapes, None
    return kind, shapes, torch.frombuffer(bytearray(of_bytes), dtype=dtype)


def report(found: list[Difference], most: int) -> Iterator[str]:
    """Lines: how often each kind of quantity differs and by how much, then the first differences one by one."""
    kinds: dict[str, list[Difference]] = {}
    for difference in found:
        kinds.setdefault(_kind(difference.quantity), []).append(difference)
    for kind, own in sorted(kinds.items(), key=lambda item: -len(item[1])):
        cases = len({difference.case for difference in own})
        apart = [difference.apart for difference in own if difference.apart is not None]
        far = f", at most {max(apart):.2g} relative" if apart else ""
        yield f"{kind}: {len(own)} differences in {cases} cases{far}"
    for difference in found[:most]:
        yield f"{difference.case}: {difference.quantity}: {difference.old} -> {difference.new}"
    if len(found) > most:
        yield f"... and {len(found) - most} more: --most {len(found)}"


def _kind(quantity: str) -> str:
    """Name the part of a record, without the place in a tensor or the name of a number, and without the rank."""
    return next((name for name in ("statistics", "metrics") if quantity.startswith(name)), quantity.partition("[")[0])
