"""A batch in memory, read as a dump of it would be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

from torch import Tensor

from rollout_corr.api.dump import columns_of
from rollout_corr.backends.layouts import LogProbs
from rollout_corr.diagnose.read.fields import ALIASES, LOG_PROBS, OFFSETS, ChosenFields
from rollout_corr.diagnose.read.formats import Loaded
from rollout_corr.diagnose.read.label_names import names_in
from rollout_corr.diagnose.read.problems import DumpError
from rollout_corr.diagnose.read.source import Part, Source
from rollout_corr.diagnose.read.tensor_files import TensorFile

# Columns that are read of every batch; others are if `by` names them.
COLUMNS = tuple(role for role in ALIASES if role not in (*LOG_PROBS[:2], *OFFSETS, "mask", "texts"))


class InMemory(Source):
    """The tensors of a batch, in any layout and on any device. They are read once, and let go of.

    Args:
        train_logp: As for `dump`.
        rollout_logp: As for `dump`.
        mask: As for `dump`.
        cu_seqlens: As for `dump`.
        columns: Further columns by name, as for `dump`.
        by: Names of columns whose values are labels.
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
        mask: LogProbs | None,
        cu_seqlens: Tensor | None,
        columns: Mapping[str, LogProbs],
        by: Iterable[str] = (),
        limit: int | None = None,
    ) -> None:
        by = tuple(by)
        given = {name: x for name, x in columns.items() if x is not None}
        _check_names(given, by)
        found = columns_of(train_logp, rollout_logp, mask, cu_seqlens, given)
        tensors = {name: x for name, x in found.items() if isinstance(x, Tensor)}
        roles = {name: name for name in tensors if name in ALIASES}
        super().__init__(ChosenFields(roles, by, guess=False), limit)
        self._found = names_in(found, by)
        self._columns: dict[str, Tensor] = tensors

    def parts(self) -> Sequence[Part]:
        """Return the batch, as the one part that there is."""
        columns, self._columns = self._columns, {}
        if not columns["train_logp"].numel():
            raise DumpError(f"train_logp: expected at least one token, got shape {list(columns['train_logp'].shape)}")
        size = sum(x.numel() * x.element_size() for x in columns.values())
        file = TensorFile(Loaded(columns, size), self.where, self.wanted, self.problems)
        file.label_names = self._found
        return [(self.where, lambda: nullcontext(file))]


def _check_names(columns: Mapping[str, object], by: Sequence[str]) -> None:
    """Refuse a column that nothing would read, and one that `by` names and nobody passed."""
    for name in columns:
        if name not in (*COLUMNS, *by, "label_names"):
            close = difflib.get_close_matches(name, ("mask", "cu_seqlens", *COLUMNS, *by), n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise TypeError(
                f"{name}: expected one of {', '.join(COLUMNS)}, or a column that by= names, by=({name!r},){hint}"
            )
    for name in by:
        if name not in columns:
            raise ValueError(f"by: expected names of columns that are passed, {name}=ids; got {name!r}")
