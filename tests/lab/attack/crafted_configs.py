"""Crafted configurations: what a stranger may write into YAML, JSON, TOML, Python and shell scripts.

`KNOWN` are texts and files that are written out, each with a name: values, keys and texts that every format gets, and
what only one of them can say. `crafted` makes further ones from a generator of random numbers: settings of the
frameworks with odd values, and good files that are cut, joined and altered.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

from rollout_corr.frameworks.shared import lookup
from rollout_corr.frameworks.shared.checking import checks_of

# Characters of the large ones; the reader takes 262,144.
SIZE = 250_000


def fill(unit: str, size: int = SIZE) -> str:
    """Repeat a text."""
    return unit * (size // len(unit))


def lines(form: str, size: int = SIZE) -> str:
    """Repeat a line with a number in it, as often as a large file has room."""
    return "".join(form.format(i) + "\n" for i in range(size // (len(form) + 6)))


def around(before: str, after: str, count: int, middle: str = "1") -> str:
    """Put something into so many brackets."""
    return before * count + middle + after * count


def doubling(form: str, first: str, count: int = 30, last: str = "") -> str:
    """A chain of lines in which each names the one before twice or more: {0} is its number, {1} that before."""
    return first + "\n" + "".join(form.format(i, i - 1) + "\n" for i in range(1, count)) + last


def shown(text: str) -> str:
    """Return the beginning of a text and its length, for a name."""
    return text if len(text) < 12 else f"{text[:12]}... {len(text)}"


A_KEY = "algorithm.rollout_correction.rollout_is"
BLOCK = "algorithm: {rollout_correction: {rollout_is: token}}\n"
DIGITS = "1" * 400

# --- what every format gets

# A setting of a format, whose name is {0} and whose value is {1}, and a name that some framework has.
FORMS = {
    ".yaml": ("{0}: {1}\n", "rollout_is_threshold"),
    ".json": ('{{"use_vllm": true, {0}: {1}}}', '"vllm_importance_sampling_clip_max"'),
    ".py": ("GRPOConfig(use_vllm=True, {0}={1})\n", "top_p"),
    ".sh": ("run {0}={1}", f"{A_KEY}_threshold"),
    ".toml": ("[trainer.loss]\n{0} = {1}\n", "kl_tau"),
}

# Numbers too long or too large, brackets too deep or never closed, texts and lists that fill the file.
VALUES = (
    DIGITS, "-" + DIGITS, "1" * 20_000, "0x" + "f" * 400, "0x" + "f" * 20_000, "0b" + "1" * 5000, "1" + "0" * 60_000,
    "1e999", "-1e999", "1e999999", "NaN", "-.inf", "01", "1.", "1_", "1_" * 1000, "0o9", "0x", "+", "1e", "1e+", "1j",
    "- 1", "-'a'", "2001-99-99", "1979-05-27T07:32:00Z", "07:32:00", "1:1:1", "1" + ":59" * 60_000 + ".5", "null", "~",
    "true", "tru", "...", "''", '""', "'a'", "a,b", "[]", "{}", "[[]]", "{a: 1}", '{"a": null}', "{{1}}", "{[]: 1}",
    "[{[]: 1}]", "{(): []}", "=", "!", "&", "*", "|", "? ", "- ", "%", "@", "`", "'", '"', "<<", "$", "\\", '"\\ud800"',
    '"\\u0000"', '"\\U00110000"', '"\\u001b[2J"', "\u202eabc", "\x1b[2J", "\0", "b'\\xff'", "[" * SIZE, "{" * SIZE,
    '{"a":' * 40_000, "{a=" * 80_000, around("[", "]", 200), around("[", "]", 90_000), around('{"a":', "}", 900),
    around('{"a":', "}", 30_000), around("{a=", "}", 40_000), around("(", ")", 150), around("(", ")", 5000),
    around("-", "", 5000), around("not ", "", 4000), around("~", "", 100_000), "'" + "x" * 240_000 + "'",
    '"' + "\\n" * 120_000 + '"', '"""' + "--top_p 1\n" * 20_000 + '"""', "b " * 120_000, "[" + "1," * 120_000 + "1]",
    "[" + "{}," * 80_000 + "1]", "[" + "-1, " * 60_000 + "1]",
    "{" + ", ".join(f'"k{i}": 1' for i in range(15_000)) + "}", "{" + ",".join(f"k{i}=1" for i in range(15_000)) + "}",
)  # fmt: skip
KEYS = (
    "''", '""', ".", "..", "a..b", "a.", "'a.b'", "1", "true", "~", DIGITS, '"a\\u0000b"', '"\\ud800"', '"a\\"b"',
    "'" + "k" * 200_000 + "'", '"' + "k" * 200_000 + '"', "k" * 240_000, "a" + ".a" * 60, "a" + ".a" * 8000,
    "a" + " . a" * 60_000, "a" + ".'b.c'" * 30_000, "'" + "a." * 8000 + "'", '"' + "a." * 100_000 + '"',
    "'" + "=" * 240_000 + "'", "a" + " " * 240_000, "--" + "a-" * 100_000,
)  # fmt: skip
# What is no setting at all, as the whole of a file.
WHOLES = (
    "", "\0", " ", "=", "null", "1", "NaN", "- a", "[]", "{}", "{}{}", "[[]]", "]", ")", "if", "'''", '"' * 5, "\\\n",
    "\r", "\x1a", "\x85", "\u2028", "\ufeff\ufeff", "# \x1b[2J", "\t1\n 2", '{"a": 1, "a": {"b": 2}, "a.b": 3}',
    '{"_a": {"_b": 1}}', "a: 1\rb: 2\x85c: 3\u2028d: 4",
    *(unit * SIZE for unit in "#\n (){}[];&<=$`"), fill("a "), fill("\\\n"), fill("a=1;"), fill("a: "), fill("--a "),
)  # fmt: skip


def _common(suffix: str) -> dict[str, str]:
    """Values, keys and texts by their names."""
    form, key = FORMS[suffix]
    return {
        **{f"value {shown(value)}": form.format(key, value) for value in VALUES},
        **{f"key {shown(name)}": form.format(name, 1) for name in KEYS},
        **{f"text {shown(text)}": text for text in WHOLES},
    }


# --- what only one of them can say
YAML = {
    # The reader of YAML has errors of its own for values that are not of their tag.
    **{
        f"tag {tag} of {shown(value)}": f"rollout_is: !!{tag} {value}\n"
        for tag in ("timestamp", "bool", "int", "float", "null", "binary", "set", "omap", "python/name:os.system")
        for value in ("zz", "5", "''", "[1]", "{a: 1}", "\"\\x00\"")
    },
    **{f"scalar {shown(value)}": f"rollout_is: {value}\n" for value in ("!!", "!<>", "!!str", "&a *a", "!a !b 1")},
    **{f"complex key {shown(key)}": f"{key}: 1\n" for key in (
        "? [a, b]\n", "? {a: b}\n", "? - - a\n", "0x" + "f" * 9000, "!!binary a", "!!timestamp zz", "<<", "? " * 60_000,
    )},
    "merge of a number": "a: {<<: 3}",
    "merge of a list of numbers": "a: {<<: [3, {b: 1}]}",
    "merge of itself": "a: &a {<<: *a, rollout_is: token}",
    "merge of itself in a list": "a: &a {<<: [*a, *a], b: 1}",
    "merge of merges": doubling("m{0}: &m{0} {{<<: [*m{1}, *m{1}], k{0}: 1}}", "m0: &m0 {k: 1}", 60),
    "merge of merges, long": doubling("m{0}: &m{0} {{<<: *m{1}, k{0}: 1}}", "m0: &m0 {k: 1}", 5000),
    "merge of merges, hidden": around("a: {", "}", 20, "b: [&m0 {k: 1}" + "".join(
        f", &m{i} {{<<: [*m{i - 1}, *m{i - 1}], k{i}: 1}}" for i in range(1, 40)
    ) + "]") + "\nc: {<<: *m39}\n",
    "aliases of lists": doubling("a{0}: &a{0} [*a{1}, *a{1}, *a{1}]", "a0: &a0 [1]"),
    "aliases of mappings": doubling("a{0}: &a{0} {{x: *a{1}, y: *a{1}}}", "a0: &a0 {x: 1}"),
    "aliases of mappings without leaves": doubling("a{0}: &a{0} {{x: *a{1}, y: *a{1}, z: *a{1}}}", "a0: &a0 {}", 40),
    "alias as a key": doubling("? &a{0} [*a{1}, *a{1}]\n: 1", "a0: &a0 [1]"),
    "long alias in a list": "a: &a '" + "x" * 60_000 + "'\nrollout_is: [" + "*a, " * 40_000 + "*a]",
    "long alias in keys": "a: &a '" + "x" * 60_000 + "'\n? [" + "*a, " * 40_000 + "*a]\n: 1",
    "long key over many": "'" + "k" * 120_000 + "': {" + "".join(f"a{i}: 1, " for i in range(12_000)) + "}",
    "holds itself": "a: &a [*a]\nrollout_is: *a\n",
    "block holds itself": "a: &a {b: *a, rollout_is: token}\n",
    "alias of nothing": "a: *b",
    "block lists": "a:\n" + "".join(" " * i + "-\n" for i in range(600)),
    "block lists in a line": "a:\n  " + "- " * 100_000 + "1",
    "block mappings": "".join(" " * i + "a:\n" for i in range(690)),
    "many keys": lines("k{}: 1"),
    "many keys like ours": lines("rollout_is_threshol{}: 1"),
    "many keys in blocks like ours": "algorithm:\n  rollout_correction:\n" + lines("    rollout_is_threshol{}: 1"),
    "one key many times": fill("rollout_is: token\n"),
    "many documents": fill("---\na: 1\n"),
    "many tags": fill("- !a !b\n"),
    "many directives": fill("%TAG !a! b\n"),
    "many anchors": "a: [" + "".join(f"&a{i} 1, " for i in range(20_000)) + "]",
    "long anchor": "a: &" + "a" * 240_000 + " 1",
    "long tag": "a: !<" + "a" * 240_000 + "> 1",
    "long block of text": "rollout_is: |\n" + fill(" b\n"),
    "long folded text": "rollout_is: >\n" + fill(" b\n\n"),
    "references in a circle": "a: ${b}\nb: ${a}\nrollout_is: ${a}\n",
    "reference with dots": "rollout_is: '${" + "." * 240_000 + "}'",
    "reference with dots and blocks": "'" + "a." * 400 + "b': '${" + "." * 100_000 + "a}'",
    "references to long texts": "a: '" + "x" * 60_000 + "'\n" + lines("b{}: ${{a}}", 150_000),
    "references inside of one another": "rollout_is: '" + around("${", "}", 40_000, "a") + "'",
    "version": "%YAML " + "1" * 5000 + ".1\n---\na: 1",
    "defaults with NUL": 'defaults: ["a\\0b.yaml"]\n' + BLOCK,
    "defaults with a surrogate": 'defaults: ["\\ud800.yaml"]\n' + BLOCK,
    "defaults with a long name": "defaults: [" + "a" * 5000 + ".yaml]\n" + BLOCK,
    "defaults that are none": "defaults: [{a: b}, 3, null, [x.yaml], gone.yaml]\n" + BLOCK,
    "defaults of itself": "defaults: [run.yaml, ./run.yaml, ../gone/run.yaml]\n" + BLOCK,
    "defaults of the root": "defaults: [/etc/gone.yaml]\n" + BLOCK,
    "defaults of a device": "defaults: [/dev/zero]\n" + BLOCK,
}  # fmt: skip

JSON = {
    "long key over many": '{"' + "k" * 120_000 + '": {' + ", ".join(f'"{i}": 1' for i in range(10_000)) + "}}",
    "blocks around a large rest": '{"a":' * 900 + "{" + ", ".join(f'"k{i}": 1' for i in range(4000)) + "}" * 901,
    "many keys": "{" + ", ".join(f'"k{i}": 1' for i in range(20_000)) + "}",
    "many keys like ours": "{" + ", ".join(f'"vllm_importance_sampling_clip_ma{i}": 1' for i in range(5000)) + "}",
    "one key many times": "{" + ", ".join(['"use_vllm": true'] * 15_000) + "}",
    "line ends": '{"use_vllm":' + "\n" * 240_000 + "true}",
}  # fmt: skip

PYTHON = {
    **{f"coding {name}": f"# -*- coding: {name} -*-\nGRPOConfig(use_vllm=True)\n" for name in (
        "nonsense", "rot13", "utf-16", "utf-7", "latin-1", "hex", "unicode_escape", "punycode", "undefined", "idna",
        "zip",
    )},
    **{f"expression {shown(value)}": f"GRPOConfig(use_vllm=True, top_p={value})\n" for value in (
        "{[], 1}", "{1: 2, **{}}", "{{1: 2}: 3}", "{10**400}", "{0x" + "f" * 9000 + "}", "1+1j", "f'{1}'", "lambda: 0",
        "[*a]", "*a", "**a", "set()", "9**9**9", "'a' * 10**10", "a[1:2]", around("{1: ", "}", 90),
        around("not ", "", 60_000), "1" + "+1" * 60_000, "a" + "()" * 90_000, "a" + "[1]" * 60_000,
        around("lambda: ", "", 3000), around("1 if 1 else ", "", 9000), around("f(a=", ")", 90),
        around("[x for x in ", "]", 90), around("await ", "", 5000), "'a' " * 60_000, "f'" + "{1}" * 60_000 + "'",
        around("f'{", "}'", 3),
    )},
    **{f"statement {shown(text)}": text for text in (
        "x = '\0'", "x = 1\n  y = 2", "if 1:\n" * 99, "".join(" " * i + "if 1:\n" for i in range(120)), "print 1",
        "x = $", "x = ?", "async def", "return", "x = '--a\n", "x = '--top_p \\\n", "x: int = 1",
        "match x:\n case " + "[" * 150 + "]" * 150 + ": pass", fill("'--a';"), fill("x=1\n"), fill("def f(): pass\n"),
        "a=" * 100_000 + "1", "".join(f"@a{i}\n" for i in range(9000)) + "def f(): pass", "f(" + "**a," * 60_000 + ")",
        "del " + "a," * 100_000, "from a import (" + "b," * 100_000 + ")", "with " + "a," * 9000 + "b: 1",
        "global " + "a," * 100_000 + "a", "'" + "\\x41" * 60_000 + "'", "'\\N{DIGIT ONE}' '\\d'", "'\\N{nothing}'",
        "f(" + "a=1," * 60_000 + ")",
    )},
    "one list in many places": "x = [" + "1," * 60_000 + "]\n" + lines("GRPOConfig(top_p=x, a{}=1)", 120_000),
    "calls of names of calls": "x0 = f(a=1)\n" + "".join(
        f"x{i} = f({', '.join(f'a{j}=x{i - 1}' for j in range(300))})\n" for i in range(1, 12)
    ) + "GRPOConfig(a=x11)\n" * 2000,
    "a call of its own name": "x = f(a=x)\nGRPOConfig(top_p=x, use_vllm=x)\n",
    "a long name": f"{'f' * 60_000}(a=1, b=2)\n" + lines("GRPOConfig(a{}=1)", 90_000),
    "many keywords": "GRPOConfig(" + ", ".join(f"k{i}=1" for i in range(12_000)) + ")",
    "many keywords like ours": "GRPOConfig(" + "".join(f"vllm_importance_sampling_{i}=1, " for i in range(5000)) + ")",
    "many calls": lines("GRPOConfig(k{}=1)"),
    "flags in a docstring": 'def f():\n    """' + "--top_p 0.5 " * 10_000 + '"""\n',
    "flags in a line": "x = '" + "--top_p 0.5 " * 20_000 + "'\n",
    "flags in many strings": "x = (" + "'--top_p 0.5 '\n" * 15_000 + ")\n",
}  # fmt: skip

SHELL = {
    "variables that double": doubling("A{0}=$A{1}$A{1}", "A0=x", 60, f"run {A_KEY}=$A59"),
    "variables that grow tenfold": doubling("A{0}=" + "$A{1}" * 10, "A0=xxxxxxxxxx", 12, f"run {A_KEY}=$A11"),
    "variables that double in quotes": doubling('A{0}="${{A{1}}}${{A{1}}}"', "A0=x", 60, f"run {A_KEY}=$A59"),
    "variables that double by default": doubling("A{0}=${{B:-$A{1}$A{1}}}", "A0=x", 60, f"run {A_KEY}=$A59"),
    "a long variable in many words": "A=" + "x" * 60_000 + "\nrun " + "$A " * 40_000,
    "a long variable in one word": "A=" + "x" * 60_000 + "\nrun " + "$A" * 60_000,
    "a long variable in a sum": "A=" + "1" * 60_000 + "\nrun --a $((" + "A+" * 30_000 + "1))",
    "many sums": "A=9\n" + fill("run --a $((A*A*A*A*A))\n", 100_000),
    "a variable of itself": "A=$A$A\nA=$A$A\nrun --a $A",
    "many variables": lines("A{}=1"),
    "one variable many times": fill("A=1\n"),
    "variables in unclosed brackets": fill("A=$(\n"),
    "variables in nested brackets": "A=$(\n" * 20_000 + ")\n" * 20_000,
    "variables in unclosed braces": fill("A=${B:-\n"),
    "variables in nested braces": "A=${B:-\n" * 15_000 + "}\n" * 15_000,
    "variables in unclosed quotes": fill('A="\n') + fill("B='\n"),
    **{f"brackets {name}": "run --a " + text for name, text in {
        "unclosed": "$(" * 100_000, "apart": "$( " * 80_000, "closed": around("$(", ")", 60_000),
        "sums": "$((" * 80_000,
        "of sums, closed": around("$((", "))", 40_000), "braces": "${" * 100_000,
        "braces closed": around("${A:-", "}", 30_000),
        "braces 200": around("${A:-", "}", 200), "quotes": '"$(' * 80_000, "arrays": "${A[@]} " * 30_000,
        "arrays unclosed": "${A[@] " * 30_000, "parameters": "$@ $* $# $? $$ $! $- $_ $1" * 9000,
        "commas": "[" + "," * 240_000 + "]",
    }.items()},
    **{f"documents {name}": text for name, text in {
        "unclosed": "".join(f"<<A{i} " for i in range(20_000)) + "\n" + fill("--a 1\n", 90_000),
        "inside of one another": lines("cat <<A{}"), "closed": lines("cat <<A{0}\n--a 1\nA{0}"),
        "empty": fill("<<A\nA\n"),
        "of one name": fill("<<A "), "quoted": "cat <<'A\n" * 20_000,
        "with blanks": "cat <<" + " " * 240_000 + "A\nA",
        "in words": fill("a<<A b\n"), "triple": fill("<<<"),
    }.items()},
    **{f"word {shown(word)}": f"run {word}" for word in (
        "--", "--=", "--a=", "a.b=", "+a.b=1", "++a.b==", "a.b=[", "a.b=]", "a.b='", "a.b=\\",
        "--use-tis --tis-clip " + DIGITS, "--use-tis --tis-clip " + "1 " * 60_000, "a." * 100_000 + "b=1",
    )},
    "many overrides": lines("run a.k{}=1"),
    "many overrides like ours": lines("run algorithm.rollout_correction.rollout_is_threshol{}=1"),
    "many flags": lines("run --k{} 1"),
    "many flags like ours": lines("run --custom-tis-function-pat{} 1"),
}  # fmt: skip

TOML = {
    **{f"long string {shown(value)}": f"[trainer.loss]\nkl_tau = {value}\n" for value in (
        '"""' + "\n[" + " " * 120_000 + "\n" + '"""', "'''" + fill("\n[a", 200_000) + "'''", "'''\n'''",
        '"""' + "\n[" + " " * 60_000 + "a" + " " * 60_000 + '"""', "{" + "a." * 8000 + "a=1}",
    )},
    **{f"table {shown(text)}": text for text in (
        "[", "[[", "[]", "[a", "[a]\n[a]", "[[a]]\n[a]", "a=1\na=2", "a.b=1\na=2", "x = '''", "[" + "a." * 8000 + "a]",
        "[" + "a." * 50 + "a]\n" + lines("k{}=1", 200_000), fill("[[a]]\n"), fill("[[a.b]]\n", 9), fill("[a]\n"),
        "[" + " " * 240_000 + "a]", "[" + "'a'." * 30_000 + "a]",
    )},
    "many tables": lines("[t{}]"),
    "many tables with a key": lines("[t{}]\na=1"),
    "many tables like ours": lines("[trainer.loss.t{}]"),
    "many tables in a list": lines("[[t.a{}]]"),
    "many keys": lines("k{} = 1"),
    "many keys with parts": lines("a.b.c.k{} = 1"),
    "many keys like ours": "[trainer.loss]\n" + lines("ratio_lo{} = 1"),
}  # fmt: skip


def _linked(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _listening(path: Path) -> None:
    """Make a socket, which stays when it is closed. A path of one is short, so that it is bound from its folder."""
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _chain(count: int, names: str) -> Callable[[Path], None]:
    """Write files that each name the next, as `names` says with {0} for it; run.yaml is the first."""

    def write(path: Path) -> None:
        for i in range(count):
            defaults = "" if i == count - 1 else f"defaults: {names.format(f'f{i + 1}.yaml')}\n"
            (path if i == 0 else path.parent / f"f{i}.yaml").write_text(f"{defaults}k{i}: 1\n{BLOCK}")

    return write


def _large_chain(path: Path) -> None:
    for i in range(20):
        (path if i == 0 else path.parent / f"f{i}.yaml").write_text(
            f"defaults: f{i + 1}.yaml\n" + lines("k{}: 1", 200_000)
        )


def _circle(path: Path) -> None:
    path.write_text("defaults: [link.yaml, other.yaml]\n")
    (path.parent / "other.yaml").symlink_to("run.yaml")
    (path.parent / "link.yaml").symlink_to("link.yaml")


def _default_of(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        make(path.parent / "base.yaml")
        path.write_text("defaults: base.yaml\n" + BLOCK)

    return write


# What is no file of text; each is made at a path.
FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": _listening,
    "a link to zeros": _linked("/dev/zero"),
    "a link to null": _linked("/dev/null"),
    "a link to nothing": _linked("gone.yaml"),
    "a link to itself": _linked("run.yaml"),
    "a link to a folder": _linked("."),
    "a link to a file of no size": _linked("/proc/self/status"),
    "a terabyte of zeros": _sparse,
    "UTF-16": lambda path: path.write_bytes(BLOCK.encode("utf-16")),
    "latin-1": lambda path: path.write_bytes("a: é".encode("latin-1")),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 100),
    "random bytes": lambda path: path.write_bytes(os.urandom(100_000)),
    "surrogates in UTF-8": lambda path: path.write_bytes(b"a: \xed\xa0\x80"),
    "too large": lambda path: path.write_bytes(b"a: 1\n" * 100_000),
    "defaults twice over 23 files": _chain(23, "[{0}, ./{0}]"),
    "defaults ten times over 23 files": _chain(23, "[" + ", ".join(["{0}", "./{0}", "././{0}"] * 4) + "]"),
    "defaults over 2,000 files": _chain(2000, "{0}"),
    "defaults of large files": _large_chain,
    "defaults in a circle of links": _circle,
    "defaults of a pipe": _default_of(os.mkfifo),
    "defaults of zeros": _default_of(_linked("/dev/zero")),
    "defaults of a terabyte": _default_of(_sparse),
    "defaults of a folder": _default_of(Path.mkdir),
    "defaults of bytes": _default_of(lambda path: path.write_bytes(b"\xff")),
}


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text.encode("utf-8", "surrogatepass"))


OWN = {".yaml": YAML, ".json": JSON, ".py": PYTHON, ".sh": SHELL, ".toml": TOML}
TEXTS = {suffix: _common(suffix) | own for suffix, own in OWN.items()}
# Name, suffix, and what writes it.
KNOWN: list[tuple[str, str, Callable[[Path], object]]] = [
    *((f"{suffix} {name}", suffix, _text(text)) for suffix, texts in TEXTS.items() for name, text in texts.items()),
    *((name, ".yaml", make) for name, make in FILES.items()),
]

# --- from random numbers ---

# Values that some reader of a setting does not expect, as JSON.
ODD = (
    *(None, True, False, 0, -1, 1, 2.0, 0.0, -0.0, 1e-320, 1e39, 1e308, 10**20, 10**400, -(10**400), float("inf"),
    float("nan")),
    *("", " ", "token", "sequence", "TOKEN", "null", "0.5_2.0", "2.0_0.5", "_", "1e-4", "nan", "-inf", "\0",
    "\x1b[2J", "\u202e", "{value}"),
    *("a,b", "token_k1,seq_mean_k3", "${a}", "x" * 5000, [], [[]], [1], [1, 2], [2, 1], ["a"], [None],
    [1, "a", None], {}, {"a": 1}, {"": {}}),
)  # fmt: skip


def crafted(rng):
    """Return the suffix, the text and the framework of a configuration; the framework may be None."""
    framework = rng.choice(lookup.readable())
    known = checks_of(framework).every or ("temperature", "top_p")
    given = {key: rng.choice(ODD) for key in rng.sample(known, rng.randint(1, min(6, len(known))))}
    for _ in range(rng.choice((0, 0, 1, 2))):
        key = rng.choice(sorted(given))
        at = rng.randrange(len(key))
        given[key[:at] + rng.choice(("", "x", ".", "_", "..", "\u00e9", " ", key)) + key[at + 1 :]] = rng.choice(ODD)
    suffix = rng.choice(sorted(TEXTS))
    text = WRITERS[suffix](given, rng)
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        at, to = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        text = rng.choice(
            (
                text[:at],
                text[:at] + text[to:],
                text + text[at:to],
                text[:at] + rng.choice("\0\n\"'[]{}():,=&*$<#\\") + text[at:],
            )
        )
        text = text or " "
    return suffix, text, rng.choice((framework, framework, None))


def _yaml(given, rng):
    # JSON is YAML; OmegaConf's dots stand for blocks too.
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in _blocks(given, rng).items())


def _blocks(given, rng):
    """Make blocks of some of the keys with dots."""
    made = {}
    for key, value in given.items():
        first, dot, rest = key.partition(".")
        inner = made.setdefault(first, {}) if dot and rng.random() < 0.7 else None
        if isinstance(inner, dict):
            inner[rest] = value
        else:
            made[key] = value
    return made


def _toml(given, rng):
    return "".join(f"{key} = {'0' if value is None else json.dumps(value)}\n" for key, value in given.items())


def _python(given, rng):
    roots = [root.rstrip(".") for name in lookup.readable() for root in checks_of(name).roots if root]
    keywords = (f"{key.rpartition('.')[2]}={value!r}" for key, value in given.items())
    return f"args = {rng.choice(roots)}({', '.join(keywords)})\n"


def _shell(given, rng):
    words = [
        f"--{key.replace('_', '-')} {value}" if rng.random() < 0.5 else f"{key}={json.dumps(value)}"
        for key, value in given.items()
    ]
    return "run " + " \\\n  ".join(words) + "\n"


WRITERS = {
    ".yaml": _yaml,
    ".json": lambda given, rng: json.dumps(_blocks(given, rng)),
    ".toml": _toml,
    ".py": _python,
    ".sh": _shell,
}
