"""The tables of pages and README, from the committed results: `python -m benchmarks.report`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.costs import tables as costs
from benchmarks.cpu.tables import DISTURBED, absent, all_tables, in_short
from benchmarks.cpu.turns import BUSY
from benchmarks.gpu import page as gpu_page
from benchmarks.machine import RESULTS, ROOT
from benchmarks.tables import Found, commit_of, grid, markdown
from rollout_corr.whole_files import write_whole

CPU_RESULTS, GPU_RESULTS, COSTS, STEPS = (RESULTS / f"{name}.json" for name in ("cpu", "gpu", "costs", "steps"))
PAGE, KERNELS = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "kernels.md"
TABLES = ROOT / "benchmarks" / "tables.md"
README = ROOT / "README.md"

# A part of the page that is made, by its name.
BEGIN, END = "<!-- {}: made by `python -m benchmarks.report`; a test compares them -->", "<!-- end of what is made -->"


NO_RESULT = ["No result is committed yet."]
NO_GPU_YET = (
    "No number in this project was measured on a GPU yet. What bounds each kernel is on [their page](kernels.md).\n"
)


def page(text: str, results: Found | None, of_gpu: Found | None, counted: Found, of_steps: Found) -> str:
    """Return docs/benchmarks.md with the parts that are made of results of the CPU, of a GPU and of counts."""
    text = filled(text, "headline", grid(costs.headline(counted)))
    text = filled(text, "steps", grid(costs.steps(of_steps)))
    text = filled(text, "gpu", [NO_GPU_YET] if of_gpu is None else below(gpu_page.body(of_gpu)))
    return filled(text, "times", NO_RESULT if results is None else in_short(results))


def every_table(text: str, results: Found | None, counted: Found) -> str:
    """Return benchmarks/tables.md with everybody's costs, and times of every size."""
    text = filled(text, "costs", below(markdown(costs.all_tables(counted))))
    return filled(text, "cpu", NO_RESULT if results is None else of_cpu(results))


def filled(text: str, name: str, lines: Iterable[str]) -> str:
    """Return a page with one part that is made."""
    before, begin, rest = text.partition(BEGIN.format(name))
    if not begin:
        raise ValueError(f"page: expected {BEGIN.format(name)}, got a page without it")
    made = "\n".join(lines).strip("\n")
    return f"{before}{begin}\n\n{made}\n\n{END}{rest.partition(END)[2]}"


def of_kernels(text: str, of_steps: Found) -> str:
    """Return docs/kernels.md with its table of a step."""
    return filled(text, "steps", grid(costs.steps_of_ours(of_steps)))


def of_readme(text: str, results: Found | None, of_steps: Found) -> str:
    """Return README with its tables of counts and of times."""
    text = filled(text, "steps", grid(costs.steps_in_short(of_steps)))
    return filled(text, "times", NO_RESULT if results is None else in_short(results))


def of_cpu(results: Found) -> list[str]:
    """The run of the CPU, and its tables."""
    about = results["machine"]
    caches = ", ".join(f"{level} {size}" for level, size in about["caches"].items()) or "unknown"
    verl = "without verl" if about["verl"] is None else f"verl {about['verl']}"
    setting = ", ".join(f"{name}={value}" for name, value in about["allocator"].items()) or "the defaults"
    missing = [f"{line}." for line in absent(results)]
    return [
        f"**This run of the CPU:** {commit_of(results)}.",
        f"{about['cpu']}, {about['cores']} cores, caches {caches}, {about['vectors']}; {about['system']}, Python "
        f"{about['python']}, torch {about['torch']}, {verl}; allocator settings: {setting}.",
        f"A round is *disturbed* if `torch.exp` took over {DISTURBED:.2f} times its fastest. It is dropped if that",
        f"took over {BUSY:g} times its median, or if a call took over {BUSY:g} times its own processor time.",
        "",
        *([*missing, ""] if missing else []),
        *below(markdown(all_tables(results))),
    ]


def below(lines: Iterable[str]) -> list[str]:
    """Lower the headings of a part by a level: a page has one title."""
    return [f"#{line}" if line.startswith("## ") else line for line in lines]


def load(path: Path = CPU_RESULTS) -> Found | None:
    """Return committed results, None before there are any."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def counted() -> Found:
    """Return the committed results of `benchmarks.costs`."""
    return json.loads(COSTS.read_text(encoding="utf-8"))


def counted_steps() -> Found:
    """Return the committed results of `benchmarks.costs.steps`."""
    return json.loads(STEPS.read_text(encoding="utf-8"))


def main() -> None:
    """Write the tables into their pages."""
    text = PAGE.read_text(encoding="utf-8")
    write_whole(PAGE, page(text, load(), load(GPU_RESULTS), counted(), counted_steps()))
    write_whole(KERNELS, of_kernels(KERNELS.read_text(encoding="utf-8"), counted_steps()))
    write_whole(TABLES, every_table(TABLES.read_text(encoding="utf-8"), load(), counted()))
    write_whole(README, of_readme(README.read_text(encoding="utf-8"), load(), counted_steps()))


if __name__ == "__main__":
    main()
