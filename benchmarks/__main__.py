"""The benchmark of the machine at hand: `benchmarks.gpu` where torch sees a GPU, else `benchmarks.cpu`."""

import sys

import torch

from benchmarks import cpu, gpu

if __name__ == "__main__":
    sys.exit((gpu if torch.cuda.is_available() else cpu).main())
