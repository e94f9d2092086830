"""The file: its head, its parts in order, and what is left of it later: which version wrote it, and who edited it."""

from __future__ import annotations

import difflib
import hashlib
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from .._version import __version__
from ..frameworks.shared.doors import Door, Within
from ..specs.correction import Spec
from ..specs.loss import Loss, explain
from .lines import fitted, joined, split_names
from .loss import Wanted, compared_by
from .program import Program

WRITTEN = "# Written by rollout-corr "
COMMAND = "#     rollout-corr eject "
LOGGER = """logger = logging.getLogger(__name__)
_logged: set[str] = set()"""
LOG_ONCE = '''def _log_once(backend: str) -> None:
    """Say once which backend runs."""
    if backend not in _logged:
        _logged.add(backend)
        logger.info("rollout correction runs on the %s backend", backend)'''
# The lines that choose the backend: the choice never falls back.
CHOICE = [
    'if backend not in ("eager", "fused"):',
    "    raise ValueError(f\"backend: expected 'eager' or 'fused', got {backend!r}\")",
    'run = _fused if backend == "fused" else _eager',
    "_log_once(backend)",
]
DIGEST = "# sha256 of the lines below: "

# What `_eager` returns.
TOLD = {
    "total": "the undivided loss", "divisor": "its divisor", "weights": "weights", "mask": "mask",
    "keep": "keep", "numbers": "the sums and maxima in `NUMBERS`",
}  # fmt: skip

TOLD_NEAR_ONE = (
    "# Sums of ratios and weights hold x - 1, which does not cancel; those called plain and perplexities hold x."
)

# Phrases of `explain` that hold for the package but not for a file.
ELSEWHERE = {
    " in float32 or float64,": " in float32,",
    ", or by `Batch.total` where it is given": "",
    ": a mean over it divides by fewer tokens, policy_loss by those of the batch unless Mean(over='kept')": "",
}


class Request(NamedTuple):
    """A request for a file."""

    name: str  # what the file calls it
    spec: Spec
    door: Door  # how it is called
    arguments: str | None  # those of the command that writes it again; None: a Spec without a name
    loss: Wanted | None = None  # with the Spec that corrects it; None: a correction alone
    backend: str = "torch"  # "torch", "triton", or "both"


def written(request: Request, program: Program, fused: Sequence[str] = ()) -> str:
    """The source of the file: plain torch, metrics, and the Triton part, if any, whose last definition is `_fused`."""
    backend = request.backend
    width, eager, chooses = request.door.width, backend != "triton", backend == "both"
    within = Within(
        spec=request.spec,
        call=_call(request, program, {"torch": "_eager", "triton": "_fused", "both": "run"}[backend]),
        metrics="_metrics(numbers)" if program.metrics.lines else "{}",
        extra=program.inputs if request.loss else program.inputs[4 if request.door.layout == "packed" else 3 :],
        check=CHOICE if chooses else [],
        fused=chooses,
    )
    numbers = [program.names[name] for name in program.numbers]
    parts = [
        f'"""{docstring(request, width)}\n"""',
        _imports(request, program, fused, chooses),
        LOGGER if chooses else "",
        *(["\n".join(program.constants)] if eager else []),
        fused[0] if fused else "",
        _numbers(numbers, width) if program.metrics.lines else "",
        request.door.public(within),
        *([_eager(program, request), *program.functions] if eager else []),
    ]
    if program.metrics.lines:
        parts += [_metrics(program, width), *program.metrics.helpers.values()]
    parts += [LOG_ONCE if chooses else "", *fused[1:]]
    body = _laid_out(parts)
    head = [f"{WRITTEN}{__version__}, Apache License 2.0."]
    if request.arguments is not None:
        head.append(COMMAND + request.arguments)
    for part in _parts(request):
        head += textwrap.wrap(repr(part), width - 2, initial_indent="# ", subsequent_indent="#     ")
    return "\n".join([*head, f"{DIGEST}{digest(body)}", body])


