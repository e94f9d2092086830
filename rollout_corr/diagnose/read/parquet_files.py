"""Rows of .parquet files as records, read in batches whose memory is bounded."""

from __future__ import annotations

import decimal
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from rollout_corr.diagnose.read.fields import ALIASES, ChosenFields, choose, last_part
from rollout_corr.diagnose.read.problems import DumpError, Problem, Problems, cut_off, extra
from rollout_corr.diagnose.read.record_files import MOST_VALUES, Numbered

# Rows that are in memory at once, and values of a column in them where sequences are long.
BATCH_ROWS, BATCH_VALUES = 64, 1 << 21
# Bytes that are read of a column at a time.
BUFFER = 1 << 20
# Log-probs are hardly compressible. A file whose footer states more values for each byte could expand without limit.
MOST_PER_BYTE = 16
NAMES = {alias for aliases in ALIASES.values() for alias in aliases}


def parquet_rows(path: Path, opened: IO[bytes], wanted: ChosenFields, problems: Problems) -> Iterator[Numbered]:
    """Read the rows of a .parquet file: of columns that may be of use, a few rows at a time.

    Args:
        path: The file.
        opened: The open file: another one may take its place between two looks at the name.
        wanted: The fields that the user names.
        problems: Takes what cannot be read.

    Raises:
        DumpError: The file is damaged, a column is missing or named twice, or the file would expand without limit.
    """
    pyarrow = extra("pyarrow", "pyarrow", "reading .parquet files")
    parquet = extra("pyarrow.parquet", "pyarrow", "reading .parquet files")
    try:
        metadata = parquet.read_metadata(opened)
        leaves = (metadata.schema.column(i) for i in range(metadata.num_columns))
        # Repeated texts stay in memory once.
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        file = parquet.ParquetFile(opened, metadata=metadata, read_dictionary=texts, buffer_size=BUFFER)
        names = _useful(file.schema_arrow, wanted, str(path), pyarrow)
    except (pyarrow.ArrowException, OSError) as error:
        raise DumpError(f"{path}: not a complete .parquet file ({error}); {cut_off('.parquet')}") from error
    rows, number = max(1, metadata.num_rows), 0
    try:
        for group in range(metadata.num_row_groups):
            size = _batch_rows(metadata.row_group(group), names, f"{path}: row group {group}")
            for batch in file.iter_batches(size, row_groups=[group], columns=names):
                for record in _records(batch, pyarrow):
                    yield number, record, (number + 1) / rows
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        problems.add(Problem(str(path), number, None, f"damaged from here on ({error})"), error)


def _useful(schema: Any, wanted: ChosenFields, path: str, pyarrow: Any) -> list[str]:
    """Choose the columns of which a field may have a role; the others may be large."""
    fields = [(column.name, name) for column in schema for name in _field_names(column, "", pyarrow)]
    choose([name for _, name in fields], wanted, path)
    asked = {*wanted.roles.values(), *wanted.by}
    used = [
        (column, name)
        for column, name in fields
        if last_part(name).lower() in NAMES or name in asked or last_part(name) in asked
    ]
    useful = list(dict.fromkeys(column for column, _ in used))
    # Two fields of one name, or two columns: a nested one has fields of other names.
    columns = [column.name for column in schema if column.name in useful]
    for names in (columns, [name for _, name in used]):
        (name, times), *_ = Counter(names).most_common(1)
        if times > 1:
            raise DumpError(f"{path}: the column {name!r} occurs twice")
    return useful


def _field_names(column: Any, prefix: str, pyarrow: Any) -> Iterator[str]:
    """Name the fields of a column: those of nested mappings get dotted names."""
    if pyarrow.types.is_struct(column.type):
        for i in range(column.type.num_fields):
            yield from _field_names(column.type.field(i), f"{prefix}{column.name}.", pyarrow)
    else:
        yield f"{prefix}{column.name}"


def _batch_rows(group: Any, names: list[str], where: str) -> int:
    """Count the rows of a row group that may be read at once, by the sizes that the footer states.

    Raises:
        DumpError: The row group holds far more values than bytes, so that a row of it could take any memory.
    """
    columns = [group.column(i) for i in range(group.num_columns)]
    columns = [column for column in columns if _is_within(column.path_in_schema, names)]
    most = max((column.num_values for column in columns), default=0)
    stored = sum(column.total_compressed_size for column in columns)
    if most > MOST_VALUES and sum(column.num_values for column in columns) > MOST_PER_BYTE * stored:
        raise DumpError(
            f"{where} holds {most:,} values of a column in {stored:,} bytes, so there is no bound on the memory for a "
            f"row; write row groups of at most {MOST_VALUES:,} values"
        )
    return max(1, min(BATCH_ROWS, BATCH_VALUES * max(1, group.num_rows) // max(1, most)))


def _is_within(path: str, names: list[str]) -> bool:
    """Return whether a leaf of the schema belongs to one of some columns, whose names may have dots."""
    parts = path.split(".")
    return any(".".join(parts[:i]) in names for i in range(1, len(parts) + 1))


def _records(batch: Any, pyarrow: Any) -> Iterator[Mapping[str, Any] | str]:
    """Make the records of a batch."""
    table = pyarrow.Table.from_batches([batch])
    while any(pyarrow.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    columns = {field.name: _Column(table.column(i).combine_chunks(), pyarrow) for i, field in enumerate(table.schema)}
    for row in range(table.num_rows):
        record: dict[str, Any] = {}
        problem = None
        for name, column in columns.items():
            try:
                record[name] = column.cell(row)
            except (pyarrow.ArrowException, ValueError, OverflowError) as error:
                problem = f"the value of {name!r} cannot be read ({error})"
        yield problem or record


class _Column:
    """A column of a batch."""

    def __init__(self, column: Any, pyarrow: Any) -> None:
        self.column, self.pyarrow = column, pyarrow
        self.words: list[Any] | None = None

    def cell(self, row: int) -> Any:
        """Return a cell as a tensor if it is a list of numbers, else as plain Python."""
        scalar = self.column[row]
        if not scalar.is_valid:
            return None
        types = self.pyarrow.types
        if isinstance(scalar, self.pyarrow.ListScalar) and not types.is_map(scalar.type):
            values = scalar.values
            if len(values) > MOST_VALUES:
                raise ValueError(f"{len(values):,} values; a record may have {MOST_VALUES:,}")
            kind = values.type
            if types.is_dictionary(kind):
                if types.is_string(kind.value_type) or types.is_large_string(kind.value_type):
                    return self._texts(values)
                values = values.dictionary_decode()
                kind = values.type
            if types.is_null(kind):
                return torch.full((len(values),), torch.nan)
            if types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind):
                return self._numbers(values)
        found = scalar.as_py()
        return float(found) if isinstance(found, decimal.Decimal) else found

    def _texts(self, values: Any) -> list[Any]:
        if self.words is None:
            self.words = [*values.dictionary.to_pylist(), None]
        return [self.words[-1 if i is None else i] for i in values.indices.to_pylist()]

    def _numbers(self, values: Any) -> Tensor:
        """Return numbers, null as NaN."""
        types = self.pyarrow.types
        if types.is_decimal(values.type) or (values.null_count and not types.is_floating(values.type)):
            values = values.cast(self.pyarrow.float64(), safe=False)
        elif types.is_unsigned_integer(values.type):
            values = values.cast(self.pyarrow.int64())
        return torch.from_numpy(values.to_numpy(zero_copy_only=False).copy())
