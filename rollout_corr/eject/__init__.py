"""Files to copy, for those who do not want a dependency: a correction, a loss, kernels; written by hand.

`eject` prints one of them with the settings of a name filled in, without the branches that these never take.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import textwrap
from functools import partial
from importlib.resources import files
from typing import Any, cast

from .._version import __version__
from ..frameworks.shared.lookup import recipe, recipe_names, spec, spec_names
from ..frameworks.shared.preset import RECIPES
from ..specs.correction import Spec
from . import wanted
from .markers import cut, written
from .wanted import CannotEject as CannotEject

__all__ = ["FRAMEWORKS", "CannotEject", "check", "eject"]

# A framework's function in calls.py.
FRAMEWORKS = {
    "verl": "compute_rollout_correction_and_rejection_mask",
    "trl": "vllm_importance_sampling_ratio",
    "skyrl": "compute_off_policy_correction",
    "slime": "custom_tis",
    "nemo": "actor_importance_weights",
}
# The settings by which a framework's function knows that it is asked for something else: how their names begin.
CONFIGURED = {
    "verl": ("rollout_",),
    "trl": ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_"),
    "skyrl": ("",),
}

COMMAND, DIGEST = "# rollout-corr eject ", "# sha256 of what follows: "


def eject(name: str, *, loss: bool = False, kernel: bool = False, framework: str | None = None,
          metrics: bool = False) -> str:  # fmt: skip
    """Write a file that stands alone.

    Args:
        name: A spec or a recipe.
        loss: The policy loss of a recipe, which takes weights and mask of its correction; else a correction.
        kernel: The correction in Triton.
        framework: Add the function that a framework calls, with its metrics: a key of FRAMEWORKS.
        metrics: The correction measures ten metrics. The kernel always does.

    Raises:
        CannotEject: No file says that; the error names it.
        ValueError: An unknown name, or flags that exclude each other.
    """
    flags = {"--loss": loss, "--kernel": kernel, "--for": framework is not None, "--metrics": metrics}
    named = [flag for flag, is_given in flags.items() if is_given]
    if named[1:] and named != ["--for", "--metrics"]:
        raise ValueError(f"expected one of --loss, --kernel, --for and --metrics, got {' '.join(named)}")
    if framework is not None and framework not in FRAMEWORKS:
        raise ValueError(f"--for: expected one of {list(FRAMEWORKS)}, got {framework!r}")
    arguments = " ".join([name, *named[:1], *([framework] if framework is not None else [])])
    if loss:
        body, told = _loss(name)
    else:
        asked = _spec(name)
        told = _in_words(asked)
        if kernel:
            body = cut(_source("kernel"), wanted.of_kernel(asked))
        else:
            source = _source("correction")
            values = wanted.of_correction(asked) | {"metrics": metrics or framework is not None}
            body = cut(source if framework is None else _with_call(source, framework, asked), values)
    compile(body, f"<rollout-corr eject {arguments}>", "exec")
    head = [f"# Written by rollout-corr {__version__}, Apache License 2.0:", COMMAND + arguments, *told]
    return "\n".join([*head, DIGEST + _digest(body), body])


def _spec(name: str) -> Spec:
    """The Spec of a preset, or of a recipe that has one."""
    if name in recipe_names() and name not in spec_names():
        of_recipe = recipe(cast("Any", name)).spec
        if of_recipe is None:
            raise ValueError(f"{name}: expected a name with a correction, got a recipe of a loss alone; add --loss")
        return of_recipe
    return spec(cast("Any", name))


def _in_words(spec: Spec) -> list[str]:
    """The Spec in words, as comments."""
    steps = [step.partition(": a mean over it")[0] for step in spec.explain().splitlines() if ". Metrics: " not in step]
    wrap = partial(textwrap.wrap, width=118, initial_indent="# ", subsequent_indent="#    ")
    return [line for step in steps for line in wrap(step)]


def _loss(name: str) -> tuple[str, list[str]]:
    """The loss of a recipe, and what its arguments are."""
    made = recipe(cast("Any", name))
    entry = RECIPES[name]
    body = cut(_source("loss"), wanted.of_loss(made.spec, made.loss, entry, made.batch))
    base = wanted.base_of(made.loss, entry.needs)
    told = [f"# base_logp is {base or 'None'}."]
    if made.spec is not None:
        wanted.of_correction(made.spec)
        train = "new_logp" if base == "rollout_logp" else "old_logp"
        report = wanted.use_of_weights(made.loss, entry.needs) == "report"
        arguments, rest = ("train_mask=", " No weights.") if report else ("weights= and train_mask=", "")
        told.append(f"# For {arguments}, correct {train} and rollout_logp: rollout-corr eject {name}.{rest}")
    return body, told


def _with_call(source: str, framework: str, spec: Spec) -> str:
    """A correction with a framework's function behind it."""
    calls = _source("calls")
    needed = {"CONFIG", "_check_config", "_of_rows", FRAMEWORKS[framework]}
    parts = []
    config: dict[str, Any] = {}
    if framework in CONFIGURED:
        config = {
            key: value for key, value in spec.to_config(framework).items() if key.startswith(CONFIGURED[framework])
        }
    for node in ast.parse(calls).body:
        if isinstance(node, ast.FunctionDef) and node.name in needed:
            parts.append(ast.get_source_segment(calls, node) or "")
        elif isinstance(node, ast.AnnAssign) and config:
            lines = [f'    "{key}": {written(value)},\n' for key, value in config.items()]
            parts.append(f"# The framework's own settings that this file is for.\nCONFIG = {{\n{''.join(lines)}}}")
    source = source.replace("from typing import NamedTuple", "from typing import Any, NamedTuple")
    return source + "".join(f"\n\n{part}\n" for part in parts)


def _source(name: str) -> str:
    return (files(__package__) / f"{name}.py").read_text(encoding="utf-8")


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]


def check(source: str) -> tuple[bool, list[str]]:
    """Compare a file with what its command writes today: whether it is that, and lines that say so."""
    lines = source.splitlines()
    command = next((line for line in lines if line.startswith(COMMAND)), None)
    digest = next((i for i, line in enumerate(lines) if line.startswith(DIGEST)), None)
    words = [] if command is None else command.removeprefix(COMMAND).split()
    if digest is None or not words:
        return False, ["not written by rollout-corr eject: its header is missing"]
    name, *flags = words
    framework = flags[flags.index("--for") + 1] if "--for" in flags[:-1] else None
    again = eject(name, loss="--loss" in flags, kernel="--kernel" in flags, framework=framework,
                  metrics="--metrics" in flags).splitlines()  # fmt: skip
    edited = _digest("\n".join(lines[digest + 1 :]) + "\n") != lines[digest].removeprefix(DIGEST)
    said = [*(line.removeprefix("# ") for line in lines[:2]), "edited since" if edited else "not edited since"]
    start = next(i for i, line in enumerate(again) if line.startswith(DIGEST)) + 1
    changes = list(difflib.unified_diff(lines[digest + 1 :], again[start:], "this file", f"rollout-corr {__version__}",
                                        n=1, lineterm=""))  # fmt: skip
    if not changes:
        return True, [*said, f"rollout-corr {__version__} writes the same file"]
    return False, [*said, f"rollout-corr {__version__} writes another file:", *changes]
