"""A row: one thing of this package next to one function of a framework, and how their results are compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor

import rollout_corr as rc
from conformance.batches import KINDS, Batch
from conformance.declared import Declared

Result = Mapping[str, Any]
Settings = Callable[[Random], dict[str, Any]]
Side = Callable[[Batch, dict[str, Any]], Result]
Kind = Literal["preset", "recipe", "drop-in", "report", "configuration"]

# The backend that presets and reports run on.
BACKEND: ContextVar[Any] = ContextVar("backend", default="auto")


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        kind: The side of this package.
        name: Its name: "nemo.tis".
        place: File and function of the framework.
        ours: Computes this package's result of a batch and settings.
        theirs: Computes the framework's.
        settings: Draws the settings of a case: literals alone, so that a recording can hold them.
        declared: Differences that the documentation states.
        kinds: The kinds of batches that the framework's function takes.
        within: Relative error that is allowed in float64 and in float32. Masks, counts and words are compared exactly.
        recordable: Tells of settings whether this package's side runs without the framework's code.
    """

    kind: Kind
    name: str
    place: str
    ours: Side
    theirs: Side
    settings: Settings = lambda rng: {}
    declared: tuple[Declared, ...] = ()
    kinds: tuple[str, ...] = KINDS
    within: tuple[float, float] = (1e-9, 2e-5)
    recordable: Callable[[dict[str, Any]], bool] = lambda settings: True

    @property
    def key(self) -> str:
        """Name of the row, unique in its framework."""
        return f"{self.title}, {self.place}"

    @property
    def title(self) -> str:
        """Kind and name, for tables."""
        return f"{self.kind} `{self.name}`"


@dataclass
class Tally:
    """The count of a row's cases. It travels between processes, so it holds the row's names and not the row.

    Attributes:
        row: Kind and name of this package's side.
        declared: Cases that differ as documented, by the name of the difference.
        undeclared: A line for each case that differs and that nothing documents.
    """

    row: str
    cases: int = 0
    agreed: int = 0
    declared: Counter[str] = field(default_factory=Counter)
    undeclared: list[str] = field(default_factory=list)

    def add(
        self,
        row: Row,
        given: Batch,
        settings: dict[str, Any],
        theirs: Result,
        left: Sequence[str] = (),
        may_differ: bool = True,
    ) -> None:
        """Compare one case with the framework's result, computed now or recorded."""
        self.cases += 1
        found, ours = differences(row, given, settings, theirs, left)
        if not found:
            self.agreed += 1
            return
        names = explained(row, given, settings, theirs, ours, found)
        if may_differ and all(names.values()):
            self.declared[next(iter(names.values()))] += 1
        else:
            name = next((name for name in names if not names[name]), next(iter(names)))
            self.undeclared.append(f"{given.kind} seed {given.seed} {settings}: {name}: {found[name]}")


def explained(
    row: Row, given: Batch, settings: dict[str, Any], theirs: Result, ours: Result, found: Iterable[str]
) -> dict[str, str]:
    """Name for each result that differs the declared difference that explains it, or ""."""

    def name(key: str) -> str:
        values = theirs.get(key), ours.get(key)
        return next((d.name for d in row.declared if d.explains(key, given, settings, *values)), "")

    return {key: name(key) for key in found}


def expected(row: Row, given: Batch, settings: dict[str, Any]) -> Result:
    """Run the framework's side of a case; of one in bf16 on the same numbers in float32.

    Frameworks subtract in bf16, which the pages state. In float32 there is nothing to declare.
    """
    if given.kind == "bf16":
        wide = {name: getattr(given, name).float() for name in ("new", "old", "rollout", "ref")}
        return _settled(row.theirs(replace(given, **wide), dict(settings)), given)
    return _settled(row.theirs(given, dict(settings)), given)


