"""Composes a run's configuration through Hydra and converts it to the typed tree."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.compat.hydra_private import caching_repository, new_hydra, new_search_path
from mgpu_pipe.config import hydra_guard, hydra_node, resolvers
from mgpu_pipe.config.conf_folders import CONFIG_NAME, conf_dir, own_conf_plugin, own_options
from mgpu_pipe.config.convert import convert, to_plain
from mgpu_pipe.config.interpolation import plain_values
from mgpu_pipe.config.plugins import installed_modules_alone
from mgpu_pipe.config.schema import ObjectiveConfig, RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors

if TYPE_CHECKING:
    from omegaconf import DictConfig

SCHEMA_NODE = "mgpu_schema"
HYDRA_VERSION = "1.3"
JOB_NAME = "mgpu_pipe"
MESSAGE_LENGTH = 400


@dataclass
class Composition:
    """What became of a command line."""

    config: RunConfig
    """The typed configuration; keys with errors hold their defaults."""
    overrides: list[str]
    """The job's overrides as they are typed, without those of Hydra's own."""
    errors: list[BadInputError] = field(default_factory=list)
    """Everything wrong with the overrides and the values."""
    multirun: bool = False
    """The configuration itself asks for a sweep (``hydra.mode=MULTIRUN``)."""
    flags: list[str] = field(default_factory=list)
    """Hydra's arguments that say which configurations there are; with the overrides they compose this very job."""
    swept: list[str] = field(default_factory=list)
    """The overrides by which a point of a sweep differs from the others."""
    points: int | None = None
    """Points of the sweep, where its sweeper tells."""
    own: list[str] = field(default_factory=list)
    """The options that ``./conf`` of the working folder brought (:mod:`.conf_folders`), e.g. ``experiment=mine``."""


def compose(overrides: Sequence[str] = ()) -> tuple[RunConfig, list[str]]:
    """Compose ``conf/config.yaml`` with ``overrides``.

    Returns:
        The typed configuration, and the overrides as Hydra took them.

    Raises:
        ConfigErrors: everything that is wrong with the overrides and the values.
    """
    composition = compose_checked(list(overrides))
    if composition.errors:
        raise ConfigErrors(composition.errors)
    return composition.config, composition.overrides


def compose_checked(overrides: list[str], conf: Path | None = None) -> Composition:
    """Like :func:`compose`, with errors returned, so that a caller can add its own.

    Args:
        conf: the Hydra tree; the shipped one by default (``--config-path``).
    """
    with hydra_session(conf=conf) as hydra:
        return compose_in(hydra, overrides)


def compose_in(hydra: Any, overrides: list[str], config_name: str = CONFIG_NAME) -> Composition:
    """Compose one job in a :func:`hydra_session`; its errors are in the result.

    Args:
        config_name: primary configuration (Hydra's ``--config-name``).
    """
    good, errors = preprocess(hydra, overrides, config_name)
    composed = compose_raw(hydra, good, config_name)
    mode = composed.hydra.mode
    made = from_composed(composed, task_overrides(good), composed.hydra.runtime)
    made.errors[:0] = errors
    made.multirun = mode is not None and mode.name == "MULTIRUN"
    return made


def compose_raw(hydra: Any, good: list[str], config_name: str) -> DictConfig:
    """What Hydra composes of overrides that :func:`preprocess` let pass, as it is."""
    with composition_errors():
        composed: DictConfig = hydra.compose_config(
            config_name=config_name,
            overrides=good,
            run_mode=_run_mode(),
            from_shell=False,
            with_log_configuration=False,
        )
    return composed


def task_overrides(good: Sequence[str]) -> list[str]:
    """Those that are not of Hydra's own."""
    return [item for item in good if not item.lstrip("+~").startswith("hydra")]


def from_composed(composed: DictConfig, overrides: list[str], runtime: Any) -> Composition:
    """Resolve and type a configuration that Hydra composed; ``runtime`` is its node ``hydra.runtime``."""
    return of_values(*plain_values(composed), overrides, own_options(runtime))


def of_values(
    values: dict[str, Any], unresolved: Sequence[ConfigError], overrides: Sequence[str], own: list[str]
) -> Composition:
    """Type the plain values of a configuration; ``unresolved`` are the errors of those that are missing."""
    named = {error.key for error in unresolved}
    config, errors = convert(RunConfig, values)
    shown = [override.removeprefix("++") for override in overrides]  # put there by check_overrides, as it would again
    told = [*unresolved, *(error for error in errors if _key(error) not in named)]
    return Composition(config, shown, told, own=own)


