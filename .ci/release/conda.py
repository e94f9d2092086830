"""The conda recipe, read by rattler-build itself: what it would build, without a channel to build it from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

RECIPE = Path("packaging", "recipe.yaml")


def check(version: str) -> None:
    """Require that the recipe is understood, and gives one package of this version."""
    from rattler_build import RattlerBuildError, Stage0Recipe

    os.environ["ROLLOUT_CORR_VERSION"] = version
    try:
        recipes = [one.recipe for one in Stage0Recipe.from_yaml(RECIPE.read_text(encoding="utf-8")).render()]
    except RattlerBuildError as error:
        sys.exit(f"{RECIPE}: rattler-build does not understand it: {error}")
    found = [(recipe.package.name, str(recipe.package.version)) for recipe in recipes]
    if found != [("rollout-corr", version)]:
        sys.exit(f"{RECIPE}: expected one package, rollout-corr {version}, got {found}")
    print(f"{RECIPE}: one package, rollout-corr {version}")
