"""`python -m builders.ejected_losses`: losses of recipes as files, run with torch alone, compared with the package."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

import rollout_corr as rc
from builders import ejected
from rollout_corr.backends import loss_blocks, run, whole
from rollout_corr.eject import CannotEject, Ejected, eject

LOSSES = importlib.import_module("rollout_corr.api.policy_loss").LOSSES


def examples(made: Ejected) -> Iterator[dict[str, Any]]:
    """Batches of several sizes, with holes, garbage, empty sequences and two dtypes of mask."""
    packed = made.request.door.layout == "packed"
    sizes = [4000, 700, 1, 0] if packed else [(40, 100), (7, 300), (1, 1), (3, 0)]
    assert made.request.loss is not None
    for seed, shape in enumerate(sizes):
        random = torch.Generator().manual_seed(seed)
        new, mask = -torch.rand(shape, generator=random), torch.rand(shape, generator=random) > 0.2
        spread = (0.01, 0.3, 0.5, 0.1)[seed]
        given = {name: new + spread * torch.randn(shape, generator=random) for name in made.request.loss.needs}
        given |= {"new_logp": new, "advantages": torch.randn(shape, generator=random)}
        if seed == 1:
            given["advantages"].view(-1)[9] = float("inf")
            for name in made.request.loss.needs:
                given[name].view(-1)[5] = float("nan")
            mask = mask.long()
        if packed:
            inner = torch.randint(0, new.numel() + 1, ((40, 9, 2, 2)[seed],), generator=random).sort().values
            given["cu_seqlens"] = torch.cat([torch.tensor([0]), inner])
            if seed != 1:
                given["cu_seqlens"][-1] = new.numel()
        yield given | {"mask": mask}


def differences(made: Ejected) -> list[str]:
    """What differs between a file and the package, bit by bit, run as the definition on the whole batch."""
    module, found, wanted = types.ModuleType("ejected"), [], made.request.loss
    exec(compile(made.source, "ejected", "exec"), module.__dict__)
    assert wanted is not None
    for number, given in enumerate(examples(made)):
        mine, theirs = (given["new_logp"].clone().requires_grad_() for _ in range(2))
        got = module.policy_loss(**given | {"new_logp": mine})
        batch = rc.Batch(mask=given["mask"], cu_seqlens=given.get("cu_seqlens"))
        logps = {name: given[name] for name in wanted.needs}
        with mock.patch.dict(LOSSES, blocks=loss_blocks.run_whole), \
                mock.patch.dict(run.CORRECTIONS, blocks=whole.run_whole):  # fmt: skip
            out = rc.policy_loss(
                theirs, given["advantages"], batch, wanted.loss, spec=wanted.spec, backend="torch", **logps
            )
        (got[0] * 1.7).backward()
        (out.value * 1.7).backward()
        pairs = [("value", got[0], out.value), ("gradient", mine.grad, theirs.grad)]
        if wanted.spec is not None:
            pairs += zip(("weights", "mask", "keep"), got[1:4], (out.weights, out.mask, out.keep), strict=True)
        for name, one, other in pairs:
            if (one is None) != (other is None) or (one is not None and not ejected._same(one, other)):
                found.append(f"{name} of batch {number}")
        expected = out.metrics()
        found += [f"{key} of batch {number}" for key, x in got[-1].items() if repr(x) != repr(expected[key])]
    return found


def main() -> int:
    """Print the table; the exit code says whether anything differs."""
    torch.set_num_threads(1)
    wrong = count = most = 0
    ejected.say("| recipe | file | lines | of code | its test runs | differs |\n| :-- | :-- | --: | --: | --: | :-- |")
    for name in sys.argv[1:] or rc.recipe_names():
        for layout in ("packed", "padded"):
            try:
                made = eject(name, layout=layout, loss=True)
            except CannotEject as error:
                ejected.say(f"| `{name}` | - | - | - | - | {error} |")
                break
            found, (lines, missed) = differences(made), ejected.alone(made)
            length = len(made.source.splitlines())
            count, wrong, most = count + 1, wrong + bool(found), max(most, length)
            covered = f"{100 * (lines - missed) / lines:.1f} %"
            ejected.say(f"| `{name}` | {layout} | {length} | {lines} | {covered} | {'; '.join(found[:3])} |")
    ejected.say(f"\n{count} files, {wrong} differ, at most {most} lines")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
