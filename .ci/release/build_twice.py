"""The source distribution and the wheel, built twice from the last commit with the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path


def build(into: Path, scratch: Path, version: str) -> list[Path]:
    """Build in two folders, require equal hashes, check what the index will show, and leave the files in `into`."""
    epoch = said("git", "log", "-1", "--format=%ct")
    # Another path, which must not show in the files.
    first, second = (built(scratch / name, epoch) for name in ("one", "another-one"))
    for one, other in zip(first, second, strict=True):
        hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (one, other)]
        if one.name != other.name or hashes[0] != hashes[1]:
            sys.exit(f"{one.name} and {other.name} were built from one commit and differ: {hashes}")
        print(f"{hashes[0]}  {one.name}")
    if any(version not in path.name for path in first):
        sys.exit(f"{[path.name for path in first]}: expected version {version}")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, first)], check=True)
    into.mkdir(parents=True)
    return [Path(path.rename(into / path.name)) for path in first]


def said(*command: str) -> str:
    """Give what a program prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def built(folder: Path, epoch: str) -> list[Path]:
    """Build both in a folder of their own; the wheel is built from the source distribution, as published."""
    tree, dist = folder / "tree", folder / "dist"
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tree, filter="data")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch}

    def run(kind: str, source: Path) -> None:
        command = [sys.executable, "-m", "build", kind, "--outdir", str(dist), str(source)]
        # A wheel carries the permissions of its files, so they must not be those that a shell happens to give.
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, umask=0o022)

    run("--sdist", tree)
    (source,) = dist.glob("*.tar.gz")
    source.write_bytes(settled(source.read_bytes(), int(epoch)))
    with tarfile.open(source) as files:
        files.extractall(folder, filter="data")
    unpacked = folder / source.name.removesuffix(".tar.gz")
    run("--wheel", unpacked)
    (wheel,) = dist.glob("*.whl")
    return [source, wheel]


def settled(source: bytes, epoch: int) -> bytes:
    """Take out of a source distribution what differs from build to build: setuptools writes times, owners and modes."""
    plain = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(source)) as files,
        tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as out,
    ):
        for member in sorted(files.getmembers(), key=lambda member: member.name):
            if member.isfile() or member.isdir():
                member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
                member.mode = 0o755 if member.isdir() else 0o644
                member.pax_headers = {}
                out.addfile(member, files.extractfile(member) if member.isfile() else None)
            else:
                sys.exit(f"{member.name}: expected files and folders alone")
    return gzip.compress(plain.getvalue(), mtime=epoch)


def contents(files: list[Path]) -> list[str]:
    """List what is inside, without the version: `sdist` or `wheel`, then the path."""
    found = []
    for path in files:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
            found += [f"wheel {name.replace(path.name.split('-')[1], 'VERSION', 1)}" for name in names]
        else:
            with tarfile.open(path) as archive:
                names = [member.name for member in archive.getmembers() if member.isfile()]
            found += [f"sdist {name.partition('/')[2]}" for name in names]
    needed = {"wheel rollout_corr/py.typed", "wheel rollout_corr-VERSION.dist-info/licenses/LICENSE", "sdist LICENSE"}
    if needed - set(found):
        sys.exit(f"not inside: {sorted(needed - set(found))}")
    return sorted(found)
