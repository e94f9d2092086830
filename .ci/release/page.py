"""Write docs/versions.md from build/release/rows.json, which `make release` leaves, and from its earlier rows.

A row stays until its Python and torch run again, with the commit that it ran at: all of them take hours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD = """# Versions

rollout-corr {version} under versions of Python, torch and Triton. Made by runs, not by hand:

```bash
make release ARGS="--rehearse --every"
python .ci/release/page.py
```

In each row the wheel of a commit was installed into an environment of its own, from the package index, on Linux without
a GPU, and `.ci/release/smoke.py` ran from an empty folder:

- *CUDA*: torch asks for CUDA's packages, which take the most room. They were installed, or libraries stood in for them
  that answer "no device" (`--without-cuda`); `-` where it was not noted. torch is the index's; no check needs a GPU.
- *installed*: package, license and types are where the wheel put them.
- *corrects*: a correction and a loss with its gradient are those worked out by hand.
- *operators*: torch knows them and traces through them (`fullgraph=True`).
- *torch.compile*: a function with a correction inside, compiled to machine code, gives what it gives outside.
- *command line*: `rollout-corr`, its demonstration, its list of specs.
- *kernels interpreted*: the Triton kernels give the definition's results in Triton's interpreter.
- *kernels compiled*: some of the kernels compile for sm_90; registers and spills are in [kernels](kernels.md).

Triton is the one that this torch brings. *refused*: it is older than the kernels need, and `backend="triton"` says so;
`backend="auto"` takes plain torch. Which Tritons' compiled kernels were also executed, instruction by instruction:
[compiled, without a GPU](kernels.md#compiled-without-a-gpu).
"""
COLUMNS = {
    "python": "Python",
    "torch": "torch",
    "triton": "Triton",
    "numpy": "NumPy",
    "cuda": "CUDA",
    "commit": "commit",
}
ABSENT = "The index has no {}."
NOT_HERE = "Not tried, because the machine had no such Python: {}. `publish.yml` has it, and tries it before a release."


def main() -> None:
    """Write the page, and print nothing."""
    path = Path("docs", "versions.md")
    found = json.loads(Path("build", "release", "rows.json").read_text(encoding="utf-8"))
    path.write_text(page(found["rows"], path.read_text(encoding="utf-8"), found["not_here"]), encoding="utf-8")


def page(rows: list[dict[str, Any]], before: str = "", not_here: Iterable[str] = ()) -> str:
    """Make the page of the rows of `make release` and of those that it had, oldest Python and torch first."""
    (version,) = {row["rollout-corr"] for row in rows if row["checks"]}
    kept = rows_of(before) if f"\nrollout-corr {version} " in before else []
    ran = {(row["python"], row["torch"]): row for row in (*kept, *rows) if row["checks"]}
    checks = list(dict.fromkeys(name for row in ran.values() for name in row["checks"]))
    shown = [ran[at] for at in sorted(ran, key=lambda at: [ordered(x) for x in at])]
    lines = [
        "| " + " | ".join([*COLUMNS.values(), *checks]) + " |",
        "|" + "---|" * (len(COLUMNS) + len(checks)),
        *(
            "| " + " | ".join([*(row[x] for x in COLUMNS), *(row["checks"].get(x, "-") for x in checks)]) + " |"
            for row in shown
        ),
    ]
    absent = [f"torch {row['torch']} for Python {row['python']}" for row in rows if "absent" in row]
    absent = list(dict.fromkeys([*listed(ABSENT, ", no ", before), *absent])) if kept else absent
    if absent:
        lines += ["", ABSENT.format(", no ".join(absent))]
    without = dict.fromkeys([*(listed(NOT_HERE, ", ", before) if kept else []), *not_here])
    without = [python for python in without if python not in {row["python"] for row in ran.values()}]
    if without:
        lines += ["", NOT_HERE.format(", ".join(without))]
    return HEAD.format(version=version) + "\n" + "\n".join(lines) + "\n"


def rows_of(text: str) -> list[dict[str, Any]]:
    """Read the rows of a page."""
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    heads = {name: key for key, name in COLUMNS.items()}
    rows = []
    for cells in table[2:]:
        row = dict(zip(table[0], cells, strict=True))
        checks = {name: cell for name, cell in row.items() if name not in heads and cell != "-"}
        rows.append({key: row[name] for name, key in heads.items()} | {"checks": checks})
    return rows


def listed(sentence: str, between: str, text: str) -> list[str]:
    """Read what a page names in a sentence."""
    found = re.search(re.escape(sentence).replace(r"\{\}", "(.+)"), text)
    return found[1].split(between) if found else []


def ordered(version: str) -> list[int]:
    """Give the numbers of a version, without the name of a build."""
    return [int(x) for x in version.partition("+")[0].split(".")]


if __name__ == "__main__":
    main()
