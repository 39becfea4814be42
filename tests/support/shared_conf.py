"""Hydra's shipped configurations, read and merged once for all compositions of a test process.

Reading some thirty files and merging them takes most of a composition, and tests compose thousands of times. Whatever
has another folder to search (``./conf``, ``hydra.searchpath``, ``--config-path``) reads and merges its files itself.
"""

from __future__ import annotations

import copy
from typing import Any

from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository

from mgpu_pipe.system.conf_folders import conf_dir

SHIPPED = ["hydra.conf", str(conf_dir()), ""]
"""Hydra's configurations, the program's, and the schemas."""
FILES: dict[str, Any] = {}
GROUPS: dict[tuple[str, Any], list[str]] = {}
MERGED: dict[str, Any] = {}

_load, _list = ConfigRepository.load_config, ConfigRepository.get_group_options
_merge, _choices = ConfigLoaderImpl._compose_config_from_defaults_list, defaults_list._create_interpolation_map


class CopyingRepository(CachingConfigRepository):
    """Merging changes what it merges."""

    def load_config(self, config_path: str) -> Any:
        return copy.deepcopy(super().load_config(config_path))


def is_shipped(repository: Any) -> bool:
    return [source.path for source in repository.get_sources()] == SHIPPED


def load_config(repository: Any, config_path: str) -> Any:
    if not is_shipped(repository):
        return _load(repository, config_path)
    if config_path not in FILES:
        FILES[config_path] = _load(repository, config_path)
    return FILES[config_path]


def get_group_options(repository: Any, group_name: str, results_filter: Any = None) -> list[str]:
    if not is_shipped(repository):
        return _list(repository, group_name, results_filter)
    if (group_name, results_filter) not in GROUPS:
        GROUPS[group_name, results_filter] = _list(repository, group_name, results_filter)
    return list(GROUPS[group_name, results_filter])


def merge(loader: Any, defaults: Any, repo: Any) -> Any:
    if not is_shipped(repo):
        return _merge(loader, defaults, repo)
    key = repr(defaults)
    if key not in MERGED:
        MERGED[key] = _merge(loader, defaults, CopyingRepository(repo))
    return copy.deepcopy(MERGED[key])


def choices(overrides: Any, defaults: Any, self_added: bool) -> Any:
    """Only a default that refers to other choices reads them."""
    return _choices(overrides, defaults, self_added) if any(each.is_interpolation() for each in defaults) else None


def share_conf() -> None:
    """From now on, in this process."""
    repositories: Any = ConfigRepository
    repositories.load_config, repositories.get_group_options = load_config, get_group_options
    loaders: Any = ConfigLoaderImpl
    loaders._compose_config_from_defaults_list = merge
    modules: Any = defaults_list
    modules._create_interpolation_map = choices
