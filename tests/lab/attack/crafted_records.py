"""Crafted .jsonl and .jsonl.gz files: a grammar for each of what a stranger may write into one."""

from __future__ import annotations

import gzip
import json

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
    """Write lines, some of them odd in their values, names, order, encoding or ends."""
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


CRAFTS = {".jsonl": craft_jsonl, ".gz": craft_gzip}
