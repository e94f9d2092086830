"""`make engine`, or `PYTHONPATH=tests python -P -m lab.engine`: a real engine and a real trainer, through doctor."""

import argparse
import sys
from pathlib import Path

import torch

from lab.engine import models, modes, recorded
from lab.engine.verdicts import ACCEPTED, HEALTHY, diagnose, outcome, summary, verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog="make engine", description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("build/engine"), help="where they are, or will be")
    parser.add_argument("--kinds", nargs="*", choices=(*models.KINDS, "moe"), default=models.RECORDED)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--record", action="store_true", help="rewrite the recorded dumps, with the last seed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    models.make(args.models, args.kinds)
    alarms = 0
    for kind in args.kinds:
        for seed in args.seeds:
            dumps, judged = {}, {}
            for dump in modes.run(args.models, kind, seed, args.sequences):
                dumps[dump.mode] = dump.tensors()
                diagnosis = diagnose(dumps[dump.mode])
                of = judged[dump.mode] = outcome(dump.mode, diagnosis)
                alarms += of == "wrong" and ACCEPTED[dump.mode] == HEALTHY
                accepted = f", accepted: {', '.join(ACCEPTED[dump.mode])}" if of == "wrong" else ""
                print(f"{kind} {seed} {of}: {dump.mode}: {verdict(diagnosis)}{accepted}", flush=True)
            print(f"{kind} {seed}: {summary(judged)}", flush=True)
        if args.record:
            recorded.write(kind, dumps)
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
