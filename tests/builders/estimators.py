"""What docs/math.md and docs/loss_math.md measure: `PYTHONPATH=tests python -m builders.estimators` writes it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

import rollout_corr as rc
from builders.healthy import healthy

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN = "<!-- made by `python -m builders.estimators`; a test compares them -->"
END = "<!-- end of what is made -->"
VOCABULARY, SIZES = 1000, (128, 16)
KLS = (1e-3, 0.1, 1.0)


def pair(kl: float) -> tuple[Tensor, Tensor]:
    """Two policies over a vocabulary with KL(first || second) = kl, as log-probs: peaked, and noise in the logits."""
    generator = torch.Generator().manual_seed(0)
    logits, noise = (torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2))
    first, low, high = (3.0 * logits).log_softmax(0), 0.0, 20.0
    for _ in range(60):  # by bisection: the KL grows with the noise
        middle = (low + high) / 2
        second = (3.0 * logits + middle * noise).log_softmax(0)
        low, high = (middle, high) if (first.exp() * (first - second)).sum() < kl else (low, middle)
    return first, second


def values() -> list[str]:
    """Bias and standard deviation of each estimate of a token, over the KL; sums over the vocabulary are exact."""
    rows = []
    for kl in KLS:
        rollout, train = pair(kl)
        p, d = rollout.exp(), train - rollout
        cells = []
        for estimate in (-d, d**2 / 2, d.exp() - 1 - d):
            mean = (p * estimate).sum()
            std = (p * (estimate - mean) ** 2).sum().sqrt()
            cells += [f"{round(float(mean / kl) - 1, 2) + 0.0:.2f}", f"{std / kl:.3g}"]
        rows.append(f"| {kl:g} | {' | '.join(cells)} |")
    return rows


TERMS = {
    '`KL("k1")`': rc.KL("k1", 1.0),
    '`KL("k2")`': rc.KL("k2", 1.0),
    '`KL("k3")`': rc.KL("k3", 1.0),
    '`KL("k3", gradient="k2")`': rc.KL("k3", 1.0, gradient="k2"),
    '`KL("k1", weight="ratio")`': rc.KL("k1", 1.0, weight="ratio"),
    '`KL("k3", weight="ratio")`': rc.KL("k3", 1.0, weight="ratio"),
}


def gradients() -> list[str]:
    """Bias and standard deviation of the gradient by the logits that one token gives, over the true one."""
    rows = []
    for name, term in TERMS.items():
        cells = []
        for kl in KLS[1:]:
            policy, ref = pair(kl)
            new = policy[:, None].clone().requires_grad_()
            loss = rc.Loss(rc.Reinforce(), rc.Mean("sum"), kl=term)
            rc.policy_loss(new, torch.zeros(VOCABULARY), loss=loss, ref_logp=ref[:, None]).value.backward()
            assert new.grad is not None
            # A token a of coefficient c has the gradient c (e_a - p) by the logits.
            p, c = policy.exp(), new.grad[:, 0]
            k = policy - ref
            true, mean = p * (k - (p * k).sum()), p * (c - (p * c).sum())
            size = true.norm()
            square = (p * c**2 * (1 - 2 * p + (p**2).sum())).sum() - (mean**2).sum()
            cells.append(f"{(mean - true).norm() / size:.2f} | {square.clamp(min=0).sqrt() / size:.3g}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


SPECS = {
    "`Weight.token(upper=2)`": rc.Spec(rc.Weight.token(upper=2.0)),
    "`Weight.product(upper=2)`": rc.Spec(rc.Weight.product(upper=2.0)),
    "fixed geometric bounds": rc.Spec(criteria=(rc.GeoRS(0.98, 1.02),)),
    'the same, `Mean("token", over="kept")`': rc.Spec(criteria=(rc.GeoRS(0.98, 1.02),)),
    '`Weight.product(upper=2, normalize="batch")`': rc.Spec(rc.Weight.product(upper=2.0, normalize="batch")),
    "`Weight.token(upper=KeepESS(0.99))`": rc.Spec(rc.Weight.token(upper=rc.KeepESS(0.99))),
    "`M2PO(0.004)`": rc.Spec(criteria=(rc.M2PO(0.004),)),
    "worst 10 % by `Quantile(0.9)`": rc.Spec(
        criteria=(rc.Criterion("k3", over="sequence", reduce="mean", upper=rc.Quantile(0.9)),)
    ),
}


def changes() -> list[str]:
    """The norm of the change of the gradient, over its norm, when one call of 256 sequences becomes several."""
    whole = healthy(1, sequences=256, median=60, k3=5e-3)
    ends, count = whole.cu_seqlens.tolist(), len(whole.lengths)
    advantages = torch.randn(count, generator=torch.Generator().manual_seed(0))

    def gradient(spec: rc.Spec, kept: bool, size: int) -> Tensor:
        found = []
        for first in range(0, count, size):
            at = slice(ends[first], ends[first + size])
            train, rollout = whole.train_logp[at], whole.rollout_logp[at]
            offsets = whole.cu_seqlens[first : first + size + 1] - ends[first]
            new = train.clone().requires_grad_()
            batch = rc.Batch(mask=whole.mask[at], cu_seqlens=offsets, total=None if kept else whole.mask.sum())
            loss = rc.Loss(mean=rc.Mean("token", over="kept" if kept else "original"))
            given = advantages[first : first + size, None]
            rc.policy_loss(new, given, batch, loss, old_logp=train, rollout_logp=rollout, spec=spec).value.backward()
            assert new.grad is not None
            found.append(new.grad * (size / count if kept else 1.0))
        return torch.cat(found)

    rows = []
    for name, spec in SPECS.items():
        kept = "kept" in name
        one = gradient(spec, kept, count)
        moved = [float((gradient(spec, kept, size) - one).norm() / one.norm()) for size in SIZES]
        rows.append(f"| {name} | {' | '.join(f'{100 * x:.1f} %' if x else '0' for x in moved)} |")
    return rows


def tables() -> dict[Path, list[str]]:
    """The tables of each page, in its order."""
    head = "| KL | k1: bias | std | k2: bias | std | k3: bias | std |", "|--:|--:|--:|--:|--:|--:|--:|"
    of_gradients = "| term | KL 0.1: bias | std | 1: bias | std |", "|---|--:|--:|--:|--:|"
    of_sizes = f"| setting | {' | '.join(f'{256 // n} calls of {n}' for n in SIZES)} |", "|---|--:|--:|"
    return {
        DOCS / "math.md": ["\n".join([*head, *values()]), "\n".join([*of_sizes, *changes()])],
        DOCS / "loss_math.md": ["\n".join([*of_gradients, *gradients()])],
    }


def main() -> None:
    """Write the tables in place of those of the pages."""
    for page, made in tables().items():
        text = page.read_text(encoding="utf-8")
        for place, table in enumerate(made):
            parts = text.split(BEGIN)
            parts[place + 1] = f"\n\n{table}\n\n{END}{parts[place + 1].partition(END)[2]}"
            text = BEGIN.join(parts)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
