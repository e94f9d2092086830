"""Make a release's files and try them: `make release`, or with `ARGS=--rehearse` while the changelog is still open.

build/release gets the two files to publish. Each step exits with what is wrong. Publishing is the workflow's, on a tag:
.github/workflows/publish.yml.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import try_wheel

OUT = Path("build", "release", "dist")

NEXT = """
To publish {version}, once `make release` has passed without --rehearse:
  git tag v{version} && git push origin v{version}
whose workflow, .github/workflows/publish.yml, builds the same files and uploads them; or, without the workflow:
  python -m twine upload {files}"""


def main() -> None:
    """Run the steps in order."""
    parser = argparse.ArgumentParser(prog="make release", description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="allow an open changelog and uncommitted changes")
    parser.add_argument("--pythons", nargs="*", default=try_wheel.PYTHONS, help="interpreters to try; none: only build")
    parser.add_argument("--torch", nargs="*", default=try_wheel.TORCHES, metavar="VERSION", help="versions to try")
    args = parser.parse_args()

    version = re.findall(r'"(.+)"', Path("rollout_corr", "_version.py").read_text(encoding="utf-8"))[-1]
    changelog, citation = (Path(name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    problems = [] if f"\nversion: {version}\n" in citation else [f"CITATION.cff: expected version {version}"]
    if not args.rehearse:
        problems += still_open(changelog, version)
        problems += [f"not committed: {line}" for line in said("git", "status", "--porcelain").splitlines()]
    if problems:
        sys.exit("\n".join(problems))
    files = build_twice(version)
    for command in (["-m", "twine", "check", "--strict"], [".ci/check_dist.py"]):
        subprocess.run([sys.executable, *command, *files], check=True)
    if not try_wheel.everywhere(files[-1].resolve(), args.pythons, args.torch):
        sys.exit("not everything ran")
    print(NEXT.format(version=version, files=" ".join(map(str, files))))


def still_open(changelog: str, version: str) -> list[str]:
    """Say why the newest section of the changelog is not the one of this version, with a date and entries."""
    heading, _, entries = changelog.partition("\n## ")[2].partition("\n")
    if not re.fullmatch(re.escape(version) + r" \(\d{4}-\d\d-\d\d\)", heading):
        return [f"CHANGELOG.md: expected the newest heading to be `## {version} (YYYY-MM-DD)`, got `## {heading}`"]
    return [] if "\n- " in entries.partition("\n## ")[0] else [f"CHANGELOG.md: {version} has no entries"]


def said(*command: str) -> str:
    """Give what a program prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def build_twice(version: str) -> list[Path]:
    """Build the source distribution and the wheel in two folders, and require equal bytes."""
    epoch = int(said("git", "log", "-1", "--format=%ct"))
    shutil.rmtree(OUT, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        # Another path, which must not show in the files.
        first, second = (built(Path(scratch, name), epoch) for name in ("one", "another-one"))
        for one, other in zip(first, second, strict=True):
            hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (one, other)]
            if one.name != other.name or hashes[0] != hashes[1] or version not in one.name:
                sys.exit(f"{one.name} and {other.name} of version {version} differ: {hashes}")
            print(f"{hashes[0]}  {one.name}")
        shutil.copytree(first[0].parent, OUT)
    return [OUT / path.name for path in first]


def built(folder: Path, epoch: int) -> list[Path]:
    """Build both from the last commit; the wheel is built from the source distribution, as published."""
    tree, dist = folder / "tree", folder / "dist"
    archive = subprocess.run(["git", "archive", "HEAD"], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tree, filter="data")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}

    def run(kind: str, source: Path) -> None:
        command = [sys.executable, "-m", "build", kind, "--outdir", str(dist), str(source)]
        # A wheel carries the permissions of its files, so they must not be those that a shell happens to give.
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, umask=0o022)

    run("--sdist", tree)
    (source,) = dist.glob("*.tar.gz")
    source.write_bytes(settled(source.read_bytes(), epoch))
    with tarfile.open(source) as files:
        files.extractall(folder, filter="data")
    run("--wheel", folder / source.name.removesuffix(".tar.gz"))
    return [source, *dist.glob("*.whl")]


def settled(source: bytes, epoch: int) -> bytes:
    """Take out of a source distribution what differs from build to build: setuptools writes times, owners and modes."""
    plain = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(source)) as files,
        tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as out,
    ):
        for member in sorted(files.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() else 0o644
            member.pax_headers = {}
            out.addfile(member, files.extractfile(member) if member.isfile() else None)
    return gzip.compress(plain.getvalue(), mtime=epoch)


if __name__ == "__main__":
    main()
