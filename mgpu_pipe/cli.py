"""``mgpu-pipe [verb] [overrides]``: the verbs, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mgpu_pipe.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_STOPPED,
    BadInputError,
    ConfigErrors,
    MgpuError,
    concealed,
    one_line,
)
from mgpu_pipe.launch.stop import asks_for_a_run, run_begins, run_ended, stop_requested
from mgpu_pipe.launch.terminal import outliving_streams

if TYPE_CHECKING:
    from argparse import Namespace

    from mgpu_pipe.config.compose import Composition
    from mgpu_pipe.config.paths import RunPaths
    from mgpu_pipe.config.schema import RunConfig

PROGRAM = "mgpu-pipe"
Job = Callable[["Composition"], int]
WORST_LAST = (EXIT_OK, EXIT_STOPPED, EXIT_BAD_INPUT, EXIT_FAILURE)


def program() -> NoReturn:
    """The command ``mgpu-pipe``."""
    from mgpu_pipe.launch.threads import limit_threads

    limit_threads(os.environ)
    code = main()
    if "torch" in sys.modules:
        from mgpu_pipe.launch.leave import leave

        leave(code)
    sys.exit(code)


def main(arguments: list[str] | None = None) -> int:
    """Run the program; the return value is its exit code (0, 1, 2 or 75)."""
    words = sys.argv[1:] if arguments is None else arguments
    if not asks_for_a_run(words):
        return _main(words)
    with outliving_streams():
        return _main(words)


def _main(words: list[str]) -> int:
    try:
        _working_directory()
        return _dispatch(words)
    except MgpuError as error:
        report_error(error)
        return error.exit_code
    except KeyboardInterrupt:  # while composing or in a verb; a run has its own handling
        print("stopped", file=sys.stderr)
        return EXIT_FAILURE
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise BadInputError(f"the working directory is gone ({error.strerror}); cd to a folder that exists") from error


def report_error(error: MgpuError) -> None:
    """Print an error on stderr, one line; several errors one line each."""
    for single in error.errors if isinstance(error, ConfigErrors) else [error]:
        print("error:", one_line(single), file=sys.stderr)


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else "--help"
    if first == "--version":
        return _version([])
    if first in ("-h", "--help", "help") and len(words) < 2:
        from mgpu_pipe.help import program_help

        print(program_help(), end="")
        return EXIT_OK
    if first in VERBS:
        return VERBS[first](words[1:])
    if first and "=" not in first and not first.startswith(("-", "~")):
        raise _unknown_verb(first)
    return _train(words)


def _unknown_verb(word: str) -> BadInputError:
    from mgpu_pipe.config.suggest import choose_from

    if Path(word).exists():
        return BadInputError(f"{PROGRAM} {word}: say what to do with it, e.g. {PROGRAM} eval {word}")
    return BadInputError(f"{PROGRAM} {word}: no such verb; {choose_from(word, VERBS)}; overrides are written key=value")


def _composed(verb: str, words: list[str], job: Job, after_sweep: Callable[[int], None] | None = None) -> int:
    """Compose ``words`` and run ``job``: once, or for every run of a sweep, and then ``after_sweep`` with its code."""
    from mgpu_pipe.config import hydra_cli

    if "--version" in words:
        return _version([])
    _find_own_classes()
    parsed = hydra_cli.parse(words)
    if parsed.help:
        from mgpu_pipe.help import composing_help

        print(composing_help(verb), end="")
        return EXIT_OK
    if shell := hydra_cli.asked_completion(parsed):
        return _complete(parsed, shell)
    if hydra_cli.asks_hydra(parsed):
        hydra_cli.answer(parsed)
        return EXIT_OK
    if not parsed.multirun and "hydra.mode=MULTIRUN" not in parsed.overrides:
        composition = hydra_cli.compose_one(parsed)
        if not composition.multirun:
            return job(composition)
    if after_sweep is None:
        return _sweep(parsed, job, keep=False)
    from mgpu_pipe.launch.preflight import joined

    if joined():
        raise BadInputError("-m: a world that torchrun or srun started trains one run; start a world for each")
    code = _sweep(parsed, job, keep=True)
    after_sweep(code)
    return code


def _complete(parsed: Namespace, shell: str) -> int:
    """Print what the last word of the shell's line may become."""
    from mgpu_pipe import completion
    from mgpu_pipe.config import hydra_cli
    from mgpu_pipe.config.listing import list_groups

    line = os.environ.get("COMP_LINE", "")
    if not line.strip():
        raise BadInputError(f"-sc query={shell}: is what the shell asks; set it up by {PROGRAM} -sc install={shell}")
    found = completion.choices(
        line, VERBS, {"ls": lambda: list(list_groups()), "checkpoints": lambda: ["list", "check", "compare", "prune"]}
    )
    words = [*found.own, *(hydra_cli.completed_overrides(parsed, found.line) if found.line is not None else [])]
    print(("\n" if shell == "fish" else " ").join(words))
    return EXIT_OK


