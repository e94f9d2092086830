"""Records as JSON, one on each line of a .jsonl file, also compressed."""

from __future__ import annotations

import gzip
import json
import reprlib
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .problems import DumpError, Problem
from .record_files import Numbered, flat_or_problem

# Bytes of a line, and bytes of memory that it may take while it is read.
MOST_LINE, MOST_MEMORY = 128 << 20, 512 << 20
# Bytes of a longer line that are read at a time to find its end.
BLOCK = 1 << 20
# How many times as large as itself a compressed file may become, once it is beyond so many bytes. Logs of log-probs
# are compressed to a third or a tenth, and equal ones to a thousandth.
MOST_TIMES, MOST_FREE = 200, 16 << 20
# Bytes that Python takes at most for a number or half a string, and for a list or mapping.
ITEM, CONTAINER = 40, 240


def json_lines(path: Path) -> Iterator[Numbered]:
    """Read the records of a .jsonl file, or one that is compressed (.gz); their numbers count lines, from 0.

    Raises:
        DumpError: The compressed data end too early, are damaged, or stand for far more than themselves; the lines
            before are read.
    """
    size = max(1, path.stat().st_size)
    number = 0
    with path.open("rb") as raw:
        file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        try:
            while line := file.readline(MOST_LINE + 1):
                if len(line) > MOST_LINE:
                    while rest := b"" if line.endswith(b"\n") else file.readline(BLOCK):
                        line = rest
                    yield number, f"line {number + 1} has more than {MOST_LINE >> 20} MiB", raw.tell() / size
                elif line.strip():
                    yield number, parsed(line, number), raw.tell() / size
                else:
                    number += _blank_lines(file)
                number += 1
                if path.suffix == ".gz" and file.tell() > max(MOST_FREE, MOST_TIMES * raw.tell()):
                    what = f"the compressed data stand for more than {MOST_TIMES} times themselves from here on"
                    raise Problem(str(path), number, None, what).error()
        except (EOFError, OSError, zlib.error) as error:
            if path.suffix != ".gz":
                raise
            what = f"the compressed data are cut off or damaged from here on ({error})"
            raise Problem(str(path), number, None, what).error() from error


def _blank_lines(file: Any) -> int:
    """Skip the blank lines that a file has in memory already; return how many there are."""
    ahead = file.peek(1)
    blank = ahead[: len(ahead) - len(ahead.lstrip())]
    end = blank.rfind(b"\n") + 1
    file.read(end)
    return blank.count(b"\n")


def parsed(line: bytes, number: int) -> dict[str, Any] | str:
    """Parse a line, or say why it cannot be used."""
    need = _memory(line)
    if need > MOST_MEMORY:
        return f"line {number + 1} could take {need >> 20} MiB of memory; a record may take {MOST_MEMORY >> 20} MiB"
    try:
        # Bytes would be decoded by a guess: one line of UTF-16 is read by it, and two are not.
        record = json.loads(line.decode("utf-8" if number else "utf-8-sig"), object_pairs_hook=_object)
        return flat_or_problem(record, dict, "an object")
    except DumpError as error:
        return f"line {number + 1}: {error}"
    except ValueError as error:
        cut = "" if line.endswith(b"\n") else "; the file ends within the line"
        return f"line {number + 1} is not JSON ({error}){cut}"
    except RecursionError:
        return f"line {number + 1} is nested too deeply"


def _memory(line: bytes) -> int:
    """Estimate from above how many bytes a line takes while it is parsed: itself, its text twice, and its values."""
    text = 2 * len(line) * (1 if line.isascii() else 4)
    if len(line) * (CONTAINER + 1) + text < MOST_MEMORY:
        # Most lines are short, and whatever they hold takes less.
        return 0
    items = line.count(b",") + line.count(b":") + line.count(b'"')
    return len(line) + text + ITEM * items + CONTAINER * (line.count(b"[") + line.count(b"{"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of the members of a JSON object; json would take the last of two of one name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise DumpError(f"the field {reprlib.repr(twice)} occurs twice")
    return found
