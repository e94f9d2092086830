"""`rollout-corr demo`: a realistic batch, corrected by several presets, in about a second."""

from __future__ import annotations

import torch

import rollout_corr as rc
from rollout_corr.cli.main import parser_of
from rollout_corr.diagnose.show.content import Table
from rollout_corr.diagnose.show.terminal import Terminal
from rollout_corr.testing import ExampleBatch, example_batch

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


def rows(batch: ExampleBatch) -> list[list[str]]:
    """Correct the batch with each preset: one row of the table per preset."""
    lines = []
    for name in PRESETS:
        out = rc.correct(
            batch.train_logp, batch.rollout_logp, batch.mask, cu_seqlens=batch.cu_seqlens, spec=rc.preset(name)
        )
        metrics = out.metrics()
        weights = ["-"] * 3
        if "weight_mean" in metrics:
            shown = {"weight_mean": ".4f", "weight_max": ".3g", "weight_ess": ".3f"}
            weights = [format(metrics[key], form) for key, form in shown.items()]
        kept = f"{100 * metrics['tokens_kept_fraction']:.2f} %"
        sequences = f"{metrics['sequences_kept']:.0f} of {metrics['sequences']:.0f}"
        lines.append([name, *weights, kept, sequences, "; ".join(out.warnings()) or "-"])
    return lines


def run(arguments: list[str]) -> int:
    """Print the mismatch of an example batch and its correction by several presets."""
    parser_of("demo", "Correct an example batch with several presets and print the results.").parse_args(arguments)
    out = Terminal()
    batch = example_batch()
    backend = rc.backend_for(batch.train_logp)
    out.line(f"rollout-corr {rc.__version__}, torch {torch.__version__}", style="bold")
    out.line(f"backend: {backend.name} ({backend.reason}), {torch.get_num_threads()} threads")
    tokens = int(batch.mask.sum())
    out.line(
        f"batch: {batch.lengths.numel()} sequences, {tokens:,} response tokens, rollout log-probs rounded to bfloat16"
    )
    out.line("D, here in the names d_mean and others, is the log-ratio train_logp - rollout_logp of a token.")
    out.line()
    metrics = rc.correct(
        batch.train_logp,
        batch.rollout_logp,
        batch.mask,
        cu_seqlens=batch.cu_seqlens,
        spec=rc.Spec(detail="full"),
    ).metrics()
    out.table("Mismatch", Table(("metric", "value"), [(key, f"{metrics[key]:.5g}") for key in MISMATCH]))
    heads = ("preset", "weight mean", "max", "ESS", "tokens kept", "sequences kept", "warnings")
    out.table("Corrected by several presets", Table(heads, rows(batch)))
    return 0
