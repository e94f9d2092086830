"""Crafted .jsonl, .jsonl.gz and .parquet files: a grammar for each of what a stranger may write into one."""

from __future__ import annotations

import decimal
import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from builders.dumps import packed, plain, records

NAMES = ("train_logp", "rollout_logp", "mask", "step", "token_ids", "versions", "texts", "advantages", "more")
# JSON texts that stand where a list of numbers is expected, or next to one.
VALUES = (
    *("null", "true", "-0.0", "1e999", "NaN", '""', '"\\ud800"', '"\U0001f600"', "[]", "{}", "[[]]", "[1]", "[null]"),
    *("1" + "0" * 400, "1" + "0" * 9000, "18446744073709551616", "[NaN, 1]", '["a"]', "[[1], 2]", '[{"a": 1}]'),
    *('{"a": {"b": [1]}}', '{"train_logp": [-1.0]}', "[" * 50_000, '{"a":' * 100 + "1" + "}" * 100, '{"": {"": 1}}'),
    *("[1,,2]", "[" + "[]," * 60_000 + "1]", '{"a":1, "a":2}', '{"' + "k" * 5000 + '": 1}', "01", "1.", "'a'"),
)
LINES = ("", "   ", "null", "5", "[]", "{}", "{", "}", "\x00", "\ufeff", "NaN", "# comment", "{}{}")


def _rows(rng):
    made = packed(rng.randint(1, 6), rng.randrange(10**6), rng.choice((4, 20)))
    return [plain(record) for record in records(made)]


def _texts(rng):
    """Write records as JSON; some values are odd, and some names are there twice."""
    lines = [[(name, json.dumps(value)) for name, value in row.items()] for row in _rows(rng)]
    for _ in range(rng.choice((0, 1, 1, 2))):
        members, value = rng.choice(lines), rng.choice(VALUES)
        at = rng.randrange(len(members))
        name, text = members[at]
        # In the place of a field, among its numbers, or next to it.
        inside = text.replace(", ", f", {value[:1000]}, ", 1)
        members[at] = (name, rng.choice((value, value, inside)))
        if rng.random() < 0.2:
            members.insert(at, (rng.choice(NAMES), value))
    return ["{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in members) + "}" for members in lines]


