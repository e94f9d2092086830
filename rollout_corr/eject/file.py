"""The file: head, docstring, public function, plain torch, metrics; and its test."""

from __future__ import annotations

import hashlib
import re
import textwrap
from typing import NamedTuple

from .._version import __version__
from ..specs.correction import Spec
from .program import Program
from .write import joined

WIDTH = 100
DIGEST = "# sha256 of the lines below: "


class Request(NamedTuple):
    """What to write.

    Attributes:
        name: What the file calls it.
        spec: The Spec.
        layout: "packed" or "padded".
        metrics: Which metrics are in it.
        command: The command that writes it again; None: a Spec without a name.
    """

    name: str
    spec: Spec
    layout: str
    metrics: str
    command: str | None


PACKED = """    train_logp, rollout_logp: [N] or [1, N], log-probs of the same tokens by the trainer and by the
        engine that sampled them: float32, bfloat16 or float16.
    mask: [N], bool, integers or floats: 0 at tokens that do not count. None: every token counts.
    cu_seqlens: [S + 1], where sequences begin, and where the last one ends."""
PADDED = """    train_logp, rollout_logp: [B, T], log-probs of the same tokens by the trainer and by the engine that
        sampled them: float32, bfloat16 or float16. Each row is a sequence.
    mask: [B, T], bool, integers or floats: 0 at tokens that do not count. None: every token counts."""


def docstring(request: Request) -> str:
    """What the file does, in the words of the Spec."""
    lines = [f"Rollout correction: {request.name}.", ""]
    for line in request.spec.explain().splitlines():
        if not line.split(". ", 1)[-1].startswith("Metrics:"):
            lines += textwrap.wrap(line, WIDTH - 2, subsequent_indent="   ")
    return "\n".join(lines)


def written(request: Request, program: Program) -> str:
    """The source of the file."""
    parts = [
        f'"""{docstring(request)}\n"""',
        _imports(program),
        "\n".join(program.constants),
        _public(request, program),
        _eager(program),
        *program.functions,
    ]
    if program.metrics.lines:
        parts += [_metrics(program), *program.metrics.helpers.values()]
    body = _laid_out(parts)
    head = [f"# Written by rollout-corr {__version__}, Apache License 2.0."]
    if request.command:
        head += [f"#     {request.command}"]
    head += textwrap.wrap(repr(request.spec), WIDTH - 2, initial_indent="# ", subsequent_indent="#     ")
    return "\n".join([*head, f"{DIGEST}{digest(body)}", body])


def digest(body: str) -> str:
    """What tells whether somebody edited a file."""
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def _imports(program: Program) -> str:
    text = "\n".join([*program.metrics.lines, *program.metrics.helpers.values()])
    return "import math\n\nimport torch" if re.search(r"\bmath\.", text) else "import torch"


def _laid_out(parts: list[str]) -> str:
    found = parts[0]
    for part in parts[1:]:
        if part:
            found += ("\n\n\n" if part.startswith("def ") else "\n\n") + part
    return found + "\n"


def _public(request: Request, program: Program) -> str:
    packed = request.layout == "packed"
    typed = "".join(f"    {name}: torch.Tensor{' | None' if name == 'mask' else ''},\n" for name in program.inputs)
    weights = "torch.Tensor" if request.spec.returns_weights else "None"
    lines = [
        "def correct(\n" + typed + f") -> tuple[{weights}, torch.Tensor, torch.Tensor, dict[str, float]]:",
        '    """Correct a batch.',
        "",
        "    Args:",
        joined((PACKED if packed else PADDED).splitlines()),
        "",
        "    Returns:",
        "        Weights, float32, 0 where nothing counts" if request.spec.returns_weights else "        None",
    ]
    lines[-1] += "; the mask of the tokens that train, in its own dtype; whether"
    lines += ["        each sequence is kept, [S] bool; and metrics, from one copy to the host.", '    """']
    lines += ["    if mask is None:", "        mask = torch.ones_like(train_logp, dtype=torch.bool)"]
    lines += ["    train, rollout = train_logp.detach().float(), rollout_logp.detach().float()"]
    more = "".join(f", {name}" for name in program.inputs[4 if packed else 3 :])
    if packed:
        lines += [
            "    shape = train.shape",
            "    offsets = cu_seqlens.to(train.device, torch.int64)",
            f"    weights, kept_mask, keep, numbers = _eager(train.view(-1), rollout.view(-1), mask.view(-1), offsets{more})",
        ]
        shaped = ["weights.view(shape)" if request.spec.returns_weights else "None", "kept_mask.view(shape)"]
    else:
        lines += [f"    weights, kept_mask, keep, numbers = _eager(train, rollout, mask{more})"]
        shaped = ["weights", "kept_mask"]
    metrics = "_metrics(*numbers.tolist())" if program.metrics.lines else "{}"
    lines += [f"    return {', '.join(shaped)}, keep, {metrics}"]
    return "\n".join(lines)


def _eager(program: Program) -> str:
    typed = "".join(f"    {name}: torch.Tensor,\n" for name in program.inputs)
    lines = [
        "def _eager(\n" + typed + ") -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:",
        '    """Weights, mask, verdicts, and the numbers that metrics are made of: [K] float64."""',
        joined(program.body),
    ]
    return "\n".join(lines)


def _metrics(program: Program) -> str:
    names = [program.names[name] for name in program.numbers]
    lines = ["def _metrics(", *(f"    {name}: float," for name in names), ") -> dict[str, float]:"]
    lines += ['    """The metrics of a batch."""']
    inner = program.metrics.lines
    if program.metrics.first is not None:
        lines += [f"    if not {program.metrics.first}:", "        return dict.fromkeys(_KEYS, 0.0)"]
    lines += ["    return {", *("        " + line for line in inner), "    }"]
    return "\n".join(lines)
