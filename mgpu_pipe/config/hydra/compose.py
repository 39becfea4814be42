"""Composes a run's configuration with Hydra and converts it to the typed tree."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.convert import convert, to_plain
from mgpu_pipe.config.hydra import guard as hydra_guard
from mgpu_pipe.config.hydra import hydra_node
from mgpu_pipe.config.hydra import interpolation as resolvers
from mgpu_pipe.config.hydra.interpolation import plain_values
from mgpu_pipe.config.plugins import installed_modules_alone
from mgpu_pipe.config.schema import ObjectiveConfig, RunConfig
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors
from mgpu_pipe.system.compat.hydra_private import caching_repository, new_hydra, new_search_path
from mgpu_pipe.system.conf_folders import CONFIG_NAME, conf_dir, own_conf_plugin, own_options
from mgpu_pipe.system.local_files import is_folder

if TYPE_CHECKING:
    from omegaconf import DictConfig

SCHEMA_NODE = "mgpu_schema"
HYDRA_VERSION = "1.3"
JOB_NAME = "mgpu_pipe"
MESSAGE_LENGTH = 400


@dataclass
class Composition:
    """The composed and typed configuration of a command line."""

    config: RunConfig
    """The typed configuration; keys with errors hold their defaults."""
    overrides: list[str]
    """The job's overrides as typed, without Hydra's."""
    errors: list[BadInputError] = field(default_factory=list)
    """Errors of the overrides and the values."""
    multirun: bool = False
    """Whether the configuration requests a sweep (``hydra.mode=MULTIRUN``)."""
    flags: list[str] = field(default_factory=list)
    """Hydra's arguments that choose the configuration files; with the overrides they compose this job again."""
    swept: list[str] = field(default_factory=list)
    """Overrides that differ between the points of a sweep."""
    points: int | None = None
    """Number of points of the sweep, if its sweeper knows it."""
    local_options: list[str] = field(default_factory=list)
    """Options from ``./conf`` of the working directory, e.g. ``experiment=mine``."""
    measures_micro_batch: bool = False
    """Whether a launch measures the micro-batch that ``data.micro_batch_size=max`` was predicted to be."""


def compose(overrides: Sequence[str] = ()) -> tuple[RunConfig, list[str]]:
    """Compose ``conf/config.yaml`` with ``overrides``: the typed tree, and the words as Hydra read them; or
    ConfigErrors."""
    composition = compose_checked(list(overrides))
    if composition.errors:
        raise ConfigErrors(composition.errors)
    return composition.config, composition.overrides


def compose_checked(overrides: list[str], conf: Path | None = None) -> Composition:
    """Like :func:`compose`, but returns the errors, so that callers can add theirs; ``conf`` is Hydra's tree."""
    with hydra_session(conf=conf) as hydra:
        return compose_in(hydra, overrides)


def compose_in(hydra: Any, overrides: list[str], config_name: str = CONFIG_NAME) -> Composition:
    """Compose a job of ``config_name`` in a :func:`hydra_session`; the result holds its errors."""
    good, errors = preprocess(hydra, overrides, config_name)
    composed = compose_raw(hydra, good, config_name)
    mode = composed.hydra.mode
    composition = from_composed(composed, task_overrides(good), composed.hydra.runtime)
    composition.errors[:0] = errors
    composition.multirun = mode is not None and mode.name == "MULTIRUN"
    return composition


def compose_raw(hydra: Any, good: list[str], config_name: str) -> DictConfig:
    """Hydra's raw composition of overrides that passed :func:`preprocess`."""
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
    """Overrides that are not Hydra's."""
    return [item for item in good if not item.lstrip("+~").startswith("hydra")]


def from_composed(composed: DictConfig, overrides: list[str], runtime: Any) -> Composition:
    """Resolve and convert a configuration that Hydra composed; ``runtime`` is its node ``hydra.runtime``."""
    return from_values(*plain_values(composed), overrides, own_options(runtime))


def from_values(
    values: dict[str, Any], unresolved: Sequence[ConfigError], overrides: Sequence[str], local_options: list[str]
) -> Composition:
    """Convert plain values to a Composition; ``unresolved`` are the errors of missing values."""
    named = {error.key for error in unresolved}
    config, errors = convert(RunConfig, values)
    typed_overrides = [override.removeprefix("++") for override in overrides]  # check_overrides adds it
    all_errors = [*unresolved, *(error for error in errors if _key(error) not in named)]
    return Composition(config, typed_overrides, all_errors, local_options=local_options)


