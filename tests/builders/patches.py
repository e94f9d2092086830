"""`python -m builders.patches`: writes the ejected file in each patch of docs/patches anew."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from builders.ejected import say
from rollout_corr.eject import eject

FOLDER = Path(__file__).parents[2] / "docs" / "patches"


class Carried(NamedTuple):
    """A file that `rollout-corr eject` wrote, in a patch."""

    path: str
    name: str
    framework: str
    backend: str = "torch"


CARRIED = {
    "verl": Carried("verl/trainer/ppo/rollout_corr_specialized.py", "verl.decoupled_geo_rs_token_tis", "verl"),
    "verl-fused": Carried(
        "verl/trainer/ppo/rollout_corr_fused.py", "verl.decoupled_geo_rs_token_tis", "verl", "triton"
    ),
    "skyrl": Carried("skyrl/backends/skyrl_train/utils/off_policy_correction_specialized.py", "skyrl.tldr", "skyrl"),
    "trl": Carried("trl/trainer/vllm_importance_sampling_specialized.py", "trl.sequence_mask", "trl"),
}


def patch_of(name: str) -> Path:
    """The file of a patch."""
    return FOLDER / f"{name}.patch"


def carried(text: str, path: str) -> str:
    """The source of a file that a patch adds."""
    added = text.partition(f"\n+++ b/{path}\n")[2].partition("\ndiff --git ")[0]
    return "".join(f"{line[1:]}\n" for line in added.splitlines() if line[:1] == "+")


def with_file(text: str, path: str, source: str) -> str:
    """A patch that adds another source at a path at which it adds a file."""
    lines = source.splitlines()
    blob = f"blob {len(source.encode())}\0{source}".encode()
    part = "\n".join(
        [
            f"diff --git a/{path} b/{path}",
            "new file mode 100644",
            f"index 0000000..{hashlib.sha1(blob).hexdigest()[:7]}",
            "--- /dev/null",
            f"+++ b/{path}",
            f"@@ -0,0 +1,{len(lines)} @@",
            *(f"+{line}" for line in lines),
            "",
        ]
    )
    pattern = rf"^diff --git a/{re.escape(path)} .*?(?=^diff --git |\Z)"
    new, count = re.subn(pattern, lambda _: part, text, flags=re.MULTILINE | re.DOTALL)
    if count != 1:
        raise ValueError(f"text: expected a patch that adds {path} once, got one that does {count} times")
    return new


def remade(name: str) -> str:
    """A patch with the file as it would be written today."""
    of = CARRIED[name]
    source = eject(of.name, of.framework, backend=of.backend).source
    return with_file(patch_of(name).read_text(encoding="utf-8"), of.path, source)


def main() -> None:
    """Write the patches, and say which were old."""
    for name in CARRIED:
        text = remade(name)
        say(f"{name}: {'as before' if text == patch_of(name).read_text(encoding='utf-8') else 'written anew'}")
        patch_of(name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
