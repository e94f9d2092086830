"""Reading of a run's configuration as people have it, with the line of each setting.

YAML (as Hydra saves it, with `defaults` that name other files), JSON, TOML, a Python file, a shell script, or the words
of a command line. Nothing is executed: what a script computes, or takes from its environment, is UNKNOWN.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tokenize
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from io import BytesIO
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

SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".py", ".sh", ".bash", ".slurm", ".txt")
# Files of a configuration that hold no more than this; a larger one is a dump or a mistake.
LARGEST = 16 << 20


class UnreadableRun(ValueError):
    """A configuration that cannot be read, with the reason."""


class NoConfiguration(UnreadableRun):
    """A file that is something else: without keys, or too large."""


def settings_in(config: object) -> Settings:
    """Read settings from the path of a file, from the words of a command line, or from a mapping or config object.

    Words may begin with paths; what comes later wins. A file that cannot be read raises UnreadableRun.
    """
    if isinstance(config, (str, Path)):
        return _of_file(Path(config), ())
    if isinstance(config, (list, tuple)):
        made: Settings = {}
        words = [str(word) for word in config]
        while words and "=" not in words[0] and not words[0].startswith("-"):
            made |= _of_file(Path(words.pop(0)), ())
        return made | {key: Setting(value) for key, value, _ in command_settings(words)}
    return {key: Setting(value) for key, value in _flat(fields_of(config))}


def _flat(block: Mapping[Any, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in block.items():
        # A configuration may hold itself, or objects that are none.
        block_like = isinstance(value, (Mapping, SimpleNamespace, Namespace)) or is_dataclass(value)
        is_block = (block_like or hasattr(value, "model_dump")) and not isinstance(value, type)
        if is_block and outer.count(".") < MOST_BLOCKS and (inner := fields_of(value)):
            yield from _flat(inner, f"{outer}{key}.")
        else:
            yield f"{outer}{key}", value


def _of_file(path: Path, within: tuple[Path, ...]) -> Settings:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UnreadableRun(f"{path}: expected a configuration file, one of {', '.join(SUFFIXES)}")
    try:
        if path.stat().st_size > LARGEST:
            raise NoConfiguration(f"{path}: expected a configuration, got a file of more than {LARGEST >> 20} MiB")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UnreadableRun(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnreadableRun(f"{path}: expected text in UTF-8: {error}") from error
    read = {".json": _json, ".toml": _toml, ".py": _python, ".yaml": _yaml, ".yml": _yaml}.get(suffix, script_settings)
    try:
        found = {key: Setting(value, line, str(path)) for key, value, line in read(text)}
    except RecursionError as error:
        raise UnreadableRun(f"{path}: blocks within blocks without an end") from error
    except ValueError as error:
        kind = NoConfiguration if isinstance(error, NoConfiguration) else UnreadableRun
        raise kind(f"{path}: {error}") from error
    inherited = _inherited(found, path, (*within, path.resolve())) if suffix in (".yaml", ".yml") else {}
    return _interpolated({**inherited, **found})


def _inherited(found: Settings, path: Path, within: tuple[Path, ...]) -> Settings:
    """Read the files that `defaults` names by their paths; groups of Hydra, which are names, are not looked for."""
    given = found["defaults"].value if "defaults" in found else None
    made: Settings = {}
    for name in given if isinstance(given, list) else [given]:
        other = path.parent / str(name)
        if isinstance(name, str) and name.endswith((".yaml", ".yml")) and other.resolve() not in within:
            if not other.is_file():
                raise UnreadableRun(f"{path}: its defaults name {name}, which is not there")
            made |= _of_file(other, within)
    return made


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
        name = whole[1]
        block = key.split(".")
        while name.startswith("."):
            name, block = name[1:], block[:-1]
        name = ".".join([*block, name]) if whole[1].startswith(".") else name
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
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except UnicodeError as error:
        raise ValueError(str(error)) from error
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise NoConfiguration("expected keys and values")
    made, left = yaml.SafeLoader(""), MOST_VALUES

    def pairs(node: Any) -> list[tuple[Any, Any]]:
        """Put in what `<<` merges; each key once, or merges of merges would double without an end."""
        try:
            made.flatten_mapping(node)
        except yaml.YAMLError as error:
            raise ValueError(" ".join(str(error).split())) from error
        once = {key.value if isinstance(key, yaml.ScalarNode) else id(key): (key, value) for key, value in node.value}
        node.value = list(once.values())
        return node.value

    def value_of(node: Any, depth: int = 0) -> Any:
        # Aliases may stand for more values than a memory holds.
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"expected a configuration, got more than {MOST_VALUES} values")
        if isinstance(node, yaml.ScalarNode):
            if node.tag == "tag:yaml.org,2002:str" and node.style is None and re.fullmatch(EXPONENT, node.value):
                return float(node.value) if "." in node.value else ReadAsText(node.value)
            try:
                return made.construct_object(node)
            except yaml.YAMLError:  # a tag that the safe loader does not build
                return UNKNOWN
        if isinstance(node, yaml.SequenceNode):
            return [value_of(item, depth + 1) for item in (node.value if depth < MOST_BLOCKS else ())]
        items = pairs(node) if depth < MOST_BLOCKS else ()
        return {str(value_of(key)): value_of(value, depth + 1) for key, value in items}

    def walk(node: Any, outer: str, depth: int) -> Iterator[Found]:
        for key, value in pairs(node) if depth < MOST_BLOCKS else ():
            name, line = f"{outer}{value_of(key)}", key.start_mark.line + 1
            if isinstance(value, yaml.MappingNode) and value.value:
                yield from walk(value, f"{name}.", depth + 1)
            else:
                yield name, value_of(value), line

    yield from walk(root, "", 0)


EXPONENT = r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"
MOST_BLOCKS, MOST_VALUES = 16, 200_000


def _json(text: str) -> Iterator[Found]:
    """Walk a JSON text with the decoder's own scanner for values, which says where each ends."""
    decoder = json.JSONDecoder()
    space = re.compile(r"[\s]*")
    line, counted = 1, 0

    def after(at: int) -> int:
        found = space.match(text, at)
        return at if found is None else found.end()

    def walk(at: int, outer: str) -> Iterator[Found]:
        nonlocal line, counted
        at = after(at + 1)
        while text[at : at + 1] == '"':
            key, at_colon = decoder.raw_decode(text, at)
            line, counted = line + text.count("\n", counted, at), at
            at = after(after(at_colon) + 1)
            value, end = decoder.raw_decode(text, at)
            if isinstance(value, dict) and value:
                yield from walk(at, f"{outer}{key}.")
            else:
                yield f"{outer}{key}", value, line
            at = after(end)
            at = after(at + 1) if text[at : at + 1] == "," else at

    whole = json.loads(text)
    if not isinstance(whole, dict):
        raise NoConfiguration("expected keys and values")
    yield from walk(after(0), "")


