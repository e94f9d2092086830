"""What compiled kernels take: registers and instructions of each, and what they execute for each token.

`tests/lab/aot` and `tests/lab/ptx` of the checkout declare the variants and do the work.
"""

from __future__ import annotations

from collections.abc import Iterator

from .calls import Record

TARGET = "sm_90"
# Of `--quick`: one for each operation.
FEW = ("token_bf16", "loss_ppo_packed")


def registers(few: bool, only: str = "") -> Iterator[tuple[str, Record]]:
    """Compile every variant for one target: what the compiler says of its kernels."""
    from lab.aot.report import EVERY, compile_one

    from_loss = {f"loss_{name}": name for name in EVERY if hasattr(EVERY[name], "objective")}
    names = from_loss | {name: name for name in EVERY if name not in from_loss.values()}
    for case, name in names.items():
        if only in case and (not few or case in FEW):
            rows = compile_one(name, TARGET)
            yield (
                case,
                {f"{i} {row.kernel}": {"shared": row.shared, **row.code._asdict()} for i, row in enumerate(rows)},
            )


def counts(few: bool, only: str = "") -> Iterator[tuple[str, Record]]:
    """Run every variant in the interpreter of PTX, at its own mean length, and count for each token."""
    from lab.aot.loss_variants import LOSS_VARIANTS
    from lab.aot.variants import OF_NEW_VARIANTS, SPLIT_VARIANTS, TURN_VARIANTS, VARIANTS
    from lab.ptx.counts import executed, row_of, variant_of

    names = [*VARIANTS, *OF_NEW_VARIANTS, *SPLIT_VARIANTS, *TURN_VARIANTS, *(f"loss_{name}" for name in LOSS_VARIANTS)]
    for name in names:
        if only in name and (not few or name in FEW):
            found = executed(name, variant_of(name).length)
            rows = {f"{i} {each[0].kernel.__name__}": row_of([each]) for i, each in enumerate(found)}
            yield name, {**rows, "all": row_of(found)}
