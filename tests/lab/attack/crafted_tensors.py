"""Crafted .pt files: a grammar of what a stranger may write into one."""

from __future__ import annotations

import pickletools
import struct
import zipfile

import torch

HUGE = (-1, 0, 1, 2**31 - 1, 2**32 - 1, 2**62, 2**63 - 1, -(2**63), 10**12, 10**400)


def nested(depth=150):
    found = []
    for _ in range(depth):
        found = [found]
    return found


def _itself():
    found = {}
    found["more"] = found
    return found


def _doubled():
    found = {"x": 1}
    for _ in range(40):
        found = {"a": found, "b": found}
    return found


# What stands in place of a tensor.
TENSORS = (
    *(lambda x, dtype=dtype: x.to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int64)),
    lambda x: x.to(torch.float8_e4m3fn),
    lambda x: x.abs().to(torch.uint64),
    lambda x: x.to_sparse(),
    lambda x: x.to("meta"),
    lambda x: torch.nn.Parameter(x.float()),
    lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    lambda x: torch.nested.nested_tensor([x.float(), x.float()[..., :1]]),
    lambda x: x.reshape(-1)[:1].expand(10**6, 10**6),
    lambda x: torch.zeros(1).expand(10**12, 0),
    lambda x: x[..., ::2],
    lambda x: torch.stack([x, x], -1)[..., 0],
    lambda x: x[None],
    lambda x: x[:0],
    lambda x: x.reshape(-1)[0],
    lambda x: torch.full_like(x, -torch.inf) if x.is_floating_point() else x,
    lambda x: [x],
    *(lambda x, value=value: value for value in (None, "text", 10**400, {1, 2}, _itself(), _doubled(), nested())),
)


def _odd(value, rng):
    try:
        return rng.choice(TENSORS)(value)
    except RuntimeError:  # torch has no such conversion for this dtype
        return value


def craft_pt(path, columns, rng):
    """Write a .pt file of odd objects or records, an altered pickle, or an altered archive."""
    kind = rng.randrange(5)
    if kind == 0:
        for name in rng.sample(sorted(columns), rng.choice((1, 1, 2))):
            columns = columns | {name: _odd(columns[name], rng)}
        torch.save(columns, path)
    elif kind == 1:
        row = {name: columns[name][:4] for name in ("train_logp", "rollout_logp", "mask")}
        rows = [dict(row) for _ in range(rng.randint(1, 5))]
        name = rng.choice(sorted(row))
        rows[rng.randrange(len(rows))][name] = _odd(row[name], rng)
        rows *= rng.choice((1, 1, 10_000))
        torch.save(rng.choice((rows, {"samples": rows}, {"step": 1, "more": {"deep": rows}})), path)
    elif kind == 4:
        torch.save(columns, path)
        _altered_archive(path, rng)
    else:
        torch.save(columns, path)
        _altered_pickle(path, rng)


INJECTED = (
    b"cos\nsystem\nX\x04\x00\x00\x00true\x85R0",
    b"c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R0",
    b"ctorch.storage\nUntypedStorage\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R0",
    b"ctorch\nFloatStorage\n)\x81}b0",
    b"\x8a\xff" + b"\xff" * 255 + b"0",
    b"]r\xff\xff\xff\x7f0",
    b"j\xff\xff\xff\xff0",
    b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"(" * 5000,
    b".",
    b"}q\x01h\x01h\x01s0",
    b"N\x85\x85\x85Q0",
    b"cnowhere\nnothing\n(tR}b0",
)


def _members(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _write(path, members, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _altered_pickle(path, rng):
    """Inject instructions, cut some out, change a byte, or make a number, such as a stride, another one."""
    members = _members(path)
    name = next(name for name in members if name.endswith("data.pkl"))
    _write(path, members | {name: _altered_instructions(members[name], rng)})


def _altered_instructions(data, rng):
    found = list(pickletools.genops(data))
    at, stop = sorted(position for _, _, position in rng.sample(found, 2))
    numbers = [position for op, _, position in found if op.name == "BININT1"]
    return rng.choice(
        (
            data[:at] + rng.choice(INJECTED) + data[at:],
            data[:at] + data[stop:],
            data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
            *(data[:n] + b"\x8a\x08" + struct.pack("<q", rng.choice(HUGE[:-1])) + data[n + 2 :] for n in numbers[:3]),
        )
    )


def _altered_archive(path, rng):
    members = _members(path)
    which = rng.choice([name for name in members if "/data/" in name and members[name]])
    kind = rng.randrange(4)
    if kind == 0:
        _write(path, members | {which: members[which][: rng.randrange(len(members[which]))]})
    elif kind == 1:
        _write(path, members, compression=rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)))
    elif kind == 2:
        _write(path, {name: data for name, data in members.items() if name != which})
    else:
        _altered_index(path, rng)


def _altered_index(path, rng):
    """Change bytes of one entry of an archive's index: flags, method, sizes, offset."""
    data = bytearray(path.read_bytes())
    at = rng.choice([i for i in range(len(data)) if data[i : i + 4] == b"PK\x01\x02"])
    field, form = rng.choice(((8, "<H"), (10, "<H"), (16, "<I"), (20, "<I"), (24, "<I"), (28, "<H"), (42, "<I")))
    struct.pack_into(form, data, at + field, rng.choice((0, 1, 8, 12, 99, rng.randrange(2**16))))
    path.write_bytes(data)


CRAFTS = {".pt": craft_pt}