def differences(
    row: Row, given: Batch, settings: dict[str, Any], theirs: Result, left: Sequence[str] = ()
) -> tuple[dict[str, str], Result]:
    """Run this package's side of a case, and say which results differ from the framework's and how."""
    found = row.ours(given, {name: value for name, value in settings.items() if name not in left})
    if row.kind == "preset":
        # A framework's function may return weights alone, or the mask.
        found = {name: value for name, value in found.items() if name in theirs or name not in ("weights", "mask")}
    ours = _settled(found, given, theirs.get("mask"))
    within = row.within[0 if given.new.dtype == torch.float64 else 1]
    made = dict.fromkeys(sorted(ours.keys() ^ theirs.keys()), "stands on one side only")
    for name in ours.keys() & theirs.keys():
        # A gradient has the dtype of the log-probs.
        rounded = 1e-2 if given.kind == "bf16" and name == "gradient" else within
        scale = size_of_terms(theirs, given) if name == "loss" else 1.0
        if (wrong := unequal(ours[name], theirs[name], rounded, scale)) is not None:
            made[name] = wrong
    return made, ours


def _settled(found: Result, given: Batch, mask: Tensor | None = None) -> Result:
    """Bring a result into the form in which it is compared and recorded.

    Weights are 0 where the framework's mask, or else the batch's, is not set; numbers are floats.
    """
    made: dict[str, Any] = {}
    at = (found.get("mask", given.mask) if mask is None else mask).reshape(given.mask.shape).bool()
    for name, value in found.items():
        if name == "weights" and value is None:
            continue
        if isinstance(value, Tensor) and value.dim() == 0:
            value = float(value)
        if name in ("weights", "mask"):
            value = (
                value.detach().expand_as(at)
                if value.dim() == 2 and len(value) == len(at)
                else value.detach().reshape(at.shape)
            )
            value = value.bool() if name == "mask" else value.where(at, 0.0)
        made[name] = float(value) if isinstance(value, (int, float)) else value
    return made


def size_of_terms(theirs: Result, given: Batch) -> float:
    """Return how large the terms of a loss are together, at least 1: where they cancel, their rounding remains."""
    slope = theirs.get("gradient")
    if not isinstance(slope, Tensor):
        return 1.0
    terms = (slope.double() * given.new.detach().double()).where(given.mask, 0.0)
    return max(1.0, terms[terms.isfinite()].abs().sum().item())


def unequal(ours: Any, theirs: Any, within: float, scale: float = 1.0) -> str | None:
    """Say how two values differ; NaN equals NaN, `within` is relative to the largest finite value or to `scale`."""
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
        near = math.isclose(ours, theirs, rel_tol=within, abs_tol=within * scale)
        same = near or (math.isnan(ours) and math.isnan(theirs))
        return None if same else f"{ours:.9g}, theirs {theirs:.9g}"
    return None if ours == theirs else f"{ours!r}, theirs {theirs!r}"


def draw(**choices: Any) -> Settings:
    """Draw each setting from a tuple of values; any other value is the setting itself."""

    def made(rng: Random) -> dict[str, Any]:
        return {name: rng.choice(values) if isinstance(values, tuple) else values for name, values in choices.items()}

    return made


def none(rng: Random) -> dict[str, Any]:
    """Draw no settings: both sides use their defaults."""
    return {}


def both(*drawn: Settings) -> Settings:
    """Draw the settings of several."""
    return lambda rng: {key: value for draw in drawn for key, value in draw(rng).items()}


def of_loss(run: Callable[..., Tensor]) -> Side:
    """Make the side of a row of a function that returns a loss: its value and its gradient."""

    def side(given: Batch, settings: dict[str, Any]) -> Result:
        own = given.trains()
        return loss_and_gradient(run(own, **settings), own)

    return side


def preset(name: str, place: str, run: Callable[..., Result], settings: Settings = none, **more: Any) -> Row:
    """Compare a preset.

    Args:
        name: "framework.preset".
        place: File and function of the framework.
        run: Runs it on a batch and the settings, and returns "weights" [B, T], "mask" [B, T], or both. Weights are
            compared where `mask`, or the batch's own mask, is set.
        settings: Draws arguments of the preset.
        **more: Further attributes of the row.
    """

    def ours(given: Batch, drawn: dict[str, Any]) -> Result:
        return corrected(given, rc.spec(name, **drawn))

    return Row("preset", name, place, ours, lambda given, drawn: run(given, **drawn), settings, **more)


