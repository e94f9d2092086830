"""The tables of docs/losses.md, made from the recipes themselves."""

from __future__ import annotations

from rollout_corr.frameworks import registry
from rollout_corr.frameworks.preset_table import expression
from rollout_corr.frameworks.recipes import calls
from rollout_corr.spec.correction import Spec

BEGIN = "<!-- made by `python -m rollout_corr.frameworks losses`; a test compares them -->"
END = "<!-- end of what is made -->"


def _preset_of(spec: Spec, name: str) -> str:
    """The preset whose Spec a recipe runs, its namesake if there is one."""
    same = [found for found, entry in registry.RECIPES.items() if entry.build() == spec]
    return name if name in same else same[0]


def table() -> str:
    """Every recipe: what it computes, over what, and what it needs."""
    lines, framework = [BEGIN], ""
    for name, call in calls().items():
        made = call.build()
        if name.partition(".")[0] != framework:
            framework = name.partition(".")[0]
            lines += ["", f"### {framework}", ""]
            lines += ["| recipe | log-probs | loss of a token | preset | reduction | divided by | note |"]
            lines += ["|---|---|---|---|---|---|---|"]
        surrogate, spec = made["surrogate"], made["spec"]
        beside = "".join(f"; `{expression(made[term])}`" for term in ("kl", "regulariser") if term in made)
        cells = (
            f"`{name}`",
            ", ".join(f"`{needed}`" for needed in call.needs) or "-",
            f"{surrogate.explain()}{beside}".replace("|", "\\|"),
            "-" if spec is None else f"`{_preset_of(spec, name)}`",
            made["reduction"],
            "nothing" if made["reduction"] == "sum" else made["denominator"],
            call.note or "-",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", END, ""])
