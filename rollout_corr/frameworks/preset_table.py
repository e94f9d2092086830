"""The table of docs/presets.md, made from the recipes themselves."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace

from rollout_corr.frameworks.registry import OLD_NAMES, RECIPES, Recipe
from rollout_corr.spec.correction import Criterion, Spec
from rollout_corr.spec.validate import Checked

BEGIN = "<!-- made by `python -m rollout_corr.frameworks presets`; a test compares them -->"
END = "<!-- end of what is made -->"


def expression(value: object) -> str:
    """A Spec, or anything else that is checked, as the Python that builds it, defaults left out."""
    if isinstance(value, tuple):
        return f"({', '.join(map(expression, value))}{',' if len(value) == 1 else ''})"
    if not isinstance(value, Checked):
        return f'"{value}"' if isinstance(value, str) else repr(value)
    words = []
    for position, field in enumerate(fields(value)):
        current, default = getattr(value, field.name), field.default
        if isinstance(value, Criterion) and field.name == "label":
            default = replace(value, label="").label
        if current != default:
            named = position > 0 or isinstance(value, Spec)
            words.append(f"{field.name}={expression(current)}" if named else expression(current))
    return f"{type(value).__name__}({', '.join(words)})"


def _call(entry: Recipe) -> str:
    words = [
        f"{name}={expression(parameter.default)}"
        for name, parameter in inspect.signature(entry.build).parameters.items()
    ]
    return f"{entry.name}({', '.join(words)})"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    return _cell(f"`{text}`")


def _summary(entry: Recipe) -> str:
    return _cell((inspect.getdoc(entry.build) or "").partition("\n")[0])


def table() -> str:
    """Every recipe with its arguments, what it does, what it matches and the Spec that it makes; then the old names."""
    lines = [BEGIN]
    framework = ""
    for name in sorted(RECIPES):
        entry = RECIPES[name]
        if name.partition(".")[0] != framework:
            framework = name.partition(".")[0]
            lines += ["", f"### {framework}", "", "| preset | what it does | matches | Spec |", "|---|---|---|---|"]
        made = expression(entry.build())
        lines.append(f"| {_code(_call(entry))} | {_summary(entry)} | {entry.matches} | {_code(made)} |")
    lines += ["", "### Old names", "", "They work and warn once.", ""]
    lines += ["| preset | what it is | name of | write |", "|---|---|---|---|"]
    for name in sorted(OLD_NAMES):
        entry = OLD_NAMES[name]
        lines.append(f"| {_code(_call(entry))} | {_summary(entry)} | {entry.matches} | {_code(entry.write)} |")
    return "\n".join([*lines, "", END, ""])
