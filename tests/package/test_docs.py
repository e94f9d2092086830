"""The pages: their Python runs, their links lead somewhere, what is generated is fresh, what is named exists."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import rollout_corr as rc
from builders import metrics_page
from builders.pages import DOCS, PAGES, ROOT, blocks
from rollout_corr.frameworks.shared import lookup
from rollout_corr.frameworks.shared.tables import losses
from rollout_corr.specs import choices, surrogate, terms

MATHS = DOCS / "math.md", DOCS / "loss_math.md"
GUIDES = DOCS / "guide.md", DOCS / "batches.md", DOCS / "troubleshooting.md"
MAPS = [ROOT / "kernels" / "README.md", *sorted((ROOT / "rollout_corr").glob("**/README.md"))]
LINKED = [*PAGES, *MAPS, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"))]

CHOICES = {
    name: getattr(choices, name)
    for name in (
        "STRETCH_REDUCTIONS",
        "OUTSIDE",
        "NORMALIZE",
        "STATS",
        "UNITS",
        "REDUCTIONS",
        "WHEN",
        "DROP",
        "REJECTED",
    )
} | {"NONFINITE": choices.NONFINITE, "SUMS_OVER": choices.SUMS_OVER}
CHOICES |= {name: getattr(terms, name) for name in ("MEANS", "MEANS_OVER", "KL_KINDS")}
CHOICES["RATIOS"] = surrogate.RATIOS


def prose(path: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^\s*```.*?^\s*```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def python_blocks() -> list[object]:
    found = []
    for block in (block for path in PAGES for block in blocks(path) if block.language == "python"):
        # test_dashboard.py runs these, and reads what was logged.
        tracks = re.search(r"^(import|from) (wandb|mlflow|trackio|torch\.utils\.tensorboard)", block.code, re.MULTILINE)
        if tracks:
            continue
        found.append(pytest.param(block, id=f"{block.path.name}:{block.line}"))
    return found


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*old name:UserWarning")  # migrate.md shows them
@pytest.mark.usefixtures("nothing_said_yet")
@pytest.mark.parametrize("block", python_blocks())
def test_python_runs(block, monkeypatch, tmp_path, request):
    """Each block in a namespace of its own, as if a fresh process had come to it."""
    monkeypatch.chdir(tmp_path)
    if "torch.distributed" in block.code:
        request.getfixturevalue("one_rank")
    # The empty lines make a traceback point into the page.
    code = compile("\n" * block.line + block.code, str(block.path), "exec")
    with torch.random.fork_rng(devices=[]):
        exec(code, {"__name__": "docs"})


def test_guide_and_math_have_python():
    """No page loses its tests by a fence that is spelled another way."""
    for path in PAGES:
        for block in blocks(path):
            assert block.language in ("python", "text", "yaml", "bash", ""), f"{path.name}:{block.line}"
            assert block.language or not re.search(r"^(import|from) ", block.code, re.MULTILINE), block
    for path in (*MATHS, *GUIDES):
        assert any(block.language == "python" for block in blocks(path))


def test_metrics_page_is_fresh():
    wanted = "PYTHONPATH=tests python -m builders.metrics_page > docs/metrics.md"
    assert (DOCS / "metrics.md").read_text(encoding="utf-8") == metrics_page.markdown(), wanted


def test_the_frameworks_whose_configuration_is_read_are_named():
    first = (DOCS / "migrate.md").read_text(encoding="utf-8").partition("- `rc.spec(name)`")[0]
    assert sorted(re.findall(r'`"(\w+)"`', first)) == lookup.readable("read")


def test_losses_page_is_fresh():
    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    assert losses() in text, "python -m rollout_corr.frameworks losses makes the part between the comments"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_rows_of_a_table_have_as_many_cells(path):
    """A bar inside a cell has to be escaped, in code too."""
    cells = 0
    for line in prose(path).splitlines():
        if not line.startswith("|"):
            cells = 0
            continue
        found = len(re.findall(r"(?<!\\)\|", line))
        assert cells in (0, found), f"{path.name}: {line}"
        cells = found


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_has_one_title(path):
    prose = re.sub(r"^\s*```.*?^\s*```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"^# ", prose, re.MULTILINE)) == 1


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), f"{path.name}: {target}"
        assert found.is_relative_to(ROOT), f"{path.name}: {target}"
        if anchor:
            assert anchor in anchors(found), f"{path.name}: {target}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_thread_is_linked_under_its_number(path):
    """`[TRL#6789](.../trl/issues/6789)`: what is shown and where it leads agree."""
    for shown, repository, number in re.findall(
        r"\[([^\]]*#\d+)\]\(https://github\.com/[^/]+/([^/]+)/(?:issues|pull)/(\d+)\)", path.read_text(encoding="utf-8")
    ):
        name, _, own = shown.partition("#")
        assert own == number, shown
        assert name.split()[0].lower() in repository.lower() or repository.lower() in name.lower().split(), shown


# --- math.md ----------------------------------------------------------------------------------------------------------


def test_every_section_of_math_ends_with_its_function():
    sections = [section for path in MATHS for section in re.split(r"^## ", prose(path), flags=re.MULTILINE)[1:]]
    assert len(sections) > 15
    for section in sections:
        title = section.partition("\n")[0]
        last = section.strip().rpartition("\n\n")[2]
        assert last.startswith("Reference: "), title
        links = re.findall(r"\[`(\w+)`\]\(\.\./rollout_corr/([\w/]+)\.py\)", last)
        assert links, title
        for name, path in links:
            module = f"rollout_corr.{path.replace('/', '.')}"
            function = inspect.unwrap(getattr(importlib.import_module(module), name))
            assert inspect.isfunction(function) and function.__module__ == module, (title, name)


def test_math_covers_every_choice():
    text = "".join(path.read_text(encoding="utf-8") for path in MATHS)
    for kind, values in CHOICES.items():
        for value in values:
            assert f'"{value}"' in text, f"{kind}: {value}"


def test_math_survives_markdown():
    """GitHub reads Markdown first, so some TeX never reaches the typesetter; and a table ends a cell at every bar."""
    text = re.sub(r"`[^`\n]*`", "", "".join(map(prose, MATHS)))
    assert text.count("$") % 2 == 0
    formulas = re.findall(r"(^|.)(\${1,2})([^$]+)\2(?=(.|$))", text, re.MULTILINE)
    assert len(formulas) > 50
    for before, mark, formula, after in formulas:
        assert "\n" not in formula, formula
        assert formula.count("{") == formula.count("}"), formula
        for wrong in (r"\\[^A-Za-z]", r"(?<![A-Za-z0-9])_", r"[<>*|]", r"\]\("):
            assert not re.search(wrong, formula), f"{formula!r} has {wrong}"
        if mark == "$":
            assert formula == formula.strip(), formula
            assert not re.match(r"[\w\-$]", before) and not re.match(r"\w", after), f"{before}${formula}${after}"


# --- names ------------------------------------------------------------------------------------------------------------


def metric_keys() -> set[str]:
    """Every native key, with LABEL for a criterion's label."""
    return set(re.findall(r"^\| `([^`]+)` \|", metrics_page.markdown(), re.MULTILINE))


