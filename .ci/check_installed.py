"""Checks an environment in which the wheel of rollout-corr and Hugging Face's `kernels` are installed."""

import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


def owner_of(module: str) -> Path:
    """The file that importing `module` would run."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        sys.exit(f"{module} cannot be found")
    return Path(spec.origin).resolve()


def recorded(distribution: str, file: str) -> Path:
    """Where `distribution` says that it put `file`."""
    return Path(str(metadata.distribution(distribution).locate_file(file))).resolve()


def main() -> None:
    """Exits with what is wrong."""
    prefix = Path(sys.prefix).resolve()
    for module, distribution, file in (
        ("rollout_corr", "rollout-corr", "rollout_corr/__init__.py"),
        ("rollout_corr.kernels", "rollout-corr", "rollout_corr/kernels/__init__.py"),
        ("kernels", "kernels", "kernels/__init__.py"),
    ):
        found, expected = owner_of(module), recorded(distribution, file)
        if found != expected or prefix not in found.parents:
            sys.exit(f"{module} is {found}; expected {expected}, inside {prefix}")
    print("rollout_corr and kernels are each where their wheel put them")


if __name__ == "__main__":
    main()
