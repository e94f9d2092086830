"""What installs and builds the package asks for what setup.py asks for; workflows may do no more than they need."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_conda_recipe_asks_for_what_setup_asks_for():
    recipe = yaml.safe_load((ROOT / "packaging" / "recipe.yaml").read_text(encoding="utf-8"))
    (python,) = re.findall(r'python_requires="(.+)"', SETUP)
    (torch,) = re.findall(r'install_requires=\["torch(.+)"\]', SETUP)
    assert recipe["requirements"]["run"] == [f"python {python}", f"pytorch {torch}"]
    (command,) = re.findall(r'"console_scripts": \["(.+)"\]', SETUP)
    assert recipe["build"]["python"]["entry_points"] == [command]
    assert f'description="{recipe["about"]["summary"]}"' in SETUP


def test_what_the_image_runs_at_its_end_passes():
    (code,) = re.findall(r'python -c "(.+)"$', (ROOT / "packaging" / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    exec(code, {})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_pinned_actions_and_may_only_read(path):
    """A tag can be moved, a commit cannot. The one job that may do more has no checkout and runs no command."""
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"uses: .*", text) == re.findall(r"uses: [\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", text)
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        for step in job["steps"]:
            checkout = "actions/checkout" in step.get("uses", "")
            assert not checkout or step["with"]["persist-credentials"] is False, name
            assert "permissions" not in job or (not checkout and "run" not in step), name
            assert "${{" not in step.get("run", ""), "what a stranger names becomes part of a command"
