"""The benchmark of this machine: `benchmarks.gpu` where torch sees a GPU, else `benchmarks.cpu`."""

import sys

import torch

from benchmarks.cpu.__main__ import main as on_cpu
from benchmarks.gpu.__main__ import main as on_gpu

if __name__ == "__main__":
    sys.exit(on_gpu() if torch.cuda.is_available() else on_cpu())
