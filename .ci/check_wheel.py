"""Checks what a wheel holds against what git tracks. In the checkout: `python .ci/check_wheel.py x.whl`."""

import subprocess
import sys
import zipfile
from collections import Counter


def tracked() -> list[str]:
    """Where each tracked file of the package belongs in a wheel; READMEs are for readers of the checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "rollout_corr", "kernels"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    files = [name for name in listed if name != "rollout_corr/kernels" and not name.endswith(".md")]
    return [f"rollout_corr/{name}" if name.startswith("kernels/") else name for name in files]


def main(wheel: str) -> None:
    """Exits with what is wrong."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    packages = {name for name in top if not name.endswith(".dist-info")}
    if packages != {"rollout_corr"}:
        sys.exit(f"{wheel} holds {sorted(packages)} at the top; it may hold rollout_corr alone")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        sys.exit(f"{wheel} holds more than once: {twice}")
    held = {name for name in names if name.startswith("rollout_corr/")}
    missing, strange = set(tracked()) - held, held - set(tracked())
    if missing or strange:
        sys.exit(f"{wheel} lacks {sorted(missing)} and holds {sorted(strange)}, which git does not track")
    print(f"{len(held)} files, each once, in one top-level package")


if __name__ == "__main__":
    main(*sys.argv[1:])
