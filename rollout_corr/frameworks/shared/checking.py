"""Mistakes in the configuration of a run, before it starts: `rc.check_config` and `rollout-corr check`.

A framework says in a table, `CHECKS`, which of its settings matter and what goes wrong with them (a folder in its
`mistakes.py`, a file in itself). This module finds the settings, asks the framework's reader for the Spec, and looks
at what all frameworks have in common. What a script leaves open is UNKNOWN, and no rule fires on it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

from ...metrics.limits import BY_KEY
from ...specs.correction import Criterion, Spec, Weight
from . import lookup
from .run_files import SCRIPTS, UNKNOWN, Setting, Settings, UnreadableRun, nested, paths_and_words, settings_in, text_of
from .settings import NoEquivalent, heard, misspelt, rows_in
from .settings import Setting as Row

if TYPE_CHECKING:
    from .names import FrameworkName

# Settings that a reader refuses one after the other, and characters of what it says.
MOST_REFUSED, MOST = 8, 4000

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class ConfigProblem:
    """One mistake in a configuration.

    Attributes:
        key: The setting, by its whole name.
        message: What is wrong with it.
        fix: What to write instead; "": the message says it.
        severity: "error": the run does not do what the setting says. "warning": it may not.
        file: The file; "" where the configuration was no file.
        line: The line of the setting; 0 where it is not written there.
        causes: The findings of `rc.doctor` that it makes.
    """

    key: str
    message: str
    fix: str = ""
    severity: Severity = "error"
    file: str = ""
    line: int = 0
    causes: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """`file:line`, as far as there is one."""
        return f"{self.file}:{self.line}" if self.line else self.file

    def __str__(self) -> str:
        """One line, as compilers write it."""
        fix = f"; {self.fix}" if self.fix else ""
        key = f"{self.key}: " if self.key else ""
        return f"{self.place}{': ' if self.place else ''}{self.severity}: {key}{self.message}{fix}"


@dataclass
class Run:
    """The settings that matter, by their whole names, and the Spec that the reader makes of them, if it makes one."""

    settings: Settings
    spec: Spec | None
    compared: bool = False  # both log-probs are there anyway
    refused: bool = False  # the reader refused a setting, so the Spec is not all that was meant
    whole: bool = True  # a setting is given by its whole name
    rows: Mapping[str, Row] = field(default_factory=dict)  # of the framework's table

    def find(self, key: str) -> Setting | None:
        """Return a setting by its whole name."""
        return self.settings.get(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a setting."""
        found = self.find(key)
        return default if found is None else found.value

    def has(self, key: str) -> bool:
        """Return whether a setting is given with a value that is known and is not null."""
        return self.get(key) is not None and self.get(key) is not UNKNOWN

    def is_(self, key: str, *values: Any, default: Any = None) -> bool:
        """Return whether a setting is known and has one of these values."""
        value = self.get(key, default)
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)

    def off(self, key: str, default: Any = None) -> bool:
        """Return whether a setting is known to be false or null."""
        return self.is_(key, None, False, default=default)

    def on(self, key: str, default: Any = None) -> bool:
        """Return whether a setting is known to be on: neither false nor null."""
        return self.get(key, default) is not UNKNOWN and not self.off(key, default)

    def number(self, key: str, default: float = math.nan) -> float:
        """Return a setting that is a number; NaN, with which nothing compares, where it is none."""
        value = self.get(key, default)
        try:
            return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
        except OverflowError:  # an integer that no float holds
            return math.nan

    def given(self, key: str, usual: bool = True) -> bool:
        """Return whether a setting is given and not false; with `usual`, nor with the default of its row."""
        default = next((row.default for name, row in self.rows.items() if f".{key}".endswith(f".{name}")), None)
        return self.has(key) and not self.is_(key, False, default if usual else None)

    @property
    def corrects(self) -> bool:
        """Whether there is a correction."""
        return self.refused or (self.spec is not None and self.spec.acts)


