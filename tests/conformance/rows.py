"""A row: one thing of this package next to one function of a framework, and how their results are compared."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

import rollout_corr as rc
from conformance.batches import KINDS, Batch, batch

DOCS = Path(__file__).resolve().parents[2] / "docs"
Result = Mapping[str, Any]
Settings = Callable[[Random], dict[str, Any]]
Side = Callable[[Batch, dict[str, Any]], Result]
Kind = Literal["preset", "recipe", "drop-in", "report", "configuration"]

# The backend that presets and reports run on.
BACKEND: ContextVar[Any] = ContextVar("backend", default="auto")
# This package's results by row, batch and settings: a second version of a framework does not pay for them again.
# None: nothing is kept. A campaign sets it, for one framework.
_kept: dict[tuple[str, ...], Result] | None = None


def keep_results() -> None:
    """Compute this package's side of a case once for all versions of a framework, from here on in this process."""
    global _kept
    _kept = {}


@cache
def words_of(page: str) -> str:
    """Read a page, differences.md here or one of docs/, on one line."""
    here = Path(__file__).with_name(page)
    return " ".join((here if here.exists() else DOCS / page).read_text(encoding="utf-8").split())


Shown = Callable[[Any, Any, Batch], bool]


@dataclass(frozen=True)
class Declared:
    """A difference that the documentation states.

    Attributes:
        name: A few words for the table.
        page: The page that states it: differences.md, or one of docs/.
        says: Words of that page; a test looks for them.
        when: Tells of a batch and settings whether the difference can appear there.
        keys: The results that may differ; none named: each of them.
        shows: Tells of the framework's value of such a result (None: it has none), ours and the batch whether they
            differ as the page says.
    """

    name: str
    page: str
    says: str
    when: Callable[[Batch, dict[str, Any]], bool]
    keys: tuple[str, ...] = ()
    shows: Shown = lambda theirs, ours, given: True

    def explains(self, key: str, given: Batch, settings: dict[str, Any], theirs: Any, ours: Any) -> bool:
        """Tell whether this is why a result differs."""
        if (self.keys and key not in self.keys) or not self.when(given, settings):
            return False
        # What is declared of a bad value holds for the rows that have one.
        return self.shows(theirs, ours, given) and (self.when is not NONFINITE or in_clean_rows(theirs, ours, given))

    def is_documented(self) -> bool:
        """Tell whether the page has the words."""
        return " ".join(self.says.split()) in words_of(self.page)


def among(*kinds: str) -> Callable[[Batch, dict[str, Any]], bool]:
    """Make the condition that a batch is of some kinds."""
    return lambda given, settings: given.kind in kinds


def beyond(clamp: float, first: str, second: str, sums: bool = False) -> Callable[[Batch, dict[str, Any]], bool]:
    """Make the condition that the log-ratio of two policies at a token, or of a sequence, lies beyond a clamp."""

    def when(given: Batch, settings: dict[str, Any]) -> bool:
        d = (getattr(given, first).detach() - getattr(given, second)).double().where(given.mask, 0.0)
        return bool((d.abs() > clamp).any() or (sums and (d.sum(1).abs() > clamp).any()))

    return when


def no_number(theirs: Any, ours: Any, given: Batch) -> bool:
    """Tell whether the framework has no number where ours differs: it raised, or it returned NaN or infinity."""
    if not isinstance(theirs, (float, Tensor)) or not isinstance(ours, (float, Tensor)):
        return theirs is None or ours is None
    a, b = torch.as_tensor(theirs).double(), torch.as_tensor(ours).double()
    return bool((~a.isfinite() | torch.isclose(a, b, rtol=1e-4, atol=1e-9)).all())


def where_ours_trains(theirs: Any, ours: Any, given: Batch) -> bool:
    """Tell whether a gradient differs only at tokens that have none here; a loss may differ."""
    if not isinstance(theirs, Tensor):
        return True
    at = ours != 0
    return torch.allclose(ours[at].double(), theirs[at].double(), rtol=1e-4, atol=1e-9)


