"""`python -m builders.ejected`: every file that can be ejected, run with torch alone, compared with the package.

Prints a table: lines, lines that its own test does not run, and what differs from the package, which is nothing.
`--kernels`: files of Triton kernels alone, run by Triton's interpreter, compared with the package's kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

import rollout_corr as rc
from rollout_corr.backends import run, whole
from rollout_corr.backends.given import Versions
from rollout_corr.eject import FRAMEWORKS as NAMES
from rollout_corr.eject import Ejected, eject
from rollout_corr.eject.program import external_inputs

# Imports a file with everything else of the package out of reach, runs its test, and counts the lines that it ran.
ALONE = """
import sys, types
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rollout_corr", "triton"):
            raise ImportError(name)
sys.meta_path.insert(0, Refused())
sys.path.insert(0, FOLDER)
import torch
if SCHEME == "verl":
    verl, protocol = types.ModuleType("verl"), types.ModuleType("verl.protocol")
    protocol.DataProto = type("DataProto", (), {"from_dict": lambda tensors: types.SimpleNamespace(batch=tensors)})
    sys.modules |= {"verl": verl, "verl.protocol": protocol}
ran = set()
def trace(frame, event, _):
    if frame.f_code.co_filename.endswith("ejected_file.py"):
        ran.add(frame.f_lineno)
        return trace
sys.settrace(trace)
import test_ejected_file as tests
for name, test in list(vars(tests).items()):
    if name.startswith("test_"):
        test()
sys.settrace(None)
import dis
import ejected_file
code = compile(open(ejected_file.__file__).read(), "x", "exec")
def lines(code):
    yield from (line for _, _, line in code.co_lines() if line)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from lines(inner)
every = set(lines(code))
print(len(every), len(every - ran))
"""


def frameworks() -> dict[str, types.ModuleType]:
    """Stand-ins for what files of frameworks import."""
    verl, protocol = types.ModuleType("verl"), types.ModuleType("verl.protocol")
    of_dict = staticmethod(lambda tensors: types.SimpleNamespace(batch=tensors))
    vars(protocol)["DataProto"] = type("DataProto", (), {"from_dict": of_dict})
    return {"verl": verl, "verl.protocol": protocol}


FRAMEWORKS = frameworks()


class Example(NamedTuple):
    """A batch for a file and for the package."""

    file: dict[str, Any]
    package: dict[str, Any]


SIZES = {"packed": (4000, 700, 1, 0), "padded": ((40, 100), (7, 300), (1, 1), (3, 0))}
# What the interpreter runs in a second or two: tokens, and how many sequences.
SMALL = {"packed": ((300, 9), (60, 4)), "padded": (((4, 70), 0), ((3, 20), 0))}


def examples(made: Ejected) -> Iterator[Example]:
    """Batches of several sizes, with holes, garbage, empty sequences and several dtypes of mask."""
    request, spec = made.request, made.request.spec
    packed = request.door.layout == "packed"
    sizes = zip(SIZES[request.door.layout], (40, 9, 2, 2), strict=True)
    for seed, (shape, count) in enumerate(SMALL[request.door.layout] if request.backend == "triton" else sizes):
        random = torch.Generator().manual_seed(seed)
        train = -torch.rand(shape, generator=random)
        rollout = train + (0.002, 0.3, 0.1, 0.1)[seed] * torch.randn(shape, generator=random)
        mask = torch.rand(shape, generator=random) > 0.2
        if seed == 1:
            train.view(-1)[5], rollout.view(-1)[-9], mask = float("nan"), -float("inf"), mask.long()
        given: dict[str, Any] = {}
        inputs = {"train_logp": train, "rollout_logp": rollout, "mask": mask}
        if packed:
            inner = torch.randint(0, train.numel() + 1, (count,), generator=random).sort().values
            inputs["cu_seqlens"] = given["cu_seqlens"] = torch.cat([torch.tensor([0]), inner])
            if seed != 1:
                inputs["cu_seqlens"][-1] = train.numel()
        if spec.measures_turns:
            ends = inputs["cu_seqlens"] if packed else torch.arange(0, train.numel() + 1, max(train.shape[1], 1))
            more = torch.randint(0, train.numel() + 1, (60,), generator=random)
            inputs["cu_turns"] = given["turns"] = (
                torch.cat([ends[:1], more.clamp(int(ends[0]), int(ends[-1])), ends]).sort().values
            )
        for name, key in external_inputs(spec):
            x = inputs[name] = torch.randint(0, 5, mask.shape, generator=random).float()
            if name == "ages":
                given["versions"] = Versions((10 - x).long(), 10)
            elif name == "entropy":
                given["entropy"] = x
            else:
                given.setdefault("external", {})[key] = x
        package: dict[str, Any] = {"train_logp": train, "rollout_logp": rollout, "spec": spec}
        if "advantages" in made.program.inputs:
            package["advantages"] = inputs["advantages"] = torch.randn(mask.shape, generator=random)
        file = {request.door.names.get(name, name): x for name, x in inputs.items()}
        yield Example(file, package | {"batch": rc.Batch(mask=mask, **given)})


@contextlib.contextmanager
def loaded(made: Ejected) -> Iterator[dict[str, Any]]:
    """The names of a file, which stays while they are used: Triton reads the source of kernels from there."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file, mock.patch.dict(sys.modules, FRAMEWORKS):
        file.write(made.source)
        file.flush()
        described = importlib.util.spec_from_file_location("ejected", file.name)
        assert described is not None and described.loader is not None
        module = importlib.util.module_from_spec(described)
        described.loader.exec_module(module)
        yield vars(module)


