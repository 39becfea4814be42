"""Private names of Hydra (1.3) and OmegaConf (2.3)."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

PRIVATE = (
    "hydra.core.config_store:ConfigStore.load",
    "hydra._internal.hydra:Hydra",
    "hydra._internal.config_repository:CachingConfigRepository",
    "hydra._internal.config_loader_impl:ConfigLoaderImpl._parse_overrides_and_create_caching_repo",
    "hydra._internal.config_loader_impl:ConfigLoaderImpl.load_configuration",
    "hydra._internal.defaults_list:_create_defaults_tree_impl",
    "hydra._internal.core_plugins.file_config_source:FileConfigSource._normalize_file_name",
    "hydra._internal.core_plugins.file_config_source:FileConfigSource.load_config",
    "hydra._internal.core_plugins.file_config_source:FileConfigSource.is_group",
    "hydra._internal.utils:create_config_search_path",
    "hydra._internal.utils:get_args_parser",
    "hydra._internal.utils:_run_hydra",
    "omegaconf:DictConfig._get_node",
    "omegaconf:ListConfig._get_node",
    "omegaconf:Node._value",
)


def loader_class() -> type:
    """The class that composes every configuration."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    return ConfigLoaderImpl


def file_source_class() -> type:
    """The class that reads configurations from a folder."""
    from hydra._internal.core_plugins.file_config_source import FileConfigSource

    return FileConfigSource


def follow_defaults(check: Callable[[list[str]], None]) -> None:
    """Call ``check`` with each configuration of a defaults list and its includers, before Hydra reads it."""
    from hydra._internal import defaults_list

    follow: Any = defaults_list._create_defaults_tree_impl

    @functools.wraps(follow)
    def follow_checked(repo: Any, root: Any, *args: Any, **options: Any) -> Any:
        chain, tree_node = [], root
        while tree_node is not None:
            if not tree_node.node.is_virtual() and tree_node.node.get_name() is not None:
                chain.append(str(tree_node.node.get_config_path()))
            tree_node = tree_node.parent
        if len(chain) > 1 and not root.node.is_deleted():
            check(chain[::-1])
        return follow(repo, root, *args, **options)

    defaults_list._create_defaults_tree_impl = follow_checked


def file_name(source: Any, config_path: str) -> str:
    """The name of a configuration's file below the folder of ``source``."""
    return str(source._normalize_file_name(config_path))


def new_search_path(conf: str) -> Any:
    """Search path of configurations, ``conf`` first."""
    from hydra._internal.utils import create_config_search_path

    return create_config_search_path(conf)


def new_hydra(job_name: str, search_path: Any) -> Any:
    """Hydra's state of one composition, or of a sweep, which reads the primary configuration once."""
    from hydra._internal.config_repository import CachingConfigRepository
    from hydra._internal.hydra import Hydra

    share_config_store()
    hydra: Any = Hydra.create_main_hydra2(job_name, search_path)
    hydra.config_loader.repository = CachingConfigRepository(hydra.config_loader.repository)
    return hydra


def share_config_store() -> None:
    """Let copies of a repository share Hydra's store of structured configurations, which returns copies."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


def caching_repository(loader: Any, config_name: str, overrides: list[str]) -> Any:
    """Repository for looking up groups without reading the primary configuration each time."""
    _, repository = loader._parse_overrides_and_create_caching_repo(config_name, overrides)
    return repository


def arguments_parser() -> argparse.ArgumentParser:
    from hydra._internal.utils import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    return parser


def run_hydra(**options: Any) -> None:
    """Run Hydra's program."""
    from hydra._internal.utils import _run_hydra

    _run_hydra(**options)


def raw_value(node: Any, key: Any) -> Any:
    """A value of a configuration as written, with unresolved interpolations."""
    return node._get_node(key)._value()
