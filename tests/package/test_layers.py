"""The map in rollout_corr/README.md holds: who may import whom, without a circle, and no peer's name in the core.

The table of the map is the list that is checked. Imports inside functions and for type checkers count everywhere.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import pytest

from builders.sources import ROOT, nodes

MAP = ROOT / "rollout_corr" / "README.md"
CORE = ("specs", "definition", "metrics", "kernels", "backends", "api")

# Files of the core that may name a peer, or import a module by a computed name.
NAMED_SLOTS = {
    "rollout_corr/specs/choices.py": "the names that Spec.report takes",
    "rollout_corr/metrics/peers.py": "where the metrics of each of these frameworks are",
    "rollout_corr/backends/batch.py": "an error: the switch by which each framework returns log-probs",
    "rollout_corr/backends/blocks.py": "a comment: what a block size was measured with",
    "kernels/correct/peers.py": "the peers' statistics in the kernels, with their columns and numbers",
}
COMPUTED_IMPORTS = {
    "rollout_corr/api/suggest.py": "loads rollout_corr.frameworks.shared.nearest for Suggestion.to_paste",
    "rollout_corr/specs/correction.py": "loads rollout_corr.frameworks.shared.writing for Spec.to_config",
    "rollout_corr/metrics/peers.py": "loads rollout_corr.frameworks.NAME.metrics for the names in Spec.report",
}

PEERS = re.compile(
    r"(?<![a-z])(areal|axolotl|cosmos_?rl|fast_?llm|flash_?rl|megatron|miles|molt|nemo|open_?instruct|openrlhf|"
    r"pipeline_?rl|prime_?rl|rlinf|rllm|roll|skyrl|slime|swift|tinker|torchforge|torchtitan|trinity|trl|tunix|unsloth|"
    r"verl|xtuner)(?![a-z])",
    re.IGNORECASE,
)


def rooms() -> dict[str, list[str]]:
    """The modules that each room may import, from the floor up: rooms, or single modules such as `backends.choose`."""
    rows = re.findall(r"^\| `([\w.]+)` \|[^|]*\| ([^|]*) \|$", MAP.read_text(encoding="utf-8"), re.MULTILINE)
    return {room: re.findall(r"`([\w.]+)`", allowed) for room, allowed in rows}


@cache
def modules() -> dict[str, Path]:
    """Every module by its name below `rollout_corr`; the package itself is `__init__`."""
    found = {}
    for folder, prefix in ((ROOT / "rollout_corr", ""), (ROOT / "kernels", "kernels.")):
        for path in folder.rglob("*.py"):
            inside = path.relative_to(folder)
            if prefix or inside.parts[0] != "kernels":
                name = prefix + ".".join(inside.with_suffix("").parts)
                found[name if name == "__init__" else name.removesuffix(".__init__")] = path
    return found


@cache
def named_in(module: str) -> tuple[frozenset[str], frozenset[str]]:
    """The modules of this package that `module` imports, anywhere in its file, and those that it names to a loader."""
    package = "rollout_corr" if module == "__init__" else f"rollout_corr.{module}"
    if modules()[module].stem != "__init__":
        package = package.rpartition(".")[0]
    imported, loaded, path = set(), set(), modules()[module]
    stub = path.with_suffix(".pyi")  # the package imports by its stub
    for node in [*nodes(path), *(nodes(stub) if stub.exists() else ())]:
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            imported |= {f"{source}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Such as "rollout_corr.cli.demo:run".
            loaded |= set(re.findall(r"^(rollout_corr(?:\.\w+)+)(?::\w+)?$", node.value))
    return frozenset(map(module_of, imported)) - {"", module}, frozenset(map(module_of, loaded)) - {"", "__init__"}


def module_of(name: str) -> str:
    """The module of this package in which a full name lies; the empty text for others' names."""
    head, _, inside = name.partition(".")
    while inside and inside not in modules():
        inside = inside.rpartition(".")[0]
    return (inside or "__init__") if head == "rollout_corr" else ""


def imports(module: str, strings: bool = True) -> frozenset[str]:
    """The modules of this package that `module` imports; with `strings` those for a loader too."""
    imported, loaded = named_in(module)
    return imported | loaded - {module} if strings else imported


