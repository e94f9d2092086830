"""Counts of what compiled kernels execute a token: instructions by class, barriers, exchanges, bytes, sectors.

`PYTHONPATH=tests python -m lab.ptx.counts` prints the whole of the table in docs/kernels.md.
`PYTHONPATH=tests python -m lab.ptx.counts --only metrics_packed loss_gspo --length 4096 400 --by-kernel` looks at
variants by mean length.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import numpy as np
import torch

from lab.aot.file_variants import FILE_VARIANTS, PACKAGE_VARIANTS
from lab.aot.loss_variants import LOSS_VARIANTS
from lab.aot.step_variants import STEP_VARIANTS
from lab.aot.variant import LossVariant, StepVariant, Variant
from lab.aot.variants import OF_NEW_VARIANTS, SPLIT_VARIANTS, TURN_VARIANTS, VARIANTS
from lab.ptx.machine import Executed
from lab.ptx.session import compiled
from rollout_corr.kernels.launches import Launch

# As many as a step of training has; few programs run: what a program does once is spread over as many tokens.
TOKENS, PROGRAMS = 1 << 22, 32
LENGTHS = (131072, 4096, 1500, 400, 64)
# Those whose speed is asked for most.
COUNTED = (
    "metrics_packed", "token_bf16", "product_geometric_padded", "split_packed", "loss_ppo_packed", "loss_gspo",
)  # fmt: skip
COLUMNS = ("instructions", "float", "exchange", "memory", "other", "barrier", "read", "written", "sectors")
HEADS = "instructions | float | exchange | memory | other | barriers / 1,000 | bytes read | written | sectors / 1,000"


def class_of(opcode: str) -> str:
    """Name the class of an instruction."""
    name, kind = opcode.split(".")[0], opcode.split(".")[-1]
    if name in ("shfl", "redux", "vote"):
        return "exchange"
    if name in ("ld", "st", "atom", "red", "ldmatrix", "stmatrix"):
        return "memory"
    if name in ("bar", "barrier"):
        return "barrier"
    return "float" if kind in ("f16", "f32", "f64", "bf16") and name != "mov" else "other"


def variant_of(name: str) -> Variant | LossVariant | StepVariant:
    """Look a variant up by the name of its case."""
    if name.startswith("step_"):
        return STEP_VARIANTS[name.removeprefix("step_")]
    if name.startswith("loss_"):
        return LOSS_VARIANTS[name.removeprefix("loss_")]
    file = FILE_VARIANTS | PACKAGE_VARIANTS
    return (VARIANTS | SPLIT_VARIANTS | OF_NEW_VARIANTS | TURN_VARIANTS | file)[name]


def _offsets(tokens: int, sequences: int) -> torch.Tensor:
    """Cut tokens into sequences of half to one and a half times the mean length, one after the other."""
    lengths = 0.5 + torch.rand(sequences, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ends = (lengths.cumsum(0) * (tokens / lengths.sum())).round()
    ends[-1] = tokens
    return torch.cat([ends.new_zeros(1), ends])


def filled(variant: Variant | LossVariant | StepVariant, tokens: int, sequences: int):
    """Make a batch of a variant, all tokens valid, its log-probs random and within the clamp."""
    given = variant.given(tokens, sequences, "cpu")
    generator = torch.Generator().manual_seed(0)
    for x in vars(given).values():
        for tensor in x if isinstance(x, list) else [x]:
            if isinstance(tensor, torch.Tensor):
                random = -torch.rand(tensor.shape, generator=generator)
                tensor.copy_(random if tensor.is_floating_point() else torch.ones_like(tensor))
    if given.mask is not None:
        given.mask.fill_(1)
    if given.offsets is not None:
        given.offsets.copy_(_offsets(tokens, sequences))
    if getattr(given, "turns", None) is not None:
        given.turns.copy_(_offsets(tokens, sequences))
    return given


def executed(name: str, length: int) -> list[tuple[Launch, Executed, float]]:
    """Run some programs of a variant, all tokens valid, its sequences of a mean length.

    Returns:
        Its launches, what they executed, and how much more the whole launch would.
    """
    variant = variant_of(name)
    given = filled(variant, TOKENS, max(1, TOKENS // length))

    def some(launch: Launch) -> np.ndarray:
        count = min(launch.programs, PROGRAMS)
        return (np.arange(count) * launch.programs + launch.programs // 2) // count

    with compiled(checked=False, programs=some) as session:
        for launch in variant.launches(given):
            session.run(launch)
    return [(launch, done, launch.programs / some(launch).size) for launch, done in session.executed]


def row_of(found: list[tuple[Launch, Executed, float]]) -> dict[str, float]:
    """Count for each token what launches execute together."""
    counts: Counter[str] = Counter()
    for launch, done, times in found:
        for x, threads in zip(done.kernel.code, done.threads.tolist(), strict=True):
            kind = class_of(x.opcode)
            counts["instructions"] += threads * times
            # A barrier is one of its program, not one of each thread.
            counts[kind] += threads * times / (launch.threads if kind == "barrier" else 1)
        counts["read"] += done.bytes["global read"] * times
        counts["written"] += done.bytes["global write"] * times
        counts["sectors"] += (done.bytes["sectors read"] + done.bytes["sectors write"]) * times
    scale = {"barrier": 1000 / TOKENS, "sectors": 1000 / TOKENS}
    return {key: round(counts[key] * scale.get(key, 1 / TOKENS), 2) for key in COLUMNS}


def table(record: dict[str, dict[str, dict[str, float]]]) -> str:
    """Lay rows out as a table; docs/kernels.md shows a part."""
    lines = [f"| variant | mean length | {HEADS} |", f"|---|{'--:|' * 10}"]
    for name, rows in record.items():
        for length, row in rows.items():
            lines.append(f"| `{name}` | {int(length):,} | {' | '.join(f'{x:.1f}' for x in row.values())} |")
    return "\n".join(lines)


def look(names: list[str], lengths: list[int], by_kernel: bool):
    """Give lines of variants, each at several mean lengths."""
    yield f"{'variant, mean length, kernel':54} programs {' '.join(f'{x:>12}' for x in COLUMNS)}"
    for name in names:
        for length in lengths or [variant_of(name).length]:
            found = executed(name, length)
            rows = [(launch.kernel.__name__, [(launch, done, times)]) for launch, done, times in found if by_kernel]
            for kernel, part in [*rows, ("all", found)]:
                numbers = " ".join(f"{x:12.2f}" for x in row_of(part).values())
                of = sum(launch.programs for launch, _, _ in part)
                yield f"{f'{name}, {length:,}, {kernel}':54} {of:8} {numbers}"


def main() -> None:
    """Look at variants that are named, or print the table of those that are always counted."""
    parser = argparse.ArgumentParser(prog="python -m lab.ptx.counts", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants; of a loss loss_NAME")
    parser.add_argument("--length", nargs="+", type=int, default=[], metavar="TOKENS", help="mean lengths of sequences")
    parser.add_argument("--by-kernel", action="store_true", help="one line for each kernel too")
    asked = parser.parse_args()
    if asked.only:
        for line in look(asked.only, asked.length, asked.by_kernel):
            sys.stdout.write(line + "\n")
        return
    record: dict[str, dict[str, dict[str, float]]] = {}
    for name in COUNTED:
        for length in LENGTHS:
            record.setdefault(name, {})[str(length)] = row_of(executed(name, length))
            sys.stderr.write(f"{name} {length}\n")
    sys.stdout.write(table(record) + "\n")


if __name__ == "__main__":
    main()
