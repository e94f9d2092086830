"""Write docs/versions.md from build/release/rows.json, which `make release` leaves."""

from __future__ import annotations

import json
from pathlib import Path

HEAD = """# Versions

Made by `make release` and `python .ci/release/page.py` from what ran; do not edit. In each row the wheel was installed
into an environment of its own, from the package index, on Linux without a GPU, and `.ci/release/smoke.py` ran: import,
a correction and a loss worked out by hand, operators under `torch.compile(fullgraph=True)`, the command line,
the kernels in Triton's interpreter and compiled for sm_90.

*refused*: that torch brings a Triton older than 3.5, and `backend="triton"` says so; `backend="auto"` takes plain
torch.
"""
COLUMNS = ("python", "torch", "triton", "numpy")


def main() -> None:
    """Write the page, and print nothing."""
    rows = json.loads(Path("build", "release", "rows.json").read_text(encoding="utf-8"))
    rows = [row for row in rows if row["checks"]]
    rows.sort(key=lambda row: [[int(x) for x in row[name].partition("+")[0].split(".")] for name in COLUMNS[:2]])
    checks = list(dict.fromkeys(name for row in rows for name in row["checks"]))
    lines = [
        "| " + " | ".join(["Python", "torch", "Triton", "NumPy", *checks]) + " |",
        "|" + "---|" * (len(COLUMNS) + len(checks)),
        *("| " + " | ".join([*(row[x] for x in COLUMNS), *(row["checks"][x] for x in checks)]) + " |" for row in rows),
    ]
    Path("docs", "versions.md").write_text(HEAD + "\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