def docstring(request: Request, width: int) -> str:
    """Describe the file in the words of its Spec and its Loss."""
    lines = [f"{'Policy loss' if request.loss else 'Rollout correction'}: {request.name}."]
    parts, logps = _parts(request), ("train_logp", "rollout_logp")
    names = [request.door.names[name] for name in logps] if request.loss is None else compared_by(request.loss)
    called = dict(zip(logps, names, strict=True))
    if "keep" not in request.door.gives:
        called[" (weight 0, keep False)"] = " (weight 0)"
    for part in parts:
        lines += ["", "The correction:" if isinstance(part, Spec) else "The loss:", ""] if len(parts) > 1 else [""]
        text = part.explain() if isinstance(part, Spec) else _told(request)
        for line in text.splitlines():
            for words, here in (ELSEWHERE | called).items():
                line = line.replace(words, here)
            if not line.split(". ", 1)[-1].startswith("Metrics:"):
                lines += textwrap.wrap(line, width - 2, subsequent_indent="   ")
    return "\n".join(lines)


def _told(request: Request) -> str:
    """Describe the loss: the file compares with one kind of log-probs."""
    assert request.loss is not None
    base = next((name for name in ("old", "rollout") if f"{name}_logp" in request.loss.needs), "new")
    return explain(request.loss.loss, base, request.loss.spec is not None and request.loss.spec.returns_weights)


def _parts(request: Request) -> list[Spec | Loss]:
    if request.loss is None:
        return [request.spec]
    return [part for part in (request.loss.spec, request.loss.loss) if part is not None]


def digest(body: str) -> str:
    """Hash the text of a file without its white space, by which `--check` finds an edit."""
    return hashlib.sha256("".join(body.split()).encode()).hexdigest()[:16]


def _imports(request: Request, program: Program, fused: Sequence[str], chooses: bool) -> str:
    lines = list(request.door.imports)
    metrics = "\n".join([*program.metrics.lines, *program.metrics.helpers.values()])
    text = "\n".join([metrics, *fused])
    used = (("import logging", chooses), ("import math", re.search(r"\bmath\.", text)),
            ("from types import SimpleNamespace", metrics))  # fmt: skip
    first = [line for line, needed in used if needed]
    if first:
        lines = first + lines if lines[0].startswith("from typing") else [*first, "", *lines]
    if fused:
        place = lines.index("import torch") + 1
        lines[place:place] = ["import triton", "import triton.language as tl"]
    return "\n".join(lines)


def _laid_out(parts: list[str]) -> str:
    found = parts[0]
    for part in parts[1:]:
        if part:
            found += ("\n\n\n" if part.startswith(("def ", "class ", "@", "# Launch ")) else "\n\n") + part
    return found + "\n"


def _call(request: Request, program: Program, run: str) -> str:
    packed = request.door.layout == "packed"
    names = ["{train}", "{rollout}", "{mask}", *(["{offsets}"] if packed else [])]
    names += program.inputs[len(names) :]
    return f"{run}({', '.join(names)})"


def _numbers(names: list[str], width: int) -> str:
    """The names of the sums and maxima, in their order."""
    text = split_names("NUMBERS", names, width)
    if any(re.match("(row_|sequence_)?(ratio|weight)", name) for name in names):
        text = f"{TOLD_NEAR_ONE}\n{text}"
    return text


def typed(gives: Sequence[str], weighs: bool) -> str:
    """The annotation of what `_eager` and `_fused` return."""
    kinds = ["None" if name == "weights" and not weighs else "torch.Tensor" for name in gives]
    return kinds[0] if len(kinds) == 1 else f"tuple[{', '.join(kinds)}]"


def told(gives: Sequence[str]) -> str:
    """Describe the results of `_eager` and `_fused` in words."""
    *some, last = [TOLD[name] for name in gives]
    return f"{', '.join(some)}{' and ' if some else ''}{last}"


