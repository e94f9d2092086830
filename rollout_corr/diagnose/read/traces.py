"""prime-rl's traces: what the trainer computed for a trace, joined with what the engine returned for it.

The trainer appends a record for each trained sequence to `traces/annotations/trainer`: the trace, a branch of its tree
of messages, and a value for each token of that branch, null where none trained. The engine's log-probs lie in
`traces/stream`, an episode a line, whose places `stream.index.jsonl` has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .json_files import MOST_LINE, json_lines, parsed
from .problems import DumpError, Problem
from .record_files import Numbered

# What tells the trainer's annotations from those of others.
TRAINER = "trainer_logprobs"
# What makes plain files of sealed ones.
UNSEAL = (
    "decompress them (zstd -d --rm traces/*/*.zst traces/annotations/*/*.zst), or set monitors.file.compress = false"
)


def joined_traces(path: Path) -> Iterator[Numbered]:
    """Read a file of the trainer's annotations, and the episode of each; the numbers count its lines, from 0.

    Raises:
        DumpError: The index of the episodes is missing.
    """
    within = path.resolve()
    root = within.parent if within.parent.name == "annotations" else within.parent.parent
    stream = root.parent / "stream"
    places = _places(stream)
    steps = _steps(root / "orchestrator.index.jsonl")
    for number, record, done in json_lines(path):
        if isinstance(record, str):
            yield number, record, done
            continue
        trace_id = record.get("trace_id")
        for branch in record.get("branches") or ():
            try:
                found = _joined(_trace(stream, places, str(trace_id)), branch)
            except DumpError as error:
                yield number, str(error), done
            except (TypeError, KeyError, AttributeError, StopIteration) as error:
                yield number, f"trace {trace_id}: expected tokens by messages ({type(error).__name__}: {error})", done
            else:
                yield number, found | ({"steps": steps[trace_id]} if trace_id in steps else {}), done


def _places(stream: Path) -> dict[str, tuple[int | None, int]]:
    """Return chunk and offset of the episode of each trace; a stream of one file has no chunks."""
    index = stream.with_name("stream.index.jsonl")
    if not index.is_file():
        raise Problem(str(index), None, None, "no such file: it says where the engine's log-probs are").error()
    found: dict[str, tuple[int | None, int]] = {}
    for _, row, _ in json_lines(index):
        if not isinstance(row, str):
            found |= {trace: (row.get("chunk"), row.get("offset")) for trace in row.get("trace_ids") or ()}
    return found


def _steps(index: Path) -> dict[str, int]:
    """Return the step that each trace trained at, as far as the orchestrator says it."""
    rows = json_lines(index) if index.is_file() else ()
    return {
        row["trace_id"]: row["info.ship.step"]
        for _, row, _ in rows
        if not isinstance(row, str) and isinstance(row.get("info.ship.step"), int)
    }


def _trace(stream: Path, places: Mapping[str, tuple[int | None, int]], trace_id: str) -> Mapping[str, Any]:
    """Read the episode of a trace, and return the trace."""
    if trace_id not in places:
        raise DumpError(f"trace {trace_id}: not in the stream of episodes")
    chunk, offset = places[trace_id]
    path = stream.with_suffix(".jsonl") if chunk is None else stream / f"{chunk:05d}.jsonl"
    if not path.is_file():
        raise DumpError(f"trace {trace_id}: its episode is in {path.name}.zst: {UNSEAL}")
    with path.open("rb") as file:
        file.seek(offset)
        episode = parsed(file.readline(MOST_LINE), 0)
    if isinstance(episode, str):
        raise DumpError(f"trace {trace_id}: its episode cannot be read: {episode}")
    return next(one for one in episode["traces"] if one["id"] == trace_id)


def _joined(trace: Mapping[str, Any], branch: Mapping[str, Any]) -> dict[str, Any]:
    """Put both log-probs of a branch together; the mask marks tokens that were sampled and trained."""
    nodes = trace["nodes"]
    ids: list[int] = []
    rollout: list[float | None] = []
    for node in _path(nodes, branch["index"]):
        own, sampled = nodes[node].get("token_ids") or [], nodes[node].get("mask") or []
        values = iter(nodes[node].get("logprobs") or ())
        ids += own
        rollout += [next(values, None) if taken else None for taken in sampled]
    train = branch[TRAINER]
    if not len(ids) == len(rollout) >= len(train):
        raise DumpError(f"trace {trace['id']}: {len(train)} values of the trainer for {len(ids)} tokens")
    # A stream may end before its branch.
    ids, rollout = ids[: len(train)], rollout[: len(train)]
    return {
        "train_logp": train,
        "rollout_logp": rollout,
        "mask": [int(a is not None and b is not None) for a, b in zip(train, rollout, strict=True)],
        "token_ids": ids,
        **({"entropy": branch["entropies"]} if branch.get("entropies") else {}),
    }


def _path(nodes: list[Mapping[str, Any]], branch: int) -> list[int]:
    """Return the messages of a branch, from the root to its leaf; branches are numbered by their leaves."""
    parents = {node.get("parent") for node in nodes}
    leaves = [i for i in range(len(nodes)) if i not in parents]
    if not 0 <= branch < len(leaves):
        raise DumpError(f"branch {branch}: the trace has {len(leaves)}")
    path: list[int] = []
    at: int | None = leaves[branch]
    while isinstance(at, int) and 0 <= at < len(nodes) and at not in path:
        path.append(at)
        at = nodes[at].get("parent")
    return path[::-1]