def craft_jsonl(path, columns, rng):
    """Write lines of which some are odd; their values, names, order, encoding or ends."""
    texts = _texts(rng)
    if rng.random() < 0.3:
        texts.insert(rng.randrange(len(texts) + 1), rng.choice(LINES))
    if rng.random() < 0.1:
        texts = rng.choice(([f"[{','.join(texts)}]"], ["".join(texts)], [json.dumps(json.dumps(texts))], texts * 50))
    text = rng.choice(("\n", "\n", "\n", "\r\n", "\n\n", "\r")).join(texts) + rng.choice(("\n", ""))
    data = bytearray(text.encode(rng.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16")), "surrogatepass"))
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        at = rng.randrange(max(1, len(data)))
        data[at : at + rng.choice((0, 1))] = rng.choice((b"\xff", b"\x00", b"\n", b",", b"[", b"}", b'"', b"\\", b"9"))
    path.write_bytes(data)


def craft_gzip(path, columns, rng):
    """Compress crafted lines: in one part or several, cut, with something behind them, or compressed twice."""
    craft_jsonl(path, columns, rng)
    data = path.read_bytes()
    at = rng.randrange(len(data) + 1)
    made = b"".join(gzip.compress(part) for part in rng.choice(([data], [data[:at], data[at:]], [b"", data, b""])))
    more = (b"\x00" * 9, b"more", b"\x1f\x8b", data)
    # The last is a line of 64 MiB in 64 KiB.
    bomb = gzip.compress(rng.choice((b" ", b"[", b"9")) * (1 << 26)) if rng.random() < 0.1 else b""
    path.write_bytes(
        rng.choice((made, made, made[: rng.randrange(len(made))], made + rng.choice(more), gzip.compress(made))) + bomb
    )


def craft_zst(path, columns, rng):
    """Compress crafted lines, whole or cut, with something behind them, or a line of 64 MiB in a few bytes."""
    craft_jsonl(path, columns, rng)
    data = pa.compress(path.read_bytes(), "zstd", asbytes=True)
    bomb = pa.compress(b"[" * (1 << 26), "zstd", asbytes=True) if rng.random() < 0.1 else b""
    path.write_bytes(rng.choice((data, data[: rng.randrange(len(data))], data + b"more", data + data)) + bomb)


TYPES = (
    *(pa.float16(), pa.float64(), pa.int8(), pa.uint32(), pa.uint64(), pa.bool_(), pa.string(), pa.large_string()),
    *(pa.binary(), pa.null(), pa.decimal128(30, 5), pa.date32(), pa.timestamp("us")),
)


def _typed(values, rng):
    """Return a column of another type, with the same values where the type can hold them."""
    kind, cells = rng.choice(TYPES), [x if isinstance(x, list) else [x] for x in values]
    try:
        return pa.array(cells).cast(rng.choice((pa.list_, pa.large_list))(kind))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return pa.nulls(len(values), pa.list_(kind))


def _dictionary(values, rng):
    column = pa.array(values)
    if not pa.types.is_list(column.type):
        return column.dictionary_encode()
    return pa.ListArray.from_arrays(column.offsets, column.values.dictionary_encode())


def _expanding(values, rng):
    """Make rows of equal values that take a few bytes in the file."""
    size = rng.choice((1000, 2_000_000, 20_000_000))
    offsets = pa.array([0, size, *([size] * (len(values) - 1))], pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(np.zeros(size, np.float32)))


COLUMNS = (
    *(_typed, _typed, _dictionary, _expanding),
    lambda values, rng: pa.array([None if rng.random() < 0.5 else value for value in values]),
    lambda values, rng: pa.array([[value] for value in values]),
    lambda values, rng: pa.array([{"a": value, "b": 1} for value in values]),
    lambda values, rng: pa.array([[("k", 1.0)]] * len(values), pa.map_(pa.string(), pa.float64())),
    lambda values, rng: pa.array([decimal.Decimal(i) for i in range(len(values))]),
    lambda values, rng: pa.array(["x" * 100_000] * len(values)),
    lambda values, rng: pa.array([["x", None]] * len(values)),
    lambda values, rng: pa.array([[0.5, None, 2.0]] * len(values)),
)


def craft_parquet(path, columns, rng):
    """Write a table of which some columns are odd, or a file of which some bytes of the footer or of a page are."""
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
        names[rng.randrange(len(names))] = rng.choice(("", ".", "a.b", "mask", "x" * 3000, "\x1b[2J"))
    elif kind == 2:
        names, values = ["sample"], [pa.StructArray.from_arrays(values, names)]
    options = {
        "row_group_size": rng.choice((1, 2, 1000)),
        "compression": rng.choice(("none", "snappy", "zstd", "gzip")),
        "use_dictionary": rng.choice((True, False)),
        "data_page_version": rng.choice(("1.0", "2.0")),
    }
    try:
        pq.write_table(pa.Table.from_arrays(values, names), path, **options)
    except (pa.ArrowException, ValueError):  # pyarrow does not write every type
        pq.write_table(pa.table({"more": [1]}), path)
    if rng.random() < 0.3:
        data = bytearray(path.read_bytes())
        footer = range(max(4, len(data) - 8 - int.from_bytes(data[-8:-4], "little")), len(data) - 8)
        for _ in range(rng.choice((1, 1, 2, 6))):
            at = rng.choice(footer if rng.random() < 0.7 and len(footer) else range(len(data)))
            data[at] = rng.choice((0, 0xFF, 0x7F, data[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
        path.write_bytes(data)


CRAFTS = {".jsonl": craft_jsonl, ".gz": craft_gzip, ".zst": craft_zst, ".parquet": craft_parquet}
