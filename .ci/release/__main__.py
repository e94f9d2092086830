"""Make a release's files and try them: `make release`, or with `ARGS=--rehearse` while the changelog is still open.

Everything lands in build/release: `dist/` with the two files to publish, `rows.json` with what ran where. What ran with
the same wheel before is not run again. Each step exits with what is wrong. Publishing is the workflow's, on a tag:
.github/workflows/publish.yml.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import build_twice
import conda
import environments
import state

OUT = Path("build", "release")
CONTENTS = Path(".ci", "release", "contents.txt")


def main() -> None:
    """Run the steps in order."""
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="allow an open changelog and uncommitted changes")
    parser.add_argument("--write-contents", action="store_true", help="take what is inside as what belongs inside")
    parser.add_argument(
        "--pythons", nargs="*", default=environments.PYTHONS, metavar="PYTHON", help="interpreters to try"
    )
    parser.add_argument("--torch", nargs="*", default=environments.TORCHES, metavar="VERSION", help="versions to try")
    parser.add_argument("--every", action="store_true", help="try every minor version of torch, for docs/versions.md")
    parser.add_argument(
        "--without-cuda", action="store_true", help="stand-ins for CUDA's packages: a fifth of what is installed"
    )
    parser.add_argument("--only-build", action="store_true", help="make the files, and try them nowhere")
    args = parser.parse_args()

    version = state.version_to_release(rehearse=args.rehearse)
    shutil.rmtree(OUT / "dist", ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        files = build_twice.build(OUT / "dist", Path(scratch), version)
    found = build_twice.contents(files)
    if args.write_contents:
        CONTENTS.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
    state.compare(found, CONTENTS.read_text(encoding="utf-8").splitlines(), args.rehearse)
    conda.check(version)
    if args.only_build:
        return
    wheel = next(path for path in files if path.suffix == ".whl")
    tried = hashlib.sha256(wheel.read_bytes() + environments.SMOKE.read_bytes()).hexdigest()
    rows = environments.rows_of(OUT / "rows.json", tried)
    found = {"tried": tried, "not_here": environments.not_here(args.pythons), "rows": rows}
    torches = environments.every_torch() if args.every else args.torch
    for row in environments.try_everywhere(wheel.resolve(), args.pythons, torches, rows, not args.without_cuda):
        rows.append(row | {"commit": build_twice.said("git", "log", "-1", "--format=%h")})
        # After each, since all of them take an hour.
        (OUT / "rows.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not any(row["checks"] for row in rows) or any(row["failed"] for row in rows):
        sys.exit("not everything ran")


if __name__ == "__main__":
    main()
