"""The command that looks at a configuration before a run: check."""

from __future__ import annotations

from pathlib import Path

from rollout_corr.cli.main import FOUND, GOOD, parser_of
from rollout_corr.cli.streams import print_json, print_line
from rollout_corr.diagnose.doctor.cause import counted
from rollout_corr.diagnose.read.problems import DumpError
from rollout_corr.frameworks.shared.checking import ConfigProblem, mistakes_in, recognized, settings_of_each
from rollout_corr.frameworks.shared.lookup import readable
from rollout_corr.frameworks.shared.run_files import SUFFIXES, NoConfiguration, UnreadableRun, settings_in


def check(arguments: list[str]) -> int:
    """Run `rollout-corr check`."""
    parser = parser_of(
        "check",
        "Name the mistakes in the configuration of a run before it starts: the key, the line, and what to write.",
        f"exit codes: {GOOD} no error (warnings are printed), {FOUND} an error, 2 a file cannot be read "
        "(in a folder a warning)",
    )
    parser.add_argument(
        "config",
        nargs="+",
        help=f"a file ({', '.join(SUFFIXES)}), or several (later ones win), then KEY=VALUE as on the "
        "command line of the run; flags after --; or a folder, whose files are checked one by one",
    )
    parser.add_argument(
        "--framework",
        metavar="NAME",
        choices=readable(),
        help=f"whose configuration it is: {', '.join(readable())}; default: the framework with most settings in it",
    )
    parser.add_argument("--json", action="store_true", help="print the mistakes as JSON, and nothing else")
    chosen = parser.parse_args(arguments)
    folder, nothing = Path(chosen.config[0]), "nothing wrong that is known"
    try:
        if len(chosen.config) == 1 and folder.is_dir():
            found, checked = _each(folder, chosen.framework)
        else:
            settings = settings_in(chosen.config)
            counts = settings_of_each(settings)
            framework = chosen.framework or recognized(counts, chosen.config)
            if framework is None:
                what = "no setting that matters to a correction, or those of several frameworks; give --framework"
                raise UnreadableRun(f"{chosen.config[0]}: {what}")
            found, checked = mistakes_in(framework, settings), f"{' '.join(chosen.config)} ({framework})"
            if not found and not counts.get(framework, 1):
                alike = max(counts, key=lambda name: counts[name])
                if counts[alike]:
                    what = f"no setting of {framework} is in it; it looks like one of {alike}"
                    raise UnreadableRun(f"{chosen.config[0]}: {what}")
                nothing = "nothing that matters to a correction is set"
    except UnreadableRun as error:
        raise DumpError(str(error)) from error
    if chosen.json:
        print_json([vars(problem) for problem in found])
    else:
        for problem in found:
            print_line(str(problem))
        print_line(f"{checked}: {counted(len(found), 'mistake') if found else nothing}")
    return FOUND if any(problem.severity == "error" for problem in found) else GOOD


def _each(folder: Path, framework: str | None) -> tuple[list[ConfigProblem], str]:
    """Check the files of a folder that are configurations; one that cannot be read is a warning."""
    found, checked = list[ConfigProblem](), 0
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix.lower() in SUFFIXES:
            try:
                settings = settings_in(path)
                name = framework or recognized(settings_of_each(settings), path)
                found += [] if name is None else mistakes_in(name, settings)
            except NoConfiguration:
                continue
            except UnreadableRun as error:
                reason = str(error).removeprefix(f"{path}: ")
                found.append(ConfigProblem("", reason, severity="warning", file=str(path)))
            checked += 1
    if not checked:
        raise UnreadableRun(f"{folder}: expected a folder with a configuration, one of {', '.join(SUFFIXES)}")
    return found, f"{folder} ({counted(checked, 'file')})"
