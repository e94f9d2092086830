"""The state of a replacement of a framework's functions, and the sentence that says why it is as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Installed(NamedTuple):
    """State of the replacement, as `installed()` returns it.

    Attributes:
        active: Whether every function of the framework that has been imported so far is replaced, and one is.
        why: The reason for `active`, in words.
        version: The framework's version, of the module that is imported or would be; None where it is not known.
        replaced: Every place that holds a function of ours, as "module.name".
        waiting: Modules that have not been imported yet; their functions are replaced when they are.
        switches: What `install` was given.
        location: Folder or file of the framework's module; None where it is not known.
        checked: Whether this version is one that was compared.
        covered: The functions that this installation is about, by their full names.
        not_covered: What the framework corrects or trains with besides, in words.
    """

    active: bool
    why: str
    version: str | None
    replaced: tuple[str, ...]
    waiting: tuple[str, ...]
    switches: Mapping[str, object]
    location: str | None
    checked: bool
    covered: tuple[str, ...]
    not_covered: tuple[str, ...]


def reason(
    called: str,
    replaced: Sequence[str],
    waiting: Sequence[str],
    lost: Sequence[str],
    missing: Sequence[str],
    *,
    asked: bool,
    refused: Sequence[str],
    last_refusal: str | None,
) -> str:
    """Say in one sentence what is replaced, or why nothing is.

    Args:
        called: The framework, with its version where that is known.
        replaced: Places that hold a function of ours.
        waiting: Modules that have not been imported yet.
        lost: Functions that other code has replaced or reloaded.
        missing: What the framework corrects with besides, in words.
        asked: Whether `install` was called and went through.
        refused: Why functions of modules that were imported later did not fit.
        last_refusal: Why the last `install` changed nothing.
    """
    if not asked:
        why = "install() was not called" if last_refusal is None else f"install(): {last_refusal}"
        return f"no function of {called} is replaced: {why}"
    if refused:
        return f"no function of {called} is replaced: {'; '.join(refused)}"
    if lost:
        return f"not all functions of {called} are replaced: other code has replaced or reloaded {list(lost)}"
    if not replaced:
        return f"no function of {called} is replaced yet; modules that are not imported yet: {', '.join(waiting)}"
    later = f"; not imported yet: {', '.join(waiting)}" if waiting else ""
    later += f"; not covered: {', '.join(missing)}" if missing else ""
    later += "" if last_refusal is None else f"; the last install() changed nothing: {last_refusal}"
    return f"{called} uses the functions of rollout-corr in {len(replaced)} places{later}"
