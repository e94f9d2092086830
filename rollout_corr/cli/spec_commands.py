"""The commands about specs by their frameworks' names: explain and specs."""

from __future__ import annotations

import ast
import os
import sys

from rollout_corr.cli.main import GOOD, parser_of
from rollout_corr.cli.streams import print_line
from rollout_corr.diagnose.read.problems import DumpError
from rollout_corr.diagnose.show.content import Table
from rollout_corr.diagnose.show.terminal import Terminal
from rollout_corr.frameworks.shared.lookup import every_preset, named, recipe, recipe_names, spec_names
from rollout_corr.frameworks.shared.writing import explained


def explain(arguments: list[str]) -> int:
    """Print what a framework's spec or recipe does, or what a setting is."""
    parser = parser_of("explain", "Explain in words what a framework's spec or recipe does, or what a setting is.")
    parser.add_argument("name", help="such as verl.decoupled_token_is (`rollout-corr specs`) or trl.epsilon_high")
    # Without a default argparse calls it required, next to the name.
    parser.add_argument("setting", nargs="*", default=[], help="an argument of rc.spec or rc.recipe, such as upper=3.0")
    chosen = parser.parse_args(arguments)
    settings = dict(_setting(given) for given in chosen.setting)
    try:
        if chosen.name in spec_names():
            said = [named(chosen.name, **settings).explain()]
        elif chosen.name in recipe_names():
            found = recipe(chosen.name, **settings)
            parts = {"spec": found.spec, "loss": found.loss}
            said = [f"{part}:\n{one.explain()}" for part, one in parts.items() if one is not None]
        else:
            said = [explained(chosen.name) or named(chosen.name).explain()]
    except (TypeError, ValueError) as error:
        raise DumpError(str(error)) from error
    out = Terminal()
    for line in "\n".join(said).splitlines():
        out.line(line)
    return GOOD


def _setting(given: str) -> tuple[str, object]:
    """Read NAME=VALUE: a Python number, None, a tuple and so on; anything else is text."""
    name, equals, text = given.partition("=")
    if not (equals and name.isidentifier()):
        raise DumpError(f"expected a setting NAME=VALUE, got {given!r}")
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return name, text


def specs(arguments: list[str]) -> int:
    """Print a table of the frameworks' specs: names, and what they do in a line."""
    parser = parser_of("specs", "List the specs of all frameworks, or those with every given word in their line.")
    parser.add_argument("word", nargs="*", help="a part of a name or a description, such as verl or geometric")
    words = [word.lower() for word in parser.parse_args(arguments).word]
    rows = [(found.name, found.about) for found in every_preset()]
    found = [row for row in rows if all(word in " ".join(row).lower() for word in words)]
    if not found:
        raise DumpError(f"no spec has {' and '.join(map(repr, words))} in its name or description")
    width = max(len(name) for name, _ in found)
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        Terminal().table("", Table(("spec", "what it does"), found, text=2))
    else:
        # A line each, for grep.
        for name, about in found:
            print_line(f"{name:<{width}}  {about}".rstrip())
    return GOOD
