"""`make attack`: a bounded, seeded campaign against every area, or those that are named.

    make attack                                                 every area, its own count of seeds from 0
    make attack ARGS="files values --seed 17 --count 500 --minutes 5"
    make attack ARGS="files --seed 17"                          seed 17 alone, with all that it says

Exit codes: 0 nothing was wrong, 1 something was, 2 the arguments cannot be used.
"""

from __future__ import annotations

import argparse
import os
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign that the arguments ask for."""
    # Before anything imports Triton or torch, here and in the processes: kernels are interpreted, one thread each.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from lab.attack import campaign, figures

    known = campaign.names()
    parser = argparse.ArgumentParser(
        prog="make attack", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--seed", type=int, help="the first seed; without --count the only one")
    parser.add_argument("--count", type=int, help="how many seeds for each area; default: what the area asks for")
    parser.add_argument("--minutes", type=float, default=30.0, help="start no attempt after so many; default: 30")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; default: as many as cores")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.areas) - set(known))
    if unknown:
        parser.error(f"there is no area {unknown[0]!r}, only {', '.join(known)}")
    if (chosen.count is not None and chosen.count < 1) or chosen.workers < 1 or not chosen.minutes > 0:
        parser.error("--count and --workers start at 1, --minutes above 0")

    one = chosen.seed is not None and chosen.count is None
    first = chosen.seed or 0

    def shown(area: campaign.Area, seed: int, outcome: campaign.Outcome) -> None:
        if one or outcome.verdict == "wrong":
            print(f"{area.name} --seed {seed}: {outcome.verdict}: {outcome.detail}", flush=True)

    areas = [campaign.load(name) for name in dict.fromkeys(chosen.areas or known)]
    asked = [(area, range(first, first + (1 if one else chosen.count or area.count))) for area in areas]
    found = campaign.run(asked, chosen.workers, 60 * chosen.minutes, shown)
    print(figures.table(found))
    return 1 if any(each.wrong for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
