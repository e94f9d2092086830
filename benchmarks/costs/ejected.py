"""Files that `rollout-corr eject` writes: what those pay who copy plain torch rather than install the package."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.cases.batches import LAYOUTS, Batch
from benchmarks.costs.counting import Cost, cost_of
from benchmarks.costs.peers import BOTH, CORRECTION, LOSS
from benchmarks.costs.tables import EJECTED
from builders.ejected import FRAMEWORKS
from rollout_corr.eject import Ejected, eject

ROOT = Path("/ejected")


class File(NamedTuple):
    """A file that is counted."""

    who: str
    what: str
    name: str
    framework: str = "plain"

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts that the file can be written for."""
        return LAYOUTS if self.framework == "plain" else ("padded",)


FILES = (
    File(EJECTED, CORRECTION, "verl.decoupled_geo_rs_token_tis"),
    File(f"{EJECTED} for verl", CORRECTION, "verl.decoupled_geo_rs_token_tis", "verl"),
    File(f"{EJECTED} for SkyRL", CORRECTION, "skyrl.tldr", "skyrl"),
    File(f"{EJECTED} for TRL", CORRECTION, "trl.token_truncate", "trl"),
    File(EJECTED, LOSS, "verl.ppo"),
    File(EJECTED, BOTH, "verl.bypass_ppo_clip_geo_rs"),
)


@cache
def written(file: File, layout: str) -> tuple[Ejected, dict[str, Any]]:
    """Write a file and import it."""
    made = eject(file.name, file.framework, layout, loss=file.what != CORRECTION)
    module = types.ModuleType("file")
    with mock.patch.dict(sys.modules, FRAMEWORKS):
        exec(compile(made.source, str(ROOT / "file.py"), "exec"), vars(module))
    tried = made.request.door.tried.replace("\n", "\n    ")
    exec(f"def run(batch):\n    {tried}", vars(module))
    return made, vars(module)


def call_of(file: File, layout: str, given: Batch) -> Callable[[], Any]:
    """The call of a file; of a loss with its backward."""
    made, scope = written(file, layout)
    mask = torch.ones_like(given.old, dtype=torch.bool) if given.mask is None else given.mask.bool()
    every = {
        "train_logp": given.old, "old_logp": given.old, "rollout_logp": given.rollout, "new_logp": given.new,
        "advantages": given.advantages, "mask": mask, "cu_seqlens": given.cu_seqlens,
    }  # fmt: skip
    if file.what == CORRECTION:
        every = {made.request.door.names.get(name, name): x for name, x in every.items()}
    batch = {name: every[name] for name in made.program.inputs}

    def call() -> Any:
        out = scope["run"](batch)
        return out if file.what == CORRECTION else (out, torch.autograd.grad(out[0], given.new))

    return call


def counted(both: dict[str, Batch]) -> Iterator[tuple[File, str, Cost]]:
    """Count every file in the layouts that it takes."""
    for file in FILES:
        for layout in file.layouts:
            yield file, layout, cost_of(call_of(file, layout, both[layout]), ROOT)
