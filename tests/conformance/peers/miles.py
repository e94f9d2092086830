"""miles: what it has of slime's, with its own loss function and its own context parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.peers import slime
from conformance.rows import Row
from conformance.sources import Source

DISTRIBUTION, PACKAGE, CHECKOUT = None, "miles", "miles"

CODE = slime.Code(
    loss="miles/backends/training_utils/loss.py",
    tis="miles/backends/training_utils/loss_hub/corrections.py",
    cp="miles/backends/training_utils/cp_utils.py",
    mis="examples/infra_features/train_infer_mismatch_helper/mis.py",
    layouts=("thd", "bshd"),
    # Its ratio is in float32, whatever the log-probs are in.
    within=(2e-5, 2e-5),
)


def rows(source: Source) -> Iterator[Row]:
    """Compare slime's presets, recipes and functions with what miles makes of them."""
    yield from slime.compare(source, CODE)
