"""Write docs/versions.md from build/release/rows.json, which `make release` leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEAD = """# Versions

rollout-corr {version} under versions of Python, torch and Triton. Made by runs, not by hand:

```bash
make release ARGS="--rehearse --every"
python .ci/release/page.py
```

In each row the wheel was installed into an environment of its own, from the package index, on Linux without a GPU, and
`.ci/release/smoke.py` ran from an empty folder:

- *installed*: package, licence and types are where the wheel put them.
- *corrects*: a correction and a loss with its gradient are those worked out by hand.
- *operators*: torch knows them and traces through them (`fullgraph=True`).
- *torch.compile*: a function with a correction inside, compiled to machine code, gives what it gives outside.
- *command line*: `rollout-corr`, its demonstration, its list of presets.
- *kernels interpreted*: the Triton kernels give the definition's results in Triton's interpreter.
- *kernels compiled*: some of the kernels compile for sm_90; registers and spills are in [kernels](kernels.md).

Triton is the one that this torch brings. *refused*: it is older than the kernels need, and `backend="triton"` says so;
`backend="auto"` takes plain torch. Which Tritons' compiled kernels were also executed, instruction by instruction:
[compiled, without a GPU](kernels.md#compiled-without-a-gpu).
"""
COLUMNS = ("python", "torch", "triton", "numpy")


def main() -> None:
    """Write the page, and print nothing."""
    Path("docs", "versions.md").write_text(
        page(json.loads(Path("build", "release", "rows.json").read_text(encoding="utf-8"))["rows"]), encoding="utf-8"
    )


def page(rows: list[dict[str, Any]]) -> str:
    """Make the page of the rows of `make release`, oldest Python and torch first."""
    ran = sorted((row for row in rows if row["checks"]), key=lambda row: [ordered(row[x]) for x in COLUMNS[:2]])
    checks = list(dict.fromkeys(name for row in ran for name in row["checks"]))
    lines = [
        "| " + " | ".join(["Python", "torch", "Triton", "NumPy", *checks]) + " |",
        "|" + "---|" * (len(COLUMNS) + len(checks)),
        *("| " + " | ".join([*(row[x] for x in COLUMNS), *(row["checks"][x] for x in checks)]) + " |" for row in ran),
    ]
    absent = [f"torch {row['torch']} for Python {row['python']}" for row in rows if "absent" in row]
    if absent:
        lines += ["", f"The index has no {', no '.join(absent)}."]
    (version,) = {row["rollout-corr"] for row in ran}
    return HEAD.format(version=version) + "\n" + "\n".join(lines) + "\n"


def ordered(version: str) -> list[int]:
    """Give the numbers of a version, without the name of a build."""
    return [int(x) for x in version.partition("+")[0].split(".")]


if __name__ == "__main__":
    main()
