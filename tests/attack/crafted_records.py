"""Crafted .jsonl, .json, .jsonl.gz and .parquet files: a grammar for each of what a stranger may write into one."""

from __future__ import annotations

import decimal
import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from builders.dumps import packed, plain, records

NAMES = (
    "train_logp",
    "rollout_logp",
    "mask",
    "step",
    "token_ids",
    "versions",
    "texts",
    "advantages",
    "new_logp",
    "more",
)


def _rows(rng):
    made = packed(rng.randint(1, 6), rng.randrange(10**6), rng.choice((4, 20)))
    return [plain(record) for record in records(made)]


# --- .jsonl -----------------------------------------------------------------------------------------------------------

# JSON texts that stand where a list of numbers is expected, or beside one.
VALUES = (
    *("null", "true", "0", "-0.0", "1e999", "NaN", "-Infinity", '""', '"\\ud800"', '"\U0001f600"', "[]", "{}", "[[]]"),
    *("1" + "0" * 400, "1" + "0" * 9000, "-1e-999", "18446744073709551616", "[1]", "[-1,-2,-3,-4]", "[null]", "[true]"),
    *("[NaN, 1]", '["a"]', "[[1], [2]]", "[[1], 2]", '[{"a": 1}]', '{"a": {"b": [1]}}', '{"train_logp": [-1.0]}'),
    *(
        "[" * 300 + "]" * 300,
        "[" * 50_000,
        '{"a":' * 100 + "1" + "}" * 100,
        '{"a":' * 20_000,
        '{"": {"": 1}}',
        "[1,,2]",
    ),
    *(
        "[" + "[]," * 60_000 + "1]",
        "{" + '"a":1,' * 3 + '"b":2}',
        '{"' + "k" * 5000 + '": 1}',
        "01",
        "- 1",
        "1.",
        "'a'",
    ),
)
LINES = (
    "",
    "   ",
    "null",
    "5",
    '"x"',
    "[]",
    "{}",
    "{",
    "}",
    "[" * 9,
    "\x00",
    "\ufeff",
    "NaN",
    "# comment",
    "a,b",
    "{}{}",
)


def craft_jsonl(path, columns, rng):
    """Write lines of which some are odd; their values, names, order, encoding or ends."""
    lines = [_members(row) for row in _rows(rng)]
    for _ in range(rng.choice((0, 1, 1, 2))):
        members = rng.choice(lines)
        name = rng.choice(NAMES)
        if name in dict(members) and rng.random() < 0.8:
            members[:] = [(key, rng.choice(VALUES) if key == name else value) for key, value in members]
        else:
            members.insert(rng.randrange(len(members) + 1), (name, rng.choice(VALUES)))
    if rng.random() < 0.2:
        _among_the_numbers(rng.choice(lines), rng)
    texts = ["{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in members) + "}" for members in lines]
    if rng.random() < 0.3:
        texts.insert(rng.randrange(len(texts) + 1), rng.choice(LINES))
    if rng.random() < 0.1:
        texts = rng.choice(([f"[{','.join(texts)}]"], ["".join(texts)], [json.dumps(json.dumps(texts))], texts * 50))
    if rng.random() < 0.1:
        texts = [f'{{"sample": {text}}}' for text in texts]
    text = rng.choice(("\n", "\n", "\n", "\r\n", "\n\n", "\r")).join(texts) + rng.choice(("\n", ""))
    encoding = rng.choice(("utf-8", "utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-32-le"))
    data = bytearray(text.encode(encoding, "surrogatepass"))
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        at = rng.randrange(max(1, len(data)))
        data[at : at + rng.choice((0, 1))] = rng.choice((b"\xff", b"\x00", b"\n", b",", b"[", b"}", b'"', b"\\", b"9"))
    path.write_bytes(data)


def _members(row):
    return [(name, json.dumps(value)) for name, value in row.items()]


def _among_the_numbers(members, rng):
    """Put an odd value into one of the lists of a record."""
    at = rng.randrange(len(members))
    name, text = members[at]
    value = rng.choice([value for value in VALUES if len(value) < 1000])
    members[at] = (name, text.replace(", ", f", {value}, ", 1))


def craft_gzip(path, columns, rng):
    """Compress crafted lines: in one part or several, cut, with something behind them, or compressed twice."""
    craft_jsonl(path, columns, rng)
    data = path.read_bytes()
    at = rng.randrange(len(data) + 1)
    parts = rng.choice(([data], [data], [data[:at], data[at:]], [b"", data, b""]))
    packed_parts = b"".join(gzip.compress(part, rng.choice((0, 6, 9))) for part in parts)
    kind = rng.randrange(8)
    if kind == 0:
        packed_parts = packed_parts[: rng.randrange(len(packed_parts))]
    elif kind == 1:
        packed_parts += rng.choice((b"\x00" * 9, b"more", b"\x1f\x8b", data))
    elif kind == 2:
        packed_parts = rng.choice((data, gzip.compress(packed_parts)))
    elif kind == 3:
        # A line of 64 MiB in 64 KiB.
        packed_parts += gzip.compress(rng.choice((b" ", b"[", b"9")) * (1 << 26))
    path.write_bytes(packed_parts)


