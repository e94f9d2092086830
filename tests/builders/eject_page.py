"""`python -m builders.eject_page`: the table of docs/eject.md."""

from __future__ import annotations

import sys

from rollout_corr.eject import eject

COMMANDS = (
    "trl.token_truncate",
    "verl.decoupled_geo_rs_token_tis --for verl",
    "verl.ppo --loss --layout padded",
    "trl.dapo --loss",
    "skyrl.token_tis --for skyrl",
    "trl.token_truncate --backend triton",
    "verl.ppo --loss --backend triton",
    "slime.tis --loss --backend triton",
    "verl.decoupled_geo_rs_token_tis --for verl --backend triton",
    "verl.decoupled_geo_rs_token_tis --for verl --backend both",
)


def table() -> str:
    """Lines of some files."""
    rows = ["| `rollout-corr eject ...` | lines |", "| :-- | --: |"]
    for command in COMMANDS:
        name, *flags = command.replace("--loss", "").split()
        given = dict(zip((flag[2:] for flag in flags[::2]), flags[1::2], strict=True))
        framework, layout = given.get("for", "plain"), given.get("layout", "packed")
        made = eject(name, framework, layout, loss="--loss" in command, backend=given.get("backend", "torch"))
        rows.append(f"| `{command}` | {len(made.source.splitlines())} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
