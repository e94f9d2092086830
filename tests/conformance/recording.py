"""Recordings of the frameworks' own results: written once where their code is, compared with where it is not.

`recorded/NAME.json` says what was recorded: versions, functions, tolerances, declared differences.
`recorded/NAME.cases.xz` holds the settings and results of each case, and `recorded/batches.xz` the batches, which all
frameworks share; both are JSON.
"""

from __future__ import annotations

import ast
import json
import lzma
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conformance.aims import Aim, aimed
from conformance.batches import Batch, batch
from conformance.rows import Result, Row, differences, expected, explained
from conformance.sources import RECORDED, Source
from conformance.telling import telling
from rollout_corr.frameworks.shared import lookup

FOLDER = Path(__file__).resolve().parent / "recorded"
SHAPE, WIDE = (4, 5), (4, 32)
# Kinds and seeds: odd ones in float32, even ones in float64. Without "long", whose results would be large.
BATCHES = (
    *(("mild", 0), ("heavy", 3), ("holes", 4), ("empty_rows", 7), ("ties", 8), ("one_token", 9)),
    *(("all_rejected", 10), ("all_masked", 11), ("nan_behind_mask", 12), ("infinite", 14), ("nan_in_front", 15)),
    *(("bf16", 16), ("spread", 17)),
)
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16)}


class Case(NamedTuple):
    """One case of a row, with the framework's result.

    Attributes:
        batch: The batch.
        settings: The settings of the framework.
        result: What it returned.
        left: Settings that had this package's defaults, and are left to them.
        may_differ: Whether the results differed as declared.
    """

    batch: Batch
    settings: dict[str, Any]
    result: Result
    left: list[str]
    may_differ: bool


@dataclass(frozen=True)
class Recorded:
    """Recorded results of one version of a framework."""

    source: Source
    rows: dict[str, list[Case]]


def frameworks() -> list[str]:
    """The frameworks that are recorded."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def described(framework: str) -> dict[str, Any]:
    """Read what a recording says of itself."""
    return json.loads((FOLDER / f"{framework}.json").read_text(encoding="utf-8"))


def record(framework: str, sources: list[tuple[Source, list[Row]]]) -> None:
    """Run the frameworks' sides and write them down; a row is recorded from the first version that has it."""
    batches = recorded_batches()
    said: list[dict[str, Any]] = []
    settings: list[list[list[Any]]] = []
    seen: set[str] = set()
    for source, rows in sources:
        own: dict[str, Any] = {"version": source.version, "kind": source.kind, "facts": source.facts, "rows": []}
        for row in rows:
            if row.key in seen:
                continue
            seen.add(row.key)
            cases: list[list[Any]] = []
            differing: dict[str, int] = {}
            defaults = _defaults(row)
            for number, given, drawn in _given(row, batches):
                if ast.literal_eval(repr(drawn)) != drawn:
                    raise ValueError(f"{row.title}: settings that are no literals: {drawn}")
                left = [name for name, value in drawn.items() if (name, repr(value)) in defaults]
                result = expected(row, given, drawn)
                differs, ours = differences(row, given, drawn, result, left)
                if differs:
                    names = explained(row, given, drawn, result, ours, differs).values()
                    name = next(iter(names)) if all(names) else "undeclared"
                    differing[name] = differing.get(name, 0) + 1
                cases.append([number, repr(drawn), _coded(result), left, bool(differs)])
            for number in _PLAIN if row.kind in ("preset", "recipe") else ():
                with suppress(*_NO_DEFAULT):
                    result = expected(row, batches[number], {})
                    if not differences(row, batches[number], {}, result)[0]:
                        cases.append([number, "{}", _coded(result), [], False])
            settings.append(cases)
            own["rows"].append(
                {
                    "row": row.title,
                    "function": row.place,
                    "within": row.within,
                    "cases": len(cases),
                    "differ as declared": differing,
                }
            )
        if own["rows"]:
            said.append(own)
    (FOLDER / f"{framework}.json").write_text(written(framework, said), encoding="utf-8")
    _write(f"{framework}.cases.xz", settings)


def written(framework: str, said: list[dict[str, Any]]) -> str:
    """Write what a recording says of itself, each row on a line of its own: a diff shows which changed."""
    made = []
    for own in said:
        rows = ",\n".join(f"   {json.dumps(row, ensure_ascii=False)}" for row in own["rows"])
        about = json.dumps({**own, "rows": []}, ensure_ascii=False)
        made.append(f"  {about.removesuffix(']}')}\n{rows}\n  ]}}")
    return "\n".join(['{"framework": "' + framework + '", "sources": [', ",\n".join(made), "]}", ""])


