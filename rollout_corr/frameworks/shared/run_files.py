"""Reading of a run's configuration as people have it, with the line of each setting.

YAML (as Hydra saves it, with `defaults` that name other files), JSON, TOML, a Python file, a shell script, or the words
of a command line. Nothing is executed: what a script computes, or takes from its environment, is UNKNOWN.

Files may come from strangers, so every reader takes time and memory in proportion to the text, which is bounded, and
counts what aliases, variables and names would multiply.
"""

from __future__ import annotations

import ast
import json
import re
import stat
import sys
import tokenize
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from .scripts import UNKNOWN as UNKNOWN
from .scripts import command_settings, parsed, script_settings
from .settings import fields_of


class Setting(NamedTuple):
    """One setting: its value, or UNKNOWN, its line in the file (0: it has none), and the file ("": none)."""

    value: Any
    line: int = 0
    file: str = ""


# Settings by their keys with dots, in the order of the file.
Settings = dict[str, Setting]

SCRIPTS = (".sh", ".bash", ".slurm", ".txt")
SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".py", *SCRIPTS)
# Characters of a file together with those that its `defaults` name; a larger one is a dump or a mistake. Python needs
# up to 230 MiB for the syntax tree of so many.
LARGEST = 1 << 18
MOST_FILES = 100
# Settings of a file, and characters of a key with dots. The largest configuration of a framework has some 1,200.
MOST_SETTINGS, LONGEST_KEY = 10_000, 1000
# Values of a YAML file with what its aliases repeat; 64 characters of text count as one.
MOST_VALUES = 30_000
# Blocks inside of one another that are taken apart, and parts of a key in TOML.
MOST_BLOCKS, MOST_PARTS = 16, 64


class UnreadableRun(ValueError):
    """A configuration that cannot be read, with the reason."""


class NoConfiguration(UnreadableRun):
    """A file that is something else: without keys, or too large."""


@dataclass
class Files:
    """The files of one configuration: what was read of each, and how many characters they may still have."""

    read: dict[Path, Settings] = field(default_factory=dict)
    left: int = LARGEST


def settings_in(config: object) -> Settings:
    """Read settings from the path of a file, from the words of a command line, or from a mapping or config object.

    Words may begin with paths; what comes later wins. A file that cannot be read raises UnreadableRun.
    """
    if isinstance(config, (str, Path)):
        return _of_file(Path(config), Files())
    if isinstance(config, (list, tuple)):
        made: Settings = {}
        paths, words = paths_and_words(config)
        for path in paths:
            made |= _of_file(path, Files())
        return made | {key: Setting(value) for key, value, _ in command_settings(words)}
    return {key: Setting(value) for key, value in _flat(fields_of(config))}


def paths_and_words(config: Iterable[object]) -> tuple[list[Path], list[str]]:
    """Split a command line into the paths that it begins with and the rest."""
    words = [str(word) for word in config]
    count = next((at for at, word in enumerate(words) if "=" in word or word.startswith("-")), len(words))
    return [Path(word) for word in words[:count]], words[count:]


