"""The command line as Hydra reads it: its own flags, one job, or a sweep."""

from __future__ import annotations

import argparse
import io
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mgpu_pipe.compat.hydra_private import arguments_parser, run_hydra
from mgpu_pipe.config import compose, hydra_node
from mgpu_pipe.config.compose import Composition
from mgpu_pipe.config.conf_folders import CONFIG_NAME, conf_dir
from mgpu_pipe.config.convert import all_keys, unknown_key
from mgpu_pipe.errors import BadInputError, ConfigErrors

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from omegaconf import DictConfig

Job = Callable[[Composition], None]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Hydra's own arguments; flags and overrides may stand in any order.

    Raises:
        BadInputError: an unknown flag.
    """
    parser = arguments_parser()

    def refuse(message: str) -> NoReturn:
        raise BadInputError(f"{message}; {_as_override(message) or 'see mgpu-pipe --help'}")

    parser.error = refuse  # type: ignore[method-assign]
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.cfg is None and (parsed.resolve or parsed.package is not None):
        raise BadInputError(f"--{'resolve' if parsed.resolve else 'package'}: goes with --cfg job, which prints")
    if parsed.experimental_rerun is not None:
        raise BadInputError("--experimental-rerun reads a pickle; give the overrides in overrides.txt again")
    return parsed


def asks_hydra(parsed: argparse.Namespace) -> bool:
    """Whether Hydra answers by itself: its own help, the configuration, information, completion."""
    return bool(parsed.hydra_help or parsed.cfg or parsed.info or parsed.shell_completion)


def answer(parsed: argparse.Namespace) -> None:
    """Let Hydra answer ``--hydra-help``, ``--cfg``, ``--info`` or ``--shell-completion``."""
    import logging

    from hydra import version

    version.setbase(compose.HYDRA_VERSION)
    compose.register()
    hydra_node.typed_on_command_line(parsed.overrides)
    logging.raiseExceptions = False  # Hydra answers through logging, which would trace a reader that left
    if not (parsed.shell_completion or parsed.hydra_help):
        with compose.hydra_session(parsed.config_dir, _conf(parsed)) as hydra:
            parsed.overrides, errors = compose.preprocess(hydra, parsed.overrides, _name(parsed))
        if errors:
            raise ConfigErrors(errors)
    with compose.composition_errors(), _hydra_raises():
        run_hydra(
            args=parsed,
            args_parser=arguments_parser(),
            task_function=_no_job,
            config_path=str(_conf(parsed) or conf_dir()),
            config_name=CONFIG_NAME,
        )


def completed_overrides(parsed: argparse.Namespace, line: str) -> list[str]:
    """Hydra's completion of the last word of ``line``; a line that it cannot read completes to nothing."""
    shown = io.StringIO()
    before = os.environ.get("COMP_LINE")
    os.environ["COMP_LINE"] = line
    try:
        with redirect_stdout(shown), redirect_stderr(io.StringIO()), suppress(BadInputError, SystemExit):
            answer(parsed)
    finally:
        os.environ.pop("COMP_LINE") if before is None else os.environ.update(COMP_LINE=before)
    return shown.getvalue().split()


def _as_override(message: str) -> str | None:
    """What an unknown flag is, written as an override; None where there is no such key."""
    flag = message.partition("unrecognized arguments: --")[2].partition(" ")[0].partition("=")[0]
    if not flag:
        return None
    key = flag.replace("-", "_")
    fix = "" if key in all_keys() else unknown_key(key, "").fix
    known = f"{key}=..." if key in all_keys() else fix
    return None if fix.startswith("see the keys") else f"keys are set by key=value, without dashes; {known}"


def compose_one(parsed: argparse.Namespace) -> Composition:
    """Compose the one job of a command line; its errors are in the result."""
    made = compose.compose_checked(parsed.overrides, _name(parsed), parsed.config_dir, _conf(parsed))
    made.flags = _flags(parsed)
    return made


def sweep(parsed: argparse.Namespace, job: Job, *, keep: bool) -> None:
    """Run ``job`` for every configuration of a sweep, through Hydra's sweeper and launcher.

    Args:
        job: must not raise; it is called once a configuration, in order.
        keep: whether the sweep's folder (``hydra.sweep.dir``) stays.

    Raises:
        ConfigErrors, BadInputError: the sweep itself cannot be composed.
    """
    with compose.hydra_session(parsed.config_dir, _conf(parsed)) as hydra, ExitStack() as stack:
        good, errors = compose.preprocess(hydra, parsed.overrides, _name(parsed), multirun=True)
        if errors:
            raise ConfigErrors(errors)
        values: dict[str, int] | None = None

        def task(config: DictConfig) -> None:
            from hydra.core.hydra_config import HydraConfig

            nonlocal values
            settings = HydraConfig.get()
            if values is None:
                values = _swept(good, settings.sweeper, hydra.config_loader)
            made = compose.from_composed(config, list(settings.overrides.task), settings.runtime)
            made.flags = _flags(parsed)
            made.swept = [item for item in made.overrides if item.partition("=")[0].lstrip("+") in values]
            made.points = math.prod(values.values()) if 0 not in values.values() else None
            made.sweep_folder = Path(settings.sweep.dir)
            job(made)

        own = [] if any(item.startswith("hydra.mode=") for item in good) else ["hydra.mode=MULTIRUN"]
        if not keep:
            from tempfile import TemporaryDirectory

            own.append(f"hydra.sweep.dir={stack.enter_context(TemporaryDirectory(prefix='mgpu-pipe-sweep-'))}")
        with compose.composition_errors():
            hydra.multirun(config_name=_name(parsed), task_function=task, overrides=[*good, *own])


def _swept(overrides: list[str], sweeper: DictConfig, loader: ConfigLoader) -> dict[str, int]:
    """The keys that have several values, with their number; 0 where only the sweeper knows it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    counts: dict[str, int] = {}
    for override in OverridesParser.create(config_loader=loader).parse_overrides([*given, *overrides]):
        counts.pop(override.key_or_group, None)  # the last one counts
        if override.is_sweep_override():
            listed = override.is_discrete_sweep() and sweeper._target_.endswith(".BasicSweeper")
            counts[override.key_or_group] = len(list(override.sweep_string_iterator())) if listed else 0
    return counts


def _flags(parsed: argparse.Namespace) -> list[str]:
    """What chooses the configurations, as it was typed."""
    named = (
        ("--config-dir", parsed.config_dir),
        ("--config-path", parsed.config_path),
        ("--config-name", parsed.config_name),
    )
    flags = [word for flag, value in named if value for word in (flag, value)]
    return [*flags, *(item for item in parsed.overrides if item.lstrip("+").startswith("hydra.searchpath="))]


def _no_job(config: DictConfig) -> None:
    """Hydra wants a job also where it answers by itself."""


def _name(parsed: argparse.Namespace) -> str:
    return parsed.config_name or CONFIG_NAME


def _conf(parsed: argparse.Namespace) -> Path | None:
    return Path(parsed.config_path).resolve() if parsed.config_path else None


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Hydra prints errors and exits by itself unless this variable is set; workers must not inherit it."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