def _eager(program: Program, request: Request) -> str:
    parameters = "".join(f"    {name}: torch.Tensor,\n" for name in program.inputs)
    train, rollout = program.inputs[:2]
    upcast = [f"{train}, {rollout} = {train}.float(), {rollout}.float()"] if request.loss is None else []
    return "\n".join([
        f"def _eager(\n{parameters}) -> {typed(program.gives, request.spec.returns_weights)}:",
        f'    """Return {told(program.gives)}."""',
        joined([*upcast, *([""] if upcast and program.body[0].startswith("#") else []), *program.body]),
    ])  # fmt: skip


def _metrics(program: Program, width: int) -> str:
    lines = ["def _metrics(numbers: torch.Tensor) -> dict[str, float]:"]
    lines += ['    """The metrics of a batch, from its sums and maxima: one copy to the host."""']
    lines += ["    v = SimpleNamespace(**dict(zip(NUMBERS, numbers.tolist(), strict=True)))"]
    lines += [f"    {line}" for line in program.metrics.first]
    items = [line for item in program.metrics.lines for line in _item(item, width - 8)]
    if program.metrics.nothing is not None:
        lines += ["    metrics = {", *("        " + line for line in items), "    }"]
        lines += [f"    return metrics if {program.metrics.nothing} else dict.fromkeys(metrics, 0.0)"]
    else:
        lines += ["    return {", *("        " + line for line in items), "    }"]
    return "\n".join(lines)


def _item(item: str, width: int) -> list[str]:
    """An item of a dict display; a conditional that is too long is broken at its branches."""
    if len(item) <= width:
        return [item]
    key, _, value = item.rstrip(",").partition(": ")
    if " if " in value:
        if len(value) <= width - 4:
            return [f"{key}: (", f"    {value}", "),"]
        pieces = [line for piece in re.split(r" (?=if |else )", value) for line in fitted(piece, width - 4)]
        return [f"{key}: (", *("    " + piece for piece in pieces), "),"]
    lines = fitted(f"{key}: {value}", width - 1)
    return [*lines[:-1], lines[-1] + ","]


# --- later ---


def checked(source: str, again: str | None) -> tuple[bool, list[str]]:
    """Say where a file comes from, and compare it with what would be written today.

    Args:
        source: The file.
        again: The file that its command writes today; None: it cannot be written again.

    Returns:
        Whether it is as it was written and would be written today; and what to say.
    """
    lines = source.splitlines()
    version = next((line for line in lines if line.startswith(WRITTEN)), None)
    place = next((i for i, line in enumerate(lines) if line.startswith(DIGEST)), None)
    if version is None or place is None:
        return False, ["not written by rollout-corr eject: its header lines are missing"]
    edited = digest("\n".join(lines[place + 1 :])) != lines[place].removeprefix(DIGEST).strip()
    said = [version.removeprefix("# "), "edited since" if edited else "not edited since"]
    if again is None:
        return not edited, [*said, "its Spec has no name, so it cannot be written again"]
    new = again.splitlines()
    new = new[next(i for i, line in enumerate(new) if line.startswith(DIGEST)) + 1 :]
    if "".join("".join(new).split()) == "".join("".join(lines[place + 1 :]).split()):
        return not edited, [*said, f"rollout-corr {__version__} writes the same file"]
    changes = difflib.unified_diff(
        lines[place + 1 :], new, "this file", f"rollout-corr {__version__}", n=1, lineterm=""
    )
    return False, [*said, f"rollout-corr {__version__} writes another file:", *changes]


def arguments_of(source: str) -> str | None:
    """The arguments of the command that wrote a file; a license may stand above its head."""
    head = source.partition(DIGEST)[0].splitlines()
    return next((line.removeprefix(COMMAND) for line in head if line.startswith(COMMAND)), None)
