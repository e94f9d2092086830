"""Registration of specs by name, called presets here: the framework's version that each matches, and what builds it."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ParamSpec

from rollout_corr.frameworks.shared.settings import refuse_other_types
from rollout_corr.specs.correction import Spec

P = ParamSpec("P")

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class Preset:
    """A registered preset.

    Args:
        name: "framework.preset".
        build: Makes the Spec.
        matches: The version of the framework whose numbers it gives.
    """

    name: str
    build: Callable[..., Spec]
    matches: str

    @property
    def about(self) -> str:
        """The first line of its documentation: its formula."""
        return (inspect.getdoc(self.build) or "").partition("\n")[0]


# Filled when the module of a framework is imported; `lookup` imports the one that a name asks for.
PRESETS: dict[str, Preset] = {}


def registered(framework: str) -> list[Preset]:
    """The presets that a framework's module has registered so far."""
    return [found for found in PRESETS.values() if found.name.partition(".")[0] == framework]


_warned: set[tuple[str, ...]] = set()


def warn_once(key: tuple[str, ...], message: str) -> None:
    """Warn once in a process for each key: a training loop may read its settings every step."""
    if key in _warned:
        return
    _warned.add(key)
    # The warning points at the caller's line, which has to change. Python 3.12 has `skip_file_prefixes` for this.
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)


def preset_of(matches: str) -> Callable[[Callable[P, Spec]], Callable[P, Spec]]:
    """Register a function as the preset "framework.function" and name it in its errors.

    Args:
        matches: The version of the framework whose numbers it gives.
    """

    def register(function: Callable[P, Spec]) -> Callable[P, Spec]:
        # The module is rollout_corr.frameworks.NAME, or NAME.presets.
        name = f"{function.__module__.split('.')[2]}.{function.__name__}"

        @functools.wraps(function)
        def build(*args: P.args, **kwargs: P.kwargs) -> Spec:
            try:
                refuse_other_types(function, kwargs)
                return function(*args, **kwargs)
            except (TypeError, ValueError) as error:
                given = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
                raise same_kind(error, f"spec {name}({given}): {error}{_known(function, kwargs)}") from error

        PRESETS[name] = Preset(name, build, matches)
        return build

    return register


def _known(function: Callable[..., object], given: Iterable[str]) -> str:
    """The arguments of a preset, where it was given one that it does not have."""
    known = [*inspect.signature(function).parameters]
    wrong = [name for name in given if name not in known]
    if not wrong:
        return ""
    close = difflib.get_close_matches(wrong[0], known, n=1)
    return f"; it takes {known or 'none'}{f', did you mean {close[0]}=?' if close else ''}"


def same_kind(error: Exception, message: str) -> Exception:
    """Return a TypeError or a ValueError, as the error is, with another message."""
    return TypeError(message) if isinstance(error, TypeError) else ValueError(message)
