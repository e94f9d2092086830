"""Run declared variants as compiled code, under whichever Triton there is, without pytest.

`make ptx` or `PYTHONPATH=tests python -m ptx` runs all of them, `make ptx ARGS="full_packed loss_gspo"` some. Another
Triton is one that stands before the installed one: `PYTHONPATH=FOLDER:tests`, with what `pip install --target FOLDER
--no-deps triton==3.9.0` put there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings

# Before the first import of a kernel.
os.environ["TRITON_INTERPRET"] = "0"


def main() -> int:
    """Run the variants that are named, or all; give the number of those that went wrong."""
    import triton

    from ptx.cases import CASES, run_case

    parser = argparse.ArgumentParser(prog="python -m ptx", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {len(CASES)} variants; of a loss loss_NAME")
    parser.add_argument("--seed", type=int, default=0, help="of the order of programs and warps")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    names, wrong = asked.names or list(CASES), []
    for name in names:
        begun = time.process_time()
        try:
            run_case(name, asked.seed)
        except Exception:  # noqa: BLE001  whatever it is, the other variants run too
            wrong.append(name)
            traceback.print_exc()
        sys.stdout.write(f"{name}: {'WRONG' if name in wrong else 'right'}, {time.process_time() - begun:.1f} s\n")
        sys.stdout.flush()
    sys.stdout.write(f"Triton {triton.__version__}: {len(names) - len(wrong)} of {len(names)} variants right\n")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(min(1, main()))
