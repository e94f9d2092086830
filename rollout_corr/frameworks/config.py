"""`from_config`: the configuration that a framework's user already has, as a Spec."""

from __future__ import annotations

from collections.abc import Callable

from rollout_corr.frameworks.registry import preset
from rollout_corr.frameworks.skyrl import config as skyrl
from rollout_corr.frameworks.verl import config as verl
from rollout_corr.frameworks.xtuner import config as xtuner
from rollout_corr.spec.correction import Spec

READERS: dict[str, Callable[..., Spec]] = {"verl": verl.read, "xtuner": xtuner.read, "skyrl": skyrl.read}


def from_config(framework: str, config: object, **options: object) -> Spec:
    """Read a framework's rollout-correction settings, of any generation.

    Old names warn once in a process, with the line to write instead. Unknown keys raise.

    Args:
        framework: "verl", "xtuner" or "skyrl".
        config: The block of settings, or a configuration that holds it: a mapping, an OmegaConf node, a dataclass, a
            pydantic model, any object with attributes. Or the name of a preset of that framework, as text.
        **options: For verl: k1_bounds="ratio" reads the bounds of k1 options as bounds of the ratio (verl#6377), which
            is what verl's documentation says and not what verl 0.9.1 does; version="0.6.0" reads `rollout_is_mode` and
            the veto of that release, which zeroed weights where later code edits the mask. For a preset: its arguments.

    Returns:
        The Spec. Which loss it feeds (verl's `bypass_mode` and `loss_type`) is no part of it.

    Raises:
        ValueError: An unknown framework or key, or a wrong value, named.
        TypeError: A value of the wrong type, named.
    """
    if framework not in READERS:
        raise ValueError(f"from_config: expected one of {list(READERS)}, got {framework!r}")
    if isinstance(config, str):
        return preset(config if "." in config else f"{framework}.{config}", **options)
    try:
        return READERS[framework](config, **options)
    except (TypeError, ValueError) as error:
        message = f"from_config({framework!r}): {error}"
        raise (TypeError if isinstance(error, TypeError) else ValueError)(message) from error
