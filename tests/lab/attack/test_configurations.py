"""Configurations that once ended `rollout-corr check` with a traceback, or not at all: one line, in time and memory."""

from __future__ import annotations

import pytest

from lab.attack.configurations import judge
from lab.attack.crafted_configs import DIGITS, KNOWN, shown

A_LONG_KEY = "'" + "a." * 8000 + "'"
# Each by its name, and what the one line says; "": it is read, and has no mistake that is known.
ONCE = {
    ".py coding nonsense": "",
    ".py coding rot13": "",
    ".py value {[]: 1}": "",
    ".py value {{1}}": "",
    f".py value {shown(DIGITS)}": "",
    f".py value {shown('not ' * 4000 + '1')}": "",  # nested too deeply for Python 3.11, read by 3.10 and 3.13
    ".py calls of names of calls": "more than 10000 settings",
    ".yaml tag timestamp of zz": "",
    ".yaml tag bool of 5": "",
    f".yaml value {shown(DIGITS)}": "",
    f".yaml value {shown('0x' + 'f' * 20_000)}": "",
    ".yaml defaults with NUL": "its defaults name a\\x00b.yaml",
    ".yaml merge of merges, hidden": "",
    ".yaml reference with dots": "",
    f".json value {shown(DIGITS)}": "",
    ".json blocks around a large rest": "",  # nested too deeply for Python 3.11, read by 3.12
    f".toml key {shown('a' + '.a' * 8000)}": "a key of more than 64 parts",
    f".toml key {shown(A_LONG_KEY)}": "a key of more than 64 parts",
    ".sh variables that double": "its variables expand to more than 1 MiB of text",
    ".sh variables in unclosed brackets": "",
    ".sh brackets unclosed": "",
    "a pipe": "expected a regular file",
    "a link to zeros": "expected a regular file",
    "a terabyte of zeros": "got more than 256 KiB of text",
    "defaults twice over 23 files": "",
    "defaults over 2,000 files": "its defaults name more than 100 files",
}


@pytest.mark.parametrize("name", ONCE)
def test_what_once_broke_it(name, tmp_path):
    (suffix, make), *others = [(suffix, make) for known, suffix, make in KNOWN if known == name]
    if suffix == ".toml":
        pytest.importorskip("tomllib")
    path = tmp_path / f"run{suffix}"
    make(path)
    outcome = judge(path, "trl")
    assert not others and outcome.verdict != "wrong", outcome.detail
    assert ONCE[name] in outcome.detail
