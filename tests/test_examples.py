"""The examples run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_context_parallel():
    script = ROOT / "examples" / "context_parallel.py"
    # On one thread each, and on a free port: other tests may run beside this one.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    if done.returncode:
        pytest.fail(done.stdout + done.stderr)
    assert done.stdout.count("2 of 2 ranks agree with the single process") == 6, done.stdout