def _key(error: BadInputError) -> str:
    return getattr(error, "key", "")


def preprocess(
    hydra: Any, arguments: list[str], config_name: str = CONFIG_NAME, multirun: bool = False
) -> tuple[list[str], list[BadInputError]]:
    """Check overrides against the schema and the groups; returns those for Hydra, rewritten, and the others' errors."""
    from hydra.core.object_type import ObjectType

    from mgpu_pipe.config.hydra.overrides import check_overrides

    hydra_node.remember_typed_keys(arguments)
    search_path = [item for item in arguments if item.lstrip("+").startswith("hydra.searchpath=")]
    loader: Any = hydra.config_loader
    with composition_errors():  # cached: the loader's look-up reads the primary configuration each time
        hydra_guard.check_search_path(loader, config_name)
        repository = caching_repository(loader, config_name, search_path)

    def lookup(group: str) -> tuple[list[str], list[str]]:
        with composition_errors():
            return tuple(repository.get_group_options(group, kind) for kind in (ObjectType.CONFIG, ObjectType.GROUP))

    return check_overrides(arguments, lookup, multirun)


@contextmanager
def hydra_session(config_dir: str | None = None, conf: Path | None = None) -> Iterator[Any]:
    """Hydra with the shipped tree, the working directory's ``conf``, the schema's defaults and the resolvers.

    Args:
        config_dir: further folder, searched after the shipped tree.
        conf: tree to use instead of the shipped one.

    Raises:
        BadInputError: a folder does not exist, a search-path plug-in fails, or a local option has a shipped option's
            name.
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
            if not is_folder(folder):
                raise BadInputError(f"--config-dir {config_dir}: no such folder")
            search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    callers_hydra = GlobalHydra.instance().hydra  # a program that uses Hydra keeps its instance
    GlobalHydra.instance().clear()
    try:
        with composition_errors():
            hydra = new_hydra(JOB_NAME, search_path)
        yield hydra
    finally:
        GlobalHydra.instance().hydra = callers_hydra


def register() -> None:
    """Register resolvers and defaults, so that keys need no ``+``; scans plug-ins, and checks compositions from now
    on."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    with installed_modules_alone():
        Plugins.instance().register(own_conf_plugin())
    hydra_guard.install_guard()
    resolvers.register()
    # Keys of one objective are no defaults of another; overrides add them with ++.
    if f"{SCHEMA_NODE}.yaml" not in ConfigStore.instance().repo:
        node = {**to_plain(RunConfig()), "objective": to_plain(ObjectiveConfig())}
        ConfigStore.instance().store(name=SCHEMA_NODE, node=node, provider="mgpu_pipe")


MIXED = re.compile(r"Error merging override \+*([^=]+)=(.*): Cannot merge \w+ with \w+ .*object_type=(list|dict)")
GIVE = {"list": "give a list, [a,b]", "dict": "give a mapping, {name:value}"}


@contextmanager
def composition_errors() -> Iterator[None]:
    """Turns errors of Hydra, OmegaConf and YAML into a BadInputError with the first line of their message."""
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
                if isinstance(cause, BadInputError):  # from one of this project's resolvers: already one line
                    raise cause from None
                cause = cause.__cause__ or cause.__context__
            text = one_line(error)
            if mixed := MIXED.match(text):
                raise ConfigError(mixed[1], mixed[2], GIVE[mixed[3]], "wrong type") from error
            raise BadInputError(text) from error
        except RecursionError as error:
            raise BadInputError("the defaults of a configuration lead too deep; make the chain shorter") from error
        except (AssertionError, AttributeError) as error:
            if not _is_of_omegaconf(error):
                raise
            raise BadInputError(
                f"an override sets a part of what is null ({one_line(error)}); give values to sweep as -m KEY=1,2, "
                "or hydra.sweeper.params in a configuration file"
            ) from error


def _is_of_omegaconf(error: BaseException) -> bool:
    """Whether OmegaConf raised ``error``; it has no error type for a null node."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("omegaconf.")


def one_line(error: BaseException) -> str:
    """Messages of an error and its direct cause, on one line."""
    causes = [error, error.__cause__] if error.__cause__ is not None else [error]
    text = ": ".join(" ".join(str(cause).split()) for cause in causes if str(cause).strip())
    return text[:MESSAGE_LENGTH] or type(error).__name__


def _run_mode() -> Any:
    from hydra.types import RunMode

    return RunMode.RUN