def craft_json(path, columns, rng):
    """Write odd records as one value: a list, an object of lists, one record, or something around them."""
    lines = [_members(row) for row in _rows(rng)]
    for _ in range(rng.choice((0, 1, 1, 2))):
        members = rng.choice(lines)
        at = rng.randrange(len(members))
        members[at] = (members[at][0], rng.choice(VALUES))
    if rng.random() < 0.2:
        _among_the_numbers(rng.choice(lines), rng)
    texts = ["{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in members) + "}" for members in lines]
    listed = f"[{', '.join(texts)}]"
    columns_of_lists = ", ".join(
        f"{json.dumps(name)}: [{', '.join(dict(members)[name] for members in lines)}]" for name in dict(lines[0])
    )
    text = rng.choice(
        (
            *(listed, listed, "{" + columns_of_lists + "}", texts[0], "\n".join(texts)),
            *('{"samples": ' + listed + "}", '{"a": ' + listed + ', "b": ' + listed + "}", "[" + listed + "]"),
            *(rng.choice(VALUES), listed[: rng.randrange(len(listed))], listed + "]", "\ufeff" + listed),
        )
    )
    path.write_bytes(text.encode(rng.choice(("utf-8", "utf-8", "utf-8", "utf-16")), "surrogatepass"))


# --- .parquet ---------------------------------------------------------------------------------------------------------

TYPES = (
    *(
        pa.float16(),
        pa.float32(),
        pa.float64(),
        pa.int8(),
        pa.int64(),
        pa.uint8(),
        pa.uint32(),
        pa.uint64(),
        pa.bool_(),
    ),
    *(pa.string(), pa.large_string(), pa.binary(), pa.null(), pa.decimal128(30, 5), pa.date32(), pa.timestamp("us")),
)


def _list_type(kind, rng):
    return rng.choice((pa.list_, pa.large_list))(kind)


def _typed(values, rng):
    """Return a column of another type, with the same values where the type can hold them."""
    column = pa.array(values)
    kind = rng.choice(TYPES)
    lists = pa.types.is_list(column.type)
    try:
        return column.cast(_list_type(kind, rng) if lists else kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass
    plain_values = [0, 1, None, 3] if kind != pa.string() else ["a", None, "b" * 999, ""]
    cells = [rng.choices(plain_values, k=len(x) if isinstance(x, list) else 1) for x in values]
    try:
        return pa.array(cells, pa.list_(kind))
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        return pa.nulls(len(values), kind)


def _dictionary(values, rng):
    column = pa.array(values)
    if not pa.types.is_list(column.type):
        return column.dictionary_encode()
    return pa.ListArray.from_arrays(column.offsets, column.values.dictionary_encode())


def _expanding(values, rng):
    """Make rows of equal values that take a few bytes in the file."""
    size = rng.choice((1000, 2_000_000, 20_000_000))
    return pa.ListArray.from_arrays(
        pa.array([0, size, *([size] * (len(values) - 1))], pa.int32()), pa.array(np.zeros(size, np.float32))
    )


COLUMNS = (
    _typed,
    _typed,
    _dictionary,
    _expanding,
    lambda values, rng: pa.array([None if rng.random() < 0.5 else value for value in values]),
    lambda values, rng: pa.array([[value] for value in values]),
    lambda values, rng: pa.array([{"a": value, "b": 1} for value in values]),
    lambda values, rng: pa.array([[("k", 1.0)]] * len(values), pa.map_(pa.string(), pa.float64())),
    lambda values, rng: pa.array([decimal.Decimal(i) for i in range(len(values))]),
    lambda values, rng: pa.array([2**64 - 1 - i for i in range(len(values))], pa.uint64()),
    lambda values, rng: pa.array(["x" * 100_000] * len(values)),
    lambda values, rng: pa.array([["x", None]] * len(values)),
    lambda values, rng: pa.array([[0.5, None, 2.0]] * len(values)),
)


def craft_parquet(path, columns, rng):
    """Write a table of which some columns are odd, or a file of which some bytes are."""
    rows = _rows(rng)
    made = {name: [row[name] for row in rows] for name in rows[0]}
    arrays = {name: pa.array(values) for name, values in made.items()}
    for _ in range(rng.choice((0, 1, 1, 2))):
        name = rng.choice(NAMES)
        arrays[name] = rng.choice(COLUMNS)(made.get(name, list(range(len(rows)))), rng)
    names, values = list(arrays), list(arrays.values())
    kind = rng.randrange(12)
    if kind == 0:
        names.append(rng.choice(names[:3]))
        values.append(rng.choice(values))
    elif kind == 1:
        names[rng.randrange(len(names))] = rng.choice(
            ("", ".", "a.b", "mask", "x" * 3000, "\x1b[2J", "train_logp.list")
        )
    elif kind == 2:
        names, values = ["sample"], [pa.StructArray.from_arrays(values, names)]
    table = pa.Table.from_arrays(values, names)
    _write(table, path, rng)
    if rng.random() < 0.3:
        _altered(path, rng)


def _write(table, path, rng):
    options = {
        "row_group_size": rng.choice((1, 2, 1000)),
        "compression": rng.choice(("none", "snappy", "zstd", "gzip")),
        "use_dictionary": rng.choice((True, False)),
        "data_page_version": rng.choice(("1.0", "2.0")),
        "store_schema": rng.choice((True, True, False)),
    }
    try:
        pq.write_table(table, path, **options)
    except (pa.ArrowException, ValueError):  # pyarrow does not write every type
        pq.write_table(pa.table({"more": [1]}), path)


def _altered(path, rng):
    """Change bytes of the footer, where the schema and all sizes are, or of a page."""
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[-8:-4], "little")
    footer = range(max(4, len(data) - 8 - length), len(data) - 8)
    for _ in range(rng.choice((1, 1, 2, 6))):
        at = rng.choice(footer if rng.random() < 0.7 and len(footer) else range(len(data)))
        data[at] = rng.choice((0, 0xFF, 0x7F, data[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
    path.write_bytes(data)


CRAFTS = {".jsonl": craft_jsonl, ".json": craft_json, ".gz": craft_gzip, ".parquet": craft_parquet}