def load(framework: str) -> Iterator[Recorded]:
    """Read the recordings of a framework, one for each version that was recorded."""
    batches, said = recorded_batches(), described(framework)
    rows = iter(_read(f"{framework}.cases.xz"))
    for own in said["sources"]:
        made: dict[str, list[Case]] = {}
        for row in own["rows"]:
            made[f"{row['row']}, {row['function']}"] = [
                Case(
                    given,
                    ast.literal_eval(drawn),
                    {name: _tensor(x) if isinstance(x, list) else x for name, x in result.items()},
                    left,
                    may_differ,
                )
                for number, drawn, result, left, may_differ in next(rows)
                for given in [batches[number] if isinstance(number, int) else aimed(Aim(*aim) for aim in number)]
            ]
        yield Recorded(Source(framework, own["version"], Path(), RECORDED, own["facts"]), made)


def _given(row: Row, batches: tuple[Batch, ...]) -> Iterator[tuple[int | list[Aim], Batch, dict[str, Any]]]:
    """The batches of a row: the shared ones, by their numbers, and those aimed at its own numbers; with settings."""
    drawn = [row.settings(Random(f"recorded-{number}")) for number in range(4 * len(batches))]
    recordable = [row.recordable(settings) for settings in drawn]
    for number, (given, settings, wanted) in enumerate(zip(batches, drawn, recordable, strict=False)):
        if given.kind in row.kinds and wanted:
            yield number, given, settings
    different = {repr(settings): settings for settings, wanted in zip(drawn, recordable, strict=True) if wanted}
    for aims, settings in telling(row, different.values()):
        yield aims, aimed(aims), settings


def _defaults(row: Row) -> set[tuple[str, str]]:
    """The defaults of a preset or a recipe, as text."""
    presets = {preset.name: preset.settings for preset in lookup.every_preset()}
    recipes = {name: entry.settings for name, entry in lookup.every_recipe().items()}
    settings = {"preset": presets, "recipe": recipes}.get(row.kind, {}).get(row.name, {})
    return {(name, repr(default)) for name, default in settings.items()}


def _coded(result: Result) -> dict[str, Any]:
    """Results as JSON has them: tensors are lists of lists of numbers, or of bools."""
    tensors = {name: x for name, x in result.items() if isinstance(x, Tensor)}
    plain = {name: x.tolist() if x.dtype == torch.bool else x.double().tolist() for name, x in tensors.items()}
    return {**result, **plain}


def _tensor(values: list[Any], dtype: torch.dtype = torch.float64) -> Tensor:
    made = torch.tensor(values)
    return made if made.dtype == torch.bool else torch.tensor(values, dtype=torch.float64).to(dtype)


def _write(name: str, data: Any) -> None:
    (FOLDER / name).write_bytes(lzma.compress(json.dumps(data, ensure_ascii=False).encode()))


def _read(name: str) -> Any:
    return json.loads(lzma.decompress((FOLDER / name).read_bytes()))


def record_batches() -> None:
    """Write down the batches."""
    made = [batch(kind, seed, WIDE if kind == "spread" else SHAPE) for kind, seed in BATCHES]
    _write("batches.xz", [{**vars(b), **_coded(_tensors(b)), "dtype": str(b.new.dtype)} for b in made])


@cache
def recorded_batches() -> tuple[Batch, ...]:
    """Read the batches."""
    made = []
    for fields in _read("batches.xz"):
        dtype = DTYPES[fields.pop("dtype")]
        # Advantages in bf16 are none that a framework has.
        dtypes = {"advantages": torch.float64 if dtype == torch.float64 else torch.float32}
        tensors = {name: _tensor(x, dtypes.get(name, dtype)) for name, x in fields.items() if isinstance(x, list)}
        made.append(Batch(**fields | tensors))
    return tuple(made)


def _tensors(given: Batch) -> dict[str, Tensor]:
    return {name: x for name, x in vars(given).items() if isinstance(x, Tensor)}


# The batches with which a row is also recorded without settings, where the framework's function has defaults, and how
# one that has none refuses.
_PLAIN = (2, 12)
_NO_DEFAULT = (TypeError, KeyError, ValueError, AttributeError, AssertionError, RuntimeError)
