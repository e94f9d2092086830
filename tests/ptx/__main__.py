"""Run declared variants as compiled code, under whichever Triton there is, without pytest.

`make ptx` or `PYTHONPATH=tests python -m ptx` runs all of them, `make ptx ARGS="full_packed loss_gspo"` some. With
`--edits TEXT` they run to notice what is taken out of the kernels' source, one thing at a time: README.md has how.
Another Triton is one that stands before the installed one: `PYTHONPATH=FOLDER:tests`, with what `pip install --target
FOLDER --no-deps triton==3.9.0` put there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

# Before the first import of a kernel.
os.environ["TRITON_INTERPRET"] = "0"


def main() -> int:
    """Run the variants that are named, or all; give how many went wrong, or how many edits nobody noticed."""
    import triton

    from ptx.cases import CASES, run_case
    from ptx.edits import hunt

    parser = argparse.ArgumentParser(prog="python -m ptx", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {len(CASES)} variants; of a loss loss_NAME")
    parser.add_argument("--seed", type=int, default=0, help="of the order of programs and warps")
    parser.add_argument("--off-by", type=int, default=0, help="units in the last place, of ex2 and lg2; a GPU has 2")
    parser.add_argument("--edits", metavar="TEXT", help="run with each edit of the source that has this in its name")
    parser.add_argument("--keep", metavar="FILE", type=Path, help="what was found about edits; a second call goes on")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    names, wrong = asked.names or list(CASES), []
    if asked.edits is not None:
        return hunt(names, asked.edits, asked.keep, asked.seed, off_by=asked.off_by)
    for name in names:
        begun = time.process_time()
        try:
            run_case(name, asked.seed, off_by=asked.off_by)
        except Exception:  # noqa: BLE001  whatever it is, the other variants run too
            wrong.append(name)
            traceback.print_exc()
        sys.stdout.write(f"{name}: {'WRONG' if name in wrong else 'right'}, {time.process_time() - begun:.1f} s\n")
        sys.stdout.flush()
    sys.stdout.write(f"Triton {triton.__version__}: {len(names) - len(wrong)} of {len(names)} variants right\n")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(min(1, main()))
