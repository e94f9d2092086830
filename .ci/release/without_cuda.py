"""A torch for CUDA on a machine without a GPU and without CUDA's packages, which are several times its size."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

CUDA = re.compile(r"(nvidia|cuda)-")
# What a library of torch takes from those of CUDA without saying of which version.
FUNCTION = re.compile(r"_{0,2}(cu|nccl|nv)\w+")
# The driver is no package: torch loads without it, and Triton looks for it.
DRIVER = "libcuda.so.1"
METADATA = """
import json
from importlib import metadata
print(json.dumps([metadata.requires("torch"), metadata.requires("rollout-corr")]))
"""


def requirements(python: Path) -> list[str]:
    """Name what the installed torch and wheel, with its extra `demo`, need besides CUDA and each other."""
    of_torch, of_wheel = json.loads(said(str(python), "-c", METADATA))
    wanted = [one for one in of_torch if not CUDA.match(one) and "extra ==" not in one]
    return wanted + [one.partition(";")[0].strip() for one in of_wheel if re.search(r"""extra == ['"]demo['"]""", one)]


def stand_in(folder: Path) -> list[str]:
    """Put libraries where torch's find none: of the same names, versions and functions, which all answer 100.

    That is CUDA's code for "no device". No check calls one of them but to ask for devices.

    Args:
        folder: torch's libraries. Those that are missing are written beside them.

    Returns:
        The names of the libraries that were written.
    """
    libraries = sorted(map(str, folder.glob("*.so")))
    missing = set(re.findall(r"^\s*(\S+) => not found", said("ldd", *libraries), re.MULTILINE)) - {DRIVER}
    if not missing:
        return []
    # The file that a version belongs to; a name without a version may be in any of them.
    files = {"": min(missing)}
    functions: dict[str, set[str]] = {"": set()}
    for library in libraries:
        for name, block in re.findall(r"required from (\S+):\n((?:    0x.+\n)+)", said("objdump", "-p", library)):
            if name in missing:
                files |= {line.split()[-1]: name for line in block.splitlines()}
        for line in said("nm", "-D", "--undefined-only", library).splitlines():
            function, _, version = line.split()[-1].replace("@@", "@").partition("@")
            if version in files and (version or FUNCTION.fullmatch(function)):
                functions.setdefault(version, set()).add(function)
    for name in sorted(missing):
        versions = {version: functions.get(version, set()) for version, file in files.items() if file == name}
        write(folder / name, versions)
    return sorted(missing)


def write(path: Path, versions: dict[str, set[str]]) -> None:
    """Compile a library that has functions under the names of versions."""
    code = "".join(f"int {name}(void) {{ return 100; }}\n" for one in versions.values() for name in sorted(one))
    named = {version: one for version, one in versions.items() if version}
    script = path.with_name(f"{path.name}.map")
    lines = [f"{version} {{ global: {'; '.join(sorted(one))}; }};\n" for version, one in named.items()]
    script.write_text("".join(lines), encoding="utf-8")
    options = [f"-Wl,-soname,{path.name}", *([f"-Wl,--version-script,{script}"] if named else [])]
    compiler = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", *options, "-x", "c", "-", "-o", str(path)]
    subprocess.run(compiler, input=code, text=True, check=True)
    script.unlink()


def said(*command: str) -> str:
    """Give what a program prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
