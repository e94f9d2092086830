"""Dumps in small files: those of a model, and those of modes that were added since, of the model trained again."""

import io
import lzma
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent / "recorded"


def write(name: str, dumps: dict[str, dict[str, Tensor]]) -> None:
    """Writes the tensors of all modes, each once and byte by byte of their values, which compresses to two thirds."""
    unique: dict[bytes, int] = {}
    planes: list[tuple[Tensor, torch.dtype]] = []
    index: dict[str, dict[str, int]] = {}
    for mode, tensors in dumps.items():
        index[mode] = {}
        for key, value in tensors.items():
            value = value if value.is_floating_point() else value.to(torch.int16)
            content = value.numpy().tobytes()
            if content not in unique:
                unique[content] = len(planes)
                planes.append((value.view(torch.uint8).view(len(value), -1).T.contiguous(), value.dtype))
            index[mode][key] = unique[content]
    buffer = io.BytesIO()
    torch.save({"planes": planes, "index": index}, buffer)
    FOLDER.mkdir(exist_ok=True)
    for added in FOLDER.glob(f"{name}_*.pt.xz"):
        added.unlink()
    (FOLDER / f"{name}.pt.xz").write_bytes(lzma.compress(buffer.getvalue(), preset=9))


def read(name: str) -> dict[str, dict[str, Tensor]]:
    """The tensors of every mode that is recorded of a model, as `verdicts.diagnose` takes them."""
    dumps = {}
    for path in (FOLDER / f"{name}.pt.xz", *sorted(FOLDER.glob(f"{name}_*.pt.xz"))):
        found = torch.load(io.BytesIO(lzma.decompress(path.read_bytes())))
        tensors = [planes.T.contiguous().view(dtype)[:, 0] for planes, dtype in found["planes"]]
        tensors = [value if value.is_floating_point() else value.int() for value in tensors]
        dumps |= {mode: {key: tensors[i] for key, i in names.items()} for mode, names in found["index"].items()}
    return dumps
