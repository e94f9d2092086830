"""Apply every framework's spec and a grid of thresholds to one dump: how much each keeps, its bias and its variance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..api.correct import correct
from ..api.selection import QUANTITIES, Selected, Selection, by_name, sums_of
from ..api.suggest import Sequences, Suggestion, suggested
from ..backends.given import Batch, KeptMass
from ..definition.sequences import Packed
from ..frameworks.shared import lookup
from ..frameworks.shared.nearest import nearest
from ..metrics.limits import CHANCE_SUM
from ..specs.choices import Reduce
from ..specs.correction import Criterion, Spec, Weight
from .doctor.cause import Finding
from .doctor.diagnosis import diagnose
from .measure.measurement import Measurement
from .read.chunk import Chunk, ValidTokens
from .read.dump import Source
from .remaining_bias import RemainingBias

# Bounds of ratios: those of tokens and products are far from 1, geometric means are close to it.
UPPERS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
NEAR_ONE = (1.0003, 1.001, 1.003, 1.01, 1.03, 1.1)
LOWERS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)

# The share of the sequences that the suggested bounds keep, and the sequences that they are measured on at most: 10 MB.
KEEP, MOST_SUGGESTED = 0.99, 262_144


@dataclass(frozen=True)
class Setting:
    """A correction that is tried."""

    name: str  # name of the framework's spec, or a description
    spec: Spec
    family: str = ""  # what it shares with its neighbors in the grid; empty for a framework's spec
    same: tuple[str, ...] = ()  # further names of an equal Spec
    # The settings of the framework that was asked for; None: it was not asked for, or cannot say it.
    config: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def target(self) -> str:
        """Name of the exact ratio that its weights stand for."""
        return "product" if self.spec.weight is not None and self.spec.weight.is_product else "token"

    @property
    def products(self) -> bool:
        """True if a product over the sequence decides."""
        weighted = self.spec.weight is not None and self.spec.weight.is_product
        return weighted or any(c.statistic.one_limb and c.reduce == "sum" for c in self.spec.criteria)


@dataclass(frozen=True)
class SettingResult:
    """The result of a setting on a dump. Rejected tokens have weight 0; without a weight, kept tokens have weight 1."""

    setting: Setting
    tokens_kept: float  # fraction of the valid trained tokens
    sequences_kept: float  # fraction of the non-empty sequences with a token that trains
    weight_mean: float  # mean weight of valid tokens, rejected ones included
    ess: float  # (sum w)^2 / (n sum w^2) of those weights
    # The bias that remains in a weighted mean, see `RemainingBias`, compared with the unbounded ratio: exp(D) of
    # the token, or exp(sum of D) of its sequence under a product weight.
    bias: float
    bias_low: float  # lower end of its interval of 95 %
    bias_high: float  # upper end
    variance: float  # variance of w over its squared mean: 1 / ess - 1
    # A product decides, and over these sequences it is chance: the mean |sum of D| is above 1 nat.
    too_long: bool = False
    # Length, and where the dump has them reward and advantage, of what trains and of what does not.
    selected: tuple[Selected, ...] = ()

    def worth(self, sequences: float) -> float:
        """Return the share of a sample without mismatch that gives the same error of a mean over so many sequences."""
        return 1.0 / (1.0 + self.variance + max(1.0, sequences) * self.bias**2)


def grid() -> list[Setting]:
    """List weights with a bound, rejections and vetoes over their thresholds."""

    def rejecting(reduce: Reduce, lower: float, upper: float | None = None) -> Spec:
        return Spec(None, (Criterion("ratio", over="sequence", reduce=reduce, lower=lower, upper=upper),))

    # A prefix's weight has the bias of the sequence up to it, which is not measured here.
    families: tuple[tuple[str, str, Callable[[float], Spec], tuple[float, ...]], ...] = (
        ("token weight, truncated", "token weight <= ", lambda x: Spec(Weight.token(upper=x)), UPPERS),
        ("product weight, truncated", "product weight <= ", lambda x: Spec(Weight.product(upper=x)), UPPERS),
        ("geometric weight, truncated", "geometric weight <= ", lambda x: Spec(Weight.geometric(upper=x)), NEAR_ONE),
        (
            "token weight, 0 outside",
            "token weight, 0 beyond ",
            lambda x: Spec(Weight.token(lower=1.0 / x, upper=x, outside="zero")),
            UPPERS,
        ),
        ("geometric rejection", "geometric rejection ", lambda x: rejecting("mean", 1.0 / x, x), NEAR_ONE),
        ("product rejection", "product rejection ", lambda x: rejecting("sum", 1.0 / x, x), UPPERS),
        ("veto", "veto below ", lambda x: rejecting("min", x), LOWERS),
    )
    return [Setting(f"{name}{x:g}", spec(x), family) for family, name, spec, bounds in families for x in bounds]


def named_settings(has_advantages: bool) -> tuple[list[Setting], dict[str, str]]:
    """List the specs by name that can be tried, equal ones together, and the reason why each of the others cannot."""
    found: dict[Spec, list[str]] = {}
    left_out: dict[str, str] = {}
    for name in lookup.spec_names():
        spec = lookup.named(name)
        against = (
            (
                any(c.of != "train/rollout" for c in spec.criteria),
                "it compares with the policy being trained, which only policy_loss has",
            ),
            (any(c.statistic.source == "caller" for c in spec.criteria), "it needs an external tensor"),
            (spec.reads_versions, "it needs versions, which are not read from a dump"),
            (spec.measures_turns, "it needs turns, which are not read from a dump"),
            (spec.reads_entropy, "it needs entropies, which are not read from a dump"),
            (spec.needs_groups, "it needs groups, which are not read from a dump"),
            (not has_advantages and _selects(spec), "it needs advantages, and the dump has none"),
        )
        why = next((reason for holds, reason in against if holds), None)
        if why is None:
            found.setdefault(spec, []).append(name)
        else:
            left_out[name] = why
    for names in found.values():
        # A correction of decoupled mode is first told by its name there.
        names.sort(key=lambda name: "bypass" in name)
    return [Setting(names[0], spec, same=tuple(names[1:])) for spec, names in found.items()], left_out


def settings_in(framework: str, tried: Iterable[Setting], left_out: dict[str, str]) -> list[Setting]:
    """Return the settings that a framework can say, in its manner, with what to write there.

    Of other frameworks' specs only those stay that are equal to one of its own or of the grid. The reason why a setting
    cannot be said is added to `left_out`.
    """
    found: dict[str, Setting] = {}
    for setting in tried:
        own = [name for name in (setting.name, *setting.same) if name.startswith(f"{framework}.")]
        if own:
            setting = replace(setting, name=own[0], same=tuple(own[1:]))
        elif not setting.family and setting.spec != Spec():
            continue
        try:
            spec, config = nearest(setting.spec, framework)
        except ValueError as error:
            left_out[setting.name] = f"it cannot be said in {framework}: {error}"
            continue
        before = found.get(repr(config))
        if before is None:
            found[repr(config)] = replace(setting, spec=spec, config=config)
        else:
            found[repr(config)] = replace(before, same=(*before.same, setting.name, *setting.same))
    return [*found.values()]


class WhatIf:
    """All settings over a dump, chunk by chunk, and what the doctor finds in the same chunks.

    Batch-normalized weights are divided by the mean of their chunk. Bounds that the batch decides are those of a chunk
    too.

    Args:
        has_advantages: Also try specs that look at advantages.
        framework: Try only what this framework can say; None: the specs of all frameworks.
    """

    def __init__(self, has_advantages: bool, framework: str | None = None) -> None:
        self.framework = framework
        tried, self.left_out = named_settings(has_advantages)
        none = Setting("no correction", Spec())
        self.settings = [none, *tried, *grid()]
        if framework is not None:
            self.left_out = {name: why for name, why in self.left_out.items() if name.startswith(f"{framework}.")}
            self.settings = settings_in(framework, self.settings, self.left_out)
            if self.settings[:1] != [none] and none.name in self.left_out:
                self.settings = [none, *self.settings]
        self.measured = Measurement()
        count = len(self.settings)
        # Per setting: tokens, kept tokens, sequences, kept sequences, w, w^2.
        self._tallies = torch.zeros(count, 6, dtype=torch.float64)
        self._biases = RemainingBias(count, ("token", "product"))
        self._selected = torch.zeros(count, len(QUANTITIES), 6, dtype=torch.float64)
        # |sum of D| of sequences, and their number.
        self._sums = torch.zeros(2, dtype=torch.float64)
        # Five numbers of each of the first sequences, for the suggestion.
        self._parts: list[Sequences] = []
        self._held = 0

    def adding(self, chunk: Chunk) -> Iterator[int]:
        """Apply all settings to a chunk; yield their number so far after every one."""
        tokens = ValidTokens.of(chunk)
        lengths, some = tokens.lengths, tokens.lengths > 0
        rejoined = Packed.of_lengths(lengths, tokens.d.numel())
        totals = rejoined.sum(tokens.d)
        self._sums += torch.tensor([float(totals.abs().sum()), float(some.sum())])
        self._hold(tokens)
        ratios = {"token": tokens.d.double().clamp(-20.0, 20.0).exp()}
        ratios["product"] = rejoined.spread(totals.clamp(-20.0, 20.0).exp())
        functions = self._biases.begin(tokens, ratios)
        quantities = _quantities(tokens)
        for i, setting in enumerate(self.settings):
            kept, weights = _applied(setting.spec, tokens, rejoined.offsets)
            left = torch.bincount(tokens.owner[kept], minlength=lengths.shape[0])
            counts = kept.numel(), kept.sum(), some.sum(), (left > 0).sum(), weights.sum(), weights.square().sum()
            self._tallies[i] += torch.tensor([float(x) for x in counts]).double()
            self._biases.add(i, functions, weights)
            self._selected[i] += sums_of(left.double() / lengths.clamp(min=1), quantities)
            yield i + 1

    def _hold(self, tokens: ValidTokens) -> None:
        d, owner = tokens.d[tokens.finite].double(), tokens.owner[tokens.finite]
        found = Sequences.by_owner(d, owner, tokens.lengths.shape[0])
        found = found.where(torch.arange(found.n.shape[0]) < MOST_SUGGESTED - self._held)
        self._parts += [found] if found.n.numel() else []
        self._held += found.n.shape[0]

    def suggestion(self) -> Suggestion | None:
        """Return what `rollout_corr.suggest` says of these sequences; None without a token."""
        return suggested(Sequences.joined(self._parts), KEEP, diagnosed=True) if self._parts else None

    @property
    def sequences(self) -> float:
        """Number of sequences with a valid token."""
        return float(self._sums[1])

    def findings(self) -> list[Finding]:
        """Return what the doctor finds, the gravest first."""
        return diagnose(self.measured)

    def results(self) -> list[SettingResult]:
        """Return the result of every setting."""
        total, sequences = self._sums.tolist()
        found = []
        for i, (setting, tally) in enumerate(zip(self.settings, self._tallies.tolist(), strict=True)):
            n, kept, count, kept_count, w, w2 = tally
            ess = w * w / (n * w2) if w2 else 0.0
            sums = self._selected[i]
            # What the dump has no value of has no sums.
            known = [q for q, values in enumerate(sums[:, 0].tolist()) if values]
            result = SettingResult(
                setting,
                kept / n if n else 0.0,
                kept_count / count if count else 0.0,
                w / n if n else 0.0,
                ess,
                *self._biases.bias(i, setting.target),
                variance=max(0.0, 1.0 / ess - 1.0) if ess else math.inf,
                too_long=setting.products and total > CHANCE_SUM * sequences,
                selected=Selection(tuple(QUANTITIES[q] for q in known), sums[known]).compared(),
            )
            found.append(result)
        return found


def _selects(spec: Spec) -> bool:
    """Return whether a Spec looks at advantages."""
    return any(criterion.when != "any" for criterion in spec.criteria)


def _quantities(tokens: ValidTokens) -> Tensor:
    """Return length, reward and advantage of the sequences of a chunk, [Q, S] float64; NaN where there is none.

    The reward is the value that all tokens of a sequence share, or the sum of rewards of tokens.
    """
    lengths, owner = tokens.lengths, tokens.owner

    def over_sequence(name: str) -> tuple[Tensor, Tensor]:
        values = tokens.column(name)
        if values is None or not values.numel():
            return (torch.full(lengths.shape, math.nan, dtype=torch.float64),) * 2
        total = torch.bincount(owner, values.double(), minlength=lengths.shape[0])
        first = values[(lengths.cumsum(0) - lengths).clamp(max=owner.shape[0] - 1)].double()
        shared = torch.bincount(owner[values == first[owner]], minlength=lengths.shape[0]) == lengths
        return first.where(shared, total), total / lengths

    values = by_name(lengths, rewards=over_sequence("rewards")[0], advantages=over_sequence("advantages")[1])
    return torch.stack([*values.values()])


def _applied(spec: Spec, tokens: ValidTokens, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Apply a setting to the M valid tokens of a chunk; return what is kept, [M] bool, and the weights, [M] float64."""
    # Only valid tokens are passed, so that masked ones are skipped once and not by every setting.
    log_mass = tokens.log_mass
    out = correct(
        tokens.train,
        tokens.rollout if log_mass is None else tokens.rollout - log_mass,
        Batch(cu_seqlens=offsets, kept_mass=None if log_mass is None else KeptMass(log_mass)),
        spec=spec,
        advantages=tokens.column("advantages") if _selects(spec) else None,
    )
    if out.weights is None:
        return out.mask, out.mask.double()
    # Rejection by "zero" returns the mask unchanged.
    kept = out.mask if spec.rejected == "mask" else out.mask & (out.weights != 0)
    return kept, out.weights.double().where(kept, 0.0)


def try_all(
    source: Source, each: Callable[[float, str], object] = lambda done, doing: None, framework: str | None = None
) -> WhatIf:
    """Read a dump once, apply every setting to it, and measure it as the doctor does.

    Args:
        source: The dump.
        each: Called after every setting of every chunk, with how much is done, 0 to 1, and what was tried.
        framework: Try only what this framework can say.
    """
    found: WhatIf | None = None
    begun = 0.0
    for chunk in source.chunks():
        found = found or WhatIf("advantages" in chunk.columns, framework)
        found.measured.add(chunk)
        # A chunk takes minutes, and reading it took none of them.
        count, here = len(found.settings), source.progress - begun
        # Records without advantages select nothing, where other records have some.
        if any(_selects(setting.spec) for setting in found.settings) or "advantages" in chunk.columns:
            given = chunk.columns.get("advantages", torch.zeros_like(chunk.train, dtype=torch.float32))
            chunk.columns["advantages"] = given.nan_to_num(0.0)
        for done in found.adding(chunk):
            each(begun + here * done / count, f"setting {done} of {count}")
        begun = source.progress
        found.measured.label_names = source.label_names
    assert found is not None  # a dump without sequences raises
    return found
