"""Opening a dump: a file or a folder of them, of any kind that is read, as blocks of whole sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rollout_corr.diagnose.read.arrays import ArrayFile, Loaded, Npz, SafeTensors, load_pt
from rollout_corr.diagnose.read.block import Block
from rollout_corr.diagnose.read.fields import Wanted, choose
from rollout_corr.diagnose.read.problems import DumpError, Problem, Problems
from rollout_corr.diagnose.read.records import RecordFile, flat, json_lines, listed, parquet_rows, transposed

SUFFIXES = (".pt", ".pth", ".safetensors", ".npz", ".jsonl", ".parquet")


class Dump:
    """A dump of log-probs.

    Args:
        path: A file, or a folder whose files of a known kind are read in the order of their names.
        fields: Roles to names of fields, where guessing them goes wrong: `{"train_logp": "pi_old"}`.
        by: Further columns to read, numbers per token or per sequence.
        limit: Read at most this many sequences.

    Attributes:
        problems: What could not be read so far.
        fields: The field of each role in the first file, once it was opened.
        progress: How much of the dump was read, 0 to 1.
    """

    def __init__(
        self,
        path: str | Path,
        fields: Mapping[str, str] | None = None,
        by: Iterable[str] = (),
        limit: int | None = None,
    ) -> None:
        self.path, self.limit = Path(path), limit
        self.wanted = Wanted(dict(fields or {}), tuple(by))
        self.problems = Problems()
        self.fields: dict[str, str] = {}
        self.progress = 0.0
        self.files = self._files()

    def _files(self) -> list[Path]:
        if not self.path.exists():
            raise DumpError(f"{self.path}: there is no such file")
        if self.path.is_dir():
            found = sorted(file for file in self.path.rglob("*") if file.suffix in SUFFIXES)
            if not found:
                raise DumpError(f"{self.path}: expected files that end in {', '.join(SUFFIXES)}, found none")
            return found
        if self.path.suffix not in SUFFIXES:
            raise DumpError(f"{self.path}: expected a name that ends in {', '.join(SUFFIXES)}")
        return [self.path]

    def blocks(self) -> Iterator[Block]:
        """Whole sequences, block by block.

        Raises:
            DumpError: Not one sequence could be read.
        """
        sequences = 0
        for i, path in enumerate(self.files):
            try:
                file = self._open(path)
            except DumpError as error:
                # A folder's other files may be whole; of a file alone nothing is left to read.
                if len(self.files) == 1:
                    raise
                whole = Problem(str(path), None, None, str(error).removeprefix(f"{path}: "))
                self.problems.add(error.problem or whole)
                continue
            for block in file.blocks():
                self.fields = self.fields or file.fields
                self.progress = (i + file.progress) / len(self.files)
                if self.limit is not None and sequences + block.sequences > self.limit:
                    block = _first(block, self.limit - sequences)
                sequences += block.sequences
                if block.sequences:
                    yield block
                if self.limit is not None and sequences >= self.limit:
                    self.progress = 1.0
                    return
        self.progress = 1.0
        if sequences == 0:
            if self.problems.shown:
                raise self.problems.shown[0].error()
            raise DumpError(f"{self.path}: it holds no sequence")

    def _open(self, path: Path) -> ArrayFile | RecordFile:
        file = str(path)
        if path.suffix == ".jsonl":
            return RecordFile(json_lines(path), file, self.wanted, self.problems)
        if path.suffix == ".parquet":
            return RecordFile(parquet_rows(path, self.problems), file, self.wanted, self.problems)
        if path.suffix == ".safetensors":
            return ArrayFile(SafeTensors(path), file, self.wanted, self.problems)
        if path.suffix == ".npz":
            return ArrayFile(Npz(path), file, self.wanted, self.problems)
        return self._open_pt(load_pt(path), file)

    def _open_pt(self, found: Any, file: str) -> ArrayFile | RecordFile:
        if isinstance(found, Mapping):
            records = [value for value in found.values() if isinstance(value, list) and value]
            if len(records) == 1 and isinstance(records[0][0], Mapping):
                found = records[0]
        if isinstance(found, (list, tuple)):
            return RecordFile(listed(found), file, self.wanted, self.problems)
        if not isinstance(found, Mapping):
            raise DumpError(f"{file}: expected a dict of tensors or a list of records, got {type(found).__name__}")
        fields = {name: _rows(value) for name, value in flat(found).items()}
        train = fields[choose(fields, self.wanted, file)["train_logp"]]
        if isinstance(train, Sequence):
            same = {name: x for name, x in fields.items() if hasattr(x, "__len__") and len(x) == len(train)}
            return RecordFile(transposed(same, len(train)), file, self.wanted, self.problems)
        tensors = {name: x for name, x in fields.items() if isinstance(x, Tensor)}
        return ArrayFile(Loaded(tensors), file, self.wanted, self.problems)


def _rows(value: Any) -> Any:
    """A jagged tensor as the list of its rows."""
    return list(value.unbind()) if isinstance(value, Tensor) and value.is_nested else value


def _first(block: Block, count: int) -> Block:
    """The first sequences of a block."""
    tokens = int(block.offsets[count])
    return replace(
        block,
        train=block.train[:tokens],
        rollout=block.rollout[:tokens],
        mask=None if block.mask is None else block.mask[:tokens],
        offsets=block.offsets[: count + 1],
        records=block.records[:count],
        columns={name: values[:tokens] for name, values in block.columns.items()},
        texts=None if block.texts is None else block.texts[:count],
    )
