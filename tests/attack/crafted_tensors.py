"""Crafted .pt, .safetensors and .npz files: a grammar for each of what a stranger may write into one."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import struct
import zipfile

import numpy as np
import torch

HUGE = (-1, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63), 10**12, 10**400)


def craft_pt(path, columns, rng):
    """Write a .pt file of odd objects, an altered pickle, or an altered archive."""
    rng.choice((_odd_tensors, _odd_records, _altered_pickle, _altered_pickle, _altered_archive))(path, columns, rng)


# --- what torch.save itself writes ------------------------------------------------------------------------------------


def _itself():
    found = {}
    found["more"] = found
    return found


def _doubled():
    found = {"x": 1}
    for _ in range(40):
        found = {"a": found, "b": found}
    return found


def _nested(depth=150):
    found = []
    for _ in range(depth):
        found = [found]
    return found


def _quantized(x):
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)


TENSORS = (
    lambda x: x.to_sparse(),
    lambda x: x.double(),
    lambda x: x.half(),
    lambda x: x.to(torch.bfloat16),
    lambda x: x.to(torch.float8_e4m3fn),
    lambda x: x.to(torch.complex64),
    lambda x: x.to("meta"),
    lambda x: torch.nn.Parameter(x.float()),
    lambda x: x.long(),
    lambda x: x.abs().to(torch.uint64),
    lambda x: x.abs().to(torch.uint16),
    lambda x: x[..., :1].expand(x.shape),
    lambda x: x.reshape(-1)[:1].expand(10**6, 10**6),
    lambda x: torch.zeros(1).expand(10**12, 0),
    lambda x: torch.zeros(1).expand(10**11),
    lambda x: x[..., ::2],
    lambda x: torch.stack([x, x], -1)[..., 0],
    lambda x: x.flip(0),
    lambda x: x[None],
    lambda x: x[:0],
    lambda x: x.reshape(-1)[0],
    lambda x: torch.full_like(x, torch.nan) if x.is_floating_point() else x,
    lambda x: torch.full_like(x, -torch.inf) if x.is_floating_point() else x,
    lambda x: [x],
    lambda x: x.tolist(),
    lambda x: None,
    lambda x: "text",
    lambda x: 10**400,
    lambda x: {1, 2},
    lambda x: _itself(),
    lambda x: _doubled(),
    lambda x: _nested(),
)


def _odd(value, rng):
    if not isinstance(value, torch.Tensor):
        return value
    try:
        return rng.choice(TENSORS)(value)
    except RuntimeError:  # torch has no such conversion for this dtype
        return value


def _odd_tensors(path, columns, rng):
    for name in rng.sample(sorted(columns), rng.choice((1, 1, 2))):
        columns = columns | {name: _odd(columns[name], rng)}
    if rng.random() < 0.3:
        columns["step"] = rng.choice((torch.tensor([2**63 + 5], dtype=torch.uint64), torch.tensor(3), 10**400))
    if rng.random() < 0.2:
        columns["more"] = rng.choice((_itself, _doubled, _nested))()
    unsigned = any(isinstance(x, torch.Tensor) and x.dtype in (torch.uint16, torch.uint64) for x in columns.values())
    # torch writes unsigned tensors in its old format, and cannot load them.
    torch.save(columns, path, _use_new_zipfile_serialization=unsigned or rng.random() < 0.8)


def _odd_records(path, columns, rng):
    row = {name: columns[name][:4] for name in ("train_logp", "rollout_logp", "mask")}
    rows = [dict(row) for _ in range(rng.randint(1, 5))]
    which = rng.randrange(len(rows))
    name = rng.choice(sorted(row))
    rows[which][name] = _odd(row[name], rng)
    if rng.random() < 0.2:
        rows = rows * rng.choice((10, 10_000))
    if rng.random() < 0.2:
        rows.append(rows)
    torch.save(rng.choice((rows, {"samples": rows}, {"step": 1, "more": {"deep": rows}})), path)


# --- the pickle itself ------------------------------------------------------------------------------------------------


def _members(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _write(path, members, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


INJECTED = (
    b"cos\nsystem\nX\x04\x00\x00\x00true\x85R0",
    b"c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R0",
    b"ctorch.storage\nUntypedStorage\n\x8a\x06\x00\x00\x00\x00\x00\x01\x85R0",
    b"ctorch\nFloatStorage\n)\x81}b0",
    b"ccollections\nOrderedDict\n)R(X\x01\x00\x00\x00ad0",
    b"\x8a\xff" + b"\xff" * 255 + b"0",
    b"]r\xff\xff\xff\x7f0",
    b"h\xff0",
    b"j\xff\xff\xff\xff0",
    b"\x80\x04",
    b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"(" * 5000,
    b"]" * 5000,
    b"0" * 50,
    b".",
    b"}q\x01h\x01h\x01s0",
    b"I" + b"9" * 400 + b"\n0",
    b"N\x85\x85\x85Q0",
    b"cnowhere\nnothing\n(tR}b0",
)


def _altered_pickle(path, columns, rng):
    torch.save(columns, path)
    members = _members(path)
    name = next(name for name in members if name.endswith("data.pkl"))
    data = members[name]
    for _ in range(rng.choice((1, 1, 2, 5))):
        starts = [position for _, _, position in pickletools.genops(members[name])]
        at = rng.choice(starts)
        kind = rng.randrange(4)
        if kind == 0:
            data = data[:at] + rng.choice(INJECTED) + data[at:]
        elif kind == 1:
            # A number, such as a size, a stride or an offset, becomes another one.
            data = _with_number(data, rng)
        elif kind == 2:
            stop = rng.choice(starts)
            data = data[: min(at, stop)] + data[max(at, stop) :]
        else:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    _write(path, members | {name: data})


def _with_number(data, rng):
    try:
        found = [(op, at) for op, _, at in pickletools.genops(data) if op.name in ("BININT1", "BININT2", "BININT")]
    except ValueError:  # altered before
        return data
    if not found:  # cut away before
        return data
    op, at = rng.choice(found)
    length = {"BININT1": 2, "BININT2": 3, "BININT": 5}[op.name]
    number = rng.choice((*HUGE, rng.randrange(300)))
    return data[:at] + pickle.dumps(number, 2)[2:-1] + data[at + length :]


def _altered_archive(path, columns, rng):
    torch.save(columns, path)
    members = _members(path)
    values = [name for name in members if "/data/" in name and members[name]]
    which = rng.choice(values)
    kind = rng.randrange(6)
    if kind == 0:
        _write(path, members | {which: members[which][: rng.randrange(len(members[which]))]})
    elif kind == 1:
        _write(path, members, compression=rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)))
    elif kind == 2:
        _write(path, {name: data for name, data in members.items() if name != which})
    elif kind == 3:
        _write(path, {name.replace("byteorder", rng.choice(("x", "byteorder"))): b"big" if "byteorder" in name else data
                      for name, data in members.items()})  # fmt: skip
    elif kind == 4:
        _altered_index(path, rng)
    else:
        with zipfile.ZipFile(path, "a") as archive:
            archive.comment = b"PK\x05\x06" * rng.randrange(9)


def _altered_index(path, rng):
    """Change bytes of one entry of an archive's index: flags, method, sizes, offset."""
    data = bytearray(path.read_bytes())
    places = [i for i in range(len(data)) if data[i : i + 4] == b"PK\x01\x02"]
    at = rng.choice(places)
    field, form = rng.choice(((8, "<H"), (10, "<H"), (16, "<I"), (20, "<I"), (24, "<I"), (28, "<H"), (42, "<I")))
    struct.pack_into(form, data, at + field, rng.choice((0, 1, 8, 12, 99, rng.randrange(2**16))))
    path.write_bytes(data)


