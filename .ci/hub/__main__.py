"""Write the kernels for Hugging Face's Hub from this tree into build/hub: `make hub`.

`build.toml` and `torch-ext/` are what its kernel-builder takes; `build/torch-BACKEND` is what it would make of them, so
that the package `kernels` loads it from the folder. The files are those of the package, byte for byte: they import each
other by relative names, and name operators after the package, which has the commit in its name there.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

NAME = "rollout_corr"
OUT = Path("build", "hub")
HERE = Path(__file__).parent
# Without a GPU there is the definition, in plain torch; an XPU has it too.
BACKENDS = ("cpu", "cuda", "rocm")
# What works at the command line is the wheel's.
LEFT_OUT = ("__main__.py", "cli/", "testing.py")
# In the card and, until the owner has filled in setup.py, in build.toml.
NOBODY = "OWNER/NAME"

BUILD = """[general]
name = "{name}"
version = {version}
edition = 5
license = "Apache-2.0"
backends = {backends}

[general.hub]
repo-id = "{repo}"

[torch-noarch]
"""


def main() -> None:
    """Write the folder anew."""
    parser = argparse.ArgumentParser(prog="make hub", description=__doc__)
    repo = constant("HUB") or NOBODY
    parser.add_argument("--repo", default=repo, help="its name on the Hub; %(default)s, from setup.py")
    args = parser.parse_args()
    dirty = "_dirty" if git("status", "--porcelain", "--", NAME, "kernels") else ""
    commit = git("rev-parse", "--short=7", "HEAD") + dirty
    # Versions of the Hub are whole numbers, and 0 stands for what may still change.
    version = int(re.findall(r'"(\d+)\.', Path(NAME, "_version.py").read_text("utf-8"))[0])
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    card = (HERE / "CARD.md").read_text(encoding="utf-8").replace(NOBODY, args.repo)
    (OUT / "CARD.md").write_text(card, encoding="utf-8")
    shutil.copytree(HERE / "benchmarks", OUT / "benchmarks")
    named = {"name": NAME.replace("_", "-"), "version": version}
    toml = BUILD.format(**named, backends=json.dumps(BACKENDS), repo=args.repo)
    (OUT / "build.toml").write_text(toml, encoding="utf-8")
    copied(OUT / "torch-ext" / NAME)
    for backend in BACKENDS:
        folder = OUT / "build" / f"torch-{backend}"
        digests = copied(folder)
        metadata = {
            "id": f"_{NAME}_{backend}_{commit}",
            **named,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": digests},
        }
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    print(f"{OUT}: {len(digests)} files for {', '.join(BACKENDS)}, version {version}, commit {commit}")
    if args.repo == NOBODY:
        print("to upload it, fill in HUB in setup.py and run `make hub` again")
        return
    print("to upload it, after `make hub` has ended without an error:")
    print(f"  hf auth login && hf repo create {args.repo} --exist-ok")
    print(f"  hf upload {args.repo} {OUT} . --commit-message 'rollout-corr {commit}'")


def constant(name: str) -> str:
    """A text that setup.py gives a name to."""
    (value,) = re.findall(rf"^{name} = (.+)$", Path("setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    return ast.literal_eval(value)


def git(*arguments: str) -> str:
    """Ask git."""
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def files() -> dict[str, str]:
    """Where each file of the package lies in an installed one."""
    tracked = [name for name in git("ls-files", NAME, "kernels").splitlines() if name.endswith((".py", ".pyi"))]
    inside = {name: name.removeprefix(f"{NAME}/") for name in tracked}
    return {name: path for name, path in inside.items() if not path.startswith(LEFT_OUT)}


def copied(folder: Path) -> dict[str, str]:
    """Copy the files of the package; give their hashes."""
    digests = {}
    for source, inside in files().items():
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / inside)
        digests[inside] = base64.b64encode(hashlib.sha256(Path(source).read_bytes()).digest()).decode()
    return digests


if __name__ == "__main__":
    main()
