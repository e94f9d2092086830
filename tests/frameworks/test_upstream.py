"""upstream/: a fault's own test fails on the framework's code as it stands, and passes on it as patched.

The second half needs checkouts of the frameworks in the folder PEERS (make test-peers).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from conformance import patched
from conformance.sources import Source, found
from conformance.verl_parts import Proto

FOLDER = Path(__file__).parents[2] / "upstream"
PATCHES = sorted(FOLDER.glob("*.patch"))
# Where a checkout holds its package; elsewhere at its top.
UNDER = {"axolotl": "src"}
GIVEN = {"DataProto": Proto}
AXOLOTL = "axolotl/core/trainers/grpo/async_trainer.py"


def named(patch: Path) -> str:
    return patch.stem


def framework_of(patch: Path) -> str:
    return patch.stem.partition("-")[0]


def lines_of(patch: Path, path: str) -> list[str]:
    """What a patch adds to a file."""
    part = patch.read_text(encoding="utf-8").split(f"+++ b/{path}\n")[1].partition("\ndiff --git")[0]
    return [line[1:] for line in part.splitlines() if line[:1] == "+"]


def test_the_index_lists_every_fault_once():
    listed = re.findall(r"\]\((\S+)\.patch\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    pages = [path.stem for path in FOLDER.glob("*.md") if path.name != "README.md"]
    assert sorted(listed) == sorted(pages) == sorted(patch.stem for patch in PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=named)
def test_a_patch_is_a_fix_and_a_test_that_the_page_describes(patch):
    (test,) = [path for path in patched.files_of(patch) if path.startswith("tests/")]
    ast.parse("\n".join(lines_of(patch, test)))
    fixed = [path for path in patched.files_of(patch) if path != test]
    page = patch.with_suffix(".md").read_text(encoding="utf-8")
    assert fixed and all(path in page for path in fixed)
    commit = re.search(r"`([0-9a-f]{9})`", page)
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert commit and re.search(rf"{patch.stem}\.patch.*`{commit[1]}`", index)


def before(patch: Path, source: Source) -> dict[str, object]:
    """What a test finds in place of a function that the patch makes out of statements."""
    if patch.stem != "axolotl-mask":
        return GIVEN
    method = "AsyncGRPOTrainer._compute_deferred_scores"
    old = source.lines(AXOLOTL, method, "is_ratio = torch.exp(", "if is_mode in (")
    return {
        "vllm_is_ratio": lambda logps_diff, is_mode, is_cap: old(logps_diff=logps_diff, is_mode=is_mode, is_cap=is_cap)[
            "is_ratio"
        ]
    }


def checkouts() -> list[tuple[Path, Source]]:
    sources = {}
    for name in sorted({framework_of(patch) for patch in PATCHES}):
        heads = [x for x in found(name, None, name, name, UNDER.get(name, "")) if "." not in x.version]
        sources[name] = heads[:1]  # a folder such as PEERS/areal-1234 has an older one
    return [(patch, source) for patch in PATCHES for source in sources[framework_of(patch)]]


@pytest.mark.peers
@pytest.mark.parametrize(("patch", "source"), checkouts(), ids=lambda x: named(x) if isinstance(x, Path) else x.version)
def test_its_test_fails_before_and_passes_after(patch, source, tmp_path):
    framework = framework_of(patch)
    under = UNDER.get(framework, "")
    root = source.root.parent if under else source.root
    package = f"{under}/{framework}".strip("/")
    (test,) = [path for path in patched.files_of(patch) if path.startswith("tests/")]
    fixed = patched.overlay(root, package, patch, tmp_path / "fixed")
    patched.apply(patch, fixed)
    with pytest.raises(AssertionError if patch.stem != "areal-binary-kl-config" else ValueError):
        patched.run(source.root, fixed / test, before(patch, source))
    assert patched.run(fixed / under, fixed / test, GIVEN) > 0