@dataclass(frozen=True)
class Rule:
    """One thing that goes wrong in a framework: the setting to blame, by its whole name, and when it is wrong.

    The message says what is wrong, with {value} for what is given.
    """

    key: str
    wrong: Callable[[Run], bool]
    message: str
    fix: str
    severity: Severity = "error"


def without(
    needed: str,
    *keys: str,
    default: Any = None,
    usual: bool = False,
    unless: Callable[[Run], bool] = lambda run: False,
) -> tuple[Rule, ...]:
    """Rules for settings that do nothing while another one is off; `usual`: their defaults may stand there anyway."""
    last = needed.rpartition(".")[2]

    def idle(key: str) -> Callable[[Run], bool]:
        return lambda run: run.given(key, usual) and run.off(needed, default) and not unless(run)

    message, fix = f"{{value}} does nothing while {last} is off", f"set {last}, or leave this out"
    return tuple(Rule(key, idle(key), message, fix) for key in keys)


def roles(block: str = "", names: str = "", **others: str) -> dict[str, str]:
    """Settings of sampling by their roles: those in a block that are called as their roles are, and others.

    "logprobs" has the engine return log-probs (without one it always does), "mode" is vLLM's `logprobs_mode`, "length"
    the most tokens of an answer, "trainer_temperature" the trainer's where that is a separate one. "top_p", "top_k" and
    "min_p" stand where the engine's log-probs are over what they keep and the trainer's are not, "repetition_penalty"
    where the engine's are after it.
    """
    return {name: f"{block}{name}" for name in names.split()} | others


@dataclass(frozen=True)
class Checks:
    """The checks of one framework's configurations."""

    keys: tuple[str, ...] = ()  # the settings that the framework's reader is given, by their whole names
    older: tuple[str, ...] = ()  # old places of settings, by whole names: the reader says what to write instead
    context: tuple[str, ...] = ()  # other settings that rules look at
    alike: tuple[str, ...] = ()  # other settings of the framework, by their last or whole names, which are like these
    closed: tuple[str, ...] = ()  # blocks in which every key is known; "" is the block that is given alone
    launchers: str = ""  # a pattern of what only this framework's scripts and TOML have: commands, modules, tables
    roots: tuple[str, ...] = ()  # beginnings of names that are no part of them: `GRPOConfig.` in a Python file
    logprobs_on_since: str = ""  # the release in which the engine's log-probs became the default; "": always
    # When the run needs them; by default, when it corrects.
    uses_logprobs: Callable[[Run], bool] = lambda run: run.corrects
    roles: Mapping[str, str] = field(default_factory=dict)  # what `roles` returns
    mode: str = "processed_logprobs"  # the default of the setting "mode"
    # The settings of the bounds: of "weight", of a criterion by its label, else of "criteria".
    bounds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()  # what else goes wrong

    @property
    def every(self) -> tuple[str, ...]:
        """All settings that matter."""
        named = (*self.keys, *self.older, *self.context, *self.roles.values())
        return tuple(dict.fromkeys(named))

    def of(self, role: str) -> str:
        """The setting of a role; "": there is none."""
        return self.roles.get(role, "")


def checks_of(framework: str) -> Checks:
    """The table of a framework; one without a table has its reader, and what is common to all."""
    module = lookup.part(framework)
    if lookup.has(framework, "mistakes"):
        module = import_module(f"{module.__package__}.mistakes")
    found: Checks = getattr(module, "CHECKS", Checks())
    return found


def check_config(framework: str, config: object) -> list[ConfigProblem]:
    """Name the mistakes in a run's configuration before it starts: which key, which line, and what to write.

    Args:
        framework: Its name, such as "verl": one of those that `rc.spec` reads a configuration of.
        config: The path of a file (YAML, JSON, TOML, Python, a shell script), the words of a command line as a list,
            or the configuration itself: a mapping or any config object. A list may begin with paths.

    Returns:
        The mistakes, errors first; an empty list where there is none that is known.

    Raises:
        ValueError: An unknown framework, or a file that cannot be read.
        TypeError: A configuration without fields.
    """
    if not lookup.is_readable(framework):
        raise ValueError(f"check_config: framework: expected one of {lookup.readable()}, got {framework!r}")
    return mistakes_in(framework, settings_in(config))


