"""One line a call: digests of what came back, and the numbers themselves where they are few."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any, TextIO
from zlib import crc32

import torch

from frozen import adapter, batches
from frozen.cases import Case, all_cases

# Values of a tensor up to which they are kept next to their digest.
MOST_VALUES = 128
# What a line holds of a group: the dtype and shape of a tensor, or the number of a list of names; a digest; values.
Group = list[str]
# What a call may end in; the record goes on.
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def record(file: TextIO, path: str, seeds: int, large: int = 0, only: str = "") -> int:
    """Write a line for each call on a path, and say how many.

    Args:
        file: Where to.
        path: One of `adapter.PATHS`.
        seeds: How many a case.
        large: How many batches of thousands of tokens are added.
        only: A part of the names of the cases that are called.
    """
    adapter.prepare()
    names, count = Names(file), 0
    with adapter.interpreted() if path == "interpreter" else contextlib.nullcontext():
        for case in all_cases():
            if only not in case.name:
                continue
            for seed in seeds_of(case.name, path, seeds, large):
                line = called(case, path, seed, names)
                file.write(json.dumps([f"{case.name}/{path}/{seed}", line], separators=(",", ":")) + "\n")
                count += 1
    return count


def seeds_of(name: str, path: str, seeds: int, large: int) -> Iterator[int]:
    """The seeds of a case: the first ones, or in the interpreter some of fifty that each case draws by its name."""
    if path == "interpreter" and seeds < 50:
        first = crc32(name.encode())
        yield from ((first + 17 * i) % 50 for i in range(seeds))
        return
    yield from range(seeds)
    yield from range(batches.LARGE, batches.LARGE + large)


class Names:
    """Lists of names, each of which is written once and then called by its digest."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._known = file, {}

    def number(self, names: tuple[str, ...]) -> str:
        if names not in self._known:
            self._known[names] = hashlib.sha1("\n".join(names).encode()).hexdigest()[:12]
            self._file.write(json.dumps(["names", self._known[names], names], separators=(",", ":")) + "\n")
        return self._known[names]


def called(case: Case, path: str, seed: int, names: Names) -> dict[str, Any]:
    """Call, and give the groups of a line by name; {"refused": ""} or {"raised": type} for a call without a result."""
    batch = batches.make(seed)
    arguments = case.arguments(batch)
    with adapter.on_path(path, seed, large=seed >= batches.LARGE):
        try:
            return _loss(case, path, arguments, names) if case.is_loss else _correction(case, path, arguments, names)
        except FAILURES as error:
            return {"refused": ""} if adapter.is_refusal(error) else {"raised": type(error).__name__, "why": str(error)}


def _correction(case: Case, path: str, arguments: dict[str, Any], names: Names) -> dict[str, Any]:
    return _result(adapter.correct(path, arguments), case, arguments, names)


def _loss(case: Case, path: str, arguments: dict[str, Any], names: Names) -> dict[str, Any]:
    new = arguments["new_logp"]
    leaves = [x.detach().clone().requires_grad_(case.differentiable) for x in (new if isinstance(new, list) else [new])]
    arguments["new_logp"] = leaves if isinstance(new, list) else leaves[0]
    out = adapter.policy_loss(path, arguments)
    found = _result(out, case, arguments, names)
    found["value"] = of_tensor(out.value)
    if case.differentiable and out.value.requires_grad:
        out.value.backward()
        found["gradient"] = of_tensor([x.grad for x in leaves])
    return found


def _result(out: Any, case: Case, arguments: dict[str, Any], names: Names) -> dict[str, Any]:
    found = {name: of_tensor(getattr(out, name)) for name in ("weights", "mask", "keep", "keep_turns")}
    labels = tuple(arguments["label_names"]) if case.labeled else ()
    for group, values in (("statistics", adapter.statistics_of(out)), ("metrics", adapter.metrics_of(out, labels))):
        found[group] = of_numbers(names.number(tuple(values)), list(values.values()))
    return {name: group for name, group in found.items() if group is not None}


def of_tensor(x: Any) -> Group | None:
    """The group of a tensor, of a list of tensors, or of None."""
    if x is None:
        return None
    parts = [None if part is None else part.detach() for part in (x if isinstance(x, list) else [x])]
    parts = [part.values() if part is not None and part.is_nested else part for part in parts]
    what = " ".join("None" if part is None else f"{part.dtype}{list(part.shape)}"[6:] for part in parts)
    flat = [torch.zeros(0) if part is None else part.contiguous().reshape(-1) for part in parts]
    if len(flat) > 3:
        what = f"{flat[0].dtype}"[6:] + f" in {len(flat)} of {[part.numel() for part in flat]}"
    values = torch.cat(flat) if flat else torch.zeros(0)
    if values.is_floating_point():
        # NaN is one number, whatever its bits.
        values = torch.where(values.isnan(), math.nan, values)
    digest = hashlib.sha1(values.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    few = values.numel() <= MOST_VALUES
    return [what, digest, packed(values.double().tolist()) if few else ""]


def of_numbers(number: str, values: list[float]) -> Group:
    """The group of numbers that have names."""
    values = [math.nan if math.isnan(value) else value for value in values]
    return [number, hashlib.sha1(struct.pack(f"<{len(values)}d", *values)).hexdigest()[:16], packed(values)]


def packed(values: list[float]) -> str:
    """Floats as text, to the bit."""
    return base64.b64encode(zlib.compress(struct.pack(f"<{len(values)}d", *values), 1)).decode()


def unpacked(text: str) -> tuple[float, ...]:
    """The floats of `packed`."""
    held = zlib.decompress(base64.b64decode(text))
    return struct.unpack(f"<{len(held) // 8}d", held)
