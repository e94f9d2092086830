"""Rows of .parquet files as records, read by pyarrow in batches whose memory is bounded."""

from __future__ import annotations

import decimal
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .fields import ChosenFields, useful
from .problems import DumpError, Problem, Problems, cut_off, extra
from .record_files import MOST_VALUES, Numbered

# Rows that are in memory at once, and values of a column in them where sequences are long.
BATCH_ROWS, BATCH_VALUES = 64, 1 << 21
# Bytes that are read of a column at a time.
BUFFER = 1 << 20
# Log-probs are hardly compressible. A file whose footer states more values for each byte could expand without limit.
MOST_PER_BYTE = 16


def parquet_rows(path: Path, wanted: ChosenFields, problems: Problems) -> Iterator[Numbered]:
    """Read the rows of a .parquet file: of columns that may be of use, a few rows at a time.

    Args:
        path: The file.
        wanted: The fields that the user names.
        problems: Takes what cannot be read.

    Raises:
        DumpError: The file is damaged, a column is missing or named twice, or the file would expand without limit.
    """
    pyarrow = extra("pyarrow", "pyarrow", "reading .parquet files")
    parquet = extra("pyarrow.parquet", "pyarrow", "reading .parquet files")
    # Opened once: another file may take its place between two looks at the name.
    with path.open("rb") as opened:
        try:
            metadata = parquet.read_metadata(opened)
            leaves = (metadata.schema.column(i) for i in range(metadata.num_columns))
            # Repeated texts stay in memory once.
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
            file = parquet.ParquetFile(opened, metadata=metadata, read_dictionary=texts, buffer_size=BUFFER)
            names = _useful_columns(file.schema_arrow, wanted, str(path), pyarrow)
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


def _useful_columns(schema: Any, wanted: ChosenFields, path: str, pyarrow: Any) -> list[str]:
    """Choose the columns whose fields may have a role: the fields of nested mappings get dotted names."""
    fields: list[tuple[str, str]] = []

    def add(column: str, name: str, kind: Any) -> None:
        if pyarrow.types.is_struct(kind):
            for inner in kind:
                add(column, f"{name}.{inner.name}", inner.type)
        else:
            fields.append((column, name))

    for column in schema:
        add(column.name, column.name, column.type)
    found = useful([name for _, name in fields], wanted, path)
    columns = list(dict.fromkeys(column for column, name in fields if name in found))
    # Two fields of one name, or two columns: a nested one has fields of other names.
    for names in ([column.name for column in schema if column.name in columns], found):
        (name, times), *_ = Counter(names).most_common(1)
        if times > 1:
            raise DumpError(f"{path}: the column {name!r} occurs twice")
    return columns


def _batch_rows(group: Any, names: list[str], where: str) -> int:
    """Count the rows of a row group that may be read at once, by the sizes that the footer states.

    Raises:
        DumpError: The row group holds far more values than bytes, so that a row of it could take any memory.
    """
    # A leaf of the schema belongs to a column, whose name may have dots.
    leaves = [group.column(i) for i in range(group.num_columns)]
    leaves = [leaf for leaf in leaves if any(f"{leaf.path_in_schema}.".startswith(f"{name}.") for name in names)]
    most = max((leaf.num_values for leaf in leaves), default=0)
    stored = sum(leaf.total_compressed_size for leaf in leaves)
    if most > MOST_VALUES and sum(leaf.num_values for leaf in leaves) > MOST_PER_BYTE * stored:
        raise DumpError(
            f"{where} holds {most:,} values of a column in {stored:,} bytes, so there is no bound on the memory for a "
            f"row; write row groups of at most {MOST_VALUES:,} values"
        )
    return max(1, min(BATCH_ROWS, BATCH_VALUES * max(1, group.num_rows) // max(1, most)))


def _records(batch: Any, pyarrow: Any) -> Iterator[Mapping[str, Any] | str]:
    """Make the records of a batch."""
    table = pyarrow.Table.from_batches([batch])
    while any(pyarrow.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    columns = {field.name: table.column(i).combine_chunks() for i, field in enumerate(table.schema)}
    words: dict[str, list[Any]] = {}
    for row in range(table.num_rows):
        record: dict[str, Any] = {}
        problem = None
        for name, column in columns.items():
            try:
                record[name] = _cell(column[row], words.setdefault(name, []), pyarrow)
            except (pyarrow.ArrowException, ValueError, OverflowError) as error:
                problem = f"the value of {name!r} cannot be read ({error})"
        yield problem or record


def _cell(scalar: Any, words: list[Any], pyarrow: Any) -> Any:
    """Return a cell as a tensor if it is a list of numbers, else as plain Python; `words` are its column's texts."""
    types = pyarrow.types
    if scalar.is_valid and isinstance(scalar, pyarrow.ListScalar) and not types.is_map(scalar.type):
        values = scalar.values
        if len(values) > MOST_VALUES:
            raise ValueError(f"{len(values):,} values; a record may have {MOST_VALUES:,}")
        if types.is_dictionary(values.type):
            if types.is_string(values.type.value_type) or types.is_large_string(values.type.value_type):
                if not words:
                    words += [*values.dictionary.to_pylist(), None]
                return [words[-1 if i is None else i] for i in values.indices.to_pylist()]
            values = values.dictionary_decode()
        kind = values.type
        if types.is_null(kind):
            return torch.full((len(values),), torch.nan)
        if types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind):
            return _numbers(values, pyarrow)
    found = scalar.as_py()
    return float(found) if isinstance(found, decimal.Decimal) else found


def _numbers(values: Any, pyarrow: Any) -> Tensor:
    """Return numbers, null as NaN."""
    types = pyarrow.types
    if types.is_decimal(values.type) or (values.null_count and not types.is_floating(values.type)):
        values = values.cast(pyarrow.float64(), safe=False)
    elif types.is_unsigned_integer(values.type):
        values = values.cast(pyarrow.int64())
    return torch.from_numpy(values.to_numpy(zero_copy_only=False).copy())
