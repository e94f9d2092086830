"""A batch in memory, read as a dump of it would be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...api.dump import OF_BATCH, columns_of
from ...backends.given import Batch
from ...backends.layouts import LogProbs
from .dump import Part, Source
from .fields import ROLES, ChosenFields
from .problems import DumpError
from .tensor_files import TensorFile

# Columns that are read although no Batch has them; others are read if `by` names them.
COLUMNS = ("token_ids", "new_logp", "steps", "advantages", "prompt_lengths", "cached_tokens")


class InMemory(Source):
    """The tensors of a batch, in any layout and on any device. They are read once, and let go of.

    Args:
        train_logp: As for `dump`.
        rollout_logp: As for `dump`.
        batch: As for `dump`.
        columns: Further columns by name, as for `dump`.
        by: Names of columns whose values are labels, next to the labels of the batch.
        limit: Read at most so many sequences.

    Raises:
        ValueError: A wrong shape, dtype or device, named.
        TypeError: An argument of the wrong type, or a column that nothing reads.
    """

    name = where = "tensors"

    def __init__(
        self,
        train_logp: LogProbs,
        rollout_logp: LogProbs | None,
        batch: Batch,
        columns: Mapping[str, LogProbs],
        by: Iterable[str] = (),
        limit: int | None = None,
    ) -> None:
        labels = [name for name, one in (batch.labels or {}).items() if one.ids is not None]
        by = tuple(dict.fromkeys((*labels, *by)))
        given = {name: x for name, x in columns.items() if x is not None}
        _check_names(given, by)
        found = columns_of(train_logp, rollout_logp, batch, given)
        tensors = {name: x for name, x in found.items() if isinstance(x, Tensor)}
        for name in by:
            if name not in tensors:
                raise ValueError(f"by: expected names of columns that are passed, {name}=ids; got {name!r}")
        roles = {name: name for name in tensors if name in ROLES}
        super().__init__(ChosenFields(roles, by, guess=False), limit)
        self._columns: dict[str, Any] = dict(found)

    def parts(self) -> Sequence[Part]:
        """Return the batch, as the one part that there is."""
        columns, self._columns = self._columns, {}
        if not columns["train_logp"].numel():
            raise DumpError(f"train_logp: expected at least one token, got shape {list(columns['train_logp'].shape)}")
        size = sum(x.nbytes for x in columns.values() if isinstance(x, Tensor))
        file = TensorFile(columns, size, self.where, self.wanted)
        return [Part(self.where, lambda: file)]


def _check_names(columns: Mapping[str, object], by: Sequence[str]) -> None:
    """Refuse a column that nothing would read. Those of a Batch are refused where they are read."""
    for name in columns:
        if name not in (*COLUMNS, *by, *OF_BATCH, *Batch.__dataclass_fields__):
            close = difflib.get_close_matches(name, (*Batch.__dataclass_fields__, *COLUMNS, *by), n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise TypeError(
                f"{name}: expected one of {', '.join(COLUMNS)}, or a column that by= names, by=({name!r},){hint}"
            )
