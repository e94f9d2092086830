"""The pages: their Python runs, their links lead somewhere, what is generated is fresh, what is named exists."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

import rollout_corr as rc
from builders import estimators, metrics_page
from builders.framework_tables import losses
from builders.healthy import same_lengths
from builders.pages import DOCS, EXAMPLES, PAGES, ROOT, blocks
from rollout_corr.cli.main import main
from rollout_corr.frameworks.shared import lookup
from rollout_corr.metrics.limits import FILLED, FILLED_TIMES, FILLED_TOKENS
from rollout_corr.specs import choices, surrogate, terms
from rollout_corr.testing import example_batch

MATHS = DOCS / "math.md", DOCS / "loss_math.md"
GUIDES = [DOCS / f"{name}.md" for name in ("guide", "batches", "turns_groups_labels", "troubleshooting")]
MAPS = [*sorted((ROOT / "kernels").glob("*.md")), *sorted((ROOT / "rollout_corr").glob("**/README.md"))]
# What the pages rest on: tables that tests make, next to them.
EVIDENCE = [*(ROOT / "tests").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "upstream").glob("*.md")]
TOP_LEVEL = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "MAINTAINING.md")
LINKED = [*PAGES, *MAPS, *EVIDENCE, *(ROOT / name for name in TOP_LEVEL)]
# Figures of trust.md, where they come from.
FIGURES = {
    "conformance": (r"^([\d,]+) rows, ([\d,]+) cases",),
    "diagnose": (r"kinds, (\d+) of them with a bug", r"(\d+ of \d+) dumps \(", r"still named, (\d wrongly)"),
    "lab/engine": (
        r"names (\d+) of the (\d+)\s+ill ones, finds (\d+ too small)",
        r"in (\d+) healthy ones",
        r"other (\d+ presets)",
    ),
}

# What a Spec or a Loss may ask for: each value has its formula in math.md or loss_math.md.
CHOICES = {
    choices: "STRETCH_REDUCTIONS OUTSIDE NORMALIZE STATS UNITS REDUCTIONS WHEN DROP REJECTED NONFINITE SUMS_OVER",
    terms: "MEANS MEANS_OVER KL_KINDS",
    surrogate: "RATIOS",
}


def prose(path: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^\s*```.*?^\s*```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def python_blocks() -> list[object]:
    """Every block of Python, but for those that test_dashboard.py runs with a tracker."""
    tracks = re.compile(r"^(import|from) (wandb|mlflow|trackio|torch\.utils\.tensorboard)", re.MULTILINE)
    found = [block for path in PAGES for block in blocks(path) if block.language == "python"]
    return [
        pytest.param(block, id=f"{block.path.name}:{block.line}") for block in found if not tracks.search(block.code)
    ]


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


def test_commands_for_agents_run(monkeypatch, tmp_path, capsys):
    """On a dump and a configuration with the names of the page; 1 is a finding, 2 would be a mistake in the command."""
    monkeypatch.chdir(tmp_path)
    sample = example_batch(sequences=6)
    rc.dump("dump.jsonl", sample.train_logp, sample.rollout_logp, cu_seqlens=sample.cu_seqlens).result()
    Path("config.yaml").write_text("algorithm: {rollout_correction: {rollout_is: token}}\n", encoding="utf-8")
    shown = [block.code for block in blocks(ROOT / "SKILL.md") if block.language == "bash"]
    commands = [shlex.split(line)[1:] for line in "".join(shown).splitlines()]
    assert len(commands) > 5
    for command in commands:
        assert main(command) in (0, 1), (command, capsys.readouterr().err)


# --- settings to paste ---

# What these pages show is a framework's own; they say which lengths its bounds fit.
OF_FRAMEWORKS = ("migrate.md", "presets.md", "losses.md", "mismatch_rl.py", "engine_rl.py")
CALL = re.compile(r"rc\.(?:spec|Spec|Criterion|GeoRS|MIS|IcePop)\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")


def settings_shown() -> dict[rc.Spec, str]:
    """Every Spec and criterion that a page or an example writes in full, in code of any kind, and where it stands."""
    found: dict[rc.Spec, str] = {}
    for path in (page for page in (*PAGES, *EXAMPLES) if page.name not in OF_FRAMEWORKS):
        for call in CALL.findall(path.read_text(encoding="utf-8")):
            try:
                made = eval(call, {"rc": rc})
            except (NameError, SyntaxError, TypeError, ValueError):
                continue  # of names that stand above it, or shown to be refused
            found.setdefault(made if isinstance(made, rc.Spec) else rc.Spec(criteria=(made,)), f"{path.name}: {call}")
    return found


def of_the_two_log_probs(spec: rc.Spec) -> bool:
    """Whether a Spec rejects by fixed bounds on what a healthy pair of log-probs has."""
    asks = spec.asks_batch or spec.reads_versions or spec.reads_entropy or spec.measures_turns or spec.needs_groups
    return not asks and all(
        c.of == "train/rollout" and c.when == "any" and c.statistic.source != "caller" for c in spec.criteria
    )


def test_settings_to_paste_keep_healthy_data():
    """At k3 3e-4, a bf16 engine, each rejects below 5 % of the tokens and sequences of any length.

    Geometric bounds have to be as wide as 2 standard deviations of D over sqrt(length): 1.018 for 8 tokens.
    """
    shown = {spec: where for spec, where in settings_shown().items() if of_the_two_log_probs(spec)}
    assert len(shown) > 20
    for length, sequences in ((8, 400), (200, 60), (4000, 12), (32_000, 3)):
        train, rollout = same_lengths(length, sequences, 3e-4)
        for spec, where in shown.items():
            found = rc.correct(train, rollout, spec=spec).metrics()
            kept = min(found["tokens_kept_fraction"], found["sequences_kept_fraction"])
            assert kept > 0.95, f"{where} keeps {100 * kept:.0f} % of {length} tokens"


# --- what is generated ---


def test_metrics_page_is_fresh():
    wanted = "PYTHONPATH=tests python -m builders.metrics_page"
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    assert page == metrics_page.page(page), wanted
    placeholders = f"at least {FILLED_TOKENS} tokens, {100 * FILLED:g} % of all and {FILLED_TIMES:g} times"
    assert placeholders in " ".join(page.split())
    for row in metrics_page.rows():  # those without a row of their own have the key of one that stands for them
        key = re.sub(r"^(sequence|sequence_mean|turn)_(?=weight_(?!divisor))", "", row.key)
        key = re.sub(r"^weight_before_bounds_(?!p\d)", "weight_", key)
        key = re.sub(r"_p[\d.]+$", "_pQ", re.sub("^(middle|last)_turn", "first_turn", key))
        assert f"\n| `{key}`" in page.partition("## What `warn")[0], row.key


def test_losses_page_is_fresh():
    text = (DOCS / "losses.md").read_text(encoding="utf-8")
    assert losses() in text, "python -m builders.framework_tables losses makes the part between the comments"


def test_what_estimators_measure_is_fresh():
    number, wanted = r"(?<=\| )[\d.]+", "PYTHONPATH=tests python -m builders.estimators"
    for page, tables in estimators.tables().items():
        parts = page.read_text(encoding="utf-8").split(estimators.BEGIN)[1:]
        for part, new in zip(parts, tables, strict=True):
            old = part.partition(estimators.END)[0].strip()
            assert re.sub(number, "0", old) == re.sub(number, "0", new), wanted
            values = ([float(x) for x in re.findall(number, text)] for text in (old, new))
            assert next(values) == pytest.approx(next(values), rel=0.02, abs=0.02), wanted


def test_the_page_of_trust_has_the_figures_of_its_evidence():
    page = " ".join((DOCS / "trust.md").read_text(encoding="utf-8").split())
    for folder, patterns in FIGURES.items():
        text = (ROOT / "tests" / folder / "README.md").read_text(encoding="utf-8")
        for pattern in patterns:
            (found,) = re.findall(pattern, text, re.MULTILINE)
            missing = [figure for figure in ([found] if isinstance(found, str) else found) if figure not in page]
            assert not missing, f"{folder}: {missing}"


def test_what_to_cite_stands_on_the_page_of_references():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["references"]
    page = (DOCS / "references.md").read_text(encoding="utf-8")
    assert len(cited) > 3 and not [one["url"] for one in cited if f"({one['url']})" not in page]


def test_the_frameworks_whose_configuration_is_read_are_named():
    first = (DOCS / "migrate.md").read_text(encoding="utf-8").partition("- `rc.spec(name)`")[0]
    assert sorted(re.findall(r'`"(\w+)"`', first)) == lookup.readable("read")


# --- links ---


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(path):
    """To a file, to a heading; and where a link's text is a name in backticks, to the file that defines it."""
    for shown, target in re.findall(r"(?:\[`(?:\w+\.)*(\w+)`)?\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists() and found.is_relative_to(ROOT), f"{path.name}: {target}"
        assert not anchor or anchor in anchors(found), f"{path.name}: {target}"
        if shown not in ("", "py", found.stem) and found.suffix == ".py":
            defined = rf"^ *((def|class) )?{shown}\b"
            assert re.search(defined, found.read_text(encoding="utf-8"), re.MULTILINE), f"{path.name}: {shown}"


def test_the_site_has_every_page_once():
    def listed(entries):
        found = [at for entry in entries for at in entry.values()]
        return [page for at in found for page in ([at] if isinstance(at, str) else listed(at))]

    pages = listed(yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    written = [path.relative_to(DOCS).as_posix() for folder in (DOCS, DOCS / "api") for path in folder.glob("*.md")]
    assert sorted(page for page in pages if not page.startswith("repository/")) == sorted(written)
    assert all((ROOT / page.removeprefix("repository/")).is_file() for page in pages if page.startswith("repository/"))


def test_the_ordinary_path_is_read_in_an_hour():
    nav = yaml.safe_load((DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    (path,) = [entry["The ordinary path"] for entry in nav if "The ordinary path" in entry]
    pages = [(DOCS / name).read_text(encoding="utf-8") for entry in path for name in entry.values()]
    assert len(pages) < 10 and sum(len(page.split()) for page in pages) < 15_000
    assert all("**Next:**" in page for page in pages)


# --- names ---


def test_public_names_are_on_one_api_page_each():
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    named = Counter(re.findall(r"^- \[`rollout_corr\.(\w+)`\]\(", text, re.MULTILINE))
    assert named == Counter(rc.__all__)


def test_math_covers_every_choice():
    text = "".join(path.read_text(encoding="utf-8") for path in MATHS)
    for module, names in CHOICES.items():
        for name in names.split():
            missing = [value for value in getattr(module, name) if f'"{value}"' not in text]
            assert not missing, name


@pytest.mark.parametrize("path", [ROOT / "README.md", *GUIDES], ids=lambda path: path.name)
def test_names_in_backticks_exist(path):
    """A plain or dotted word in backticks is a metric, or each of its parts is a word of the package's source."""
    metrics = {row.key for row in metrics_page.rows()}
    assert "chi2_train_rollout" in metrics and "LABEL/tokens_rejected_fraction" in metrics
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "rollout_corr").rglob("*.py")]
    words = set(re.findall(r"\w+", "".join(sources))) | {"create_graph", "retain_graph"}
    named = set(re.findall(r"(?<!`)`([A-Za-z_][\w.]*(?:/\w+)?)`(?!`)", prose(path)))
    for name in named - metrics:
        _, slash, key = name.rpartition("/")
        assert (f"LABEL/{key}" in metrics) if slash else words.issuperset(name.split(".")), f"{path.name}: {name}"
