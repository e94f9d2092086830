"""Smoke test of an installed rollout-corr: prints a JSON row of what ran. Needs nothing but the package and torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

KERNELS = """
import torch
import rollout_corr as rc
train, rollout, offsets = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5]), torch.tensor([0, 2, 3])
spec = rc.Spec(rc.Weight.token(upper=1.2), (rc.Criterion("k1", over="sequence", reduce="mean", upper=0.1),))
wanted = rc.correct(train, rollout, cu_seqlens=offsets, spec=spec)
found = rc.correct(train, rollout, cu_seqlens=offsets, spec=spec, backend=BACKEND)
torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-6, atol=0)
assert found.mask.equal(wanted.mask) and found.keep.equal(wanted.keep)
"""


def installed() -> None:
    """The package comes from the environment, with its license and its types."""
    import rollout_corr

    assert Path(sys.prefix).resolve() in Path(rollout_corr.__file__).resolve().parents, rollout_corr.__file__
    assert metadata.version("rollout-corr") == rollout_corr.__version__
    assert Path(rollout_corr.__file__).with_name("py.typed").is_file()
    assert any(str(path).endswith("licenses/LICENSE") for path in metadata.files("rollout-corr") or ())


def corrects() -> None:
    """Weights, masks and a loss on the CPU are those worked out by hand."""
    import math

    import torch

    import rollout_corr as rc

    new = torch.tensor([[-1.0, -3.0]], requires_grad=True)
    out = rc.correct(new.detach(), torch.tensor([[-2.0, -1.0]]), spec=rc.Spec(rc.Weight.token(upper=2.0)))
    torch.testing.assert_close(out.weights, torch.tensor([[2.0, math.exp(-2.0)]]))
    loss = rc.policy_loss(new, torch.ones(1), loss=rc.Loss(rc.PPO(0.2)), old_logp=new.detach(), correction=out)
    loss.value.backward()
    torch.testing.assert_close(new.grad, -out.weights / 2)


def operators() -> None:
    """Torch knows the operators, traces through both calls without running them, and differentiates around one."""
    import torch

    import rollout_corr as rc

    assert all(hasattr(torch.ops.rollout_corr, name) for name in ("correct", "policy_loss", "scale_gradient"))
    spec = rc.Spec(weight=rc.Weight.token(upper=1.05))
    traced = torch.compile(lambda x: rc.correct(x, x - 0.1, spec=spec).weights, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(torch.zeros(2, 3)), torch.full((2, 3), 1.05))
    loss = rc.Loss(rc.PPO(0.2))

    def by_mask(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out = rc.correct(old, old - 0.1, mask=mask, spec=spec)
        given = {"loss": loss, "old_logp": old, "correction": out}
        return rc.policy_loss(new, torch.ones(2), mask=mask, **given).value

    def by_batch(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch = rc.Batch(mask=mask)
        out = rc.correct(old, old - 0.1, batch, spec=spec)
        return rc.policy_loss(new, torch.ones(2), batch, loss, old_logp=old, correction=out).value

    mask = torch.tensor([[True, True, False], [True, False, False]])
    for call in (by_mask, by_batch):
        new = torch.zeros(2, 3, requires_grad=True)
        torch.compile(call, backend="eager", fullgraph=True)(new, torch.zeros(2, 3), mask).backward()
        torch.testing.assert_close(new.grad, mask * torch.tensor(-1.05 / 3))
    slope = torch.func.grad(lambda x: (rc.correct(x, x.detach() - 0.1, spec=spec).weights * x).sum())(torch.zeros(2, 3))
    torch.testing.assert_close(slope, torch.full((2, 3), 1.05))


def compiled() -> str | None:
    """A correction inside of a function that torch compiles to machine code gives what it gives outside."""
    import torch

    import rollout_corr as rc

    if not (os.environ.get("CXX") or shutil.which("g++")):
        return "no C++ compiler"
    spec = rc.Spec(rc.Weight.token(upper=1.2), (rc.Criterion("k1", over="sequence", reduce="mean", upper=0.1),))

    def step(train: torch.Tensor, rollout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = rc.correct(train * 2, rollout * 2, spec=spec)
        return out.weights + 1, out.mask

    generator = torch.Generator().manual_seed(0)
    train, rollout = -torch.rand(2, 4, 64, generator=generator)
    for found, wanted in zip(torch.compile(step, fullgraph=True)(train, rollout), step(train, rollout), strict=True):
        torch.testing.assert_close(found, wanted)
    return None


def command_line() -> None:
    """The command, its demonstration and its list of specs."""
    program = Path(sys.executable).with_name("rollout-corr")
    for arguments in (["--version"], ["demo"], ["specs", "verl"]):
        called(str(program), *arguments)


def interpreted() -> str | None:
    """The kernels in Triton's interpreter, where there is a Triton that does."""
    return kernels("triton", TRITON_INTERPRET="1")


def compiled_ahead() -> str | None:
    """The kernels compiled for a GPU, without one."""
    from rollout_corr.backends import operators

    if operators.MISSING_TRITON is not None:
        return "refused"
    # The tool that compiles them is the checkout's.
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2] / "tests")
    called(sys.executable, "-m", "lab.aot", "--few", "--target", "sm_90", "--jobs", "1")
    return None


def kernels(backend: str, **environment: str) -> str | None:
    """Compare a backend with the definition in a process of its own; a refusal says which Triton it needs."""
    code = KERNELS.replace("BACKEND", repr(backend))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if "the kernels need Triton" in done.stderr:
        return "refused"
    assert done.returncode == 0, done.stderr[-2000:]
    return None


def called(*command: str) -> None:
    """Run a program that has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-1000:]}{done.stderr[-2000:]}"


CHECKS: dict[str, Callable[[], str | None]] = {
    "installed": installed,
    "corrects": corrects,
    "operators": operators,
    "torch.compile": compiled,
    "command line": command_line,
    "kernels interpreted": interpreted,
    "kernels compiled": compiled_ahead,
}


def main() -> None:
    """Run all checks, and print the row last."""
    checks, failed = {}, []
    for name, check in CHECKS.items():
        try:
            checks[name] = check() or "passes"
        except Exception:  # noqa: BLE001  whatever a check raises is its result, and the others are still to run
            traceback.print_exc()
            checks[name] = "fails"
            failed.append(name)
    versions = {}
    for name in ("rollout-corr", "torch", "triton", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "none"
    print(json.dumps({**versions, "checks": checks, "failed": failed}))


if __name__ == "__main__":
    main()
