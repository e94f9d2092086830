"""`make kernels`, or `PYTHONPATH=tests python -m lab.aot`: compile the kernels for GPUs that are not here."""

import sys

from lab.aot.report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
