"""The tables of docs/presets.md and docs/losses.md, made from the presets and recipes themselves."""

from __future__ import annotations

import inspect
from itertools import groupby

from rollout_corr.frameworks.shared.lookup import every_preset, every_recipe
from rollout_corr.frameworks.shared.preset import Preset
from rollout_corr.specs.checked import expression
from rollout_corr.specs.surrogate import Surrogate

BEGIN = "<!-- made by `python -m rollout_corr.frameworks {}`; a test compares them -->"
END = "<!-- end of what is made -->"


def presets() -> str:
    """Return the table of presets: arguments, what each does, the version it matches, its Spec; then the old names."""
    lines = [BEGIN.format("presets")]
    for framework, found in groupby(every_preset(), key=_framework):
        lines += ["", f"### {framework}", "", *_header("preset", "what it does", "matches", "Spec")]
        lines += [
            _row(_code(_call(preset)), _summary(preset), preset.matches, _code(expression(preset.build())))
            for preset in found
        ]
    lines += ["", "### Old names", "", "They work and warn once.", ""]
    lines += _header("preset", "what it does", "name of", "write")
    old = every_preset(old=True)
    lines += [_row(_code(_call(preset)), _summary(preset), preset.matches, _code(preset.write)) for preset in old]
    return "\n".join([*lines, "", END, ""])


def losses() -> str:
    """Return the table of recipes: the log-probs that each needs, its loss, its preset and what it is divided by."""
    lines = [BEGIN.format("losses")]
    specs = {preset.name: preset.build() for preset in every_preset()}
    for framework, found in groupby(every_recipe().items(), key=lambda item: item[0].partition(".")[0]):
        lines += ["", f"### {framework}", ""]
        lines += _header("recipe", "log-probs", "loss of a token", "preset", "reduction", "divided by", "note")
        for name, recipe in found:
            made = recipe.build()
            terms = [f"; {_code(expression(made[term]))}" for term in ("kl", "regulariser") if term in made]
            # The preset whose Spec the recipe runs, its namesake if there is one.
            same = [preset for preset, spec in specs.items() if spec == made["spec"]]
            lines.append(
                _row(
                    _code(name),
                    ", ".join(map(_code, recipe.needs)) or "-",
                    _loss(made["surrogate"]) + "".join(terms),
                    "-" if made["spec"] is None else _code(name if name in same else same[0]),
                    made["reduction"],
                    "nothing" if made["reduction"] == "sum" else made["denominator"],
                    recipe.note or "-",
                )
            )
    return "\n".join([*lines, "", END, ""])


def _loss(surrogate: Surrogate) -> str:
    return surrogate.explain() if surrogate.coef == 1.0 else f"{surrogate.coef:g} of {surrogate.explain()}"


def _framework(preset: Preset) -> str:
    return preset.name.partition(".")[0]


def _header(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _code(text: str) -> str:
    return f"`{text}`"


def _call(preset: Preset) -> str:
    parameters = inspect.signature(preset.build).parameters.items()
    return f"{preset.name}({', '.join(f'{name}={expression(parameter.default)}' for name, parameter in parameters)})"


def _summary(preset: Preset) -> str:
    return (inspect.getdoc(preset.build) or "").partition("\n")[0]
