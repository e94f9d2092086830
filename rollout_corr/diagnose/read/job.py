"""The folder of a job: who wrote the files in it, which of them are dumps, and where the configuration lies."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .problems import DumpError
from .writers import WRITERS, Writer, beginning, writer_of

# Saved configurations of a run, the likeliest first.
CONFIGS = (
    *(".hydra/config.yaml", "config.yaml", "config.yml", "rl.json", "config.toml", "args.json", "config.json"),
    "training_args.json",
)
# Fields of the configuration of a model, which lies in every checkpoint.
OF_MODELS = ('"model_type"', '"architectures"')


@dataclass(frozen=True)
class Job:
    """The folder of a running or ended job."""

    folder: Path
    writer: Writer | None = None  # who wrote the dumps; None: no framework that is known
    # The files with both log-probs by step; under None those whose names say none.
    dumps: Mapping[int | None, tuple[Path, ...]] = field(default_factory=dict)
    config: Path | None = None  # the configuration that the run saved; None: there is none of a known name
    missing: tuple[str, ...] = ()  # what is not there, in sentences: a side of the log-probs, and what gives it
    others: tuple[Path, ...] = ()  # files of kinds that are read, which are none of the dumps
    # What speaks against one job, in sentences: dumps of another framework, or several runs.
    doubts: tuple[str, ...] = ()

    @property
    def framework(self) -> str | None:
        """The name of the framework, as messages say it."""
        return None if self.writer is None else self.writer.framework

    def __str__(self) -> str:
        if self.writer is None:
            return ""
        steps = [step for step in self.dumps if step is not None]
        of = f", steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f", step {steps[0]}" if steps else ""
        count = sum(map(len, self.dumps.values()))
        others = f"; other files, not read: {len(self.others)}" if self.others else ""
        what = f"{count} file{'s' * (count != 1)} of {self.writer.framework} ({self.writer.switch})"
        return "; ".join((f"{what}{of}{others}", *self.doubts))


def find_job(folder: Path, suffixes: tuple[str, ...]) -> Job:
    """Look for the dumps in a folder, by the names that frameworks give them.

    Args:
        folder: The folder, with any number of folders inside.
        suffixes: Ends of the names of files that are read, where no framework is recognized.

    Raises:
        DumpError: No file has both log-probs; the message says what is missing.
    """
    files = sorted(Path(at, name) for at, _, names in os.walk(folder) for name in names)
    config = _config(folder, files)
    claimed: dict[Writer, dict[Path, int | None]] = {}
    for file in files:
        writer, step = writer_of(file)
        if writer is not None:
            claimed.setdefault(writer, {})[file] = step
    missing = tuple(_missing(writer, found) for writer, found in claimed.items() if writer.sides != "both")
    for writer in WRITERS:
        if writer.sides == "both" and writer in claimed:
            dumps: dict[int | None, tuple[Path, ...]] = {}
            for file, step in sorted(claimed[writer].items(), key=lambda one: (one[1] or 0, _natural(one[0]))):
                dumps[step] = (*dumps.get(step, ()), file)
            others = tuple(_read(set(files) - {*claimed[writer]}, suffixes))
            return Job(folder, writer, dumps, config, (), others, _doubts(writer, dumps, claimed))
    one_sided = {file for found in claimed.values() for file in found}
    found = _read(set(files) - one_sided - {config}, suffixes)
    if not found:
        expected = f"expected files that end in {', '.join(suffixes)}, found none"
        raise DumpError(f"{folder}: {'; '.join(missing) or expected}")
    return Job(folder, None, {None: tuple(found)}, config, missing)


def _read(files: Iterable[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """Sort out the files of kinds that are read."""
    return sorted(file for file in files if file.name.endswith(suffixes))


def _natural(file: Path) -> list[str | int]:
    """Order the numbers in names by their values: rank 10 comes after rank 9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", file.as_posix())]


def _doubts(
    writer: Writer, dumps: Mapping[int | None, tuple[Path, ...]], claimed: Mapping[Writer, Mapping[Path, object]]
) -> tuple[str, ...]:
    """Say what else lies there, or that a step is there twice."""
    said = [
        f"dumps of {other.framework} are not read ({next(iter(found)).name}, ...): name their folder"
        for other, found in claimed.items()
        if other.sides == "both" and other.framework != writer.framework
    ]
    said += [
        f"{len(found)} sealed files are not read: {other.both}"
        for other, found in claimed.items()
        if other.sides == "sealed" and other.framework == writer.framework
    ]
    twice = next((step for step, of in dumps.items() if len({file.parent for file in of}) > 1), None)
    return (*said, *([] if twice is None else [f"step {twice} lies in several folders: name one run's"]))


def _missing(writer: Writer, files: Mapping[Path, object]) -> str:
    has = {
        "rollout": "has the log-probs of the engine alone",
        "none": "has no log-probs",
        "pickled": "is a pickle",
        "sealed": "is compressed with zstd",
    }
    one = next(iter(files)).name
    both = writer.both or f'rollout_corr.frameworks.{writer.framework}.install(dump="FOLDER")'
    return f"{one} of {writer.framework} ({writer.switch}) {has[writer.sides]}; for both: {both}"


def _config(folder: Path, files: Iterable[Path]) -> Path | None:
    """Find the configuration of the run: the one nearest to the top, of the likeliest name."""
    ranked = []
    for file in files:
        path = file.relative_to(folder).as_posix()
        for place, name in enumerate(CONFIGS):
            if path == name or path.endswith(f"/{name}"):
                ranked.append((path.count("/") - name.count("/"), place, file))
                break
    heads = ((file, beginning(file)) for _, _, file in sorted(ranked))
    return next((file for file, head in heads if head and not any(word in head for word in OF_MODELS)), None)
