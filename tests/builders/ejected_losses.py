"""`python -m builders.ejected_losses`: losses of recipes as files, run with torch alone, compared with the package.

`--kernels`: files of Triton kernels alone, run by Triton's interpreter, compared with the package's kernels.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import rollout_corr as rc
from builders import ejected, interpreter
from rollout_corr.backends import loss_blocks, run, whole
from rollout_corr.eject import Ejected, eject

LOSSES = importlib.import_module("rollout_corr.api.policy_loss").LOSSES


def examples(made: Ejected) -> Iterator[dict[str, Any]]:
    """Batches of several sizes, with holes, garbage, empty sequences and two dtypes of mask."""
    packed = made.request.door.layout == "packed"
    sizes: list[Any] = [4000, 700, 1, 0] if packed else [(40, 100), (7, 300), (1, 1), (3, 0)]
    counts = (40, 9, 2, 2)
    if made.request.backend != "torch":
        # What the interpreter runs in a second.
        sizes, counts = [300, 60], (9, 4, 0, 0)
    assert made.request.loss is not None
    for seed, shape in enumerate(sizes):
        random = torch.Generator().manual_seed(seed)
        new, mask = -torch.rand(shape, generator=random), torch.rand(shape, generator=random) > 0.2
        spread = (0.01, 0.3, 0.5, 0.1)[seed]
        given = {name: new + spread * torch.randn(shape, generator=random) for name in made.request.loss.needs}
        given |= {"new_logp": new, "advantages": torch.randn(shape, generator=random)}
        if made.request.backend != "torch":
            given = {name: x if name == "advantages" else x.to((torch.float32, torch.bfloat16)[seed])
                     for name, x in given.items()}  # fmt: skip
        if seed == 1:
            given["advantages"].view(-1)[9] = float("inf")
            for name in made.request.loss.needs:
                given[name].view(-1)[5] = float("nan")
            mask = mask.long()
        if packed:
            inner = torch.randint(0, new.numel() + 1, (counts[seed],), generator=random).sort().values
            given["cu_seqlens"] = torch.cat([torch.tensor([0]), inner])
            if seed != 1:
                given["cu_seqlens"][-1] = new.numel()
        yield given | {"mask": mask}


def differences(made: Ejected) -> list[str]:
    """What differs between a file and the package, bit by bit, run as the definition on the whole batch."""
    whole_batches = (mock.patch.dict(LOSSES, blocks=loss_blocks.run_whole),
                     mock.patch.dict(run.CORRECTIONS, blocks=whole.run_whole))  # fmt: skip
    quick = contextlib.nullcontext() if made.request.backend == "torch" else interpreter.quick()
    with ejected.loaded(made) as names, whole_batches[0], whole_batches[1], quick:
        compared = (_differing(made, names, *numbered) for numbered in enumerate(examples(made)))
        return [found for some in compared for found in some]


def _differing(made: Ejected, names: dict[str, Any], number: int, given: dict[str, Any]) -> Iterator[str]:
    backend, wanted = made.request.backend, made.request.loss
    assert wanted is not None
    # A batch of one row is packed too.
    rows = (1, -1) if number == 1 and given["new_logp"].dim() == 1 else given["new_logp"].shape
    given = {key: x if key == "cu_seqlens" else x.reshape(rows) for key, x in given.items()}
    mine, theirs = (given["new_logp"].clone().requires_grad_() for _ in range(2))
    choice = {"backend": "fused"} if backend == "both" else {}
    got = names["policy_loss"](**given | {"new_logp": mine}, **choice)
    batch = rc.Batch(mask=given["mask"], cu_seqlens=given.get("cu_seqlens"))
    logps = {name: given[name] for name in wanted.needs}
    out = rc.policy_loss(
        theirs, given["advantages"], batch, wanted.loss, spec=wanted.spec, backend=RUNS[backend], **logps
    )
    (got[0] * 1.7).backward()
    (out.value * 1.7).backward()
    pairs = [("value", got[0], out.value), ("gradient", mine.grad, theirs.grad)]
    if wanted.spec is not None:
        pairs += zip(("weights", "mask", "keep"), got[1:4], (out.weights, out.mask, out.keep), strict=True)
    for name, one, other in pairs:
        if (one is None) != (other is None) or (one is not None and not ejected._same(one, other)):
            yield f"{name} of batch {number}"
    expected = out.metrics()
    yield from (f"{key} of batch {number}" for key, x in got[-1].items() if repr(x) != repr(expected[key]))


# The backend of the package that a file is compared with.
RUNS: dict[str, Any] = {"torch": "torch", "triton": "triton", "both": "triton"}


def files(name: str, kernels: bool) -> Iterator[tuple[str, Ejected]]:
    """The files of a recipe: packed and padded; of kernels the first."""
    for layout in ("packed",) if kernels else ("packed", "padded"):
        yield layout, eject(name, layout=layout, loss=True, backend="triton" if kernels else "torch")


if __name__ == "__main__":
    raise SystemExit(ejected.main(rc.recipe_names(), files, differences))