def room_of(module: str) -> str:
    return module.partition(".")[0]


def test_the_map_has_every_room_and_points_down():
    chart = rooms()
    assert set(chart) == {room_of(module) for module in modules()}
    above: list[str] = []
    for room, allowed in chart.items():
        assert {room_of(name) for name in allowed} <= set(above), f"{room} may import only rooms above it in the table"
        assert set(allowed) <= set(modules()) | set(chart), room
        above.append(room)
    assert not {"definition", "kernels"} & {room_of(name) for room in ("definition", "kernels") for name in chart[room]}


def test_imports_follow_the_map():
    chart, used = rooms(), set()
    for module in modules():
        room = room_of(module)
        for target in imports(module):
            if room_of(target) == room:
                continue
            way = [name for name in chart[room] if target == name or target.startswith(f"{name}.")]
            assert way, f"{module} imports {target}; {room} may import {chart[room]}"
            used |= {(room, name) for name in way}
    unused = {(room, name) for room, allowed in chart.items() for name in allowed} - used
    assert not unused, f"on the map, but imported by nobody: {sorted(unused)}"


def test_no_circle():
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in done:
            for target in imports(module, strings=False):
                visit(target, (*way, module))
            done.add(module)

    for module in modules():
        visit(module, ())


@pytest.mark.parametrize("room", CORE)
def test_the_core_knows_no_peer(room):
    named, computed = set(), set()
    for module, path in modules().items():
        if room_of(module) != room:
            continue
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        found = sorted(set(PEERS.findall(text)))
        if found:
            named.add(name)
            assert name in NAMED_SLOTS, f"{name} names {found}"
        if re.search(r"import_module\(|__import__\(", text):
            computed.add(name)
    folder = "kernels/" if room == "kernels" else f"rollout_corr/{room}/"
    assert named == {name for name in NAMED_SLOTS if name.startswith(folder)}, "a slot that no longer names a peer"
    assert computed == {name for name in COMPUTED_IMPORTS if name.startswith(folder)}


def test_every_framework_is_known_as_a_peer():
    frameworks = ROOT / "rollout_corr" / "frameworks"
    folders = {path.parent.name for path in frameworks.glob("*/__init__.py")} - {"shared"}
    assert len(folders) > 5
    assert not {name for name in folders if not PEERS.fullmatch(name)}


def test_the_page_of_a_room_names_its_files():
    for folder in [path.parent for path in modules().values() if path.name == "__init__.py"]:
        # A framework is found by the name of its file.
        if folder.parent in (ROOT, ROOT / "rollout_corr") and folder.name not in ("rollout_corr", "frameworks"):
            text = (folder / "README.md").read_text(encoding="utf-8")
            missing = {path.name for path in folder.glob("*.py") if f"]({path.name})" not in text} - {"__init__.py"}
            assert not missing, f"{folder.name}/README.md misses {missing}"


def trail(page: Path) -> list[tuple[Path, str]]:
    """The files and names of the trail to follow, as a page has them."""
    rows = re.findall(
        r"^\| Where .*\| \[[^\]]*\]\(([^)]+)\) \| `(\w+)` \|$", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    return [((page.parent / link).resolve(), name) for link, name in rows]


def test_the_trail_leads_there():
    found = trail(MAP)
    assert len(found) == 4
    for path, name in found:
        assert re.search(rf"^(def {name}\(|{name}\b.*=)", path.read_text(encoding="utf-8"), re.MULTILINE), (path, name)


def test_the_pictures_name_files_that_exist():
    pictures = "".join(re.findall(r"```text\n(.*?)```", MAP.read_text(encoding="utf-8"), re.DOTALL))
    named = re.findall(r"(\w+)/(\w+\.py)((?:, \w+\.py)*)", pictures)
    assert len(named) > 15
    for room, first, more in named:
        for file in (first, *re.findall(r"\w+\.py", more)):
            assert (MAP.parent / room / file).exists(), f"{room}/{file}"
    for folder in re.findall(r"kernels/\w+/", pictures):
        assert (ROOT / folder).is_dir(), folder
