"""Composes, checks and launches configurations, once or for each run of a sweep, for every verb that takes one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.hub import names_files
from mgpu_pipe.config.hydra import command_line as hydra_cli
from mgpu_pipe.config.hydra.compose import Composition
from mgpu_pipe.config.resolve import MICRO_BATCH, SAVES, STRATEGY, devices_per_node, unplanned_keys
from mgpu_pipe.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_STOPPED,
    BadInputError,
    ConfigError,
    ConfigErrors,
    MgpuError,
    WorkerError,
    one_line,
    print_error,
    print_line,
    print_text,
    print_traceback,
    raised_by,
)
from mgpu_pipe.import_path import allow_own_classes
from mgpu_pipe.launch.signals import stop_requested

if TYPE_CHECKING:
    from argparse import Namespace

    from mgpu_pipe.checks.notices import Notice
    from mgpu_pipe.config.schema import RunConfig
    from mgpu_pipe.launch.outcome import LaunchResult

Job = Callable[[Composition], int]
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
                       a folder instead of the shipped configurations
  -c, --cfg job        print the composed configuration, and do nothing else;
                       with --resolve: interpolations resolved, with
                       -p, --package KEY: that section
  -i, --info [WHAT]    print how it is composed: defaults, searchpath, plugins
  -sc, --shell-completion
                       install=bash prints what sets up tab completion
  --hydra-help         Hydra's own help
  -h, --help           this help
"""


def compose_and_run(
    verb: str, description: str, words: list[str], job: Job, sweep: Callable[[Namespace], int] | None = None
) -> int:
    """Compose ``words`` and run ``job``: once, or for every point of a sweep.

    Args:
        verb: verb in the help's usage line.
        description: description for the help.
        sweep: runs a sweep of these arguments instead of ``job`` for each point.
    """
    allow_own_classes()
    parsed = hydra_cli.parse(words)
    if parsed.help:
        print_text(HELP.format(usage=verb, description=description), end="")
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
    """Run ``job`` for each point through Hydra's sweeper, all despite failures; ``keep`` its folder or not."""
    codes: list[int] = []
    count = 0

    def run_point(composition: Composition) -> None:
        nonlocal count
        count += 1
        number = f"{count} of {composition.points}" if composition.points else str(count)
        overrides = shlex.join(composition.overrides)
        if stop_requested() or EXIT_STOPPED in codes:
            print_line(f"run {number}: not started, because the sweep was stopped: {overrides}", file=sys.stderr)
            codes.append(EXIT_STOPPED)
            return
        print_line(f"run {number}: {overrides}", file=sys.stderr, flush=True)
        try:
            codes.append(job(composition))
        except MgpuError as error:
            print_error(error)
            codes.append(error.exit_code)
        except Exception:  # a bug: print the traceback and continue with the other runs
            print_traceback()
            codes.append(EXIT_FAILURE)

    hydra_cli.sweep(parsed, run_point, keep=keep)
    return max(codes, key=WORST_LAST.index, default=EXIT_OK)


def check_composition(
    composition: Composition, *, joins: bool = False, elsewhere: bool = False, trains: bool = True
) -> RunConfig:
    """Check a composition before anything starts, print its notices to stderr and return its configuration.

    Args:
        joins: whether this process trains next, as a rank of a joined world if there is one; then it broadcasts errors
            that only rank 0 looks for.
        elsewhere: see :func:`mgpu_pipe.checks.preflight.preflight`.
        trains: whether the whole model is trained; else its memory is not checked.

    Raises:
        ConfigErrors: all errors of the configuration.
    """
    trainer = composition.config.trainer
    if not trains:
        composition.config = replace(composition.config, trainer=replace(trainer, memory_check="off"))
    print_notices(notices_of(composition, joins=joins, elsewhere=elsewhere))
    composition.config = replace(composition.config, trainer=trainer)
    return composition.config


def launch_composition(
    composition: Composition, command: Sequence[str], chosen: Callable[[Path], None] = lambda folder: None
) -> LaunchResult:
    """Launch a checked composition of the user's ``command``; ``chosen`` gets the run's folder before."""
    from mgpu_pipe.launch.base_run import with_base
    from mgpu_pipe.launch.local import launch
    from mgpu_pipe.runs.resume_command import CommandLine

    started = with_base(composition, _base_run)
    if not isinstance(started, Composition):
        return started
    launcher = composition.config.launch.type
    if launcher != "local":
        fix = "use mgpu-pipe submit, or launch=local to train on this machine"
        raise ConfigError("launch.type", launcher, fix, "such a run is a job")
    if composition.measures_micro_batch:
        from mgpu_pipe.launch.micro_batch_tries import largest_micro_batch

        composition.config = largest_micro_batch(composition.config)
    alone = [*composition.flags, *composition.overrides]
    command_line = CommandLine(
        composition.overrides, command, alone, composition.swept, composition.local_options, chosen=chosen
    )
    return launch(composition.config, command_line)


