"""docs/presets.md, docs/losses.md, shared/names.py: `PYTHONPATH=tests python -m builders.framework_tables presets`.

`losses` prints the tables of the second page, `names` the file.
"""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from rollout_corr.frameworks.shared.lookup import every_preset, every_recipe, readable, recipe_names, spec_names
from rollout_corr.frameworks.shared.preset import Preset, RecipeEntry
from rollout_corr.specs.checked import expression

BEGIN = "<!-- made by `python -m builders.framework_tables {}`; a test compares them -->"
END = "<!-- end of what is made -->"

NAMES = '''"""Names for editors and type checkers: `python -m builders.framework_tables names` prints it.

When the package runs, names are found by the folders of the frameworks. A name that is known only then, as a `str`, is
for a type checker `typing.cast(rc.SpecName, name)`.
"""

from typing import Literal
'''


def presets() -> str:
    """Return the table of specs by name: arguments, and what each does; above it the version that most match."""
    lines = [BEGIN.format("presets")]
    for framework, group in groupby(every_preset(), key=_framework):
        found = list(group)
        usual = _most(preset.matches for preset in found)
        cells = [
            (_code(_call(preset)), preset.about + ("" if preset.matches == usual else f" ({preset.matches})"))
            for preset in found
        ]
        lines += _folded(framework, f"as in {usual}", ("name", "what it does"), cells)
    return "\n".join([*lines, "", END, ""])


def losses() -> str:
    """Return the tables of recipes: the loss of each, and what else it has, unless that is the usual.

    Recipes of a framework that differ in their names alone share a row. What all of them have stands above.
    """
    lines = [BEGIN.format("losses")]
    specs = {preset.name: preset.build() for preset in every_preset()}
    for framework, found in groupby(every_recipe().items(), key=lambda item: item[0].partition(".")[0]):
        rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for name, recipe in found:
            made = recipe.build()
            loss, mean = made.loss, made.loss.mean
            terms = [term for term in (loss.surrogate, loss.kl, loss.regularizer) if term is not None]
            # The name of the Spec that the recipe runs, its own if there is one.
            same = [preset for preset, spec in specs.items() if spec == made.spec]
            over = "" if mean.of == "sum" or mean.over == "original" else f" over {mean.over}"
            divided = (mean.of if mean.length is None else f"{mean.of} / {mean.length:g}") + over
            more = (
                "" if made.spec is None else "spec of its name" if name in same else f"spec {_code(same[0])}",
                "" if divided == "token" else f"mean {divided}",
                _needs(recipe),
                # The page says it of every total.
                *recipe.note.replace(" of all ranks", "").split("; "),
            )
            cell = " + ".join(_code(expression(term).replace(", ", ",")) for term in terms)
            rows.setdefault((cell, tuple(filter(None, more))), []).append(_code(name))
        first, *others = (more for _, more in rows)
        every = [part for part in first if all(part in more for more in others)]
        made_rows = [
            (", ".join(names), cell, "; ".join(part for part in more if part not in every) or "-")
            for (cell, more), names in rows.items()
        ]
        head: tuple[str, ...] = ("recipe", "loss", "and")
        if all(row[-1] == "-" for row in made_rows):
            head, made_rows = head[:-1], [row[:-1] for row in made_rows]
        lines += _folded(framework, "; ".join(every), head, made_rows)
    return "\n".join([*lines, "", END, ""])


def names() -> str:
    """Return the module shared/names.py: the names of specs, of recipes and of frameworks with a configuration."""
    specs, recipes = spec_names(), recipe_names()
    both = [name for name in specs if name in recipes]
    literals = {
        "_SpecAndRecipe": both,
        "SpecName": [name for name in specs if name not in both],
        "RecipeName": [name for name in recipes if name not in both],
        "FrameworkName": readable(),
    }
    made = []
    for name, found in literals.items():
        first = "    _SpecAndRecipe,\n" if name in ("SpecName", "RecipeName") else ""
        made.append(f"{name} = Literal[\n{first}{_wrapped(found)}\n]  # fmt: skip")
    return "\n".join([NAMES, *made, ""])


def _wrapped(names: list[str]) -> str:
    """The names in lines of 120 characters, each framework's from a line of its own."""
    lines = []
    for _, found in groupby(names, key=lambda name: name.partition(".")[0] if "." in name else ""):
        quoted = " ".join(f'"{name}",' for name in found)
        lines += textwrap.wrap(quoted, 120, initial_indent=" " * 4, subsequent_indent=" " * 4)
    return "\n".join(lines)


def _needs(recipe: RecipeEntry) -> str:
    """The log-probs that a recipe takes, where they are not those of its mode: old, and rollout for a correction."""
    usual = ("old_logp",) if recipe.build().spec is None else ("old_logp", "rollout_logp")
    return "" if recipe.needs == usual else f"takes {', '.join(map(_code, recipe.needs)) or 'none'}"


def _most(texts: Iterable[str]) -> str:
    """The text that stands there most often, of several the first."""
    return Counter(texts).most_common(1)[0][0]


def _framework(preset: Preset) -> str:
    return preset.name.partition(".")[0]


def _folded(framework: str, about: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A heading, and below it a table that opens at a click; its summary has the number of rows."""
    # HTML: nothing renders the backticks of a name there.
    said = f"{len(rows)} row{'s' * (len(rows) != 1)}" + (f", {about}" if about else "").replace("`", "")
    summary = f"<details markdown><summary>{said}</summary>"
    return ["", f"#### {framework}", "", summary, "", *_header(*head), *(_row(*row) for row in rows), "", "</details>"]


def _header(*names: str) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _code(text: str) -> str:
    return f"`{text}`"


def _call(preset: Preset) -> str:
    return f"{preset.name}({', '.join(f'{name}={expression(default)}' for name, default in preset.settings.items())})"


TABLES = {"presets": presets, "losses": losses, "names": names}

if __name__ == "__main__":
    sys.stdout.write(TABLES[sys.argv[1]]())
