"""The command line in hostile surroundings: environment, folders, streams, limits and flags of the interpreter.

Each attempt starts the command line in a process of its own, reads the same dump, and expects the same JSON as in calm
surroundings, or a line on stderr and exit code 2.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from attack.campaign import Area, Outcome
from builders import dumps
from rollout_corr.cli.main import main

FLAGS = ("-O", "-OO", "-bb", "-B", "-I", "-Xdev", "-Xutf8=0", "-Wignore", "-Xint_max_str_digits=640", "-u", "-q")
NOWHERE = "/nowhere/at/all"
VARIABLES = {
    "HOME": (None, "", NOWHERE, "relative", "/dev/null", "/proc"),
    **dict.fromkeys(
        ("TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), (NOWHERE, "/dev/null")
    ),
    "PYTHONHASHSEED": ("0", "1", "4294967295"),
    "PYTHONIOENCODING": ("ascii", "cp1252", "latin-1:replace", "utf-16", "utf-8:surrogateescape"),
    "PYTHONWARNINGS": ("error::UserWarning", "always", "nonsense"),
    "PYTHONUTF8": ("0", "1"),
    "LC_ALL": (None, "C", "POSIX", "C.UTF-8", "tr_TR.UTF-8", "nonsense"),
    "LANG": (None, "de_DE", "zh_CN.GB18030"),
    "TZ": ("nonsense", "Pacific/Kiritimati", ":/dev/zero"),
    "COLUMNS": ("0", "1", "-5", "100000", "wide"),
    "TERM": (None, "", "dumb", "nonsense"),
    "NO_COLOR": ("1", ""),
    "FORCE_COLOR": ("1",),
    "OMP_NUM_THREADS": ("1", "3", "-1", "many"),
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": ("1", "0"),
    "TRITON_INTERPRET": ("0", "1", "yes"),
    "CUDA_VISIBLE_DEVICES": ("", "-1", "7", "x"),
    "PATH": (None, "", NOWHERE),
}
# What is run before the command, by the same process.
BEFORE = (
    "import sys; sys.setrecursionlimit(250)",
    "import time; time.time = iter(range(2_000_000_000, 0, -3600)).__next__",
    "import torch; torch.set_default_dtype(torch.float64)",
    "import torch; torch.set_default_device('meta')",
    "import torch; torch.use_deterministic_algorithms(True)",
    "import torch; torch.set_grad_enabled(False)",
    "import locale; locale.setlocale(locale.LC_ALL, '')",
    "import os; os.umask(0o777)",
    "import gc; gc.disable()",
    "import random; random.seed = None",
    "import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
    "import sys; sys.stdin = None",
    "import os; os.close(0)",
    "import sys; sys.argv = ['']",
)
# Files beside or around the dump, that change nothing of it.
STATES = ("as it is", "crlf", "byte order mark", "in a folder", "loop beside it", "odd name", "long name", "read only")
LIMITS = {"NOFILE": 24, "FSIZE": 0, "STACK": 512 * 1024, "CORE": 0}
RUN = "; sys.argv[:1] = ['rollout-corr']; from rollout_corr.cli.main import main; sys.exit(main(ARGUMENTS))"


@dataclass
class Surroundings:
    """The surroundings of a process: its flags, environment, first statements, limits, and the dump's state."""

    flags: list[str] = field(default_factory=list)
    variables: dict[str, str | None] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    state: str = STATES[0]


def drawn(rng: random.Random) -> Surroundings:
    """Draw one to four hostile things."""
    found = Surroundings()
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(("flags", "variables", "variables", "before", "limits", "state"))
        if kind == "flags":
            found.flags.append(rng.choice(FLAGS))
        elif kind == "variables":
            name = rng.choice(list(VARIABLES))
            found.variables[name] = rng.choice(VARIABLES[name])
        elif kind == "before":
            found.before.append(rng.choice(BEFORE))
        elif kind == "limits":
            found.limits.append(rng.choice(list(LIMITS)))
        else:
            found.state = rng.choice(STATES)
    return found


def placed(folder: Path, state: str) -> Path:
    """Write the dump; the path to give to the command."""
    # Plain JSON, whose floats are the same in every mode.
    lines = [json.dumps(dumps.plain(record)) for record in dumps.records(dumps.packed(6, seed=1))]
    text = "\n".join(lines) + "\n"
    name = {"odd name": "a\n\x1b[2J\udcff\u202e.jsonl", "long name": "x" * 240 + ".jsonl"}.get(state, "dump.jsonl")
    path = folder / name
    if state == "crlf":
        text = text.replace("\n", "\r\n")
    path.write_bytes((b"\xef\xbb\xbf" if state == "byte order mark" else b"") + text.encode())
    if state == "loop beside it":
        (folder / "loop").symlink_to(folder)
        (folder / "again").symlink_to("again")
    if state == "read only":
        path.chmod(0o400)
        folder.chmod(0o500)
    return folder if state in ("in a folder", "loop beside it") else path


@functools.cache
def calm(command: str) -> dict[str, object]:
    """Print by the command in calm surroundings."""
    with tempfile.TemporaryDirectory() as folder:
        return printed(command, placed(Path(folder), STATES[0]))


def printed(command: str, path: Path) -> dict[str, object]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main([command, str(path), "--json"])
    return numbers(out.getvalue())


def numbers(text: str) -> dict[str, object]:
    """Read what was printed, without the names of files."""
    return json.loads(text, object_hook=lambda found: {name: x for name, x in found.items() if name != "file"})


def limited(names: list[str]) -> Callable[[], None]:
    def limit() -> None:
        for name in names:
            kind = getattr(resource, f"RLIMIT_{name}")
            resource.setrlimit(kind, (LIMITS[name], resource.getrlimit(kind)[1]))

    return limit


def attempt(seed: int) -> Outcome:
    """Run a command in surroundings that the seed decides."""
    rng = random.Random(seed)
    found, command = drawn(rng), rng.choice(("report", "doctor", "what-if"))
    environment = dict(os.environ)
    for name, value in found.variables.items():
        environment.pop(name, None)
        environment |= {} if value is None else {name: value}
    with tempfile.TemporaryDirectory() as folder:
        path = placed(Path(folder), found.state)
        arguments = [command, os.fspath(path), "--json"]
        code = "; ".join(["import sys", *found.before]) + RUN.replace("ARGUMENTS", ascii(arguments))
        done = subprocess.run(
            [sys.executable, *found.flags, "-c", code],
            env=environment, cwd=folder, capture_output=True, timeout=100, preexec_fn=limited(found.limits),
        )  # fmt: skip
        Path(folder).chmod(0o700)
    said = done.stderr.decode("utf-8", "replace")
    told = f"{found} {command}: exit {done.returncode}, {said[-1500:]}"
    if done.returncode == 2 and said.startswith("rollout-corr") and len(said.splitlines()) == 1:
        return Outcome("refused", said)
    if done.returncode not in (0, 1) or "Traceback" in said:
        return Outcome("wrong", told)
    encoding = (found.variables.get("PYTHONIOENCODING") or "utf-8").partition(":")[0]
    same = numbers(done.stdout.decode(encoding)) == calm(command)
    return Outcome("right") if same else Outcome("wrong", f"another result, {told}")


AREA = Area("surroundings", "processes", attempt, count=300, few=1, limit=150.0)
