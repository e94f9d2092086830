"""`doctor` and `report`: name the causes of a mismatch, and show where it is, of files or of tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..backends.given import Batch, batch_given
from ..backends.layouts import LogProbs
from ..frameworks.shared.checking import ConfigProblem, mistakes_beside
from .doctor.diagnosis import diagnose
from .measure.measurement import measure
from .read.dump import Dump, Paths, Source
from .read.in_memory import InMemory
from .results import Diagnosis, Report, where_to_write
from .show.terminal import progress_of


def doctor(
    source: Paths | LogProbs,
    /,
    rollout_logp: LogProbs | None = None,
    batch: Batch | None = None,
    *,
    mask: LogProbs | None = None,
    cu_seqlens: Tensor | None = None,
    by: str | Sequence[str] = (),
    field: Mapping[str, str] | None = None,
    limit: int | None = None,
    on_policy: bool = False,
    exact: bool = False,
    progress: bool | None = None,
    **columns: LogProbs,
) -> Diagnosis:
    """Name the causes of a mismatch between the log-probs of trainer and engine, as `rollout-corr doctor` does.

    Tensors are read as a dump of them would be, and nothing is written. All values are copied to the host, and some
    statistics take seconds for a million tokens, so call it when a metric alarms and not in every step.

    Args:
        source: A dump (.jsonl or .pt), a folder of them, or a list of these; or train_logp: the log-probs
            under the trainer's policy, in any layout that `correct` takes.
        rollout_logp: With train_logp: log-probs under the engine that sampled the tokens, same layout.
        batch: With train_logp: everything else about the tokens, as `Batch`. Its turns, versions, kept mass and
            labels are read, as in a dump of it.
        mask: Short for `Batch(mask=...)`: non-zero is valid, same layout. None: every token is valid.
        cu_seqlens: The offsets of packed sequences, short for `Batch(cu_seqlens=...)`: [S + 1] int32 or int64.
        by: Names of columns of labels, whole numbers from 0 (environment, source): names the labels that are far
            worse than the others. The labels of a batch are among them.
        field: Of a dump, names of fields by role where the guess is wrong: {"train_logp": "old_log_probs"}.
        limit: Read only the first so many sequences.
        on_policy: `new_logp` and `train_logp` come from the same weights, so they must be equal.
        exact: The two log-probs must agree bit for bit: a token that differs is an error, `not_exact`. It says how
            many differ, where the first one is, and what they have in common, as `Diagnosis.in_common` does: a place in
            a page of the KV cache, a prefix-cache hit, a turn, a label of `by` (rank, batch_size, expert), ...
        progress: Show a bar on standard error; None: where that is a terminal.
        **columns: With train_logp: what `dump` takes: `token_ids`, `new_logp`, `steps`, `advantages`,
            `prompt_lengths`, `cached_tokens`, and those that `by` names, per token or per sequence.

    Returns:
        A `Diagnosis`: print it, or read its `findings`.

    Raises:
        ValueError: A dump that cannot be read; a wrong shape, dtype, device or name; `exact` without two log-probs of
            a valid token. The message names it.
        TypeError: An argument of the wrong type.
    """
    roles = field or {}
    if exact and (
        source is rollout_logp or ("train_logp" in roles and roles["train_logp"] == roles.get("rollout_logp"))
    ):
        raise ValueError("exact: expected two log-probs to compare, got one tensor as both")
    read = _source(source, rollout_logp, batch, mask, cu_seqlens, by, field, limit, columns)
    return _diagnosis(read, on_policy, progress, exact)


def report(
    source: Paths | LogProbs,
    /,
    rollout_logp: LogProbs | None = None,
    batch: Batch | None = None,
    *,
    mask: LogProbs | None = None,
    cu_seqlens: Tensor | None = None,
    page: str | os.PathLike[str] | None = None,
    compare: Paths | Diagnosis | None = None,
    by: str | Sequence[str] = (),
    field: Mapping[str, str] | None = None,
    limit: int | None = None,
    progress: bool | None = None,
    **columns: LogProbs,
) -> Report:
    """Show where the log-probs of trainer and engine differ, as `rollout-corr report` does.

    Args:
        source: A dump, a folder of them, or a list of these; or train_logp: log-probs under the trainer's policy.
        rollout_logp: With train_logp: log-probs under the engine that sampled the tokens, same layout.
        batch: With train_logp: everything else about the tokens, as `Batch`.
        mask: Short for `Batch(mask=...)`: non-zero is valid, same layout.
        cu_seqlens: The offsets of packed sequences, short for `Batch(cu_seqlens=...)`: [S + 1] int32 or int64.
        page: Where to write the HTML page, such as "page.html"; None: nowhere, and `Report.save` writes it.
        compare: A second dump, or what `doctor` found in other tensors, shown next to the first.
        by: Names of columns by which D is shown too.
        field: Of a dump, names of fields by role where the guess is wrong: {"train_logp": "old_log_probs"}.
        limit: Read only the first so many sequences.
        progress: Show a bar on standard error; None: where that is a terminal.
        **columns: With train_logp: what `dump` takes, and those that `by` names, per token or per sequence.

    Returns:
        A `Report`: print it, save its page, or read its `findings`.

    Raises:
        ValueError: A dump that cannot be read; a page that cannot be written; a wrong shape, dtype, device or name.
        TypeError: An argument of the wrong type.
    """
    sources = [_source(source, rollout_logp, batch, mask, cu_seqlens, by, field, limit, columns)]
    if compare is not None and not isinstance(compare, Diagnosis):
        if not _is_path(compare):
            raise TypeError(f"compare: expected a path or what rc.doctor returned, got {type(compare).__name__}")
        sources.append(Dump(compare, field, _names(by), limit))
    others = (compare,) if isinstance(compare, Diagnosis) else ()
    if page is not None:
        # Before minutes are spent on what it shows.
        where_to_write(page, [*sources, *(each.source for each in others)])
    found = Report((*(_diagnosis(each, False, progress) for each in sources), *others))
    if page is not None:
        found.save(page)
    return found


def _diagnosis(source: Source, on_policy: bool, progress: bool | None, exact: bool = False) -> Diagnosis:
    with progress_of(f"reading {source.name}", progress) as move:
        measured = measure(source, lambda: move(source.progress, source.reading), exact)
    if exact and not measured.evidence.tokens:
        raise ValueError(f"exact: expected valid tokens to compare, got none in {source.where}")
    return Diagnosis(source, measured, tuple(diagnose(measured, on_policy)), tuple(_mistakes(source)))


def _mistakes(source: Source) -> Iterator[ConfigProblem]:
    for job in source.jobs if isinstance(source, Dump) else ():
        if job.config is not None:
            yield from mistakes_beside(job.framework, job.config)


def _names(by: str | Sequence[str]) -> tuple[str, ...]:
    return (by,) if isinstance(by, str) else tuple(by)


def _is_path(source: object) -> bool:
    """Tell paths from tensors; of an empty list nobody knows, and it holds no path."""
    if isinstance(source, (list, tuple)):
        return bool(source) and all(isinstance(each, (str, os.PathLike)) for each in source)
    return isinstance(source, (str, os.PathLike))


def _source(
    source: Any,
    rollout_logp: LogProbs | None,
    batch: Batch | None,
    mask: LogProbs | None,
    cu_seqlens: Tensor | None,
    by: str | Sequence[str],
    field: Mapping[str, str] | None,
    limit: int | None,
    columns: Mapping[str, LogProbs],
) -> Source:
    """Recognize what is to be read, and refuse arguments that belong to the other kind."""
    if _is_path(source):
        given = {"rollout_logp": rollout_logp, "batch": batch, "mask": mask, "cu_seqlens": cu_seqlens, **columns}
        for name, value in given.items():
            if value is not None:
                raise TypeError(
                    f"{name}: expected None with a path, whose file has its own; got {type(value).__name__}"
                )
        return Dump(source, field, _names(by), limit)
    if not isinstance(source, (Tensor, list, tuple)):
        raise TypeError(f"source: expected a path, a list of paths or train_logp, got {type(source).__name__}")
    if field is not None:
        raise TypeError(f"field: expected None with tensors, which are passed by role; got {type(field).__name__}")
    return InMemory(source, rollout_logp, batch_given(batch, mask, cu_seqlens), columns, _names(by), limit)