def differences(made: Ejected) -> list[str]:
    """What differs between a file and the package, bit by bit, run as the definition on the whole batch."""
    with loaded(made) as names:
        compared = (_differing(made, names, *numbered) for numbered in enumerate(examples(made)))
        return [found for some in compared for found in some]


def _differing(made: Ejected, names: dict[str, Any], number: int, example: Example) -> Iterator[str]:
    scope = names | {"batch": example.file}
    exec("def run(batch):\n    " + made.request.door.tried.replace("\n", "\n    "), scope)
    weights, mask, keep, metrics = scope["run"](example.file)
    out = rc.correct(**example.package, backend=made.request.backend)
    for name, mine, theirs in (("weights", weights, out.weights), ("mask", mask, out.mask), ("keep", keep, out.keep)):
        if name == "keep" and keep is None:
            continue
        if (mine is None) != (theirs is None) or (mine is not None and not _same(mine, theirs)):
            yield f"{name} of batch {number}"
    expected = out.metrics(made.request.door.metrics or "native")
    for key in made.program.metrics.keys:
        mine, theirs = metrics[key], expected[key]
        if not (mine == theirs or (mine != mine and theirs != theirs)):
            yield f"{key} of batch {number}: {mine!r}, not {theirs!r}"


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return mine.dtype == theirs.dtype and torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


def alone(made: Ejected) -> tuple[int, int]:
    """Run the test of a file where nothing else can be imported: its lines of code, and those that did not run."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "ejected_file.py").write_text(made.source)
        Path(folder, "test_ejected_file.py").write_text(made.test("ejected_file"))
        script = f"FOLDER, SCHEME = {folder!r}, {made.request.door.metrics or ''!r}\n{ALONE}"
        ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise AssertionError(ran.stderr[-2000:])
    every, missed = ran.stdout.split()
    return int(every), int(missed)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def files(name: str, kernels: bool) -> Iterator[tuple[str, Ejected]]:
    """The files of a spec: packed, padded, and for its framework; of kernels the first."""
    yield "packed", eject(name, backend="triton" if kernels else "torch")
    framework = name.partition(".")[0]
    if not kernels:
        yield "padded", eject(name, layout="padded")
    if not kernels and framework in NAMES:
        yield framework, eject(name, framework)


def main(
    every: Sequence[str] = rc.spec_names(),
    files: Callable[[str, bool], Iterator[tuple[str, Ejected]]] = files,
    differences: Callable[[Ejected], list[str]] = differences,
) -> int:
    """Print the table; the exit code says whether anything differs."""
    from builders import interpreter  # which imports Triton

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="presets or recipes; default: all")
    parser.add_argument("--kernels", action="store_true", help="files of Triton kernels")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.kernels:
        os.environ["TRITON_INTERPRET"] = "1"
    wrong = count = most = 0
    say("| name | file | lines | of code | its test runs | differs |\n| :-- | :-- | --: | --: | --: | :-- |")
    # Blocks sum in another order than devices do.
    whole_batches = mock.patch.dict(run.CORRECTIONS, blocks=whole.run_whole)
    with whole_batches, interpreter.quick() if chosen.kernels else contextlib.nullcontext():
        for name in chosen.names or every:
            try:
                for kind, made in files(name, chosen.kernels):
                    found, length, ran = differences(made), len(made.source.splitlines()), "- | -"
                    if not chosen.kernels:
                        lines, missed = alone(made)
                        ran = f"{lines} | {100 * (lines - missed) / lines:.1f} %"
                    count, wrong, most = count + 1, wrong + bool(found), max(most, length)
                    say(f"| `{name}` | {kind} | {length} | {ran} | {'; '.join(found[:3])} |")
            except ValueError as error:
                say(f"| `{name}` | - | - | - | - | {error} |")
    say(f"\n{count} files, {wrong} differ, at most {most} lines")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
