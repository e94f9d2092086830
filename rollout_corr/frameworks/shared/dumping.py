"""Dumps of a running job: `install(dump="folder", every=100)` of every drop-in."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from rollout_corr.api.dump import dump

LOGGER = logging.getLogger("rollout_corr")

DumpPath = str | os.PathLike[str] | None


class Dumps:
    """Writes some sequences of every so many calls of a framework's correction, in the background; off at first."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._every = 100
        self._calls = 0

    def turn(self, path: DumpPath, every: int) -> None:
        """Begin to write, or stop.

        Args:
            path: As for `rollout_corr.dump`; None stops.
            every: How many calls come to one that is written; the first is.

        Raises:
            ValueError, TypeError: A wrong path or number, named.
        """
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every: expected a whole number >= 1, got {every!r}")
        target = None if path is None else Path(path)
        if target is not None and target.suffix not in ("", ".jsonl"):
            raise ValueError(f"dump: expected a name that ends in .jsonl or a folder's, got {str(target)!r}")
        self._path, self._every, self._calls = target, every, 0

    def seen(self, train_logp: Any, rollout_logp: Any, mask: Any, cu_seqlens: Any = None) -> None:
        """Write some of these sequences, as `rollout_corr.dump` does, if it is their turn."""
        if self._path is None:
            return
        calls, self._calls = self._calls, self._calls + 1
        if calls % self._every:
            return
        try:
            dump(self._path, train_logp, rollout_logp, mask=mask, cu_seqlens=cu_seqlens, step=calls)
        except (TypeError, ValueError) as error:
            # What is corrected can be dumped; where it cannot after all, the training is worth more than its dump.
            LOGGER.warning("rollout-corr: dump=%s is off: %s", self._path, error)
            self._path = None
