"""`python -m rollout_corr COMMAND`, also installed as `rollout-corr`."""

from __future__ import annotations

import argparse
import sys

# The commands that look at a dump of log-probs; rollout_corr.diagnose.commands has their arguments.
LOOKING = {
    "report": "show where the log-probs of a dump differ",
    "doctor": "name the causes; exit with 1 if there are some",
    "what-if": "try every preset and a grid of thresholds on a dump",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="rollout-corr", description="Everything after the log-probs.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="correct a realistic batch with several presets and show what happened")
    explain = commands.add_parser("explain", help="say in plain words what a preset does")
    explain.add_argument("preset", help="a name such as verl.decoupled_token_is")
    commands.add_parser("presets", help="list the presets")
    commands.add_parser("kernels", add_help=False, help="compile the kernels for GPUs that are not there, and report")
    for name, about in LOOKING.items():
        commands.add_parser(name, add_help=False, help=about)
    chosen, options = parser.parse_known_args(arguments)
    if chosen.command in LOOKING:
        from rollout_corr.diagnose.commands import run

        return run(chosen.command, options)
    if chosen.command == "kernels":
        from rollout_corr.aot.report import main as kernels

        return kernels(options)
    if options:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    if chosen.command == "demo":
        from rollout_corr.cli.demo import main as demo

        demo()
        return 0
    import rollout_corr as rc

    if chosen.command == "presets":
        print("\n".join(rc.presets.names()))
        return 0
    try:
        print(rc.preset(chosen.preset).explain())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