def _flat(block: Mapping[Any, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in block.items():
        # A configuration may hold itself, or objects that are none.
        block_like = isinstance(value, (Mapping, SimpleNamespace, Namespace)) or is_dataclass(value)
        is_block = (block_like or hasattr(value, "model_dump")) and not isinstance(value, type)
        deep = outer.count(".") >= MOST_BLOCKS or len(outer) > LONGEST_KEY
        if is_block and not deep and (inner := fields_of(value)):
            yield from _flat(inner, f"{outer}{key}.")
        else:
            yield f"{outer}{key}", value


def text_of(path: Path, most: int = LARGEST) -> str:
    """Read a configuration's file as text; one that is no regular file, or too large, raises UnreadableRun."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UnreadableRun(f"{path}: expected a configuration file, one of {', '.join(SUFFIXES)}")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnreadableRun(f"{path}: expected a regular file")
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(most + 1)
    except OSError as error:
        raise UnreadableRun(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnreadableRun(f"{path}: expected text in UTF-8: {error}") from error
    if len(text) > most:
        raise NoConfiguration(f"{path}: expected a configuration, got more than {LARGEST >> 10} KiB of text")
    return text


def _of_file(path: Path, files: Files) -> Settings:
    text = text_of(path, files.left)
    files.left -= len(text)
    suffix = path.suffix.lower()
    read = {".json": _json, ".toml": _toml, ".py": _python, ".yaml": _yaml, ".yml": _yaml}.get(suffix, script_settings)
    found: Settings = {}
    try:
        for count, (key, value, line) in enumerate(read(text)):
            if count >= MOST_SETTINGS or len(key) > LONGEST_KEY:
                what = f"more than {MOST_SETTINGS} settings, or a key of more than {LONGEST_KEY} characters"
                raise NoConfiguration(f"expected a configuration, got {what}")
            found[key] = Setting(value, line, str(path))
    except (RecursionError, MemoryError) as error:  # the parser of Python has a stack of its own
        raise UnreadableRun(f"{path}: nested too deeply") from error
    except ValueError as error:
        kind = NoConfiguration if isinstance(error, NoConfiguration) else UnreadableRun
        raise kind(f"{path}: {error}") from error
    inherited = _inherited(found, path, files) if suffix in (".yaml", ".yml") else {}
    return _interpolated({**inherited, **found})


def _inherited(found: Settings, path: Path, files: Files) -> Settings:
    """Read the files that `defaults` names by their paths; groups of Hydra, which are names, are not looked for."""
    given = found["defaults"].value if "defaults" in found else None
    made: Settings = {}
    for name in given if isinstance(given, list) else [given]:
        if not (isinstance(name, str) and name.endswith((".yaml", ".yml"))):
            continue
        other = path.parent / name
        try:
            there = other.resolve() if other.is_file() else None
        except (OSError, ValueError, RuntimeError) as error:  # no name of a file, or links that lead in a circle
            raise UnreadableRun(f"{path}: its defaults name {name}: {error}") from error
        if there is None:
            raise UnreadableRun(f"{path}: its defaults name {name}, which does not exist")
        if there not in files.read:
            if len(files.read) >= MOST_FILES:
                raise UnreadableRun(f"{path}: its defaults name more than {MOST_FILES} files")
            # A file that names itself finds nothing there.
            files.read |= {path.resolve(): files.read.get(path.resolve(), {}), there: {}}
            files.read[there] = _of_file(other, files)
        made |= files.read[there]
    return made


def _held(value: Any) -> Any:
    """Return a value with UNKNOWN for each integer that no float holds and that Python may refuse to print."""
    if isinstance(value, int):
        return value if value.bit_length() <= sys.float_info.max_exp else UNKNOWN
    if isinstance(value, (list, tuple, set)):
        return type(value)(map(_held, value))
    return {_held(key): _held(item) for key, item in value.items()} if isinstance(value, dict) else value


REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def _interpolated(found: Settings) -> Settings:
    """Put in what `${block.key}` and `${.key}` refer to; other references are UNKNOWN."""

    def value_of(key: str, depth: int) -> Any:
        value = found[key].value
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = REFERENCE.fullmatch(value)
        if whole is None or depth > 8:
            return UNKNOWN
        name = whole[1].lstrip(".")
        if up := len(whole[1]) - len(name):
            block = key.split(".")
            name = ".".join([*block[: max(0, len(block) - up)], name])
        return value_of(name, depth + 1) if name in found else UNKNOWN

    return {key: setting._replace(value=value_of(key, 0)) for key, setting in found.items()}


# --- kinds of files: key, value, line ---

Found = tuple[str, Any, int]


class ReadAsText(float):
    """A number such as 1e-4, which OmegaConf reads as one and YAML 1.1 as text."""


def _yaml(text: str) -> Iterator[Found]:
    try:
        import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own
    except ImportError as error:
        raise ValueError("a .yaml file needs PyYAML: pip install pyyaml") from error
    left = MOST_VALUES

    def count(values: int) -> None:
        """Count what was made; aliases may stand for more values than a memory holds."""
        nonlocal left
        left -= values
        if left < 0:
            raise NoConfiguration(f"expected a configuration, got more than {MOST_VALUES} values")

    try:
        loader = yaml.SafeLoader(text)
        compose = loader.compose_node

        def composed(*around: Any) -> Any:
            count(1)
            return compose(*around)

        # It composes the parts of a node by this name too.
        loader.compose_node = composed
        root = loader.get_single_node()
    except (NoConfiguration, RecursionError, MemoryError):
        raise
    except Exception as error:  # PyYAML meets texts that are no YAML with errors of many kinds
        raise ValueError(" ".join(str(error).split())) from error
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise NoConfiguration("expected keys and values")
    left = MOST_VALUES
    merged: dict[int, list[tuple[Any, Any]]] = {}

    def pairs(node: Any) -> list[tuple[Any, Any]]:
        """Put in what `<<` merges: each key once, what is nearest of it."""
        if id(node) in merged:
            return merged[id(node)]
        merged[id(node)] = []  # of a mapping that merges itself
        own, others = list[tuple[Any, Any]](), list[tuple[Any, Any]]()
        for key, value in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                own.append((key, value))
                continue
            # Of several the first wins.
            for each in reversed(value.value) if isinstance(value, yaml.SequenceNode) else [value]:
                if not isinstance(each, yaml.MappingNode):
                    raise ValueError(f"line {key.start_mark.line + 1}: expected a mapping to merge")
                others += pairs(each)
        count(len(others))
        once = {key.value if isinstance(key, yaml.ScalarNode) else id(key): (key, value) for key, value in others + own}
        merged[id(node)] = list(once.values())
        return merged[id(node)]

    def value_of(node: Any, depth: int = 0) -> Any:
        if isinstance(node, yaml.ScalarNode):
            count(1 + len(node.value) // 64)
            if node.tag == "tag:yaml.org,2002:str" and node.style is None and re.fullmatch(EXPONENT, node.value):
                return float(node.value) if "." in node.value else ReadAsText(node.value)
            try:
                return _held(loader.construct_object(node))
            except Exception:  # noqa: BLE001 - a tag that it does not build, or not of this text, in errors of any kind
                return UNKNOWN
        count(1)
        if isinstance(node, yaml.SequenceNode):
            return [value_of(item, depth + 1) for item in (node.value if depth < MOST_BLOCKS else ())]
        items = pairs(node) if depth < MOST_BLOCKS else ()
        return {str(value_of(key)): value_of(value, depth + 1) for key, value in items}

    def walk(node: Any, outer: str, depth: int) -> Iterator[Found]:
        for key, value in pairs(node) if depth < MOST_BLOCKS and len(outer) <= LONGEST_KEY else ():
            name, line = f"{outer}{value_of(key)}", key.start_mark.line + 1
            if isinstance(value, yaml.MappingNode) and value.value:
                yield from walk(value, f"{name}.", depth + 1)
            else:
                yield name, value_of(value), line

    yield from walk(root, "", 0)


EXPONENT = r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"


def _json(text: str) -> Iterator[Found]:
    whole = _held(json.loads(text))
    if not isinstance(whole, dict):
        raise NoConfiguration("expected keys and values")
    lines = _lines_of_json(text)
    for key, value in _flat(whole):
        yield key, value, lines.get(key, 0)


JSON_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"(?P<colon>(?=\s*:))?|[{}\[\]\n]', re.DOTALL)


def _lines_of_json(text: str) -> dict[str, int]:
    """Find the lines of the keys in a text that is JSON."""
    lines: dict[str, int] = {}
    # The beginning of the names in each block around; None in a list, which is a value.
    around: list[str | None] = []
    line, name = 1, ""
    for found in JSON_TOKEN.finditer(text):
        token, outer = found[0], around[-1] if around else ""
        if token == "\n":
            line += 1
        elif token in "}]":
            around.pop()
        elif token in "{[":
            block = f"{name}." if around else ""
            around.append(None if token == "[" or outer is None or len(block) > LONGEST_KEY else block)
        elif found["colon"] is not None and outer is not None:
            name = outer + json.loads(token)
            lines[name] = line
    return lines


DEEP_KEY = re.compile(rf"""(?:\.[ \t]*(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*){{{MOST_PARTS}}}""")


def _toml(text: str) -> Iterator[Found]:
    if sys.version_info < (3, 11):
        raise ValueError("a .toml file needs Python 3.11, whose library reads it")
    import tomllib  # type: ignore[import-not-found, unused-ignore]  # not in the oldest Python that mypy assumes

    # Its reader goes through all parts of a key for each of them.
    if DEEP_KEY.search(text):
        raise ValueError(f"a key of more than {MOST_PARTS} parts")
    lines: dict[str, int] = {}
    table = ""
    values = _flat(_held(tomllib.loads(text)))
    for number, line in enumerate(text.split("\n"), 1):
        if header := re.match(r"\s*\[\[?([^\[\]]+)\]", line):
            table = re.sub(r"[\s\"']", "", header[1]) + "."
        elif given := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            lines.setdefault(table + re.sub(r"[\"']", "", given[1]), number)
    for key, value in values:
        # The value of an inline table stands in the line of the table.
        parts = key[:LONGEST_KEY].split(".")
        outer = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
        yield key, value, next((lines[name] for name in outer if name in lines), 0)


def _python(text: str) -> Iterator[Found]:
    """Keywords of calls as `Class.keyword`, and the flags in strings that make a command line.

    A call that is assigned to the name of an evaluation, such as `eval_args` or `val_args`, stands under that name:
    its sampling is not the training's.
    """
    try:
        tree = parsed(text)
        words = list(_words_in_strings(text)) if "--" in text else []
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from error
    except tokenize.TokenError as error:
        raise ValueError(str(error)) from error
    names = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    documented, assigned_to, calls = set[int](), dict[int, str](), list[ast.Call]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            calls.append(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned_to[id(node.value)] = node.targets[0].id
    yield from command_settings((word for word in words if word[1] not in documented), flags_only=True)
    known: dict[int, Any] = {}
    for node in calls:
        path = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        assigned = assigned_to.get(id(node), "")
        yield from _of_call(node, assigned if re.search(EVALUATION, assigned) else path, names, known)


EVALUATION = r"eval|^(val|valid|validation|test)(_|$)"


def _of_call(
    node: ast.Call, path: str, names: Mapping[str, ast.expr], known: dict[int, Any], depth: int = 0
) -> Iterator[Found]:
    """Yield the keywords of a call; `known` has the values of expressions read so far, since a name may recur."""
    for keyword in node.keywords:
        if keyword.arg is None:
            continue
        value = names.get(keyword.value.id, keyword.value) if isinstance(keyword.value, ast.Name) else keyword.value
        name = f"{path}.{keyword.arg}"
        if isinstance(value, ast.Call) and value.keywords and depth < 4:
            # Also as a block of the call around it.
            yield from _of_call(value, name, names, known, depth + 1)
            continue
        if id(value) not in known:
            try:
                known[id(value)] = _held(ast.literal_eval(value))
            except (ValueError, TypeError):  # no literal, or one that cannot be: {[]: 1}
                known[id(value)] = UNKNOWN
        yield name, known[id(value)], keyword.value.lineno


def _words_in_strings(text: str) -> Iterator[tuple[str, int]]:
    """The words of those strings of a Python file in which flags stand, with their lines."""
    kinds = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type in kinds and "--" in token.string:
            for number, line in enumerate(token.string.splitlines(), token.start[0]):
                yield from ((word, number) for word in re.findall(r"""[^\s"'()\[\],\\]+""", line))
            yield "\n", token.end[0]


def nested(settings: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Build blocks from keys with dots; what is UNKNOWN is left out."""
    made: dict[str, Any] = {}
    for key, value in settings:
        if value is UNKNOWN:
            continue
        at = made
        *blocks, last = key.split(".")
        for block in blocks:
            inner = at.setdefault(block, {})
            at = inner if isinstance(inner, dict) else at.setdefault(f"{block}.", {})
        at[last] = value
    return made
