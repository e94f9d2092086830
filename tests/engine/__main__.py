"""`make engine`, or `PYTHONPATH=tests python -P -m engine`: a real engine and a real trainer, through the package."""

import argparse
import sys
from pathlib import Path

import torch

from . import models, modes, page, recorded
from .verdicts import ACCEPTED


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine", description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("build/engine"), help="where they are, or will be")
    parser.add_argument("--kinds", nargs="*", choices=list(models.STEPS), default=list(models.STEPS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument(
        "--record", action="store_true", help="rewrite the dumps of the default tests, from the first seed"
    )
    parser.add_argument("--write", action="store_true", help="rewrite docs/engine.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    models.make(args.models, args.kinds)
    rows = []
    for kind in args.kinds:
        for seed in args.seeds:
            dumps = {}
            for dump in modes.run(args.models, kind, seed, args.sequences):
                tensors = dump.tensors()
                row = page.look(f"{kind} {seed}", dump.mode, tensors)
                said = f"{row.verdict}, accepted {' or '.join(ACCEPTED[dump.mode])}"
                print(f"{row.study:8} {'ok' if row.right else 'NO'} {dump.mode:46} k3 {row.k3:8.2g} {said}", flush=True)
                rows.append(row)
                dumps[dump.mode] = recorded.thinned(tensors, recorded.SEQUENCES[kind])
            if args.record and seed == args.seeds[0]:
                recorded.write(kind, dumps)
    print(page.summary(rows))
    if args.write:
        page.write(rows)
    return int(any(not row.right for row in rows if ACCEPTED[row.mode] == ("healthy",)))


if __name__ == "__main__":
    sys.exit(main())
