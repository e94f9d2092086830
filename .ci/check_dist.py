"""Checks what a wheel or a source distribution holds against what git tracks: `python .ci/check_dist.py FILE...`."""

import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter

# What packaging adds.
ADDED = re.compile(r"rollout_corr-[^/]+\.dist-info/.*|rollout_corr\.egg-info/.*|PKG-INFO|setup\.cfg")
# What a source distribution holds besides the package.
TOP_LEVEL = {"LICENSE", "README.md", "pyproject.toml", "setup.py"}


def sources() -> set[str]:
    """Each tracked file of the package; READMEs are for readers of the checkout, and rollout_corr/kernels is a link."""
    command = ["git", "ls-files", "rollout_corr", "kernels"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name for name in listed if name != "rollout_corr/kernels" and not name.endswith(".md")}


def check(file: str) -> None:
    """Exit with what is missing, or what nobody tracks."""
    if file.endswith(".whl"):
        with zipfile.ZipFile(file) as archive:
            held = archive.namelist()
        expected = {f"rollout_corr/{name}" if name.startswith("kernels/") else name for name in sources()}
    else:
        with tarfile.open(file) as archive:
            held = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
        expected = sources() | TOP_LEVEL
    twice = [name for name, count in Counter(held).items() if count > 1]
    strange = [name for name in set(held) - expected if not ADDED.fullmatch(name)]
    missing = expected - set(held)
    if twice or strange or missing:
        sys.exit(f"{file} lacks {sorted(missing)}, holds {sorted(strange)} untracked and {twice} more than once")
    if not any(name.endswith("LICENSE") for name in held):
        sys.exit(f"{file} has no license")
    print(f"{file}: {len(expected)} tracked files, each once")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        check(name)
