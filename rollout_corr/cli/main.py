"""The commands of `rollout-corr`, which `python -m rollout_corr` runs too.

Each command is a row of `COMMANDS`. It parses its own arguments. Its modules are imported when it is called, and torch
with them.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from rollout_corr._version import __version__
from rollout_corr.cli.streams import error_line, let_go_of, usable_streams
from rollout_corr.diagnose.read.problems import DumpError
from rollout_corr.diagnose.show.visible import visible

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

# Takes the arguments after the command's name, and returns the exit code.
Run = Callable[[list[str]], int]

PROGRAM = "rollout-corr"

# Exit codes, as `main` says.
GOOD, FOUND, UNUSABLE = 0, 1, 2
# 128 and the number of the signal that a shell would report: SIGINT, SIGPIPE.
INTERRUPTED, CLOSED_PIPE = 130, 141


class Command(NamedTuple):
    """One command."""

    about: str  # its line in `rollout-corr --help`
    loader: str  # `module:function` of what runs it

    def load(self) -> Run:
        """Import the function that runs the command."""
        from rollout_corr import correct  # noqa: F401 - brings torch, whose import the package keeps quiet

        module, _, function = self.loader.partition(":")
        run: Run = getattr(import_module(module), function)
        return run


COMMANDS = {
    "demo": Command("plant a bug in an example batch, find it, and compare specs", "rollout_corr.cli.demo:run"),
    "explain": Command(
        "explain in words what a framework's spec or recipe does", "rollout_corr.cli.spec_commands:explain"
    ),
    "specs": Command(
        "list the specs of all frameworks, or those that contain a word", "rollout_corr.cli.spec_commands:specs"
    ),
    "check": Command(
        "name the mistakes in a run's configuration before it starts", "rollout_corr.cli.check_command:check"
    ),
    "report": Command("show where the two log-probs of a dump differ", "rollout_corr.cli.dump_commands:report"),
    "doctor": Command("name the causes of a mismatch; exit with 1 if any", "rollout_corr.cli.dump_commands:doctor"),
    "eject": Command(
        "print one file to copy: the correction of a spec or the loss of a recipe", "rollout_corr.cli.eject_command:run"
    ),
    "what-if": Command("try all specs and a grid of thresholds on a dump", "rollout_corr.cli.dump_commands:what_if"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` default to those of the process.

    Exit codes: 0 all is well; 1 a condition of `doctor --fail-if` is true; 2 an argument, a
    dump or the output cannot be used; 130 interrupted; 141 whoever reads the output has closed it.
    """
    with usable_streams():
        return _guarded(sys.argv[1:] if arguments is None else arguments)


def _command(arguments: list[str]) -> str:
    """Return the name of the command. Whatever follows, --help too, belongs to it."""
    parser = Parser(prog=PROGRAM, description="Rollout correction for LLM reinforcement learning.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.about)
    return str(parser.parse_args(arguments[:1] or ["--help"]).command)


def _guarded(arguments: list[str]) -> int:
    """Run one command; whatever it raises becomes an exit code and at most one line on stderr."""
    said = PROGRAM
    try:
        try:
            name = _command(arguments)
            said = f"{PROGRAM} {name}"
            return COMMANDS[name].load()(arguments[1:])
        finally:
            # An error of the last write is still an error of the command.
            sys.stdout.flush()
    except KeyboardInterrupt:
        error_line(f"{PROGRAM}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        let_go_of(sys.stdout)
        return CLOSED_PIPE
    except DumpError as error:
        error_line(f"{said}: {error}")
    except OSError as error:
        let_go_of(sys.stdout)
        where = f"{error.filename}: " if error.filename else ""
        error_line(f"{said}: {where}{error.strerror or error}")
    except MemoryError:
        error_line(f"{said}: out of memory")
    except Exception:  # noqa: BLE001 - a mistake in this program; the interpreter would exit with 1, "unhealthy" to a gate
        for line in traceback.format_exc().splitlines():
            error_line(line)
        error_line(f"{said}: this is a mistake in {PROGRAM}; please report the lines above")
    return UNUSABLE


def parser_of(command: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Make the parser of a command's own arguments."""
    return Parser(prog=f"{PROGRAM} {command}", description=description, epilog=epilog)


class Parser(argparse.ArgumentParser):
    """A parser whose errors, which repeat arguments, are shown as other texts are."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and a line that says what is wrong."""
        super().error(visible(message))

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help; argparse would not say that it could not."""
        (file or sys.stdout).write(self.format_help())
