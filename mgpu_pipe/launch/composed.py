"""What the verbs that take a configuration share: composing it, once or for each run of a sweep, and checking it."""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config import hydra_cli
from mgpu_pipe.config.hub import names_files
from mgpu_pipe.config.paths import working_directory
from mgpu_pipe.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_STOPPED,
    BadInputError,
    ConfigError,
    ConfigErrors,
    MgpuError,
    one_line,
    print_error,
    raised_by,
)
from mgpu_pipe.launch.stop import stop_requested

if TYPE_CHECKING:
    from argparse import Namespace

    from mgpu_pipe.checks.notices import Notice
    from mgpu_pipe.config.compose import Composition
    from mgpu_pipe.config.schema import RunConfig
    from mgpu_pipe.launch.outcome import LaunchResult

Job = Callable[["Composition"], int]
WORST_LAST = (EXIT_OK, EXIT_STOPPED, EXIT_BAD_INPUT, EXIT_FAILURE)

HELP = """\
usage: mgpu-pipe {usage} [OVERRIDES] [OPTIONS]

{description}

overrides:
  GROUP=OPTION         choose an option, e.g. model=llama_tiny strategy=fsdp
                       (mgpu-pipe ls lists them)
  KEY=VALUE            set a key, e.g. optimizer.lr=3e-4 trainer.max_steps=20
                       (mgpu-pipe schema explains them)

options:
  -m, --multirun       once for every combination of values, e.g. seed=1,2
  -cd, --config-dir DIR
                       a further folder of configurations
  -cn, --config-name NAME
                       another primary configuration than config
  -cp, --config-path DIR
                       a folder in the place of the shipped configurations
  -c, --cfg job        print the composed configuration, and do nothing else;
                       with --resolve: interpolations resolved, with
                       -p, --package KEY: that section
  -i, --info [WHAT]    print how it is composed: defaults, searchpath, plugins
  -sc, --shell-completion
                       install=bash prints what sets up tab completion
  --hydra-help         Hydra's own help
  -h, --help           this help
"""


def composed(
    verb: str, description: str, words: list[str], job: Job, sweep: Callable[[Namespace], int] | None = None
) -> int:
    """Compose ``words`` and run ``job``: once, or for every point of a sweep.

    Args:
        verb: as the help writes it.
        description: what the verb does, for the help.
        sweep: runs a sweep of these arguments, in the place of ``job`` for each point.
    """
    find_own_classes()
    parsed = hydra_cli.parse(words)
    if parsed.help:
        print(HELP.format(usage=verb, description=description), end="")
        return EXIT_OK
    if hydra_cli.asks_hydra(parsed):
        hydra_cli.answer(parsed)
        return EXIT_OK
    if not parsed.multirun and "hydra.mode=MULTIRUN" not in parsed.overrides:
        composition = hydra_cli.compose_one(parsed)
        if not composition.multirun:
            return job(composition)
    return each_point(parsed, job, keep=False) if sweep is None else sweep(parsed)


def each_point(parsed: Namespace, job: Job, *, keep: bool) -> int:
    """Run ``job`` for one point after another, through Hydra's sweeper; a failure is reported and the others go on.

    Args:
        keep: whether Hydra's own folder of the sweep stays.
    """
    codes: list[int] = []
    seen = 0

    def one(composition: Composition) -> None:
        nonlocal seen
        seen += 1
        number = f"{seen} of {composition.points}" if composition.points else str(seen)
        shown = shlex.join(composition.overrides)
        if stop_requested() or EXIT_STOPPED in codes:
            print(f"run {number}: not started, because the sweep was stopped: {shown}", file=sys.stderr)
            codes.append(EXIT_STOPPED)
            return
        print(f"run {number}: {shown}", file=sys.stderr, flush=True)
        try:
            codes.append(job(composition))
        except MgpuError as error:
            print_error(error)
            codes.append(error.exit_code)
        except Exception:  # a defect of this program: shown whole, and the other runs go on
            traceback.print_exc()
            codes.append(EXIT_FAILURE)

    hydra_cli.sweep(parsed, one, keep=keep)
    return max(codes, key=WORST_LAST.index, default=EXIT_OK)