def _toml(text: str) -> Iterator[Found]:
    if sys.version_info < (3, 11):
        raise ValueError("a .toml file needs Python 3.11, whose library reads it")
    import tomllib  # type: ignore[import-not-found, unused-ignore]  # not in the oldest Python that mypy assumes

    values = dict(_flat(tomllib.loads(text)))
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?", line):
            table = re.sub(r"[\s\"']", "", header[1]) + "."
        elif given := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            lines.setdefault(table + re.sub(r"[\"']", "", given[1]), number)
    for key, value in values.items():
        # The value of an inline table stands in the line of the table.
        parts = key.split(".")
        outer = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
        yield key, value, next((lines[name] for name in outer if name in lines), 0)


def _python(text: str) -> Iterator[Found]:
    """Keywords of calls as `Class.keyword`, and the flags in strings that make a command line.

    A call that is assigned to the name of an evaluation, such as `eval_args` or `val_args`, stands under that name:
    its sampling is not the training's.
    """
    try:
        tree = parsed(text)
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.msg}") from error
    names = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    documented = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    words = (word for word in _words_in_strings(text) if word[1] not in documented)
    yield from command_settings(words, flags_only=True)
    of_evaluation = {
        id(node.value): node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if re.search(EVALUATION, node.targets[0].id)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            path = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield from _of_call(node, of_evaluation.get(id(node), path), names)


EVALUATION = r"eval|^(val|valid|validation|test)(_|$)"


def _of_call(node: ast.Call, path: str, names: Mapping[str, ast.expr], depth: int = 0) -> Iterator[Found]:
    for keyword in node.keywords:
        if keyword.arg is None:
            continue
        value = names.get(keyword.value.id, keyword.value) if isinstance(keyword.value, ast.Name) else keyword.value
        name = f"{path}.{keyword.arg}"
        if isinstance(value, ast.Call) and value.keywords and depth < 4:
            # Also as a block of the call around it.
            yield from _of_call(value, name, names, depth + 1)
            continue
        try:
            read = ast.literal_eval(value)
        except ValueError:
            read = UNKNOWN
        yield name, read, keyword.value.lineno


def _words_in_strings(text: str) -> Iterator[tuple[str, int]]:
    """The words of those strings of a Python file in which flags stand, with their lines."""
    kinds = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.tokenize(BytesIO(text.encode()).readline):
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