def mistakes_beside(framework: str | None, file: Path) -> list[ConfigProblem]:
    """Name the mistakes in a configuration saved with dumps, whose log-probs are compared whatever it corrects.

    A framework that is None is recognized by the settings; one without a reader has no rules.
    """
    try:
        settings = settings_in(file)
        framework = recognized(settings_of_each(settings), file) if framework is None else framework
        known = framework is not None and lookup.is_readable(framework)
        return mistakes_in(framework, settings, compared=True) if framework is not None and known else []
    except UnreadableRun as error:
        return [ConfigProblem("", str(error), severity="warning")]


def recognized(counts: Mapping[str, int], config: object = None) -> str | None:
    """Recognize the framework of a configuration: by what launches it, or else as the one with most settings there.

    None: it is of none, or of several. Flags that slime and miles share are slime's, and those of axolotl that stand
    without a block are TRL's.
    """
    if launched := launched_by(config):
        return launched
    most = max(counts.values())
    alike = [name for name, count in counts.items() if most and count == most]
    shared: dict[tuple[str, ...], str | None] = {("miles", "slime"): "slime", ("axolotl", "trl"): "trl"}
    return shared.get(tuple(sorted(alike)), alike[0] if len(alike) == 1 else None)


def launched_by(config: object) -> str | None:
    """Find the framework whose launcher a script, a command line or TOML names; None: of none, or of several."""
    paths, words = paths_and_words(config if isinstance(config, (list, tuple)) else [])
    paths += [Path(config)] if isinstance(config, (str, Path)) else []
    named = [path for path in paths if path.suffix.lower() in (*SCRIPTS, ".toml")]
    texts = [re.sub(r"^[ \t]*#.*", "", text_of(path), flags=re.MULTILINE) for path in named]
    patterns = {name: checks_of(name).launchers for name in lookup.readable()}
    text = "\n".join([*texts, " ".join(words)])
    found = [name for name, pattern in patterns.items() if pattern and re.search(pattern, text)]
    return found[0] if len(found) == 1 else None


def settings_of_each(settings: Settings) -> dict[str, int]:
    """Count the settings that matter to each framework that has a table."""
    counts = {}
    for name in lookup.readable():
        checks = checks_of(name)
        if checks.keys:
            counts[name] = len(_that_matter(_in_roots(settings, checks), checks))
    return counts


def mistakes_in(framework: str, settings: Settings, compared: bool = False) -> list[ConfigProblem]:
    """Name the mistakes in settings that were read; `compared`: both log-probs are there whatever is corrected."""
    checks = checks_of(framework)
    every = _in_roots(settings, checks)
    settings = _that_matter(every, checks)
    read = {*checks.keys, *checks.older}
    of_reader = {key: setting for key, setting in settings.items() if key in read or not read}
    spec, problems = _read(framework, of_reader) if of_reader else (None, [])
    refused = any(problem.severity == "error" for problem in problems)
    rows = dict(rows_in(lookup.part(framework).settings({}).rows))
    run = Run(settings, spec, compared, refused, whole=any(key in every for key in settings), rows=rows)
    problems = [*_spelling(every, settings, checks), *problems, *_engine(run, checks), *_bounds(run, checks)]
    problems += _rules(run, checks.rules)
    once = {(problem.key, problem.line): problem for problem in reversed(problems)}
    kept = [problem for problem in dict.fromkeys(problems) if once[problem.key, problem.line] is problem]
    return sorted(kept, key=lambda problem: (problem.severity != "error", problem.file, problem.line))


def _in_roots(settings: Settings, checks: Checks) -> Settings:
    """Take roots off the names; of a Python file only what stands in calls of these, and flags, remains."""
    made: Settings = {}
    for key, setting in settings.items():
        root = next((root for root in checks.roots if f".{root}" in f".{key}"), None)
        if root is not None:
            made[f".{key}".partition(f".{root}")[2]] = setting
        elif not setting.file.endswith(".py") or "." not in key:
            made[key] = setting
    return made