def _find_own_classes() -> None:
    """Import from the working folder too, as under `python -m`; the verbs that open what others made do not."""
    here = _working_directory()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def _sweep(parsed: Namespace, job: Job, *, keep: bool) -> int:
    """Run the jobs of a sweep one after another; a failure is reported and the others go on.

    Args:
        keep: whether the sweep has a folder, beside those of its runs.
    """
    from mgpu_pipe.config import hydra_cli
    from mgpu_pipe.errors import ConfigError

    codes: list[int] = []
    seen = 0

    def one(composition: Composition) -> None:
        nonlocal seen
        seen += 1
        number = f"{seen} of {composition.points}" if composition.points else str(seen)
        shown = shlex.join(composition.overrides)
        if stop_requested() or EXIT_STOPPED in codes:
            print(f"run {number}: not started, for the sweep was stopped: {shown}", file=sys.stderr)
            codes.append(EXIT_STOPPED)
            return
        print(f"run {number}: {shown}", file=sys.stderr, flush=True)
        if composition.config.run.dir is not None:
            composition.errors.append(
                ConfigError("run.dir", composition.config.run.dir, "leave it out with -m: every run has its own folder")
            )
        try:
            codes.append(job(composition))
        except MgpuError as error:
            report_error(error)
            codes.append(error.exit_code)
        except Exception:  # a defect of this program: shown whole, and the other runs go on
            traceback.print_exc()
            codes.append(EXIT_FAILURE)

    hydra_cli.sweep(parsed, one, keep=keep)
    return max(codes, key=WORST_LAST.index, default=EXIT_OK)


def _checked(composition: Composition) -> RunConfig:
    """The configuration, everything about it that can be known checked; notices go to stderr.

    Raises:
        ConfigErrors: everything wrong with it.
    """
    from mgpu_pipe.launch.preflight import preflight, preflight_errors

    alone = [*composition.flags, *composition.overrides]
    if composition.errors:
        raise ConfigErrors(preflight_errors(composition.config, composition.errors, alone))
    for notice in preflight(composition.config, alone):
        print(f"note: {one_line(notice.key)}: {one_line(notice.text)}", file=sys.stderr)
    return composition.config


def _train(words: list[str]) -> int:
    """Compose once, check, and hand over to the launcher."""
    command = [PROGRAM, *words]
    runs: list[RunPaths] = []
    folder: Path | None = None
    """Of the sweep."""

    def job(composition: Composition) -> int:
        nonlocal folder
        folder = composition.sweep_folder
        run_begins()
        config = _checked(composition)
        from mgpu_pipe.config.paths import RunPaths
        from mgpu_pipe.launch.again import Asked
        from mgpu_pipe.launch.local import launch

        alone = [*composition.flags, *composition.overrides]
        result = launch(config, Asked(composition.overrides, command, alone, composition.swept))
        run_ended(asked_to_stop=result.asked_to_stop)
        runs.append(RunPaths(result.folder))
        return result.exit_code

    def conclude(code: int) -> None:
        if runs and folder is not None:
            from mgpu_pipe.launch.sweep_end import show_sweep

            show_sweep(runs, folder, words if code == EXIT_STOPPED else ())

    return _composed("train", words, job, after_sweep=conclude)


def _check(words: list[str]) -> int:
    def job(composition: Composition) -> int:
        config = _checked(composition)
        from mgpu_pipe.launch.overview import overview

        _print_rows(overview(config))
        return EXIT_OK

    return _composed("check", words, job)


def _print_rows(rows: list[tuple[str, str]]) -> None:
    """Two columns, the second wrapped to the terminal's width."""
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, concealed(text))
    Console(highlight=False, markup=False, emoji=False).print(table)


def _verify(words: list[str]) -> int:
    def job(composition: Composition) -> int:
        config = _checked(composition)
        from mgpu_pipe.verify.command import verify

        return verify(config, composition.overrides)

    return _composed("verify", words, job)


def _eval(words: list[str]) -> int:
    from mgpu_pipe.inference.commands import evaluate

    return evaluate(words)


def _generate(words: list[str]) -> int:
    from mgpu_pipe.inference.commands import generate

    return generate(words)


def _export(words: list[str]) -> int:
    from mgpu_pipe.inference.commands import export

    return export(words)


def _import(words: list[str]) -> int:
    from mgpu_pipe.inference.commands import import_weights

    return import_weights(words)


def _checkpoints(words: list[str]) -> int:
    from mgpu_pipe.launch.checkpoints import checkpoints

    return checkpoints(words)


def _report(words: list[str]) -> int:
    from mgpu_pipe.report.commands import report

    return report(words)


def _ls(words: list[str]) -> int:
    """List the groups and their options; the default is marked with a star."""
    from mgpu_pipe.config.arguments import VerbParser, parse
    from mgpu_pipe.config.listing import list_groups

    parser = VerbParser(prog=f"{PROGRAM} ls", description="List the groups and their options; * marks the default.")
    parser.add_argument("group", nargs="?", metavar="GROUP", help="list this one alone")
    arguments = parse(parser, words)
    if arguments is None:
        return EXIT_OK
    for group, options in list_groups(arguments.group).items():
        print(group)
        width = max(len(option.name) for option in options)
        for option in options:
            print(f"  {'*' if option.is_default else ' '} {option.name:<{width}}  {option.description}".rstrip())
    return EXIT_OK


def _schema(words: list[str]) -> int:
    """Print the JSON schema of a configuration."""
    import json

    if _takes_nothing("schema", "Print the JSON schema (draft 2020-12) of every key, for editors.", words):
        from mgpu_pipe.config.json_schema import json_schema

        print(json.dumps(json_schema(), indent=2))
    return EXIT_OK


def _version(words: list[str]) -> int:
    if _takes_nothing("version", "Print the version of this program.", words):
        from mgpu_pipe import __version__

        print(f"mgpu_pipe {__version__}")
    return EXIT_OK


def _takes_nothing(verb: str, description: str, words: list[str]) -> bool:
    """Whether to go on; not after ``--help``, which is answered."""
    from mgpu_pipe.config.arguments import VerbParser, parse

    return parse(VerbParser(prog=f"{PROGRAM} {verb}", description=description), words) is not None


VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "check": _check,
    "verify": _verify,
    "eval": _eval,
    "generate": _generate,
    "export": _export,
    "import": _import,
    "checkpoints": _checkpoints,
    "report": _report,
    "ls": _ls,
    "schema": _schema,
    "version": _version,
}
