"""`rollout-corr demo`: a realistic batch, corrected by several presets, in about a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import rollout_corr as rc
from rollout_corr.cli.main import parser_of
from rollout_corr.testing import ExampleBatch, example_batch, pad

PRESETS = (
    "verl.disabled",
    "verl.decoupled_token_is",
    "verl.decoupled_seq_is",
    "verl.decoupled_geo_rs_token_tis",
    "openrlhf.icepop",
    "skyrl.geometric_mask",
    "slime.mis_geo",
    "trl.default",
)
MISMATCH = (
    *("d_mean", "d_abs_mean", "d_min", "d_max", "d_p1", "d_p50", "d_p99", "d_p99.99", "kl_k3", "chi2_token"),
    *("chi2_sequence", "sum_d_abs_mean", "train_ppl", "rollout_ppl", "prob_correlation"),
)
ROUNDS = 5


def by_hand(train: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Compute token weights, geometric rejection and 12 metrics on padded tensors, as trainers write it by hand."""
    log_ratio = train - rollout
    weights = torch.exp(log_ratio.clamp(-20.0, 20.0)).clamp(max=2.0) * mask
    count = mask.sum(1).clamp(min=1)
    mean = (log_ratio * mask).sum(1) / count
    keep = (mean >= torch.log(torch.tensor(0.999))) & (mean <= torch.log(torch.tensor(1.001)))
    new_mask = mask * keep[:, None]
    tokens = mask.sum()
    k3 = torch.exp(log_ratio) - 1.0 - log_ratio
    train_mean, rollout_mean = (train * mask).sum(1) / count, (rollout * mask).sum(1) / count
    metrics = {
        "kl": ((-log_ratio * mask).sum() / tokens).item(),
        "k3": ((k3 * mask).sum() / tokens).item(),
        "abs": ((log_ratio.abs() * mask).sum() / tokens).item(),
        "max": (log_ratio.abs() * mask).max().item(),
        "chi2": ((torch.exp(2.0 * log_ratio) * mask).sum() / tokens - 1.0).item(),
        "train_ppl": torch.exp(-train_mean).mean().item(),
        "rollout_ppl": torch.exp(-rollout_mean).mean().item(),
        "log_ppl_diff": (rollout_mean - train_mean).mean().item(),
        "weight_mean": (weights.sum() / tokens).item(),
        "weight_std": (((weights - 1.0) ** 2 * mask).sum() / tokens).sqrt().item(),
        "ess": (weights.sum() ** 2 / (tokens * (weights**2).sum())).item(),
        "kept": (new_mask.sum() / tokens).item(),
    }
    return weights, new_mask, metrics


def milliseconds(call: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Time two functions in turns, so that both see the same load; medians, without the first round."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 1):
        for function, taken in zip((call, other), times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0][1:]), statistics.median(times[1][1:])


def rows(batch: ExampleBatch) -> list[list[str]]:
    """Correct the batch with each preset: one row of the table per preset."""
    lines = []
    for name in PRESETS:
        out = rc.correct(
            batch.train_logp, batch.rollout_logp, batch.mask, cu_seqlens=batch.cu_seqlens, spec=rc.preset(name)
        )
        metrics = out.metrics()
        weighted = "weight_mean" in metrics
        lines.append(
            [
                name,
                f"{metrics['weight_mean']:.4f}" if weighted else "-",
                f"{metrics['weight_max']:.3g}" if weighted else "-",
                f"{metrics['weight_ess']:.3f}" if weighted else "-",
                f"{100 * metrics['tokens_kept_fraction']:.2f} %",
                f"{metrics['sequences_kept']:.0f} of {metrics['sequences']:.0f}",
                "; ".join(out.warnings()) or "-",
            ]
        )
    return lines


def run(arguments: list[str]) -> int:
    """Print the mismatch of an example batch, its correction by several presets, and how long one takes."""
    parser_of("demo", "Correct an example batch with several presets and print the results.").parse_args(arguments)
    from rich.console import Console
    from rich.table import Table

    console = Console()
    batch = example_batch()
    backend = rc.backend_for(batch.train_logp)
    console.print(f"[bold]rollout-corr {rc.__version__}[/bold], torch {torch.__version__}")
    console.print(f"backend: [bold]{backend.name}[/bold] ({backend.reason}), {torch.get_num_threads()} threads")
    tokens = int(batch.mask.sum())
    console.print(
        f"batch: {batch.lengths.numel()} sequences, {tokens:,} response tokens, rollout log-probs rounded to bfloat16"
    )
    console.print("D, here in the names d_mean and others, is the log-ratio train_logp - rollout_logp of a token.\n")

    out = rc.correct(
        batch.train_logp,
        batch.rollout_logp,
        batch.mask,
        cu_seqlens=batch.cu_seqlens,
        spec=rc.Spec(detail="full"),
    )
    metrics = out.metrics()
    mismatch = Table(title="Mismatch", title_justify="left")
    for column in ("metric", "value"):
        mismatch.add_column(column, justify="left" if column == "metric" else "right")
    for key in MISMATCH:
        mismatch.add_row(key, f"{metrics[key]:.5g}")
    console.print(mismatch)

    table = Table(title="Corrected by several presets", title_justify="left")
    for i, column in enumerate(("preset", "weight mean", "max", "ESS", "tokens kept", "sequences kept", "warnings")):
        table.add_column(column, justify="right" if 0 < i < 6 else "left")
    for line in rows(batch):
        table.add_row(*line)
    console.print(table)

    train, rollout = (pad(x, batch.lengths) for x in (batch.train_logp, batch.rollout_logp))
    mask = pad(batch.mask.long(), batch.lengths)
    spec = rc.Spec(
        weight=rc.Weight("token", upper=2.0),
        criteria=(rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.999, upper=1.001),),
    )
    count = len(rc.correct(train, rollout, mask, spec=spec).metrics())
    ours, theirs = milliseconds(
        lambda: rc.correct(train, rollout, mask, spec=spec).metrics(), lambda: by_hand(train, rollout, mask)
    )
    console.print(
        f"\nToken weights and geometric rejection on the padded batch {list(mask.shape)}, median time of {ROUNDS} "
        f"runs:\n{ours:.1f} ms with {count} metrics; {theirs:.1f} ms written by hand in torch, with 12 metrics "
        f"({theirs / ours:.1f}x)."
    )
    return 0