# --- .safetensors -----------------------------------------------------------------------------------------------------


def _json(rng, depth=0):
    """Draw a JSON value."""
    kind = rng.randrange(9)
    if kind == 0:
        return rng.choice(HUGE)
    if kind == 1:
        return rng.choice((None, True, 1.5, "F32", "", "BF16", "F8_E4M3", "U64", "C64", "BOOL"))
    if kind == 2:
        return _nested(rng.choice((1, 10, 200)))
    if kind < 6 or depth > 3:
        return [rng.choice((*HUGE, 3, 4, "a", None)) for _ in range(rng.randrange(4))]
    return {rng.choice(("dtype", "shape", "data_offsets", "x")): _json(rng, depth + 1) for _ in range(rng.randrange(4))}


def craft_safetensors(path, columns, rng):
    """Write a .safetensors file with an altered header."""
    from safetensors.torch import save_file

    save_file({name: x.contiguous() for name, x in columns.items()}, path)
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header, values = json.loads(data[8 : 8 + length]), data[8 + length :]
    name = rng.choice(sorted(header))
    other = rng.choice(sorted(header))
    kind = rng.randrange(9)
    if kind == 0:
        header[name] = _json(rng)
    elif kind == 1:
        header[name][rng.choice(sorted(header[name]))] = _json(rng)
    elif kind == 2:
        header[name]["data_offsets"] = header[other]["data_offsets"]
    elif kind == 3:
        part = rng.choice(("shape", "data_offsets"))
        header[name][part] = [rng.choice((x, *HUGE)) for x in header[name][part]]
    elif kind == 4:
        header[name]["shape"] = rng.choice(([10**12, 0], [0, 10**12], [], [1] * 100, [2**62, 4]))
        header[name]["data_offsets"] = [0, 0]
    elif kind == 5:
        header[name]["dtype"] = rng.choice(("F16", "U32", "U64", "I64", "F64", "F8_E5M2", "BOOL", "f32", "I4"))
    text = json.dumps(header)
    if kind == 6:
        text = text[:-1] + "," + text[1:]
    elif kind == 7:
        text = rng.choice(("[" * 100_000, "{" * 9, "null", "[]", '"x"', "1" * 5000, '{"a":' * 20_000, "\udcff"))
    elif kind == 8:
        text = "\ufeff" + text
    raw = text.encode("utf-8", "surrogatepass")
    head = struct.pack("<Q", rng.choice((len(raw), len(raw), len(raw), len(raw) + 1, 2**63, 0)))
    path.write_bytes(head + raw + values)


