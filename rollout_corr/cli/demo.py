"""`rollout-corr demo`: a batch with a planted bug, what the doctor says, what specs make of it, and a page."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from torch import Tensor

from rollout_corr._version import __version__
from rollout_corr.api.correct import correct
from rollout_corr.api.dump import dump
from rollout_corr.api.suggest import suggest
from rollout_corr.cli.main import GOOD, PROGRAM, parser_of
from rollout_corr.diagnose.calls import doctor
from rollout_corr.diagnose.results import Report
from rollout_corr.diagnose.show.content import Table
from rollout_corr.diagnose.show.terminal import BOLD, Terminal, findings
from rollout_corr.frameworks.shared.lookup import spec
from rollout_corr.frameworks.shared.names import SpecName
from rollout_corr.testing import ExampleBatch, example_batch

FOLDER = "rollout_corr_demo"
SPECS: tuple[SpecName, ...] = ("verl.decoupled_token_is", "verl.decoupled_geo_rs_token_tis", "trl.default")
SUGGESTED = "rc.suggest(fixed batch).spec"
SEQUENCES, RANKS, BAD_RANK = 160, 8, 5


def broken(batch: ExampleBatch) -> Tensor:
    """Move the rollout log-probs of one rank of eight by a token; return them, [N]."""
    rank = torch.arange(SEQUENCES) % RANKS
    return torch.where(
        (rank == BAD_RANK).repeat_interleave(batch.lengths), batch.rollout_logp.roll(1), batch.rollout_logp
    )


def healthy() -> ExampleBatch:
    """Make a batch without a bug."""
    batch = example_batch(sequences=SEQUENCES, catastrophic=0.0)
    # The example's least likely tokens all have one log-prob, which would look like a placeholder.
    lower = torch.where(
        batch.train_logp <= -18.0, torch.rand(batch.train_logp.shape, generator=torch.manual_seed(0)), 0.0
    )
    return batch._replace(train_logp=batch.train_logp - lower, rollout_logp=batch.rollout_logp - lower)


def rows(batch: ExampleBatch, bad: Tensor) -> list[list[str]]:
    """Correct the batch with each spec, with the bug and without it: one row of the table per spec."""
    found = []
    suggested = suggest(batch.train_logp, batch.rollout_logp, mask=batch.mask, cu_seqlens=batch.cu_seqlens).spec
    for name, tried in (*((name, spec(name)) for name in SPECS), (SUGGESTED, suggested)):
        cells = [name]
        for rollout_logp in (bad, batch.rollout_logp):
            out = correct(batch.train_logp, rollout_logp, mask=batch.mask, cu_seqlens=batch.cu_seqlens, spec=tried)
            metrics = out.metrics()
            size = metrics.get("weight_ess", 1.0)
            cells += [f"{100 * metrics['tokens_kept_fraction']:.0f} %", f"{100 * size:.0f} %"]
        found.append(cells)
    return found


def _program() -> str:
    """Return what a shell calls this program by."""
    return PROGRAM if shutil.which(PROGRAM) else f"{sys.executable} -m rollout_corr"


def run(arguments: list[str]) -> int:
    """Plant a bug in a batch, let the doctor find it, correct it anyway, and write the page."""
    parser = parser_of("demo", "Plant a bug in a realistic batch, find it, and compare corrections.")
    parser.add_argument("--out", default=FOLDER, metavar="FOLDER", help=f"where dump and page go; default: {FOLDER}")
    folder = Path(parser.parse_args(arguments).out)
    out = Terminal()
    batch = healthy()
    bad = broken(batch)
    out.line(f"{PROGRAM} {__version__}, torch {torch.__version__}", BOLD)
    out.line(
        f"{SEQUENCES} answers with {int(batch.mask.sum()):,} tokens, and two log-probs for each token: the engine's, "
        f"that sampled it, and the trainer's. On one rank of {RANKS} the engine's are moved by one token, a bug of "
        "real frameworks; nothing crashes, and the loss looks as always."
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "broken.jsonl"
    # `dump` appends to what is there.
    path.unlink(missing_ok=True)
    dump(path, batch.train_logp, bad, mask=batch.mask, cu_seqlens=batch.cu_seqlens, sequences=None).result()

    out.line()
    out.line(f"1. What the doctor says about it: doctor {path}", BOLD)
    found = doctor(path)
    out.show(findings(found))

    out.line()
    heads = ("spec", "kept", "ESS", "fixed: kept", "ESS")
    out.line(
        "2. What three frameworks' specs and one from rc.suggest do to this batch, and to the batch without the bug",
        BOLD,
    )
    out.table("", Table(heads, rows(batch, bad)))
    out.line(
        "kept: trained tokens. ESS: effective sample size, the share that is left when weights differ. A spec "
        "hides a bug at best, and one with bounds for other lengths rejects healthy answers: rc.suggest measures them."
    )

    page = Report((found,)).save(folder / "report.html")
    out.line()
    out.line(f"3. The page with the pictures: {page}", BOLD)
    out.line()
    out.line("Next:", BOLD)
    for following in (f"what-if {path}", f"explain {SPECS[1]}", "doctor DUMP.jsonl"):
        out.line(f"  {_program()} {following}", wrap=False)
    out.line("rc.dump in your training loop writes DUMP.jsonl.")
    return GOOD
