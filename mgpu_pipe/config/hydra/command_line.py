"""The command line as Hydra reads it: its own flags, one job, or a sweep."""

from __future__ import annotations

import argparse
import io
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn

from mgpu_pipe.config.convert import all_keys, unknown_key
from mgpu_pipe.config.hydra import compose, hydra_node
from mgpu_pipe.config.hydra.compose import Composition
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import BadInputError, ConfigErrors
from mgpu_pipe.system.compat.hydra_private import arguments_parser, run_hydra
from mgpu_pipe.system.conf_folders import CONFIG_NAME, conf_dir

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

    from mgpu_pipe.config.schema import RunConfig

VERB_FLAGS = ("--samples", "--dry-run")
"""Flags of the composing verbs, parsed before Hydra's."""
Job = Callable[[Composition], None]


@dataclass(frozen=True)
class SweepRequest:
    """The parsed command line of a sweep.

    Attributes:
        config: the sweep's configuration, without swept values.
        fixed: overrides of every point.
        values: overrides of each swept key, or its one override with a range.
        flags: Hydra's arguments that choose the configuration files.
        plain: whether Hydra's basic sweeper and launcher are chosen, without callbacks; if not, Hydra runs the sweep.
        launcher: option of ``hydra/launcher``.
    """

    config: RunConfig
    fixed: list[str]
    values: dict[str, list[str] | Override]
    flags: list[str]
    plain: bool
    launcher: str


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse Hydra's arguments, flags and overrides in any order; BadInputError for an unknown flag."""
    parser = arguments_parser()

    def refuse(message: str) -> NoReturn:
        raise BadInputError(f"{message}; {_as_override(message) or 'see mgpu-pipe --help'}")

    parser.error = refuse  # type: ignore[method-assign]
    parsed = parser.parse_intermixed_args(arguments)
    if parsed.cfg is None and (parsed.resolve or parsed.package is not None):
        raise BadInputError(f"--{'resolve' if parsed.resolve else 'package'}: only works with --cfg job, which prints")
    if parsed.experimental_rerun is not None:
        raise BadInputError("--experimental-rerun reads a pickle; give the overrides in overrides.txt again")
    return parsed


def asks_hydra(parsed: argparse.Namespace) -> bool:
    """Whether Hydra answers alone: its help, the configuration, information or completion."""
    return bool(parsed.hydra_help or parsed.cfg or parsed.info or parsed.shell_completion)


def answer(parsed: argparse.Namespace) -> None:
    """Let Hydra answer ``--hydra-help``, ``--cfg``, ``--info`` or ``--shell-completion``."""
    from hydra import version

    version.setbase(compose.HYDRA_VERSION)
    compose.register()
    hydra_node.remember_typed_keys(parsed.overrides)
    logging.raiseExceptions = False  # Hydra answers through logging, which prints a traceback if the reader is gone
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
    """Hydra's completions of the last word of ``line``; none if Hydra cannot read the line."""
    output = io.StringIO()
    before = os.environ.get("COMP_LINE")
    os.environ["COMP_LINE"] = line
    try:
        with redirect_stdout(output), redirect_stderr(io.StringIO()), suppress(BadInputError, SystemExit):
            answer(parsed)
    finally:
        os.environ.pop("COMP_LINE") if before is None else os.environ.update(COMP_LINE=before)
    return output.getvalue().split()


def _as_override(message: str) -> str | None:
    """Advice to write an unknown flag as an override; None without such a key."""
    flag = message.partition("unrecognized arguments: -")[2].lstrip("-").partition(" ")[0].partition("=")[0]
    if not flag:
        return None
    key = flag.replace("-", "_")
    fix = "" if key in all_keys() else unknown_key(key, "").fix
    known = f"{key}=..." if key in all_keys() else fix
    flags = re.findall(r"--[a-z][\w-]*", arguments_parser().format_usage())
    others = [name for name in (*flags, *VERB_FLAGS) if name != f"--{flag}"]
    close = nearest(f"--{flag}", others, cutoff=0.8)
    if fix.startswith("see the keys") or (close and key not in all_keys()):
        return f"did you mean {close}?" if close else None
    return f"keys are set by key=value, without dashes; {known}"


