"""What installs and builds the package asks for what setup.py asks for; workflows may do no more than they need."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
# Rows of README's table.
COUNTED = "rollout-corr, one pass", "verl"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def constant(name: str) -> str:
    """A text that setup.py gives a name to."""
    assigned = [node for node in ast.parse(SETUP).body if isinstance(node, ast.Assign)]
    (value,) = [node.value for node in assigned if getattr(node.targets[0], "id", None) == name]
    return ast.literal_eval(value)


def test_the_conda_recipe_asks_for_what_setup_asks_for():
    recipe = yaml.safe_load((ROOT / "packaging" / "recipe.yaml").read_text(encoding="utf-8"))
    (python,) = re.findall(r'python_requires="(.+)"', SETUP)
    (torch,) = re.findall(r'install_requires=\["torch(.+)"\]', SETUP)
    assert recipe["requirements"]["run"] == [f"python {python}", f"pytorch {torch}"]
    (command,) = re.findall(r'"console_scripts": \["(.+)"\]', SETUP)
    assert recipe["build"]["python"]["entry_points"] == [command]
    assert recipe["about"]["summary"] == constant("SUMMARY")


def test_everything_says_what_it_is_in_the_same_sentence():
    """README and the first page of the site in their first sentence, the others where they have a summary."""
    said = constant("SUMMARY")
    for name in ("README.md", "docs/index.md", "SKILL.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert f"\n**{said}.**\n" in text.partition("\n## ")[0], name
    site, cited = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/site/mkdocs.yml", "CITATION.cff"))
    assert re.findall(r'^site_description: "(.+)"$', site, re.MULTILINE) == [said]
    assert yaml.safe_load(cited)["abstract"] == said


def test_the_first_screen_tells_the_counted_costs():
    """Launches and bytes of a step in one pass, and of verl's, as in the table of README that is made of the counts."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = {who: re.search(rf"^\| {who} \| (\d+) \| \d+ \| ([\d.]+) \|$", readme, re.MULTILINE) for who in COUNTED}
    ours, verl = (rows[who].groups() for who in COUNTED)
    told = f"{ours[0]} launches and {ours[1]} bytes a token, verl's {verl[0]} and {verl[1]}"
    assert told in " ".join(readme.partition("\n## ")[0].split())


def test_nobody_is_named_before_the_owner_is_known():
    """And once known, wherever a page or a tool has to name a place, it comes from setup.py."""
    if constant("REPOSITORY"):
        assert constant("REPOSITORY").startswith("https://")
    else:
        security = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
        assert "*Security* tab" not in security and "https://" not in security
    hub, card = ((ROOT / ".ci" / "hub" / name).read_text(encoding="utf-8") for name in ("__main__.py", "CARD.md"))
    assert 'constant("HUB")' in hub and 'get_kernel("OWNER/NAME"' in card


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


def test_a_label_gives_the_machine_with_a_gpu_one_commit_of_a_pull_request():
    """And not what is pushed later; what follows the report runs although that fails; a run without a GPU says so."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    named = {name for name, job in jobs.items() if job["runs-on"] != "ubuntu-latest"}
    assert named == {"gpu", "gpu-hosted"}
    for name in named:
        condition, steps = jobs[name]["if"], jobs[name]["steps"]
        assert "github.event.action == 'labeled' && github.event.label.name == 'gpu'" in condition
        assert "pull_request" not in condition
        report = [step.get("run", "").startswith("make gpu-report") for step in steps].index(True)
        assert [step["if"] for step in steps[report + 1 :]].count("${{ !cancelled() }}") == len(steps) - report - 2 > 0
    assert jobs["no-gpu"]["if"] == "vars.GPU_RUNNER == ''" and "title=no GPU" in jobs["no-gpu"]["steps"][0]["run"]
    assert jobs["gpu-hosted"]["if"].startswith("vars.GPU_RUNNER != ''")


def test_the_oldest_torch_that_is_promised_is_tried():
    """At every push the wheel, each week all tests."""
    (oldest,) = re.findall(r'install_requires=\["torch>=(.+)"\]', SETUP)
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    assert "if" not in jobs["wheel-oldest"] and "--torch oldest" in jobs["wheel-oldest"]["steps"][-1]["run"]
    assert f"torch=={oldest}.0" in str(jobs["oldest"]["steps"])
