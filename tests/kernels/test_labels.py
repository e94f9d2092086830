"""Labels with the kernels: what a call without labels gives to the bit, and plain torch's statistics of each label.

Loops judge those of plain torch in tests/metrics/test_random_calls.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import rollout_corr as rc
from builders import judges
from builders.kernel_cases import (
    FEW,
    INTERPRETED,
    NARROW,
    WIDE,
    between_fences,
    bits,
    flat,
    same,
    shaped,
    unchecked,
    watched,
)
from frozen.generator import LABELS
from rollout_corr.metrics.schema import layout as columns

pytestmark = INTERPRETED


def statistics_of(out):
    """Sums and extrema by name."""
    statistics = out.statistics
    names = [name for kind in columns(statistics.spec, extra=statistics.extra) for name in kind]
    return dict(zip(names, statistics.sums.tolist() + statistics.maxima.tolist(), strict=True))


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 60))])
def test_labels_of_tokens_and_of_sequences_and_signs_of_advantages(seed, device):
    def drawn(text):
        call = judges.correction(text, ("token", "sequence"), kind=(5, 1, 9, 0, 7, 17), extras=0.0)
        return replace(call, spec=replace(call.spec, report=("native",), nonfinite="reject"))

    call = judges.for_kernels(drawn, f"labels {seed}")
    plain, kinds = call, call.drawn.column("labels", torch.int64)
    if seed % 2:
        kinds = torch.tensor(call.drawn.laid.tokens.of_sequences["labels"]).long()
    labels = {"kind": rc.Labels(kinds, LABELS), "advantage": rc.Labels()}
    call = replace(call, drawn=replace(call.drawn, batch=call.drawn.batch | {"labels": labels}))
    wanted = statistics_of(call.corrected(call.spec, "torch"))
    with shaped((FEW, NARROW, WIDE)[seed % 3]), unchecked(), watched():
        out, without = (between_fences(one, device).corrected(call.spec, "triton") for one in (call, plain))
    results = ([*flat(x.weights), *flat(x.mask), x.keep.cpu()] for x in (out, without))
    assert all(bits(one).equal(bits(other)) for one, other in zip(*results, strict=True))
    found, alone = statistics_of(out), statistics_of(without)
    assert {name: found[name] for name in alone} == alone
    of_label = {}
    for name, value in wanted.items():
        label, _, own = name.partition("/")
        if "=" in label:
            of_label.setdefault(label, {})[own] = value
    assert len(of_label) == 2 * (3 + 1), "three names of each, and those of no name"
    wrong = {
        f"{label}/{name}": (found[f"{label}/{name}"], value)
        for label, own in of_label.items()
        for name, value in own.items()
        if not same(name, found[f"{label}/{name}"], own)
    }
    assert wrong == {}, call.spec
