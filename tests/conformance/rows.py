"""A row: one thing of this package beside one function of a framework, and how their results are compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor

import rollout_corr as rc
from conformance.batches import KINDS, Batch, batch

DOCS = Path(__file__).resolve().parents[2] / "docs"
Result = Mapping[str, Any]
Settings = Callable[[Random], dict[str, Any]]
Kind = Literal["preset", "recipe", "drop-in", "report", "configuration"]

# This package's results by row, batch and settings: a second version of a framework does not pay for them again.
# None: nothing is kept. A campaign sets it, for one framework.
_kept: dict[tuple[str, ...], Result] | None = None


def keep_results() -> None:
    """Compute this package's side of a case once for all versions of a framework, from here on in this process."""
    global _kept
    _kept = {}


def once(row: str, given: Batch, drawn: dict[str, Any], compute: Callable[[], Result]) -> Result:
    """Return this package's result of a case: a kept one, if results are kept."""
    if _kept is None:
        return compute()
    key = row, given.kind, str(given.seed), repr(drawn)
    if key not in _kept:
        _kept[key] = compute()
    return _kept[key]


@dataclass(frozen=True)
class Declared:
    """A difference that the documentation states.

    Attributes:
        name: A few words for the table.
        page: The page that states it, of docs/.
        says: Words of that page; a test looks for them.
        when: Tells of a batch and settings whether the difference can appear there.
    """

    name: str
    page: str
    says: str
    when: Callable[[Batch, dict[str, Any]], bool]

    def is_documented(self) -> bool:
        """Tell whether the page has the words."""
        text = " ".join((DOCS / self.page).read_text(encoding="utf-8").split())
        return " ".join(self.says.split()) in text


BF16 = Declared(
    "subtract in bf16", "presets.md", "subtract in bf16", lambda given, settings: given.new.dtype == torch.bfloat16
)


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        kind: The side of this package.
        ours: Its name: "nemo.tis".
        theirs: File and function of the framework.
        run: Computes both results, ours and then theirs, for a batch and settings.
        settings: Draws the settings of a case.
        declared: Differences that the documentation states.
        kinds: The kinds of batches that the framework's function takes.
        within: Relative error that is allowed in float64 and in float32. Masks, counts and words are compared exactly.
    """

    kind: Kind
    ours: str
    theirs: str
    run: Callable[[Batch, dict[str, Any]], tuple[Result, Result]]
    settings: Settings = lambda rng: {}
    declared: tuple[Declared, ...] = ()
    kinds: tuple[str, ...] = KINDS
    within: tuple[float, float] = (1e-9, 2e-5)


@dataclass
class Tally:
    """The count of a row's cases. It travels between processes, so it holds the row's names and not the row.

    Attributes:
        row: Kind and name of this package's side.
        theirs: The framework's function.
        declared: Cases that differ as documented, by the name of the difference.
        undeclared: A line for each case that differs and that nothing documents.
        undeclared_finite: How many of them were on finite input.
    """

    row: str
    theirs: str
    cases: int = 0
    agreed: int = 0
    declared: Counter[str] = field(default_factory=Counter)
    undeclared: list[str] = field(default_factory=list)
    undeclared_finite: int = 0


def compared(row: Row, cases: int, seed: int = 0) -> Tally:
    """Run a row on `cases` batches, which go around its kinds."""
    tally = Tally(f"{row.kind} `{row.ours}`", row.theirs)
    for number in range(cases):
        kind = row.kinds[number % len(row.kinds)]
        given = batch(kind, seed + number)
        settings = row.settings(Random(f"settings-{seed + number}"))
        tally.cases += 1
        found = difference(row, given, settings)
        if found is None:
            tally.agreed += 1
            continue
        named = next((d for d in row.declared if d.when(given, settings)), None)
        if named is not None:
            tally.declared[named.name] += 1
        else:
            tally.undeclared.append(f"{kind} seed {given.seed} {settings}: {found}")
            tally.undeclared_finite += given.finite
    return tally


def difference(row: Row, given: Batch, settings: dict[str, Any]) -> str | None:
    """Run one case, and say how the results differ."""
    ours, theirs = row.run(given, settings)
    within = row.within[0 if given.new.dtype == torch.float64 else 1]
    if ours.keys() != theirs.keys():
        return f"keys {sorted(ours.keys() ^ theirs.keys())} stand on one side only"
    for name, value in ours.items():
        found = unequal(value, theirs[name], within)
        if found is not None:
            return f"{name}: {found}"
    return None


def unequal(ours: Any, theirs: Any, within: float) -> str | None:
    """Say how two values differ; NaN equals NaN, and `within` is relative to the largest finite value."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        if ours.shape != theirs.shape:
            return f"shape {list(ours.shape)}, theirs {list(theirs.shape)}"
        if not (ours.is_floating_point() and theirs.is_floating_point()):
            wrong = (ours.bool() != theirs.bool()).nonzero().tolist()
            return f"differ at {wrong[:3]} of {len(wrong)} places" if wrong else None
        a, b = ours.detach().double(), theirs.detach().double()
        scale = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 0.0
        close = torch.isclose(a, b, rtol=within, atol=within * scale, equal_nan=True)
        if close.all():
            return None
        where = (~close).nonzero()[0].tolist()
        return f"{a[tuple(where)].item():.9g} at {where}, theirs {b[tuple(where)].item():.9g}"
    if isinstance(ours, float) and isinstance(theirs, float):
        same = math.isclose(ours, theirs, rel_tol=within, abs_tol=within) or (math.isnan(ours) and math.isnan(theirs))
        return None if same else f"{ours:.9g}, theirs {theirs:.9g}"
    return None if ours == theirs else f"{ours!r}, theirs {theirs!r}"