def _that_matter(settings: Settings, checks: Checks) -> Settings:
    """Return the settings that matter by their whole names, also of a block alone or within a larger one."""
    if not checks.keys:
        return settings
    made: Settings = {}
    for whole in checks.every:
        within = whole.split(".")
        alone = [".".join(within[at:]) for at in range(1, len(within))] if whole in checks.keys else []
        key = next((key for key in (whole, *alone) if key in settings), None)
        if key is None and alone:
            key = next((key for key in settings if key.endswith(f".{whole}")), None)
        if key is not None:
            made[whole] = settings[key]
    return made


def _problem(found: Setting | None, key: str, message: str, fix: str, **more: Any) -> ConfigProblem:
    at = found or Setting(None)
    return ConfigProblem(key, message, fix, file=at.file, line=at.line, **more)


# --- the reader, which knows values and old names ---


def _read(framework: str, settings: Settings) -> tuple[Spec | None, list[ConfigProblem]]:
    """Read the Spec, and turn what the reader says into problems; a setting that it refuses is left out then."""
    settings, problems = dict(settings), list[ConfigProblem]()
    for _ in range(MOST_REFUSED):
        blocks = nested((key, setting.value) for key, setting in settings.items())
        with heard() as notices:
            try:
                # An object and no mapping: readers take it for a larger configuration than what they read.
                spec = lookup.spec(cast("FrameworkName", framework), SimpleNamespace(**blocks))
            except NoEquivalent:
                return None, problems
            except (TypeError, ValueError) as error:
                said = str(error).removeprefix(f"spec({framework!r}): ")
                problem = _said_of(getattr(error, "key", ""), getattr(error, "why", said), settings, "error")
                # Once a setting is taken out, others may be refused that fit the one that was meant.
                problems = problems or [problem]
                if settings.pop(problem.key, None) is None:
                    return None, problems
                continue
        texts = ((key, text.removeprefix(f"{framework}: ").removeprefix(f"{key}: ")) for key, text in notices)
        return spec, [*problems, *(_said_of(key, text, settings, "warning") for key, text in texts)]
    return None, problems


def _said_of(key: str, text: str, settings: Settings, severity: Severity) -> ConfigProblem:
    """Turn what the reader says of a setting into a problem; of a text that repeats a value of any length, a part."""
    # The key itself, its last part, or the block that holds it.
    ends = [f".{part}" for part in (key, key.rpartition(".")[2], key.rpartition(".")[0]) if part]
    whole = next((name for end in ends for name in settings if f".{name}".endswith(end)), "")
    message, _, fix = text[:MOST].partition("; ")
    return _problem(settings.get(whole), whole, message, fix, severity=severity)


# --- names ---


def _spelling(every: Settings, settings: Settings, checks: Checks) -> Iterator[ConfigProblem]:
    """Name keys that are nearly one that matters, and keys that matter in another place."""
    found = {id(setting) for setting in settings.values()}
    # Settings of sampling are left out: evaluation has the same names.
    named = [*checks.keys, *filter(None, (checks.of("logprobs"), checks.of("mode")))]
    for key, setting in every.items():
        block, _, last = key.rpartition(".")
        if id(setting) in found or key in checks.alike or last in checks.alike:
            continue
        if any(whole.endswith(f".{key}") for whole in named):
            continue
        places = [whole for whole in named if "_" in last and whole.rpartition(".")[2] == last]
        # Of the same block, which may be given alone.
        parted = [(whole.rpartition(".")[2], whole.rpartition(".")[0]) for whole in named]
        near = [name for name, outer in parted if not block or f".{outer}".endswith(f".{block}")]
        # A comparison of letters takes most of the time, and one that is misspelt differs by two at most.
        near = [name for name in near if abs(len(name) - len(last)) <= 2]
        exact = any(outer == block for _, outer in parted)
        if places and not any(place in settings for place in places):
            yield _problem(setting, key, "nothing reads it in this place", f"write {places[0]}")
        elif not places and (meant := misspelt(last, near, 0.84 if exact else 0.92)):
            yield _problem(setting, key, f"unknown key{meant}", "")
        elif block in checks.closed and (block or Path(setting.file).suffix in ("", ".py")):
            yield _problem(setting, key, "unknown key: one of a newer release?", "", severity="warning")


