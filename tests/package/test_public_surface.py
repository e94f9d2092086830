"""The public surface changes on purpose, and a removal is announced one minor version before."""

from __future__ import annotations

import json
import re
from pathlib import Path

import rollout_corr as rc
from builders.public_surface import FILE, surface


def test_what_users_rely_on_is_what_the_file_says():
    """docs/maintaining.md says what a difference needs before the file may be written anew."""
    found, frozen = surface(), json.loads(FILE.read_text(encoding="utf-8"))
    assert found == frozen, f"docs/maintaining.md#what-users-rely-on; `python -m builders.public_surface` writes {FILE}"


def test_what_is_announced_to_go_is_gone_when_its_version_comes():
    """A warning that names a version ("from 0.2.0 on") names a minor version that is still to come."""
    root = Path(rc.__file__).parent
    announced = {
        (path.name, tuple(map(int, found)))
        for path in root.rglob("*.py")
        for found in re.findall(r"from (\d+)\.(\d+)\.0 on\b", path.read_text(encoding="utf-8"))
    }
    now = tuple(map(int, rc.__version__.split(".")[:2]))
    assert announced and not [one for one in announced if one[1] <= now]
