"""The command line as Hydra reads it: its own flags, one job, or a sweep."""

from __future__ import annotations

import argparse
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mgpu_pipe.compat.hydra_private import arguments_parser, run_hydra
from mgpu_pipe.config import compose, hydra_node
from mgpu_pipe.config.compose import Composition
from mgpu_pipe.config.conf_folders import CONFIG_NAME, conf_dir
from mgpu_pipe.config.convert import all_keys, unknown_key
from mgpu_pipe.errors import BadInputError, ConfigErrors

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

    from mgpu_pipe.config.schema import RunConfig

Job = Callable[[Composition], None]


@dataclass(frozen=True)
class SweepWords:
    """What a sweep's command line asks for.

    Attributes:
        config: of the sweep itself: the values that are swept are not in it.
        fixed: the overrides that every point has.
        values: for each key that is swept the overrides that set it, or the one of a range of values.
        flags: Hydra's arguments that say which configurations there are.
        plain: whether Hydra's own sweeper and launcher are chosen, and no callbacks; else Hydra is to run the sweep.
        launcher: the option of ``hydra/launcher``.
    """

    config: RunConfig
    fixed: list[str]
    values: dict[str, list[str] | Override]
    flags: list[str]
    plain: bool
    launcher: str


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
    return next(compose_each(parsed, [[]]))


def compose_each(parsed: argparse.Namespace, points: Iterable[Sequence[str]]) -> Iterator[Composition]:
    """Compose jobs, each of ``parsed.overrides`` and a point's own. Errors are in the results."""
    from mgpu_pipe.config.compose_points import PointComposer

    with compose.hydra_session(parsed.config_dir, _conf(parsed)) as hydra:
        composer = PointComposer(hydra, parsed.overrides, _name(parsed))
        for point in points:
            made = composer.compose(point)
            made.flags = _flags(parsed)
            yield made


def sweep(parsed: argparse.Namespace, job: Job, *, keep: bool) -> None:
    """Run ``job`` for every configuration of a sweep, through Hydra's sweeper and launcher.

    Args:
        job: must not raise; it is called once a configuration, in order.
        keep: whether Hydra's own folder of the sweep (``hydra.sweep.dir``) stays.

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
                named = settings.sweeper._target_.endswith(".BasicSweeper")
                _, swept = split_sweep(good, settings.sweeper, hydra.config_loader)
                values = {key: len(one) if named and isinstance(one, list) else 0 for key, one in swept.items()}
            made = compose.from_composed(config, list(settings.overrides.task), settings.runtime)
            made.flags = _flags(parsed)
            made.swept = [item for item in made.overrides if item.partition("=")[0].lstrip("+") in values]
            made.points = math.prod(values.values()) if 0 not in values.values() else None
            job(made)

        own = [] if any(item.startswith("hydra.mode=") for item in good) else ["hydra.mode=MULTIRUN"]
        if not keep:
            from tempfile import TemporaryDirectory

            own.append(f"hydra.sweep.dir={stack.enter_context(TemporaryDirectory(prefix='mgpu-pipe-sweep-'))}")
        with compose.composition_errors():
            hydra.multirun(config_name=_name(parsed), task_function=task, overrides=[*good, *own])


def read_sweep(parsed: argparse.Namespace) -> SweepWords:
    """What a sweep is made of; nothing of it runs.

    Raises:
        ConfigErrors, BadInputError: the sweep itself cannot be composed.
    """
    from hydra.types import RunMode

    with compose.hydra_session(parsed.config_dir, _conf(parsed)) as hydra:
        good, errors = compose.preprocess(hydra, parsed.overrides, _name(parsed), multirun=True)
        if errors:
            raise ConfigErrors(errors)
        mode = [] if any(item.startswith("hydra.mode=") for item in good) else ["hydra.mode=MULTIRUN"]
        with compose.composition_errors():
            composed = hydra.compose_config(
                config_name=_name(parsed),
                overrides=[*good, *mode],
                run_mode=RunMode.MULTIRUN,
                from_shell=False,
                with_log_configuration=False,
            )
            chosen = composed.hydra
            plain = chosen.sweeper._target_.endswith(".BasicSweeper") and chosen.launcher._target_.endswith(
                ".BasicLauncher"
            )
            fixed, values = split_sweep(good, chosen.sweeper, hydra.config_loader)
        config = compose.from_composed(composed, [], chosen.runtime).config
        launcher = str(chosen.runtime.choices.get("hydra/launcher"))
        return SweepWords(config, fixed, values, _flags(parsed), plain and not chosen.callbacks, launcher)


def split_sweep(
    overrides: list[str], sweeper: Mapping[str, Any], loader: ConfigLoader | None = None
) -> tuple[list[str], dict[str, list[str] | Override]]:
    """The overrides that every point has, and those that set each swept key: listed, or one for a range of values.

    Of several overrides of one key the last one counts.

    Args:
        sweeper: Hydra's, whose ``params`` are overrides too.
        loader: finds what ``glob(...)`` stands for.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    parsed = OverridesParser.create(config_loader=loader).parse_overrides([*given, *overrides])
    last = {override.key_or_group: override for override in parsed}
    fixed: list[str] = []
    values: dict[str, list[str] | Override] = {}
    for override in parsed:
        counts = last[override.key_or_group]
        swept = counts.is_sweep_override() or override.is_sweep_override()
        if override.is_hydra_override() or (swept and counts is not override):
            continue
        key = override.get_key_element().removeprefix("++")
        if not override.is_sweep_override():
            fixed.append(str(override.input_line).removeprefix("++"))
        elif override.is_discrete_sweep():
            values[override.key_or_group] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            values[override.key_or_group] = override
    return fixed, values


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
