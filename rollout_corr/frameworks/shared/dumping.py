"""Dumps of a running job: `install(dump="folder", every=100)` of every drop-in."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

LOGGER = logging.getLogger("rollout_corr")


class Dumps:
    """Writes some sequences of every so many calls of a framework's correction, in the background.

    Args:
        path: As for `rollout_corr.dump`; None writes nothing.
        every: How many calls come to one that is written; the first is.

    Raises:
        ValueError: A wrong path or number, named.
    """

    def __init__(self, path: str | os.PathLike[str] | None, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every: expected a whole number >= 1, got {every!r}")
        self._path = None if path is None else Path(path)
        if self._path is not None and self._path.suffix not in ("", ".jsonl"):
            raise ValueError(f"dump: expected a name that ends in .jsonl or a folder's, got {str(path)!r}")
        self._every, self._calls = every, 0

    def seen(self, train_logp: Any, rollout_logp: Any, mask: Any, cu_seqlens: Any = None) -> None:
        """Write some of these sequences, as `rollout_corr.dump` does, if it is their turn."""
        if self._path is None:
            return
        calls, self._calls = self._calls, self._calls + 1
        if calls % self._every:
            return
        from ...api.dump import dump

        try:
            dump(self._path, train_logp, rollout_logp, mask=mask, cu_seqlens=cu_seqlens, step=calls)
        except (TypeError, ValueError) as error:
            # What is corrected can be dumped; where it cannot after all, the training is worth more than its dump.
            LOGGER.warning("rollout-corr: dump=%s is off: %s", self._path, error)
            self._path = None