def compose_one(parsed: argparse.Namespace) -> Composition:
    """Compose the single job of a command line; the result holds its errors."""
    return next(compose_each(parsed, [[]]))


def compose_each(parsed: argparse.Namespace, points: Iterable[Sequence[str]]) -> Iterator[Composition]:
    """Compose a job of each point and ``parsed.overrides``; the results hold the errors."""
    from mgpu_pipe.config.hydra.compose_points import PointComposer

    with compose.hydra_session(parsed.config_dir, _conf(parsed)) as hydra:
        composer = PointComposer(hydra, parsed.overrides, _name(parsed))
        for point in points:
            composition = composer.compose(point)
            composition.flags = _flags(parsed)
            yield composition


def sweep(parsed: argparse.Namespace, job: Job, *, keep: bool) -> None:
    """Run ``job`` for every configuration of a sweep, through Hydra's sweeper and launcher.

    Args:
        job: called once per configuration, in order; must not raise.
        keep: whether Hydra's folder of the sweep (``hydra.sweep.dir``) stays.

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
                values = {
                    key: len(choices) if named and isinstance(choices, list) else 0 for key, choices in swept.items()
                }
            composition = compose.from_composed(config, list(settings.overrides.task), settings.runtime)
            composition.flags = _flags(parsed)
            composition.swept = [item for item in composition.overrides if item.partition("=")[0].lstrip("+") in values]
            composition.points = math.prod(values.values()) if 0 not in values.values() else None
            job(composition)

        mode_overrides = [] if any(item.startswith("hydra.mode=") for item in good) else ["hydra.mode=MULTIRUN"]
        if not keep:
            mode_overrides.append(
                f"hydra.sweep.dir={stack.enter_context(TemporaryDirectory(prefix='mgpu-pipe-sweep-'))}"
            )
        with compose.composition_errors():
            hydra.multirun(config_name=_name(parsed), task_function=task, overrides=[*good, *mode_overrides])


def read_sweep(parsed: argparse.Namespace) -> SweepRequest:
    """Read the parts of a sweep without running it; errors if the sweep itself cannot be composed."""
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
        return SweepRequest(config, fixed, values, _flags(parsed), plain and not chosen.callbacks, launcher)


def split_sweep(
    overrides: list[str], sweeper: Mapping[str, Any], loader: ConfigLoader | None = None
) -> tuple[list[str], dict[str, list[str] | Override]]:
    """Split overrides into those of every point and those of each swept key: a list, or one override with a range.

    The last override of a key counts.

    Args:
        sweeper: Hydra's sweeper settings, whose ``params`` are overrides too.
        loader: resolves ``glob(...)``.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    sweeper_overrides = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    parsed = OverridesParser.create(config_loader=loader).parse_overrides([*sweeper_overrides, *overrides])
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
    """Typed arguments that choose the configuration files."""
    named = (
        ("--config-dir", parsed.config_dir),
        ("--config-path", parsed.config_path),
        ("--config-name", parsed.config_name),
    )
    flags = [word for flag, value in named if value for word in (flag, value)]
    return [*flags, *(item for item in parsed.overrides if item.lstrip("+").startswith("hydra.searchpath="))]


def _no_job(config: DictConfig) -> None:
    """Empty job, which Hydra requires even when it answers alone."""


def _name(parsed: argparse.Namespace) -> str:
    return parsed.config_name or CONFIG_NAME


def _conf(parsed: argparse.Namespace) -> Path | None:
    return Path(parsed.config_path).resolve() if parsed.config_path else None


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Sets ``HYDRA_FULL_ERROR`` so that Hydra raises instead of exiting; workers must not inherit it."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
