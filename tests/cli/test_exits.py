"""How a command ends: 1 is for a gate alone, 2 and a line for what cannot be used, 130 and 141 if it is cut short."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from builders.dumps import packed, plain, records, write, write_jsonl
from builders.hostile import TEXTS
from rollout_corr.cli.main import main
from rollout_corr.diagnose import calls
from rollout_corr.diagnose.show import page as pages

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = [sys.executable, "-m", "rollout_corr"]


@pytest.fixture
def dump(tmp_path):
    return write("jsonl", tmp_path, packed())


def raising(error):
    def run(*arguments):
        raise error

    return run


def test_a_closed_pipe_is_silent():
    """`rollout-corr ... | head` ends without a word, with the code of a process that SIGPIPE ended."""
    process = subprocess.Popen([*RUN, "specs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(timeout=120) == 141
    process.stderr.close()


def test_a_full_disk_is_one_line():
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*RUN, "specs"], stdout=full, stderr=subprocess.PIPE, check=False, timeout=120)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"No space left on device" in done.stderr


def test_closed_streams(dump):
    """Whoever closes both streams is not written to, and the exit code is what it would be."""
    command = f"{sys.executable} -m rollout_corr doctor '{dump}' --json --fail-if 'tokens < 0' >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False, timeout=120)
    assert done.returncode == 0 and done.stderr == b"", done


def test_a_closed_stderr(monkeypatch):
    """An error that has no stream to go to changes neither the exit code nor sys.stderr."""
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["doctor", "missing.jsonl"]) == 2 and sys.stderr is None


def test_a_terminal_of_another_encoding(tmp_path, monkeypatch):
    """Characters that it lacks are written as numbers, on 20 columns too."""
    rows = [plain(record) for record in records(packed(3))]
    for row in rows:
        row["texts"] = ["Ġ漢🙂" for _ in row["token_ids"]]
    write_jsonl(tmp_path / "dümp.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "20")
    with io.TextIOWrapper(io.BytesIO(), "ascii") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert main(["report", "dümp.jsonl"]) == 0
        out.flush()
        said = out.buffer.getvalue().decode().replace("\n", "")
    assert "Worst tokens" in said and "\\u6f22" in said.replace(" ", "")
    assert (tmp_path / "dümp.jsonl.report.html").exists()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "rollout-corr: interrupted\n"),
        (OSError(5, "Input/output error", "a\nb"), 2, "rollout-corr doctor: a\\nb: Input/output error\n"),
        (MemoryError(), 2, "rollout-corr doctor: out of memory\n"),
        # A mistake of this program does not look like an unhealthy dump.
        (ZeroDivisionError("\x1b[2J"), 2, "ZeroDivisionError: \\x1b[2J\nrollout-corr doctor: this is a mistake in "
         "rollout-corr; please report the lines above\n"),
    ],
)  # fmt: skip
def test_what_a_command_raises_becomes_a_line_and_an_exit_code(error, code, said, dump, capsys, monkeypatch):
    monkeypatch.setattr(calls, "measure", raising(error))
    assert main(["doctor", str(dump)]) == code
    out, err = capsys.readouterr()
    assert out == "" and "\x1b" not in err
    assert err.endswith(said) if "mistake" in said else err == said


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("(" * 2000 + "tokens > 1" + ")" * 2000, "expected at most 2000 characters, got 4010"),
        ("tokens > 1e999", "1e999 is larger than any float"),
        ("tokens > " + "9" * 1900, "is larger than any float"),
        ("\x1b[2J > 1\n\n", "expected comparisons"),
        ("\udc80 > 1", "expected comparisons"),
    ],
)
def test_a_condition_that_cannot_be_read_is_one_line(condition, message, dump, capsys):
    assert main(["doctor", str(dump), "--fail-if", condition]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "\x1b" not in said


def test_a_condition_is_read_before_the_dump(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "missing.pt"), "--fail-if", "tokens"]) == 2
    assert "--fail-if" in capsys.readouterr().err
    deep = "(" * 49 + "not tokens < 1" + ")" * 49
    assert main(["doctor", str(write("jsonl", tmp_path, packed())), "--fail-if", deep]) == 1


@pytest.mark.parametrize("text", [text for text in TEXTS if "\0" not in text][::4])
def test_arguments_are_shown_on_one_line(text, dump, capsys):
    """Whatever stands in an argument, it makes no line of its own and no control character."""
    for arguments in (
        ["report", text or "x"],
        ["report", str(dump), "--no-page", "--by", text or "x"],
        ["doctor", str(dump), "--field", text],
        ["doctor", str(dump), "--limit", text],
        ["doctor", str(dump), f"--{text}x"],
        ["explain", text],
        [text or "x"],
    ):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code
        out = capsys.readouterr()
        assert code == 2, arguments
        assert all(c.isprintable() or c == "\n" for c in out.err + out.out), out
        assert "Traceback" not in out.err


# --- pages ------------------------------------------------------------------------------------------------------------


def test_a_page_never_replaces_the_dump(tmp_path, capsys):
    """Not by its name, a symlink, a hard link, a file of the folder or the second dump."""
    columns = packed()
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    one = write("jsonl", folder / "sub", columns)
    other = write("jsonl", tmp_path, columns)
    before = one.read_bytes()
    (tmp_path / "link.html").symlink_to(one)
    os.link(one, tmp_path / "hard.html")
    (tmp_path / "elsewhere").symlink_to(folder)
    for kind, read, path in (
        ("report", one, one),
        ("report", one, tmp_path / "link.html"),
        ("report", one, tmp_path / "hard.html"),
        ("report", folder, one),
        ("report", folder, folder / "new.jsonl"),
        ("report", tmp_path / "elsewhere", folder / "sub" / "new.pt"),
        ("report", one, tmp_path / "elsewhere" / "sub" / one.name),
    ):
        assert main([kind, str(read), "--page", str(path)]) == 2, (kind, read, path)
        said = capsys.readouterr().err
        assert said.startswith(f"rollout-corr {kind}: page {path}: ") and said.count("\n") == 1
    assert main(["report", str(other), "--compare", str(one), "--page", str(tmp_path / "link.html")]) == 2
    assert one.read_bytes() == before and (tmp_path / "link.html").is_symlink()
    assert sorted(path.name for path in folder.rglob("*.*")) == [one.name]


def test_a_page_that_fails_leaves_the_old_one(dump, tmp_path, capsys, monkeypatch):
    page = tmp_path / "x.html"
    page.write_text("old", encoding="utf-8")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["report", str(dump), "--page", str(page)]) == 2
    assert capsys.readouterr().err == f"rollout-corr report: page {page}: cannot be written: No space left on device\n"
    monkeypatch.undo()
    monkeypatch.setattr(pages, "report_page", raising(ValueError("a mistake")))
    assert main(["report", str(dump), "--page", str(page)]) == 2
    assert page.read_text(encoding="utf-8") == "old" and not list(tmp_path.glob("*.part"))
