"""Counts of what compiled kernels execute a token: instructions by class, barriers, exchanges, bytes, sectors.

`PYTHONPATH=tests python -m ptx.counts` prints the table of docs/kernels.md, and what tests/ptx/counts.json holds.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import torch
import triton

from ptx.session import compiled
from rollout_corr.aot.loss_variants import LOSS_VARIANTS
from rollout_corr.aot.variants import VARIANTS

RECORDED = Path(__file__).with_name("counts.json")
TOKENS = 1 << 15
# Those whose speed is asked for most, and one of each mean length.
COUNTED = (
    "metrics_huge",
    "metrics_packed",
    "metrics_short",
    "token_bf16",
    "product_geometric_padded",
    "loss_ppo_packed",
    "loss_ppo_short",
    "loss_gspo_padded",
)


def class_of(opcode: str) -> str:
    """Name the class of an instruction."""
    name, kind = opcode.split(".")[0], opcode.split(".")[-1]
    if name in ("shfl", "redux", "vote"):
        return "exchange"
    if name in ("ld", "st", "atom", "red", "ldmatrix"):
        return "memory"
    if name in ("bar", "barrier"):
        return "barrier"
    return "float" if kind in ("f16", "f32", "f64", "bf16") and name != "mov" else "other"


def counted(name: str) -> dict[str, float]:
    """Run a variant on sequences of its mean length, all tokens valid, and count for each token."""
    variant = LOSS_VARIANTS[name.removeprefix("loss_")] if name.startswith("loss_") else VARIANTS[name]
    length = min(variant.length, TOKENS)
    given = variant.given(TOKENS, TOKENS // length, "cpu")
    generator = torch.Generator().manual_seed(0)
    for x in vars(given).values():
        if isinstance(x, torch.Tensor):
            random = -torch.rand(x.shape, generator=generator)
            x.copy_(random if x.is_floating_point() else torch.ones_like(x))
    if given.offsets is not None:
        given.offsets.copy_(torch.arange(0, TOKENS + 1, length))
    with compiled(checked=False) as session:
        for launch in variant.launches(given):
            session.run(launch)
    found: Counter[str] = Counter()
    for launch, done in session.executed:
        for number, block in enumerate(done.kernel.blocks):
            for x in block.instructions:
                kind = class_of(x.opcode)
                found["instructions"] += done.threads[number]
                # A barrier is one of its program, not one of each thread.
                found[kind] += done.threads[number] / (launch.threads if kind == "barrier" else 1)
        found["read"] += done.bytes["global read"]
        found["written"] += done.bytes["global write"]
        found["sectors"] += done.bytes["sectors read"] + done.bytes["sectors write"]
    scale = {"barrier": 1000 / TOKENS, "sectors": 1000 / TOKENS}
    columns = ("instructions", "float", "exchange", "memory", "other", "barrier", "read", "written", "sectors")
    return {key: round(found[key] * scale.get(key, 1 / TOKENS), 2) for key in columns}


def table(rows: dict[str, dict[str, float]]) -> str:
    """Lay rows out as the table of docs/kernels.md."""
    heads = (
        "| variant | mean length | instructions | float | exchange | memory | other | barriers / 1,000 | bytes read |"
    )
    lines = [f"{heads} written | sectors / 1,000 |", f"|---|{'--:|' * 10}"]
    for name, row in rows.items():
        variant = LOSS_VARIANTS[name.removeprefix("loss_")] if name.startswith("loss_") else VARIANTS[name]
        lines.append(f"| `{name}` | {min(variant.length, TOKENS):,} | {' | '.join(f'{x:.1f}' for x in row.values())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    rows = {name: counted(name) for name in COUNTED}
    RECORDED.write_text(json.dumps({"triton": triton.__version__, "counts": rows}, indent=1) + "\n")
    sys.stdout.write(table(rows) + "\n")
