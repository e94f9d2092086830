"""The pages "How to add" in CONTRIBUTING name what there is.

That a statistic and a metric are rows, a surrogate a class and a framework a folder is tried in tests/specs/,
tests/metrics/test_rows.py and tests/frameworks/test_one_folder.py.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = re.split(r"^### ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
TITLES = ("A statistic", "A surrogate", "A metric", "A preset", "A framework")


def test_pages_name_what_exists():
    pages = "".join(page for page in PAGES if page.startswith(TITLES))
    named = re.findall(r"`((?:tests|rollout_corr|kernels)/[\w/.]+)`", pages)
    assert len(named) > 5
    for name in named:
        assert "NAME" in name or (ROOT / name).exists(), name


def test_a_name_of_a_file_is_defined_there():
    """As in "`statistic` of [criteria.py](...)" and "`SURROGATES` of `tests/frozen/generator.py`"."""
    pages = "".join(page for page in PAGES if page.startswith(TITLES))
    named = re.findall(r"`(\w+)`\s+of\s+(?:\[[^\]]+\]\(|`)([\w/.]+\.py)[`)]", pages)
    assert len(named) > 5
    for name, path in named:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(def {name}\(|class {name}\b|{name}\b.*=)", text, re.MULTILINE), (path, name)
