"""The test of a file with a loss: its numbers, its gradient, what is behind the mask, and a batch of nothing."""

from __future__ import annotations

from typing import Any

import torch

from .._version import __version__
from ..api.policy_loss import policy_loss
from ..backends.given import Batch
from .file import Request
from .program import Program
from .proof import text_of, wrapped

BATCH = '''def make_batch(device="cpu"):
    """Eight sequences: D grows from 1e-4 to 1.5, one is empty; a NaN behind the mask, an infinity in front of it."""
    i = torch.arange(96, device=device)
    new_logp = -((i * 7919) % 997).float() / 499
    advantages = ((i // 12 * 5) % 7 - 3).float() / 2
    mask = (i * 31) % 7 != 0
    mask[24:36] = False
    new_logp[24], advantages[50], mask[50] = float("nan"), float("inf"), True
{more}    new_logp[61] -= 12.0  # beyond bounds of tokens
{beyond}    return {{{items}}}


def run(batch, upstream=1.0):
    """Everything that the function returns, and the gradient."""
    new_logp = batch["new_logp"].clone().requires_grad_()
    found = policy_loss(**batch | {{"new_logp": new_logp}})
    (found[0] * upstream).backward()
    return found, new_logp.grad
'''

TEST = """def test_numbers():
    found, gradient = run(make_batch())
    torch.testing.assert_close(found[0], torch.tensor(VALUE), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.flatten(), torch.tensor(GRADIENT), rtol=1e-5, atol=1e-6)
    for key, value in METRICS.items():
        assert math.isclose(found[-1][key], value, rel_tol=1e-5, abs_tol=1e-6), key
{corrected}

def test_backward_scales_the_gradient():
    _, once = run(make_batch())
    _, twice = run(make_batch(), 2.0)
    assert torch.equal(twice, 2.0 * once)


def test_without_a_gradient():
    with torch.no_grad():
        value = policy_loss(**make_batch())[0]
    assert torch.equal(value, run(make_batch())[0][0]) and not value.requires_grad


def test_what_is_behind_the_mask_changes_nothing():
    batch = make_batch()
    first, gradient = run(batch)
    batch["new_logp"] = torch.where(batch["mask"], batch["new_logp"], float("nan"))
    second, same = run(batch)
    assert torch.equal(first[0], second[0]) and torch.equal(gradient, same) and first[-1] == second[-1]
    assert not gradient[~batch["mask"]].any()


def test_nothing_counts():
    batch = make_batch()
    batch["mask"] = torch.zeros_like(batch["mask"])
    found, gradient = run(batch)
    assert found[0] == 0.0 and not gradient.any() and all(math.isfinite(x) for x in found[-1].values())


def test_no_tokens():
    batch = {{name: x[:0] for name, x in make_batch().items()}}
{empty}    found, gradient = run(batch)
    assert found[0] == 0.0 and gradient.numel() == 0


def test_every_token_counts_without_a_mask():
    batch = {{name: x.nan_to_num(0.0, 0.0) if x.is_floating_point() else x for name, x in make_batch().items()}}
    every = run(batch | {{"mask": torch.ones_like(batch["mask"])}})
    assert torch.equal(run(batch | {{"mask": None}})[1], every[1])


def test_wrong_shape():
    batch = make_batch()
    batch["advantages"] = batch["advantages"][..., 1:]
    with pytest.raises(ValueError, match="advantages"):
        run(batch)
"""
CORRECTED = """    _, weights, mask, keep, _ = found
    assert mask.flatten().long().tolist() == MASK and keep.tolist() == KEEP
    if WEIGHTS is None:
        assert weights is None
    else:
        torch.testing.assert_close(weights.flatten(), torch.tensor(WEIGHTS), rtol=1e-5, atol=1e-6)
"""


def _batch(program: Program, packed: bool) -> str:
    names = [name for name in program.inputs if name.endswith("_logp") and name != "new_logp"]
    more = [f"    {name} = new_logp + ((i * {104729 + 2 * place}) % 101 - 50).float() * 4 ** (i // 12) / 2**19\n"
            for place, name in enumerate(names)]  # fmt: skip
    beyond = [f"    {name}[73] -= 25.0  # beyond the clamp\n" for name in names]
    if packed:
        more.append("    cu_seqlens = torch.tensor([0, 12, 24, 36, 36, 60, 72, 84, 96], device=device)\n")
    items = (f'"{name}": {name}' + ("" if packed else ".view(8, 12)") for name in program.inputs)
    return BATCH.format(more="".join(more), beyond="".join(beyond), items=", ".join(items))


def test_of_loss(request: Request, program: Program, module: str) -> str:
    """Write the test of a file that is imported as `module`."""
    assert request.loss is not None
    packed, width, wanted = request.door.layout == "packed", request.door.width, request.loss
    scope: dict[str, Any] = {"torch": torch}
    exec(_batch(program, packed), scope)
    given: dict[str, Any] = scope["make_batch"]()
    new, logps = given["new_logp"].requires_grad_(), {name: given[name] for name in wanted.needs}
    batch = Batch(mask=given["mask"], cu_seqlens=given.get("cu_seqlens"))
    out = policy_loss(new, given["advantages"], batch, wanted.loss, spec=wanted.spec, backend="torch", **logps)
    out.value.backward()
    found = out.metrics()
    metrics = [f'    "{key}": {text_of(found[key])},' for key in program.metrics.keys]
    numbers = [f"VALUE = {text_of(float(f'{out.value.item():.7g}'))}", wrapped("GRADIENT", _rounded(new.grad), width)]
    if wanted.spec is not None:
        assert isinstance(out.mask, torch.Tensor) and out.keep is not None
        numbers += [
            wrapped("WEIGHTS", _rounded(out.weights), width),
            wrapped("MASK", out.mask.flatten().long().tolist(), width),
            wrapped("KEEP", out.keep.tolist(), width),
        ]
    numbers += ["\n".join(["METRICS = {", *metrics, "}"])]
    empty = '    batch["cu_seqlens"] = torch.tensor([0, 0, 0])\n' if packed else ""
    text = TEST.format(corrected="" if wanted.spec is None else CORRECTED, empty=empty)
    return "\n\n".join([
        f'"""Test of {module}.py: numbers of rollout-corr {__version__}."""',
        f"import math\n\nimport pytest\nimport torch\n\nfrom {module} import policy_loss",
        "\n".join(numbers),
        "\n" + _batch(program, packed) + "\n\n" + text,
    ])  # fmt: skip


def _rounded(x: Any) -> list[float] | None:
    return None if x is None else [float(f"{one:.7g}") for one in x.flatten().tolist()]
