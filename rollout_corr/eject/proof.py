"""The test of a file: the numbers of a small batch, what is behind the mask, a batch of nothing, and wrong shapes."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import torch

from .._version import __version__
from ..api.correct import correct
from ..backends.given import Batch, Versions
from .file import Request
from .program import Program, external_inputs

# The batch is made of whole numbers, so that it is the same on every machine.
BATCH = '''def make_batch(device={device}):
    """Eight sequences: D grows from 1e-4 to 1.5, one is empty; a NaN behind the mask, an infinity in front of it."""
    i = torch.arange(96, device=device)
    {train} = -((i * 7919) % 997).float() / 499
    {rollout} = {train} + ((i * 104729) % 101 - 50).float() * 4 ** (i // 12) / 2**19
    {train}[61] -= 12.0  # beyond bounds of tokens
    {rollout}[73] -= 25.0  # beyond the clamp
    {mask} = (i * 31) % 7 != 0
    {mask}[24:36] = False
    {train}[24], {rollout}[50], {mask}[50] = float("nan"), -float("inf"), True
{more}    return {{{items}}}
'''

TEST = '''def run(batch):
    """Weights, mask, verdicts of sequences, and metrics."""
{tried}


def test_numbers():
    weights, mask, keep, metrics = run(make_batch())
    assert mask.flatten().long().tolist() == MASK
    if keep is not None:
        assert keep.tolist() == KEEP
    if WEIGHTS is None:
        assert weights is None
    else:
        torch.testing.assert_close(weights.flatten().cpu(), torch.tensor(WEIGHTS), rtol=1e-5, atol=1e-6, equal_nan=True)
    for key, value in METRICS.items():
        assert math.isclose(metrics[key], value, rel_tol=1e-5, abs_tol=1e-6) or str(metrics[key]) == str(value), key


def test_what_is_behind_the_mask_changes_nothing():
    batch = make_batch()
    first = run(batch)
    for name in ("{train}", "{rollout}"):
        batch[name] = torch.where(batch["{mask}"], batch[name], float("nan"))
    second = run(batch)
    assert str(first[3]) == str(second[3]) and torch.equal(first[1], second[1])
    if first[0] is not None:
        torch.testing.assert_close(first[0], second[0], rtol=0, atol=0, equal_nan=True)


def test_nothing_counts():
    batch = make_batch()
    batch["{mask}"] = torch.zeros_like(batch["{mask}"])
    weights, mask, _, metrics = run(batch)
    assert not mask.any() and (weights is None or not weights.any())
    assert all(math.isfinite(value) for value in metrics.values())


def test_no_sequences():
    batch = {{name: 0 * x[:1] if name.startswith("cu_") else x[:0] for name, x in make_batch().items()}}
    weights, mask, _, metrics = run(batch)
    assert mask.numel() == 0 and (weights is None or weights.numel() == 0)
    assert all(math.isfinite(value) for value in metrics.values())


def test_wrong_shape():
    batch = make_batch()
    batch["{rollout}"] = batch["{rollout}"][..., 1:]
    with pytest.raises(ValueError, match="{rollout}"):
        run(batch)
'''


def example(request: Request, program: Program) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The batch of the test by the file's names, and as the package takes it."""
    scope: dict[str, Any] = {"torch": torch}
    exec(_batch(request, program), scope)
    batch: dict[str, torch.Tensor] = scope["make_batch"]("cpu")
    train, rollout, mask = (batch[request.door.names[name]] for name in ("train_logp", "rollout_logp", "mask"))
    more: dict[str, Any] = {"cu_seqlens": batch.get("cu_seqlens"), "turns": batch.get("cu_turns")}
    for name, key in external_inputs(request.spec):
        if name == "ages":
            more["versions"] = Versions((10 - batch[name]).long(), 10)
        elif name == "entropy":
            more["entropy"] = batch[name]
        else:
            more.setdefault("external", {})[key] = batch[name]
    given = {"train_logp": train, "rollout_logp": rollout, "batch": Batch(mask=mask, **more), "spec": request.spec}
    return batch, given | {"advantages": batch.get("advantages")}


def _batch(request: Request, program: Program) -> str:
    names, packed = request.door.names, request.door.layout == "packed"
    train, rollout, mask = (names[name] for name in ("train_logp", "rollout_logp", "mask"))
    more, shaped = [], [train, rollout, mask]
    for name in program.inputs[3:]:
        if name == "cu_seqlens":
            more.append("cu_seqlens = torch.tensor([0, 12, 24, 36, 36, 60, 72, 84, 96], device=device)")
        elif name == "cu_turns":
            more.append("cu_turns = torch.arange(0, 97, 4, device=device)")
        else:
            more.append(f"{name} = ((i * 17) % 5 - {2 if name == 'advantages' else 0}).float()")
            shaped.append(name)
    items = [f'"{name}": {name}' + ("" if packed or name not in shaped else ".view(8, 12)") for name in program.inputs]
    # Without a GPU kernels alone run in the interpreter: TRITON_INTERPRET=1.
    device = '"cuda" if torch.cuda.is_available() else "cpu"' if request.backend == "triton" else '"cpu"'
    return BATCH.format(
        device=device, train=train, rollout=rollout, mask=mask,
        more="".join(f"    {line}\n" for line in more), items=", ".join(items),
    )  # fmt: skip


def test_of(request: Request, program: Program, module: str) -> str:
    """Write the test of a file that is imported as `module`."""
    _, given = example(request, program)
    out = correct(**given, backend="torch")
    numbers = program.metrics.keys
    metrics = {key: value for key, value in out.metrics(request.door.metrics or "native").items() if key in numbers}
    width, names = request.door.width, request.door.names
    imported = ["SETTINGS", request.door.function] if "SETTINGS" in request.door.tried else [request.door.function]
    weights = None if out.weights is None else [float(f"{x:.7g}") for x in out.weights.flatten().tolist()]
    mask = out.mask.flatten().long().tolist() if isinstance(out.mask, torch.Tensor) else None
    parts = [
        f'"""Test of {module}.py: numbers of rollout-corr {__version__}."""',
        f"import math\n\nimport pytest\nimport torch\n\nfrom {module} import {', '.join(imported)}",
        wrapped("MASK", mask, width) + "\n" + wrapped("KEEP", out.keep.tolist(), width) + "\n"
        + wrapped("WEIGHTS", weights, width) + "\n"
        + "\n".join(["METRICS = {", *(f'    "{key}": {text_of(value)},' for key, value in metrics.items()), "}"]),
    ]  # fmt: skip
    text = "\n\n".join(parts) + "\n\n\n" + _batch(request, program) + "\n\n"
    tried = textwrap.indent(request.door.tried, "    ")
    return text + TEST.format(tried=tried, train=names["train_logp"], rollout=names["rollout_logp"], mask=names["mask"])


def wrapped(name: str, values: list[Any] | None, width: int) -> str:
    """An assignment of a list."""
    if values is None:
        return f"{name} = None"
    lines = textwrap.wrap(", ".join(map(text_of, values)), width - 4)
    return "\n".join([f"{name} = [", *("    " + line for line in lines), "]"])


def text_of(value: float) -> str:
    """A number as source."""
    return repr(value) if math.isfinite(value) else f"math.{value}".replace("math.-", "-math.")