@pytest.mark.parametrize("path", [ROOT / "README.md", *GUIDES], ids=lambda path: path.name)
def test_names_in_backticks_exist(path):
    """A plain or dotted word in backticks is a metric, or each of its parts is a word of the package's source."""
    metrics = metric_keys()
    assert "chi2_train_rollout" in metrics and "LABEL/tokens_rejected_fraction" in metrics
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "rollout_corr").rglob("*.py")]
    words = set(re.findall(r"\w+", "".join(sources))) | {"create_graph", "retain_graph"}
    named = set(re.findall(r"(?<!`)`([A-Za-z_][\w.]*(?:/\w+)?)`(?!`)", prose(path)))
    assert path != GUIDES[0] or len(named & metrics) > 10
    for name in named - metrics:
        _, slash, key = name.rpartition("/")
        assert (f"LABEL/{key}" in metrics) if slash else words.issuperset(name.split(".")), f"{path.name}: {name}"


def test_attributes_in_the_guide_exist():
    owners = {"rc": rc, "out": rc.Correction, "loss": rc.PolicyLoss, "groups": rc.FilteredGroups, "torch": torch}
    for owner, name in re.findall(r"\b(rc|out|loss|groups|torch)\.(\w+)", "".join(map(prose, GUIDES))):
        fields = getattr(owners[owner], "__annotations__", {})
        assert hasattr(owners[owner], name) or name in fields, f"{owner}.{name}"
