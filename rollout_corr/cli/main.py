"""The commands of `rollout-corr`, which `python -m rollout_corr` runs too.

Each command is a row of `COMMANDS`. It parses its own arguments, and its modules are imported when it is called.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

# Takes the arguments after the command's name, and returns the exit code.
Run = Callable[[list[str]], int]

PROGRAM = "rollout-corr"


class Command(NamedTuple):
    """One command.

    Attributes:
        about: Its line in `rollout-corr --help`.
        loader: `module:function` of what runs it.
    """

    about: str
    loader: str

    def load(self) -> Run:
        """Import the function that runs the command."""
        module, _, function = self.loader.partition(":")
        run: Run = getattr(import_module(module), function)
        return run


COMMANDS = {
    "demo": Command("correct an example batch with several presets and print the results", "rollout_corr.cli.demo:run"),
    "explain": Command("explain in words what a preset does", "rollout_corr.cli.main:explain"),
    "presets": Command("list the names of all presets", "rollout_corr.cli.main:presets"),
    "report": Command("show where the two log-probs of a dump differ", "rollout_corr.cli.dump_commands:report"),
    "doctor": Command("name the causes of a mismatch; exit with 1 if any", "rollout_corr.cli.dump_commands:doctor"),
    "what-if": Command("try all presets and a grid of thresholds on a dump", "rollout_corr.cli.dump_commands:what_if"),
    "kernels": Command("compile the kernels for several GPU models; needs no GPU", "rollout_corr.aot.report:main"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code; `arguments` default to those of the process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Rollout correction for LLM reinforcement learning.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.about)
    # Only the name is parsed here: whatever follows, --help too, belongs to the command.
    return COMMANDS[parser.parse_args(arguments[:1]).command].load()(arguments[1:])


def parser_of(command: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Make the parser of a command's own arguments."""
    return argparse.ArgumentParser(prog=f"{PROGRAM} {command}", description=description, epilog=epilog)


def explain(arguments: list[str]) -> int:
    """Print what a preset does."""
    import rollout_corr as rc

    parser = parser_of("explain", "Explain in words what a preset does.")
    parser.add_argument("preset", help="a name such as verl.decoupled_token_is; `rollout-corr presets` lists them")
    try:
        print(rc.preset(parser.parse_args(arguments).preset).explain())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def presets(arguments: list[str]) -> int:
    """Print the names of all presets."""
    import rollout_corr as rc

    parser_of("presets", "List the names of all presets.").parse_args(arguments)
    print("\n".join(rc.presets.names()))
    return 0
