"""Random calls by the kernels as compiled code, judged by the plain loops of tests/oracles."""

from __future__ import annotations

import pytest

from builders import judges
from builders.kernel_cases import shaped, unchecked
from frozen.generator import SURROGATES
from frozen.runners import one_thread
from lab.ptx.worker import outcome_of, start

UNITS = ("token", "sequence", "sequence", "turn")
# Averages of two ratios and contrasts of groups run on plain torch.
NAMES = [name for name in SURROGATES if name not in ("AveragePPO", "REAL")]


@pytest.fixture(scope="module")
def process():
    with start() as pool:
        yield pool


def judge(kind: str, seed: int) -> None:
    """Judge a correction, a loss, or a loss with a Spec; in a process without Triton's interpreter."""
    from lab.aot.variants import VARIANTS
    from lab.ptx.cases import shape_of
    from lab.ptx.session import compiled

    def drawn(text: str) -> judges.Call:
        if kind == "correction":
            return judges.correction(text, UNITS[seed % 2 :])
        return judges.loss(text, NAMES[seed % len(NAMES)], seed % 2 == 1, *([UNITS] if kind == "step" else []))

    call = judges.for_kernels(drawn, f"compiled {kind} {seed}")
    # In a tile with fewer elements than threads, some read what another has written in place, and drop it.
    shapes = ((0, shape_of(VARIANTS["metrics_short" if seed % 2 else "metrics_packed"])),)
    with one_thread(), shaped(shapes), unchecked(), compiled(seed=seed):
        if kind == "correction":
            judges.judge_correction(call, call.corrected(call.spec, "triton"))
        else:
            judges.judge_loss(call, "triton")


# A kernel of its own for each call takes the compiler seconds, a step ten; `make ptx` has them all.
CASES = [(kind, seed) for kind in ("correction", "loss", "step") for seed in range(16)]
GATE = [("correction", 0), ("loss", 0)]


@pytest.mark.parametrize(
    ("kind", "seed"), [pytest.param(*case, marks=[pytest.mark.slow] * (case not in GATE)) for case in CASES]
)
def test_compiled_code(kind, seed, process):
    assert process.submit(outcome_of, judge, kind, seed).result() == ""