# --- what the engine returns ---


# What the doctor finds where the engine's log-probs are from before the temperature.
BEFORE_TEMPERATURE = ("temperature", "raw_log_probs", "not_the_sampler")


def _engine(run: Run, checks: Checks) -> Iterator[ConfigProblem]:
    if not (run.compared or checks.uses_logprobs(run)):
        return
    key = checks.of("logprobs")
    if key and run.off(key, True) and not run.compared:
        message = "the correction gets no log-probs of the engine"
        yield _problem(run.find(key), key, message, f"write {key}=true")
    elif checks.logprobs_on_since and run.whole and not run.find(key) and not run.compared:
        message = f"missing: true since {checks.logprobs_on_since}; before, false, and the correction is skipped"
        file = next(iter(run.settings.values())).file
        yield ConfigProblem(key, message, f"write {key}=true", severity="warning", file=file)
    key, of_trainer = checks.of("temperature"), checks.of("trainer_temperature")
    sampled = run.number(key, 1.0) if key else 1.0
    trained = run.number(of_trainer, sampled) if of_trainer else sampled
    mode = checks.of("mode")
    if sampled == 0.0:
        yield _problem(run.find(key), key, "at temperature 0 the engine takes the likeliest token", "sample at 1.0")
    elif mode and run.is_(mode, "raw_logprobs", "raw_logits", default=checks.mode) and abs(trained - 1.0) > 0.0:
        message = f"the engine's log-probs are from before the temperature of {trained:g}, the trainer's from after it"
        blamed = mode if run.find(mode) else key
        fix = f"write {mode}=processed_logprobs"
        yield _problem(run.find(blamed), blamed, message, fix, causes=BEFORE_TEMPERATURE)
    if abs(trained - sampled) > 0.0:
        message = f"the trainer's log-probs are at the temperature {trained:g}, sampling at {sampled:g}"
        yield _problem(run.find(of_trainer), of_trainer, message, f"write {sampled:g}", causes=("temperature",))
    yield from _sampled(run, checks)


# Settings that cut the distribution: the test for a value that cuts, and the value that does nothing.
CUTS: dict[str, tuple[Callable[[float], bool], str]] = {
    "top_p": (lambda value: 0.0 < value < 1.0, "1.0"),
    # Beyond a thousand tokens little is cut: TRL#7269 measures 0.6 % at 1,024.
    "top_k": (lambda value: 0.0 < value < 1000.0, "-1"),
    "min_p": (lambda value: value > 0.0, "0.0"),
}


def _sampled(run: Run, checks: Checks) -> Iterator[ConfigProblem]:
    """Name what the engine's processed log-probs have in them and the trainer's do not."""
    mode = checks.of("mode")
    if mode and run.is_(mode, "raw_logprobs", default=checks.mode):
        return
    for name, (cuts, nothing) in CUTS.items():
        key = checks.of(name)
        if key and cuts(run.number(key)):
            message = (
                f"{name} {run.get(key)}: the engine's log-probs are over what it keeps, the trainer's over all tokens"
            )
            fix = f"write {nothing}, or pass rc.KeptMass"
            yield _problem(run.find(key), key, message, fix, causes=("renormalized",))
    key = checks.of("repetition_penalty")
    if key and abs(run.number(key) - 1.0) > 0.0:
        message = f"the engine's log-probs are after the penalty of {run.get(key)}, the trainer's without it"
        yield _problem(run.find(key), key, message, "write 1.0", causes=("penalties",))


# --- what the bounds do to an engine that is well ---

