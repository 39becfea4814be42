"""Guard that checks every composition of the process before Hydra acts on it, and every file before Hydra reads it.

It covers the jobs of a sweep and the compositions that Hydra makes to answer its own flags.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from mgpu_pipe.config.freeze import check_environment_use
from mgpu_pipe.config.hydra.hydra_node import errors_below, was_typed
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors
from mgpu_pipe.system.compat.hydra_private import file_name, file_source_class, follow_defaults, loader_class
from mgpu_pipe.system.conf_folders import conf_dir
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, check_yaml, read_bytes


def install_guard() -> None:
    """Install the check of every composition in this process; idempotent."""
    loaders: Any = loader_class()
    original: Any = loaders.load_configuration
    if getattr(original, "checks_hydra_node", False):
        return

    @functools.wraps(original)
    def load_configuration(loader: Any, config_name: Any, overrides: Any, *args: Any, **options: Any) -> DictConfig:
        check_search_path(loader, config_name)
        try:
            composed: DictConfig = original(loader, config_name, overrides, *args, **options)
        except KeyError as error:  # Hydra copies the variables of hydra.job.env_copy unchecked
            fix = "set that variable or remove it from the list"
            raise ConfigError("hydra.job.env_copy", f"[{error.args[0]}]", fix) from error
        errors = list(errors_below(composed, loader))
        if errors:
            raise ConfigErrors(errors)
        return composed

    _check_files()
    follow_defaults(_check_cycle)
    load_configuration.checks_hydra_node = True  # type: ignore[attr-defined]
    loaders.load_configuration = load_configuration


def _check_cycle(chain: Sequence[str]) -> None:
    """Refuse a configuration that includes itself; each in ``chain`` is in the defaults of the one before."""
    if chain[-1] in chain[:-1]:
        cycle = chain[chain.index(chain[-1]) :]
        reason = f"includes itself ({' -> '.join(cycle)})" if len(cycle) > 2 else "includes itself"
        raise BadInputError(f"{cycle[0]}.yaml: {reason}; remove {cycle[-1]} from the defaults of {cycle[-2]}.yaml")


def _check_files() -> None:
    """Install the check of every configuration file before Hydra reads it."""
    sources: Any = file_source_class()
    original: Any = sources.load_config
    is_group: Any = sources.is_group

    def leads_out(source: Any, name: str) -> bool:
        root = Path(os.path.realpath(source.path))
        return not Path(os.path.realpath(Path(source.path, name))).is_relative_to(root)

    def is_own_group(source: Any, config_path: str) -> bool:
        return not leads_out(source, config_path) and bool(is_group(source, config_path))

    @functools.wraps(original)
    def load_config(source: Any, config_path: str) -> Any:
        path = Path(source.path, file_name(source, config_path))
        if leads_out(source, file_name(source, config_path)):
            raise BadInputError(f"{path}: leads out of {source.path}; put a copy of that file there")
        try:
            text = read_bytes(path, MAX_CONFIG_BYTES, Path(source.path)).decode("utf-8")
            check_yaml(text, aliases=True)
        except (OSError, UnicodeDecodeError, YAMLError) as error:
            raise BadInputError(f"{path}: not a readable configuration ({' '.join(str(error).split())})") from error
        loaded = original(source, config_path)
        if Path(source.path) != conf_dir():
            check_environment_use(path, OmegaConf.to_container(loaded.config, resolve=False))
        return loaded

    sources.load_config, sources.is_group = load_config, is_own_group


def check_search_path(loader: Any, config_name: str | None) -> None:
    """Refuse a search path from a configuration file that would import a package.

    Raises:
        ConfigError: an entry is not a folder.
        BadInputError: the configuration cannot be read.
    """
    if config_name is None or was_typed("hydra.searchpath"):
        return
    loaded = loader.repository.load_config(config_path=config_name)
    if loaded is None or not OmegaConf.is_dict(loaded.config):
        return
    for entry in OmegaConf.select(loaded.config, "hydra.searchpath") or []:
        scheme, separator, _ = str(entry).partition("://")
        if separator and scheme != "file":
            fix = f"type hydra.searchpath=[{entry}] on the command line, or use file://<folder>"
            reason = "a configuration file cannot have a package imported"
            raise ConfigError("hydra.searchpath", entry, fix, reason)