def in_clean_rows(theirs: Any, ours: Any, given: Batch) -> bool:
    """Tell whether rows without a bad value agree: masks and weights as they are, gradients but for one divisor."""
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor) or theirs.shape != given.mask.shape:
        return True
    # Where bad values stand behind the mask, a row that has any is not clean: sums over rows multiply them by 0.
    excused = ~given.mask if given.kind != "nan_behind_mask" else torch.zeros_like(given.mask)
    clean = torch.stack([x.isfinite() | excused for x in (given.new, given.old, given.rollout, given.ref)])
    a, b = (x.double()[clean.all(0).all(1)] for x in (theirs, ours))
    at = a.isfinite() & b.isfinite()
    if not theirs.is_floating_point():
        return bool((a == b).all())
    a, b = a[at], b[at]
    by = (a * b).sum() / (b * b).sum().clamp(min=1e-300)
    scale = a.abs().max().item() if a.numel() else 0.0
    return any(torch.allclose(a, c * b, rtol=1e-4, atol=1e-5 * scale) for c in (1.0, by))


NONFINITE = among("infinite", "nan_in_front")
BF16 = Declared("subtract in bf16", "differences.md", "subtract in bf16", among("bf16"))
PROPAGATES = Declared(
    "non-finite log-probs go on into the loss there", "differences.md", "let the NaN through into the loss", NONFINITE
)
# What verl, SkyRL and xtuner do.
REJECTS = Declared(
    "a non-finite token rejects its sequence here",
    "differences.md",
    "Most frameworks let the NaN through into the loss (verl's weights, xtuner, SkyRL",
    NONFINITE,
)
# What verl and SkyRL do.
LEFT_OUT = Declared(
    "a token that is not finite is left out here",
    "differences.md",
    "NaN or infinity at a valid token; with a sum over rows at a masked one too (verl, SkyRL)",
    among("infinite", "nan_in_front", "nan_behind_mask"),
    shows=in_clean_rows,
)
FAR = (
    beyond(20.0, "new", "ref"),
    *(beyond(20.0, *pair, sums=True) for pair in (("old", "rollout"), ("new", "rollout"), ("new", "old"))),
)
CLAMP = Declared(
    "exponents beyond +-20",
    "differences.md",
    "the exponent is then clamped to +-20",
    lambda given, settings: any(far(given, settings) for far in FAR),
)


NO_LOWER_CLAMP = Declared(
    "GSPO without a lower clamp",
    "losses.md",
    "it does not clamp the log-ratio from below; this package clamps it at -10",
    lambda given, settings: bool(
        ((given.new - given.old).where(given.mask, 0.0).sum(1) < -10 * given.mask.sum(1)).any()
    ),
)


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


def compared(row: Row, cases: int, seed: int = 0) -> Tally:
    """Run a row on `cases` batches, which go around its kinds."""
    from lab.planted.telling import aimed_batch

    tally = Tally(row.title)
    for number in range(cases):
        kind = row.kinds[number % len(row.kinds)]
        settings = row.settings(Random(f"settings-{seed + number}"))
        given = aimed_batch(row, settings, seed + number) if kind == "aimed" else batch(kind, seed + number)
        tally.add(row, given, settings, expected(row, given, settings))
    return tally


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
    found = _once(row, given, {name: value for name, value in settings.items() if name not in left})
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


def _once(row: Row, given: Batch, settings: dict[str, Any]) -> Result:
    # A drop-in may depend on the version.
    if _kept is None or row.kind == "drop-in":
        return row.ours(given, dict(settings))
    key = row.key, given.kind, str(given.seed), repr(settings)
    if key not in _kept:
        _kept[key] = row.ours(given, dict(settings))
    return _kept[key]


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


def held(name: str, fields: dict[str, Any]) -> object:
    """Put a configuration into one of the things that users hold it in."""
    more = {"num_generations": 8} if name == "a larger dict" else {}
    return {"Namespace": Namespace, "SimpleNamespace": SimpleNamespace}.get(name, dict)(**fields, **more)


HOLDERS = ("dict", "a larger dict", "Namespace", "SimpleNamespace")


def loss_and_gradient(value: Tensor, given: Batch) -> Result:
    """Return the loss as a float and d(loss)/d(new) where the mask is set."""
    slope = None
    if value.requires_grad:
        (slope,) = torch.autograd.grad(value, given.new, allow_unused=True)
    slope = torch.zeros_like(given.new) if slope is None else slope
    return {"loss": float(value.detach()), "gradient": slope.where(given.mask, 0.0)}
