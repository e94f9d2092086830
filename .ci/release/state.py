"""The state of the checkout that a release is made from: one version, a closed changelog, nothing uncommitted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def version_to_release(rehearse: bool) -> str:
    """Give the version; exit where it is not everywhere, or where the changelog or the checkout is still open."""
    version_file = Path("rollout_corr", "_version.py").read_text(encoding="utf-8")
    version = re.findall(r'^__version__ = "([^"]+)"$', version_file, re.MULTILINE)[0]
    problems = [
        *cited_otherwise(Path("CITATION.cff").read_text(encoding="utf-8"), version),
        *([] if rehearse else still_open(Path("CHANGELOG.md").read_text(encoding="utf-8"), version)),
        *([] if rehearse else uncommitted()),
    ]
    if problems:
        sys.exit("\n".join(problems))
    print(f"rollout-corr {version}")
    return version


def cited_otherwise(citation: str, version: str) -> list[str]:
    """Say where CITATION.cff has another version."""
    return [] if f"\nversion: {version}\n" in citation else [f"CITATION.cff: expected version {version}"]


def still_open(changelog: str, version: str) -> list[str]:
    """Say what keeps the newest section of the changelog from being that of a version, with a date and entries."""
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    heading, _, entries = sections[0].partition("\n") if sections else ("", "", "")
    if not re.fullmatch(re.escape(version) + r" \(\d{4}-\d\d-\d\d\)", heading):
        return [f"CHANGELOG.md: expected the newest heading to be `## {version} (YYYY-MM-DD)`, got `## {heading}`"]
    return [] if "\n- " in entries else [f"CHANGELOG.md: {version} has no entries"]


def uncommitted() -> list[str]:
    """Name files that differ from the last commit."""
    status = subprocess.run(["git", "status", "--porcelain"], check=True, capture_output=True, text=True).stdout
    return [f"not committed: {line}" for line in status.splitlines()]


def compare(found: list[str], listed: list[str], rehearse: bool) -> None:
    """Show where the files hold something else than the committed list says; exit, but in a rehearsal."""
    lacks, strange = sorted(set(listed) - set(found)), sorted(set(found) - set(listed))
    if lacks or strange:
        print(*[f"- {line}" for line in lacks], *[f"+ {line}" for line in strange], sep="\n")
        if not rehearse:
            sys.exit("The contents changed since the last list. Where that is meant: --write-contents, and commit it.")
        return
    print(f"{len(found)} files inside, as listed")