def checked(composition: Composition, *, joins: bool = False, elsewhere: bool = False) -> RunConfig:
    """The configuration, everything about it that can be known checked; notices go to stderr.

    Args:
        joins: whether this process trains next, as a rank where there is a world; then the others hear of an error
            that they did not look for.
        elsewhere: as of :func:`mgpu_pipe.checks.preflight.preflight`.

    Raises:
        ConfigErrors: everything wrong with it.
    """
    tell(notices_of(composition, joins=joins, elsewhere=elsewhere))
    return composition.config


def launched(
    composition: Composition, command: Sequence[str], chosen: Callable[[Path], None] = lambda folder: None
) -> LaunchResult:
    """Run a composition that was checked.

    Args:
        command: what the user typed, for the record.
        chosen: told the run's folder, before the run is begun.
    """
    from mgpu_pipe.config.compose import Composition
    from mgpu_pipe.launch.base_run import with_base
    from mgpu_pipe.launch.local import launch
    from mgpu_pipe.runs.continue_line import Asked

    started = with_base(composition, _base_run)
    if not isinstance(started, Composition):
        return started
    launcher = composition.config.launch.type
    if launcher != "local":
        fix = "use mgpu-pipe submit, or launch=local to train on this machine"
        raise ConfigError("launch.type", launcher, fix, "such a run is a job")
    alone = [*composition.flags, *composition.overrides]
    asked = Asked(composition.overrides, command, alone, composition.swept, composition.own, chosen=chosen)
    return launch(composition.config, asked)


def _base_run(composition: Composition, command: Sequence[str]) -> LaunchResult:
    checked(composition)
    return launched(composition, command)


def notices_of(composition: Composition, *, joins: bool = False, elsewhere: bool = False) -> list[Notice]:
    """What is worth knowing of a configuration that can run. Names on the Hub become names at a commit.

    Args:
        joins: as of :func:`checked`.
        elsewhere: as of :func:`mgpu_pipe.checks.preflight.preflight`.

    Raises:
        ConfigErrors: everything wrong with it.
    """
    from mgpu_pipe.checks.notices import Notice
    from mgpu_pipe.checks.preflight import preflight, preflight_errors

    alone = [*composition.flags, *composition.overrides]
    if composition.errors:
        raise ConfigErrors(preflight_errors(composition.config, composition.errors, alone))
    if not names_files(composition.config):
        return preflight(composition.config, alone, elsewhere)
    from mgpu_pipe.runs.hub_names import pin

    pinned = pin(composition.config)
    composition.config = pinned.config
    if pinned.by_rank_zero:
        return []  # and rank 0 checks the rest, for what the names lead to is not here yet
    try:
        if pinned.errors:
            raise ConfigErrors(preflight_errors(composition.config, pinned.errors, alone))
        return [*(Notice(key, text) for key, text in pinned.told), *preflight(composition.config, alone, elsewhere)]
    except MgpuError as error:
        if joins and pinned.others_wait:
            from mgpu_pipe.launch.join import refuse_alone

            refuse_alone(composition.config, error.exit_code)
        raise


def errors_of(composition: Composition) -> list[BadInputError]:
    """Everything that can be known to be wrong with a point."""

    def check() -> None:
        notices_of(composition)

    return raised_by(check)


def tell(notices: Iterable[Notice]) -> None:
    """Print them to stderr, one line each."""
    for notice in notices:
        print(f"note: {one_line(notice.key)}: {one_line(notice.text)}", file=sys.stderr)


def find_own_classes() -> None:
    """Import from the working folder too, as under `python -m`; the verbs that open what others made do not."""
    here = working_directory()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
