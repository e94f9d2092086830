"""The error for an argument that should be a Spec."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_corr.spec.correction import Criterion, Weight


def no_spec(given: object, wanted: str = "a Spec") -> TypeError:
    """Make the error for what is no Spec, with the call that makes one of it."""
    hint = ""
    if isinstance(given, str):
        hint = f" {given!r}; a name becomes one by rc.preset({given!r})"
    elif isinstance(given, Mapping):
        hint = (
            "; a framework's settings become one by rc.from_config(framework, settings), plain data by Spec.from_dict"
        )
    elif isinstance(given, (Weight, Criterion)):
        field = f"weight={given!r}" if isinstance(given, Weight) else f"criteria=({given!r},)"
        hint = f"; write Spec({field})"
    return TypeError(f"spec: expected {wanted}, got {type(given).__name__}{hint}")
