"""Compare this package with the frameworks' own code: `make conformance`."""

from __future__ import annotations

import argparse
import sys

from conformance import campaign, page, recording
from conformance.campaign import Compared, Task


def main(given: list[str] | None = None) -> int:
    """Run the comparison; 1 if a difference is not documented."""
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("frameworks", nargs="*", help="frameworks to compare; all that have rows by default")
    parser.add_argument("--cases", type=int, default=520, help="batches for each row (520)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    parser.add_argument("--record", action="store_true", help="write down the frameworks' results for the tests")
    parser.add_argument("--write", action="store_true", help="write what is compared into tests/conformance/README.md")
    parser.add_argument("--list", action="store_true", help="write the list of that page again, and compare nothing")
    arguments = parser.parse_args(given)
    if arguments.list:
        page.write()
        return 0
    if arguments.write and (arguments.seed or arguments.only or arguments.record):
        parser.error("--write: expected all rows, from the first seed 0")
    known = campaign.frameworks()
    unknown = sorted(set(arguments.frameworks) - set(known))
    if unknown:
        parser.error(f"no rows for {', '.join(unknown)}; expected some of {', '.join(known)}")
    names = arguments.frameworks or known
    found = []
    if arguments.record and set(names) == set(known):
        recording.record_batches()
    tasks = [Task(name, arguments.cases, arguments.seed, arguments.only, arguments.record) for name in names]
    for source, tally in (compared for made in campaign.run(tasks) for compared in made):
        found.append(Compared(source, tally))
        counts = f"{tally.agreed} agree, {sum(tally.declared.values())} declared, {len(tally.undeclared)} undeclared"
        print(f"{source.framework} {source.version}: {tally.row}: {counts}", flush=True)
        for line in tally.undeclared[:3]:
            print(f"    {line}")
    absent = sorted(set(names) - {source.framework for source, _ in found})
    if absent:
        print(f"not found here: {', '.join(absent)} (install them, or name a folder of checkouts by PEERS=)")
    if arguments.write or arguments.record:
        page.write(found if arguments.write else ())
    undeclared = sum(len(tally.undeclared) for _, tally in found)
    print(f"{len(found)} rows, {sum(tally.cases for _, tally in found)} cases, {undeclared} undeclared differences")
    return 1 if undeclared or not found else 0


if __name__ == "__main__":
    sys.exit(main())
