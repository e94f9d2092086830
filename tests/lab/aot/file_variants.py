"""Variants of the two kernels of rollout_corr/eject/kernel.py, the file to copy, next to the package's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from builders.kernel_file import ALL, ZERO, spec_of
from lab.aot.variant import HUGE, LONGEST, SHORT, Variant
from rollout_corr.eject import kernel
from rollout_corr.eject.kernel import Settings
from rollout_corr.specs.operands import CorrectOperands


@dataclass(frozen=True)
class FileLaunch:
    """A launch of the file, with what is read of the package's `Launch`."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    threads: int = 32

    def options(self, warp: int, nvidia: bool) -> dict[str, int]:
        """Give the options that the file launches with."""
        return {"num_warps": 1}


def launches_of(*given: Any, **named: Any) -> tuple[tuple[FileLaunch, ...], kernel.Correction]:
    """List the launches of a call of the file, which do not run, and the memory that they would fill."""
    found = []

    def note(self: Any, *values: Any, grid: tuple[int], warmup: bool, num_warps: int, **constants: Any) -> None:
        names = (parameter.name for parameter in self.params)
        found.append(FileLaunch(self, grid[0], dict(zip(names, values, strict=False)) | constants, 32 * num_warps))

    with mock.patch.object(JITFunction, "run", note):
        out = kernel.correct(*given, **named)
    return tuple(found), out


@dataclass(frozen=True)
class FileVariant(Variant):
    """A variant of the file: its layout is a `Variant`'s, what it does are `Settings`."""

    settings: Settings = field(default=Settings(), kw_only=True)

    def launches(self, given: CorrectOperands | None = None) -> tuple[FileLaunch, ...]:
        """List what `correct` of the file would launch for a batch, by default one on the meta device."""
        given = self.given(self.tokens, self.tokens // self.length) if given is None else given
        return launches_of(given.train, given.rollout, given.mask, given.offsets, self.settings)[0]


FILE_VARIANTS = {
    one.name: one
    for one in (
        FileVariant("file_packed", settings=ALL),
        FileVariant("file_metrics", mask=None, settings=Settings(upper=None)),
        FileVariant("file_bf16", mask=torch.uint8, train=torch.bfloat16, rollout=torch.bfloat16, settings=ALL),
        FileVariant("file_padded", packed=False, mask=torch.int64, settings=ZERO),
        FileVariant("file_strided", packed=False, mask=torch.int64, aligned=False, settings=ALL),
        FileVariant("file_short", offsets=torch.int64, length=SHORT, train=torch.float16, settings=ZERO),
        FileVariant("file_long", length=LONGEST, tokens=HUGE, settings=ALL),
    )
}
# The package's own kernels that do the same as one of these, to count next to it.
PACKAGE_VARIANTS = {"package_packed": Variant("package_packed", spec_of(ALL))}