# --- .npz -------------------------------------------------------------------------------------------------------------

DESCRIPTIONS = (
    *("<f4", ">f4", "<f8", ">f8", "<f2", ">f2", "<f16", "<i8", ">i8", "<u8", "<u2", "|b1", "|u1", "<c8", "<U4", "|S4"),
    *("|O", "|V8", "<M8[s]", "<m8[ns]", "<f3", "float", "", "|i8", [("a", "<f4")], [("a", "<f4", (10**9,))], 4, None),
)
SHAPES = ((), (0,), (-1,), (10**12, 0), (0, 10**12), (2**63,), (2**62, 4), (10**400,), (1,) * 40, [3], "x", (1.5,), 7)


def craft_npz(path, columns, rng):
    """Write an .npz file with an altered member, or an altered archive."""
    arrays = {name: x.numpy() for name, x in columns.items()}
    name = rng.choice(sorted(arrays))
    x = arrays[name]
    kind = rng.randrange(8)
    if kind == 0:
        # Right, in another byte order or layout.
        arrays[name] = rng.choice((x.astype(x.dtype.newbyteorder(">")), np.asfortranarray(x), x[..., ::-1][..., ::-1]))
    elif kind == 1:
        arrays[name] = rng.choice(
            (x.astype(np.longdouble), x.astype(object), x.astype("U9"), x.astype("c8"), x.astype("u8"), x[None], x[:0])
        )
    (np.savez if rng.random() < 0.5 else np.savez_compressed)(path, **arrays)
    if kind in (2, 3, 4):
        members = _members(path)
        members[f"{name}.npy"] = _npy(members[f"{name}.npy"], x, rng)
        _write(path, members, compression=rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
    elif kind == 5:
        _write(path, _members(path), compression=rng.choice((zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)))
    elif kind == 6:
        _altered_index(path, rng)
    elif kind == 7:
        bomb = io.BytesIO()
        np.save(bomb, np.zeros(rng.choice((10**5, 5 * 10**5)), np.float32))
        _write(path, _members(path) | {f"{name}.npy": bomb.getvalue()}, compression=zipfile.ZIP_DEFLATED)


def _npy(data, x, rng):
    """Replace a part of an array's header."""
    header = {"descr": x.dtype.str, "fortran_order": False, "shape": x.shape}
    part = rng.choice(sorted(header))
    header[part] = {
        "descr": rng.choice(DESCRIPTIONS),
        "fortran_order": rng.choice((True, 1, None, "yes")),
        "shape": rng.choice(SHAPES),
    }[part]
    text = repr(header)
    if rng.random() < 0.2:
        text = rng.choice(
            ("(" * 3000, "-" * 9000 + "1", "{" * 100, "None", "{}", "__import__('os')", text + "," * 12_000)
        )
    raw = text.encode() + b"\n"
    version = rng.choice((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x09"))
    length = struct.pack("<H" if version == b"\x01\x00" else "<I", len(raw) % 2**16)
    return b"\x93NUMPY" + version + length + raw + data[128:]


CRAFTS = {".pt": craft_pt, ".safetensors": craft_safetensors, ".npz": craft_npz}
