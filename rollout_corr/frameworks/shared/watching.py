"""Watching a running job from a drop-in: warnings in the log, and dumps by `install(dump="folder", every=100)`."""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...metrics.statistics import PendingMetrics

LOGGER = logging.getLogger("rollout_corr")

# A sentence that still holds is said again after so many corrections.
AGAIN = 100
HOW_OFTEN = f" [each warning comes once, and again after {AGAIN} corrections"
SILENCE = "; install(warnings=False) silences them"

_NUMBER = re.compile(r"[-+]?\b(?:\d[\d.,]*(?:e[-+]?\d+)?|inf|nan)\b")


class Speaker:
    """Logs what `warnings()` says of a framework's corrections, and behind the first how they are silenced."""

    def __init__(self, called: Callable[[], str], silence: str = "") -> None:
        self._called = called
        self._first = f"{HOW_OFTEN}{silence}]"
        self._corrections = 0
        self._said: dict[str, int] = {}
        self._waiting: deque[tuple[int, PendingMetrics]] = deque()

    def hear(self, pending: PendingMetrics) -> None:
        """Log the warnings of a correction, and of earlier ones whose statistics have reached the host by now.

        Nothing waits for a GPU: statistics that nobody has read yet are read at a later correction.
        """
        self._waiting.append((self._corrections, pending))
        self._corrections += 1
        while self._waiting and self._waiting[0][1].done():
            self._say(*self._waiting.popleft())

    def finish(self) -> None:
        """Log the warnings of every correction so far; waits for the statistics."""
        while self._waiting:
            self._say(*self._waiting.popleft())

    def _say(self, correction: int, pending: PendingMetrics) -> None:
        for sentence in pending.warnings():
            # Numbers change with each batch, and so does the advice: a sentence is new by what it begins with.
            kind = " ".join(_NUMBER.sub("#", sentence).split()[:6])
            if kind in self._said and correction < self._said[kind] + AGAIN:
                continue
            about = "" if self._said else self._first
            self._said[kind] = correction
            LOGGER.warning(
                "rollout-corr in %s, correction %d%s: %s%s", self._called(), correction, _rank(), sentence, about
            )


def _rank() -> str:
    import torch.distributed as dist

    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return f", rank {dist.get_rank()}" if several else ""


class Dumps:
    """Writes some sequences of every so many calls of a framework's correction, of the first too, in the background.

    The first call that cannot be written turns it off, with a warning.
    """

    def __init__(self, path: str | os.PathLike[str], every: int) -> None:
        self._path: Path | None = Path(path)
        if self._path.suffix not in ("", ".jsonl"):
            raise ValueError(f"dump: expected a name that ends in .jsonl or a folder's, got {str(path)!r}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every: expected a whole number >= 1, got {every!r}")
        self._every, self._calls = every, 0

    def seen(self, train_logp: Any, rollout_logp: Any, mask: Any, cu_seqlens: Any = None, **columns: Any) -> None:
        """Write some of these sequences, as `rollout_corr.dump` does, if it is their turn."""
        path = self._path
        if path is None:
            return
        calls, self._calls = self._calls, self._calls + 1
        if calls % self._every:
            return
        from ...api.dump import dump

        try:
            future = dump(path, train_logp, rollout_logp, mask=mask, cu_seqlens=cu_seqlens, step=calls, **columns)
        except (TypeError, ValueError) as error:
            self._end(error)
        else:
            future.add_done_callback(self._written)

    def _written(self, future: Future[int]) -> None:
        """See what became of a call, in the thread that writes."""
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """Turn the dump off: the training is worth more than it."""
        path, self._path = self._path, None
        if path is not None:
            LOGGER.warning("rollout-corr: dump=%s is off: %s", path, error)