def _base_run(composition: Composition, command: Sequence[str]) -> LaunchResult:
    check_composition(composition)
    return launch_composition(composition, command)


def notices_of(composition: Composition, *, joins: bool = False, elsewhere: bool = False) -> list[Notice]:
    """Notices of a configuration that can run; pins its names on the Hub to commits.

    Args:
        joins: see :func:`check_composition`.
        elsewhere: see :func:`mgpu_pipe.checks.preflight.preflight`.

    Raises:
        ConfigErrors: all errors of the configuration.
    """
    from mgpu_pipe.checks.notices import Notice
    from mgpu_pipe.checks.preflight import preflight, preflight_errors

    alone = [*composition.flags, *composition.overrides]
    if composition.errors:
        raise ConfigErrors(preflight_errors(composition.config, composition.errors, alone))
    config = composition.config
    if config.run.starts_from is not None:
        from mgpu_pipe.launch.base_run import base_words, check_bases

        words = tuple(base_words(config.run, config.trainer, config.data.cache_dir))
        check_bases(tuple(composition.flags), words, config.run.starts_from)
    if not names_files(composition.config.model, composition.config.data):
        return [*_plan_auto(composition, elsewhere), *preflight(composition.config, alone, elsewhere)]
    from mgpu_pipe.runs.hub_names import pin

    pinned = pin(composition.config)
    composition.config = pinned.config
    if pinned.by_rank_zero:
        return []  # rank 0 checks the rest: the files of the names are not here yet
    try:
        if pinned.errors:
            raise ConfigErrors(preflight_errors(composition.config, pinned.errors, alone))
        notices = [*(Notice(key, text) for key, text in pinned.notices), *_plan_auto(composition, elsewhere)]
        return [*notices, *preflight(composition.config, alone, elsewhere)]
    except MgpuError as error:
        if joins and pinned.others_wait:
            from mgpu_pipe.launch.join import refuse_alone

            devices = devices_per_node(config.trainer, config.strategy)
            with suppress(WorkerError):  # the others never came: this error is the one to print
                refuse_alone(devices, config.launch.collective_timeout, error.exit_code)
        raise


def _plan_auto(composition: Composition, elsewhere: bool) -> list[Notice]:
    """Replace ``auto`` and ``max`` by planned values; the notices name them."""
    config = composition.config
    keys = unplanned_keys(config.strategy, config.data, config.checkpoint)
    if not keys:
        return []
    from mgpu_pipe.checks.check_sizes import range_errors
    from mgpu_pipe.runs.latest import resumed_config

    if range_errors(config):  # preflight reports these
        return []
    notices: list[Notice] = []
    resumed = resumed_config(config, composition.swept)
    if STRATEGY in keys:
        from mgpu_pipe.checks.layout_candidates import with_typed_schedule
        from mgpu_pipe.checks.planned_keys import with_planned_strategy

        plan = with_typed_schedule(config.plan, config.strategy, composition.overrides)
        config, notices = with_planned_strategy(replace(config, plan=plan))
    if MICRO_BATCH in keys:
        from mgpu_pipe.checks.planned_keys import with_predicted_micro_batch

        predicted = with_predicted_micro_batch(config, resumed, elsewhere)
        config, composition.measures_micro_batch = predicted[0], predicted[2]
        notices.append(predicted[1])
    if SAVES in keys:
        from mgpu_pipe.checks.planned_keys import plan_save_steps

        steps, notice = plan_save_steps(config, resumed)
        config = replace(config, checkpoint=replace(config.checkpoint, every_n_steps=steps))
        notices.append(notice)
    composition.config = config
    return notices


def errors_of(composition: Composition) -> list[BadInputError]:
    """Errors of a point that are known before it starts."""

    def check() -> None:
        notices_of(composition)

    return raised_by(check)


def print_notices(notices: Iterable[Notice]) -> None:
    """Print notices to stderr, one line each."""
    for notice in notices:
        print_line(f"note: {one_line(notice.key)}: {one_line(notice.text)}", file=sys.stderr)
