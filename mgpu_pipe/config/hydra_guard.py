"""Has every composition of the process checked before Hydra acts on it.

Those of a sweep's jobs too, and those that Hydra makes to answer by itself; and every configuration file before Hydra
reads it.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from mgpu_pipe.compat.hydra_private import file_name, file_source_class, loader_class
from mgpu_pipe.config.hydra_node import errors_below, was_typed
from mgpu_pipe.config.plain_files import MAX_CONFIG_BYTES, check_yaml, read_bytes
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors


def install_guard() -> None:
    """Have every composition of this process checked; may be called again."""
    loaders: Any = loader_class()
    original: Any = loaders.load_configuration
    if getattr(original, "checks_hydra_node", False):
        return

    @functools.wraps(original)
    def load_configuration(loader: Any, config_name: Any, overrides: Any, *args: Any, **options: Any) -> DictConfig:
        check_search_path(loader, config_name)
        try:
            composed: DictConfig = original(loader, config_name, overrides, *args, **options)
        except KeyError as error:  # Hydra copies a variable of hydra.job.env_copy without looking
            fix = "set that variable or remove it from the list"
            raise ConfigError("hydra.job.env_copy", f"[{error.args[0]}]", fix) from error
        errors = list(errors_below(composed, loader))
        if errors:
            raise ConfigErrors(errors)
        return composed

    _check_files()
    load_configuration.checks_hydra_node = True  # type: ignore[attr-defined]
    loaders.load_configuration = load_configuration


def _check_files() -> None:
    """Have every configuration file looked through before Hydra reads it."""
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
            check_yaml(read_bytes(path, MAX_CONFIG_BYTES, Path(source.path)).decode("utf-8"), aliases=True)
        except (OSError, UnicodeDecodeError, YAMLError) as error:
            raise BadInputError(f"{path}: not a readable configuration ({' '.join(str(error).split())})") from error
        return original(source, config_path)

    sources.load_config, sources.is_group = load_config, is_own_group


def check_search_path(loader: Any, config_name: str | None) -> None:
    """Refuse a search path that a configuration file gives and that imports what it names.

    Raises:
        ConfigError: an entry that is no folder.
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
