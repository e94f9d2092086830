"""The distribution. pyproject.toml holds the build system and the tools' settings."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
# Read as text, because torch may not be there when this runs.
VERSION_FILE = (HERE / "rollout_corr" / "_version.py").read_text(encoding="utf-8")
(VERSION,) = re.findall(r'^__version__ = "([^"]+)"$', VERSION_FILE, re.MULTILINE)

# The first sentence of README, the site and whatever else says what this is.
SUMMARY = (
    "Fused Triton kernels for rollout correction in LLM RL: "
    "importance weights, rejection, metrics and policy loss in one pass"
)
# Who and where, for the owner to fill in: a name, two addresses with https://, OWNER/NAME on Hugging Face's Hub.
# The metadata, the site and the Hub's files read these lines; while one is empty, none of them names anything.
AUTHOR = ""
REPOSITORY = ""
DOCUMENTATION = ""
HUB = ""
URLS = {
    "Repository": REPOSITORY,
    "Documentation": DOCUMENTATION,
    "Issues": REPOSITORY and f"{REPOSITORY}/issues",
    "Changelog": REPOSITORY and f"{REPOSITORY}/blob/main/CHANGELOG.md",
}

# What examples/mismatch_rl.py shows and draws with.
EXAMPLE = ["rich>=13", "numpy", "matplotlib>=3.8"]
# What `rollout-corr check` reads .yaml files with.
CHECK = ["pyyaml>=6"]
# The pictures of examples, and the suites of `pytest benchmarks`.
BENCH = ["matplotlib>=3.8", "pytest-benchmark>=4"]
TEST = [
    *EXAMPLE,
    *BENCH,
    *CHECK,
    "hypothesis>=6.100",
    # For tests/package/test_typing.py. This version of pyright brings its program along, the extra its Node.
    "mypy>=1.19",
    "pyright[nodejs]>=1.1.414",
    # Triton 3.6 fails in the interpreter with NumPy 2.4, and torch decides which Triton it is.
    "numpy<2.4",
    "pytest>=8",
    "pytest-xdist>=3",
    # tests/eject/test_eject.py: a file to copy imports nothing that it does not use. Pinned in pyproject.toml.
    "ruff",
    # For the interpreter tests. The package itself runs without it.
    "triton; platform_system == 'Linux'",
]
# The site of `make docs`; ruff breaks the lines of its signatures.
DOCS = ["latex2mathml>=3.77", "mkdocs>=1.6", "mkdocs-material>=9.6", "mkdocstrings[python]>=1.0", "ruff"]
# What else .ci/run needs.
LINT = ["build>=1.2", "pytest-cov>=7"]
RELEASE = ["build>=1.2", "twine>=6.1"]


def description() -> str:
    """README; on an index its links lead to the repository, as there is no file next to it."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    if not REPOSITORY:
        return text
    text = re.sub(r"(!\[[^]]*\]\()(?!https:)", rf"\g<1>{REPOSITORY}/raw/main/", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!https:|#)", rf"\g<1>{REPOSITORY}/blob/main/", text)


setup(
    name="rollout-corr",
    version=VERSION,
    description=SUMMARY,
    long_description=description(),
    long_description_content_type="text/markdown",
    author=AUTHOR or None,
    project_urls={name: url for name, url in URLS.items() if url},
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    # rollout_corr/kernels is a symlink, for checkers and editors. The search leaves it out and it is named here, so
    # that the mapping below alone decides what is installed, also where a checkout has no symlinks.
    packages=[
        *find_packages(include=["rollout_corr*"], exclude=["rollout_corr.kernels*"]),
        "rollout_corr.kernels",
        *(f"rollout_corr.kernels.{name}" for name in find_packages("kernels")),
    ],
    package_dir={"rollout_corr.kernels": "kernels"},
    # Type checkers read the stub, and `__init__.py` its names.
    package_data={"rollout_corr": ["py.typed", "__init__.pyi"]},
    # Never Triton: the wheel of torch for a GPU brings its own, and a CPU needs none.
    install_requires=["torch>=2.10"],
    extras_require={
        "example": EXAMPLE,
        "check": CHECK,
        "bench": BENCH,
        "docs": DOCS,
        "test": TEST,
        "dev": [*TEST, *LINT],
        "release": RELEASE,
    },
    entry_points={"console_scripts": ["rollout-corr = rollout_corr.cli.main:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