def corrected(given: Batch, spec: rc.Spec) -> Result:
    """Return this package's weights and mask."""
    batch = rc.Batch(mask=given.mask, turns="runs" if spec.measures_turns else None)
    out = rc.correct(given.old, given.rollout, batch, spec=spec, advantages=given.advantages, backend=BACKEND.get())
    return {"mask": out.mask, "weights": out.weights}


def recipe(name: str, place: str, run: Callable[..., Tensor], settings: Settings = none, **more: Any) -> Row:
    """Compare a recipe: the loss and its gradient."""
    from rollout_corr.frameworks.shared.lookup import every_recipe

    needs = every_recipe()[name].needs
    fields = {"old_logp": "old", "rollout_logp": "rollout", "ref_logp": "ref"}

    def ours(given: Batch, **drawn: Any) -> Tensor:
        made = rc.recipe(name, **drawn)
        policies = {argument: getattr(given, fields[argument]) for argument in needs}
        policies.pop("ref_logp", None)
        if made.loss.kl is not None:
            policies["ref_logp"] = given.ref
        if (spec := made.spec) is not None and (spec.weight or any("rollout" in c.of for c in spec.criteria)):
            policies["rollout_logp"] = given.rollout
        return loss_of(made, given, **policies)

    return Row("recipe", name, place, of_loss(ours), of_loss(run), settings, **more)


def loss_of(made: rc.Recipe, given: Batch, mask: Tensor | None = None, **policies: Tensor | None) -> Tensor:
    """Return this package's loss of a recipe."""
    batch = rc.Batch(mask=given.mask if mask is None else mask, **made.batch)
    advantages = given.advantages
    return rc.policy_loss(given.new, advantages, batch, made.loss, spec=made.spec, **policies).value


def configuration(
    framework: str,
    place: str,
    run: Callable[..., Tensor],
    settings: Settings,
    hold: Callable[[dict[str, Any]], object] = lambda drawn: drawn,
    old: Callable[[Batch, dict[str, Any]], Tensor | None] = lambda given, drawn: given.old,
    **more: Any,
) -> Row:
    """Compare a reader: the loss that it makes of a configuration, and its gradient.

    Args:
        framework: The name that `rc.recipe` takes.
        place: File and function of the framework.
        run: Returns the framework's loss of a batch and the settings.
        settings: Draws a configuration.
        hold: Puts the settings into what users of the framework have: a dataclass, a namespace, a larger mapping.
        old: Chooses the log-probs that users of such a configuration pass as `old_logp`; None: none.
        **more: Further attributes of the row.
    """

    def ours(given: Batch, **drawn: Any) -> Tensor:
        made = rc.recipe(framework, hold(drawn))
        reference = None if made.loss.kl is None else given.ref
        return loss_of(made, given, old_logp=old(given, drawn), rollout_logp=given.rollout, ref_logp=reference)

    return Row("configuration", framework, place, of_loss(ours), of_loss(run), settings, **more)


def spec_of(framework: str, place: str, run: Side, settings: Settings, which: str = "", **more: Any) -> Row:
    """Compare a reader: the weights and the mask of the Spec that it makes of a configuration."""

    def ours(given: Batch, drawn: dict[str, Any]) -> Result:
        return corrected(given, rc.spec(framework, drawn))

    return Row("configuration", f"{framework}.config{which}", place, ours, run, settings, **more)


def report(
    name: str, place: str, spec: Callable[[dict[str, Any]], rc.Spec], run: Side, settings: Settings, **more: Any
) -> Row:
    """Compare a framework's metrics under its own keys."""

    def ours(given: Batch, drawn: dict[str, Any]) -> Result:
        batch = rc.Batch(mask=given.mask)
        return rc.correct(given.old, given.rollout, batch, spec=spec(drawn), backend=BACKEND.get()).metrics(name)

    return Row("report", name, place, ours, run, settings, **more)


def loss_and_gradient(value: Tensor, given: Batch) -> Result:
    """Return the loss as a float and d(loss)/d(new) where the mask is set."""
    slope = None
    if value.requires_grad:
        (slope,) = torch.autograd.grad(value, given.new, allow_unused=True)
    slope = torch.zeros_like(given.new) if slope is None else slope
    return {"loss": float(value.detach()), "gradient": slope.where(given.mask, 0.0)}