def _key(error: BadInputError) -> str:
    return getattr(error, "key", "")


def preprocess(
    hydra: Any, arguments: list[str], config_name: str = CONFIG_NAME, multirun: bool = False
) -> tuple[list[str], list[BadInputError]]:
    """Check overrides against the schema and the groups: those that Hydra accepts, made so, and the others' errors."""
    from hydra.core.object_type import ObjectType

    from mgpu_pipe.config.overrides import check_overrides

    hydra_node.typed_on_command_line(arguments)
    search_path = [item for item in arguments if item.lstrip("+").startswith("hydra.searchpath=")]
    loader: Any = hydra.config_loader
    with composition_errors():  # once, for the loader's public look-up reads the primary configuration every time
        hydra_guard.check_search_path(loader, config_name)
        repository = caching_repository(loader, config_name, search_path)

    def lookup(group: str) -> tuple[list[str], list[str]]:
        with composition_errors():
            return tuple(repository.get_group_options(group, kind) for kind in (ObjectType.CONFIG, ObjectType.GROUP))

    return check_overrides(arguments, lookup, multirun)


@contextmanager
def hydra_session(config_dir: str | None = None, conf: Path | None = None) -> Iterator[Any]:
    """Hydra, set up with the shipped tree, the working folder's own, the schema's defaults and the resolvers.

    Args:
        config_dir: a further folder, searched after the shipped tree.
        conf: takes the place of the shipped tree.

    Raises:
        BadInputError: a folder that does not exist, a search-path plug-in's complaint, or an own option that has the
            name of a shipped one.
    """
    from hydra import version
    from hydra.core.config_search_path import SearchPathQuery
    from hydra.core.global_hydra import GlobalHydra

    version.setbase(HYDRA_VERSION)
    register()
    with composition_errors():
        search_path = new_search_path(str(conf or conf_dir()))
        if config_dir is not None:
            folder = Path(config_dir).resolve()
            if not folder.is_dir():
                raise BadInputError(f"--config-dir {config_dir}: no such folder")
            search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    of_caller = GlobalHydra.instance().hydra  # a program that uses Hydra itself goes on with its own
    GlobalHydra.instance().clear()
    try:
        with composition_errors():
            hydra = new_hydra(JOB_NAME, search_path)
        yield hydra
    finally:
        GlobalHydra.instance().hydra = of_caller


def register() -> None:
    """Give Hydra the schema's defaults, under which every key can be set without ``+``, and the resolvers.

    Hydra scans its plug-ins here, those that are installed alone, and every composition is checked from now on.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    with installed_modules_alone():
        Plugins.instance().register(own_conf_plugin())
    hydra_guard.install_guard()
    resolvers.register()
    # An objective's own keys are not another's, so they are no defaults; overrides bring them with ++.
    if f"{SCHEMA_NODE}.yaml" not in ConfigStore.instance().repo:
        node = {**to_plain(RunConfig()), "objective": to_plain(ObjectiveConfig())}
        ConfigStore.instance().store(name=SCHEMA_NODE, node=node, provider="mgpu_pipe")


@contextmanager
def composition_errors() -> Iterator[None]:
    """Turn what Hydra, OmegaConf and YAML refuse into one line; Hydra raises some of it as a bare ValueError.

    Raises:
        BadInputError: with the first of their words; the cause is kept.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is not available", category=UserWarning)
        try:
            yield
        except (HydraException, OmegaConfBaseException, YAMLError, UserWarning, ValueError) as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, BadInputError):  # of a resolver of ours: a line already
                    raise cause from None
                cause = cause.__cause__ or cause.__context__
            raise BadInputError(one_line(error)) from error
        except (AssertionError, AttributeError) as error:
            if not _is_of_omegaconf(error):
                raise
            raise BadInputError(
                f"an override sets a part of what is null ({one_line(error)}); give values to sweep as -m KEY=1,2, "
                "or hydra.sweeper.params in a configuration file"
            ) from error


def _is_of_omegaconf(error: BaseException) -> bool:
    """Whether OmegaConf raised it, which meets a null with no error of its own."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and str(at.tb_frame.f_globals.get("__name__")).startswith("omegaconf.")


def one_line(error: BaseException) -> str:
    """The message of an error and of its direct cause on one line."""
    causes = [error, error.__cause__] if error.__cause__ is not None else [error]
    text = ": ".join(" ".join(str(cause).split()) for cause in causes if str(cause).strip())
    return text[:MESSAGE_LENGTH] or type(error).__name__


def _run_mode() -> Any:
    from hydra.types import RunMode

    return RunMode.RUN