# Of an engine that matches well, so that wider bounds are never blamed.
HEALTHY_KL = 0.02 * BY_KEY["kl_rollout_train_k3"].watch
# A mean log-ratio that no run reaches: a bound beyond it is one of a token's ratio.
NEVER_MEAN = 0.4
MOST_OUTSIDE = 0.5


def _bounds(run: Run, checks: Checks) -> Iterator[ConfigProblem]:
    if run.spec is None or not checks.bounds:
        return
    length = run.number(checks.of("length")) / 2.0
    length = 1000.0 if math.isnan(length) or length < 1.0 else length
    parts: list[tuple[Weight | Criterion, str]] = [(each, each.label or "") for each in run.spec.criteria]
    parts += [] if run.spec.weight is None else [(run.spec.weight, "weight")]
    for part, label in parts:
        said = _said(part, length)
        if said:
            places = checks.bounds.get(label, checks.bounds.get("criteria", ()))
            key = next((key for key in places if run.has(key)), next(iter(places), label))
            yield _problem(run.find(key), key, said[0], said[1], severity="warning")


def _said(part: Weight | Criterion, length: float) -> tuple[str, str] | None:
    """Say that the bounds of a weight or criterion belong to another level."""
    logs = _log_bounds(part)
    if logs is None:
        return None
    low, high = logs
    over = {("token", None): "token", ("sequence", "mean"): "geometric", ("sequence", "sum"): "product"}
    level = over.get((part.over, part.reduce))
    if level == "geometric" and low < -NEVER_MEAN and high > NEVER_MEAN:
        return (
            "bounds of a token's ratio on the mean of a sequence, which never reaches them: nothing is rejected",
            "a geometric mean has bounds such as 0.99 and 1.01",
        )
    if level is None:
        return None
    tokens = {"token": 1.0, "geometric": 1.0 / length, "product": length}[level]
    # D is about normal: a mean of -KL and a variance of 2 KL a token, summed or averaged over the tokens.
    mean = -HEALTHY_KL * (length if level == "product" else 1.0)
    outside = 1.0 - _normal(low, high, mean, math.sqrt(2.0 * HEALTHY_KL * tokens))
    truncates = isinstance(part, Weight) and part.outside == "clamp"
    # At most 1 is a choice; at most a little more is the bound of another level.
    if not (1.0 < math.exp(min(high, 1.0)) < 1.05 and level == "token" if truncates else outside > MOST_OUTSIDE):
        return None
    unit = "tokens" if level == "token" else f"sequences of {length:.0f} tokens"
    does = "rejects" if isinstance(part, Criterion) else "cuts the weights of"
    other = {
        "token": "0.999_1.001 is for the mean of a sequence; a token's ratio has bounds such as 0.5 and 2",
        "geometric": "a geometric mean has bounds such as 0.99 and 1.01; rc.suggest finds them for a batch",
        "product": "test the mean of a sequence, or its tokens: a product of ratios grows with the length",
    }[level]
    return f"{does} {outside:.0%} of {unit} of an engine that is well (KL {HEALTHY_KL:g} a token)", other


def _log_bounds(part: Weight | Criterion) -> tuple[float, float] | None:
    low, high = part.low, part.high
    if isinstance(part, Criterion) and (part.when != "any" or part.of != "train/rollout"):
        return None
    if isinstance(part, Weight) or part.stat == "ratio":
        return (math.log(low) if low else -math.inf), (math.log(high) if high else math.inf)
    if part.stat == "k1":
        return (-math.inf if high is None else -high), (math.inf if low is None else -low)
    return None


def _normal(low: float, high: float, mean: float, deviation: float) -> float:
    """The probability that a normal number lies between two bounds."""
    scale = deviation * math.sqrt(2.0)
    return 0.5 * (math.erf((high - mean) / scale) - math.erf((low - mean) / scale))


# --- what the framework says ---


def _rules(run: Run, rules: tuple[Rule, ...]) -> Iterator[ConfigProblem]:
    for rule in rules:
        if rule.wrong(run):
            found = run.find(rule.key)
            value = None if found is None else found.value
            yield _problem(found, rule.key, rule.message.format(value=value), rule.fix, severity=rule.severity)
