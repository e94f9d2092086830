"""The conda recipe and the container file ask for the packages that setup.py asks for."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


def test_the_conda_recipe_asks_for_what_setup_asks_for():
    recipe = yaml.safe_load((ROOT / "packaging" / "recipe.yaml").read_text(encoding="utf-8"))
    (python,) = re.findall(r'python_requires="(.+)"', SETUP)
    (torch,) = re.findall(r'install_requires=\["torch(.+)"\]', SETUP)
    assert recipe["requirements"]["run"] == [f"python {python}", f"pytorch {torch}"]
    (command,) = re.findall(r'"console_scripts": \["(.+)"\]', SETUP)
    assert recipe["build"]["python"]["entry_points"] == [command]
    assert recipe["package"]["version"] == '${{ env.get("ROLLOUT_CORR_VERSION") }}', "setup.py reads the one version"
    assert f'description="{recipe["about"]["summary"]}"' in SETUP


def test_the_image_keeps_its_torch():
    """Every installation in the container file leaves out requirements, and what is copied is a release's."""
    text = (ROOT / "packaging" / "Dockerfile").read_text(encoding="utf-8")
    assert all("--no-deps" in line for line in text.splitlines() if "pip install" in line) and "pip install" in text
    copied = re.findall(r"^COPY (\S+)", text, re.MULTILINE)
    assert copied == ["build/release/dist/*.whl"]
    ignored = (ROOT / "packaging" / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert [line for line in ignored if not line.startswith("#")] == ["*", *(f"!{path}" for path in copied)]


def test_what_the_image_runs_at_its_end_passes():
    """With `weights` of a Spec that has none, no image could have been built."""
    (code,) = re.findall(r'python -c "(.+)"$', (ROOT / "packaging" / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    exec(code, {})