def none(rng: Random) -> dict[str, Any]:
    """Draw no settings: both sides use their defaults."""
    return {}


def preset(name: str, theirs: str, run: Callable[..., Result], settings: Settings = none, **more: Any) -> Row:
    """Compare a preset.

    Args:
        name: "framework.preset".
        theirs: File and function of the framework.
        run: Runs it on a batch and the settings, and returns "weights" [B, T], "mask" [B, T], or both. Weights are
            compared where `mask`, or the batch's own mask, is set.
        settings: Draws arguments of the preset.
        **more: Further attributes of the row.
    """

    def both(given: Batch, drawn: dict[str, Any]) -> tuple[Result, Result]:
        def ours() -> Result:
            spec = rc.spec(name, **drawn)
            turns = "runs" if spec.measures_turns else None
            out = rc.correct(
                given.old, given.rollout, rc.Batch(mask=given.mask, turns=turns), spec=spec, advantages=given.advantages
            )
            return {"mask": out.mask, "weights": out.weights}

        expected, made = dict(run(given, **drawn)), dict(once(f"preset {name}", given, drawn, ours))
        if "weights" in expected:
            at = expected.get("mask", given.mask).bool()
            for side in (made, expected):
                side["weights"] = side["weights"].where(at, 0.0)
        return {key: value for key, value in made.items() if key in expected}, expected

    return Row("preset", name, theirs, both, settings, **more)


def recipe(name: str, theirs: str, run: Callable[..., Tensor], settings: Settings = none, **more: Any) -> Row:
    """Compare a recipe: the loss and its gradient.

    Args:
        name: "framework.recipe".
        theirs: File and function of the framework.
        run: Returns the framework's loss of a batch, whose `new` takes a gradient, and the settings.
        settings: Draws settings of the recipe.
        **more: Further attributes of the row.
    """
    from rollout_corr.frameworks.shared.lookup import every_recipe

    needs = every_recipe()[name].needs
    fields = {"old_logp": "old", "rollout_logp": "rollout", "ref_logp": "ref"}

    def both(given: Batch, drawn: dict[str, Any]) -> tuple[Result, Result]:
        def ours() -> Result:
            arguments = {argument: getattr(given, fields[argument]) for argument in needs}
            mine, made = given.trains(), rc.recipe(name, **drawn)
            arguments.pop("ref_logp", None)
            if made.loss.kl is not None:
                arguments["ref_logp"] = given.ref
            if (spec := made.spec) is not None and (spec.weight or any("rollout" in c.of for c in spec.criteria)):
                arguments["rollout_logp"] = given.rollout
            batch = rc.Batch(mask=given.mask, **made.batch)
            out = rc.policy_loss(mine.new, given.advantages, batch, made.loss, spec=made.spec, **arguments)
            return loss_and_gradient(out.value, mine)

        made = once(f"recipe {name}", given, drawn, ours)
        return made, loss_and_gradient(run(peer := given.trains(), **drawn), peer)

    return Row("recipe", name, theirs, both, settings, **more)


def configuration(
    framework: str,
    theirs: str,
    run: Callable[..., Tensor],
    settings: Settings,
    hold: Callable[[dict[str, Any]], object] = lambda drawn: drawn,
    old: Callable[[Batch, dict[str, Any]], Tensor | None] = lambda given, drawn: given.old,
    **more: Any,
) -> Row:
    """Compare a reader: the loss that it makes of a configuration, and its gradient.

    Args:
        framework: The name that `rc.recipe` takes.
        theirs: File and function of the framework.
        run: Returns the framework's loss of a batch and the settings.
        settings: Draws a configuration.
        hold: Puts the settings into what users of the framework have: a dataclass, a namespace, a larger mapping.
        old: Chooses the log-probs that users of such a configuration pass as `old_logp`; None: none.
        **more: Further attributes of the row.
    """

    def both(given: Batch, drawn: dict[str, Any]) -> tuple[Result, Result]:
        def ours() -> Result:
            mine, made = given.trains(), rc.recipe(framework, hold(drawn))
            out = rc.policy_loss(
                mine.new,
                given.advantages,
                rc.Batch(mask=given.mask, **made.batch),
                made.loss,
                old_logp=old(mine, drawn),
                rollout_logp=given.rollout,
                ref_logp=None if made.loss.kl is None else given.ref,
                spec=made.spec,
            )
            return loss_and_gradient(out.value, mine)

        made = once(f"configuration {theirs}", given, drawn, ours)
        return made, loss_and_gradient(run(peer := given.trains(), **drawn), peer)

    return Row("configuration", framework, theirs, both, settings, **more)


def loss_and_gradient(value: Tensor, given: Batch) -> Result:
    """Return the loss as a float and d(loss)/d(new) where the mask is set."""
    slope = None
    if value.requires_grad:
        (slope,) = torch.autograd.grad(value, given.new, allow_unused=True)
    slope = torch.zeros_like(given.new) if slope is None else slope
    return {"loss": float(value.detach()), "gradient": slope.where(given.mask, 0.0)}
