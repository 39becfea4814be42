"""Sections of the configuration that plug-ins extend, by a name that decides their keys; and the options of groups.

An installed package declares its keys as a dataclass, a subclass of the section's, in a module without torch.
It registers that class in an entry point group, under the name that chooses its code: ``mgpu_pipe.data_keys`` for
``data.source``, ``mgpu_pipe.strategy_keys`` for ``strategy.engine``, ``mgpu_pipe.launch_keys`` for ``launch.type``.
``mgpu_pipe.objective_keys`` names a :class:`~mgpu_pipe.config.objective.Description`, which holds the class and more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, cast, get_type_hints

import yaml

from mgpu_pipe.config import plugins
from mgpu_pipe.config.data_sources import find_source, source_names
from mgpu_pipe.config.group_keys import StrategyConfig
from mgpu_pipe.config.objective import description as describe
from mgpu_pipe.config.schema import DataConfig, LaunchConfig, ObjectiveConfig
from mgpu_pipe.config.suggest import choose_from
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.system.conf_folders import CONFIG_NAME, OWN, conf_dir, own_conf
from mgpu_pipe.system.local_files import MAX_CONFIG_BYTES, read_bytes


@dataclass(frozen=True)
class Section:
    """A section that plug-ins extend.

    Attributes:
        base: dataclass of the keys that the section always has.
        chooser: key that names the plug-in.
        built_in: names that this project provides.
        code: entry point group of the plug-ins.
        keys_group: entry point group of the plug-ins' keys.
        built_in_keys: imports the dataclass that a built-in name declares; None for a name that declares none.
    """

    base: type
    chooser: str
    built_in: tuple[str, ...]
    code: str
    keys_group: str
    built_in_keys: Callable[[str], type | None]

    @property
    def name(self) -> str:
        return self.chooser.partition(".")[0]

    def keys(self, name: str) -> type:
        """Dataclass of the section's keys if its chooser is ``name``; ConfigError if a package has none."""
        keys: Any = self.built_in_keys(name)
        if keys is None:
            if name in self.built_in or name not in plugins.entry_names(self.keys_group):
                return self.base
            keys = plugins.load(self.chooser, name, self.keys_group)
        if not (isinstance(keys, type) and issubclass(keys, self.base) and "__dataclass_fields__" in vars(keys)):
            fix = f"declare them in a dataclass that is a subclass of {self.base.__module__}.{self.base.__name__}"
            raise ConfigError(self.chooser, name, fix, f"its keys, of {self.keys_group}, are no such class")
        return cast(type, keys)

    def chosen_by(self, values: Mapping[str, Any]) -> str:
        """Name that ``values`` of the section choose, or the default."""
        word = self.chooser.partition(".")[2]
        return str(values.get(word, getattr(self.base, word)))

    def all_keys(self) -> dict[str, type]:
        """Dataclass of every name that declares one."""
        built_in = [name for name in self.built_in if self.built_in_keys(name) is not None]
        return {name: self.keys(name) for name in (*built_in, *plugins.entry_names(self.keys_group))}

    def owners(self, key: str) -> list[str]:
        """Names that declare this key."""
        return [name for name, keys in self.all_keys().items() if key in own_keys(keys)]


def _source_keys(name: str) -> type | None:
    source = find_source(name)
    return source.keys if source else None


def _launcher_keys(name: str) -> type | None:
    if name != "slurm":
        return None
    keys: type = import_module("mgpu_pipe.launch.slurm.slurm_keys").SlurmConfig
    return keys


DATA = Section(DataConfig, "data.source", source_names(), plugins.DATA_GROUP, plugins.DATA_KEYS_GROUP, _source_keys)
OBJECTIVE = Section(
    *(ObjectiveConfig, "objective.name", plugins.OBJECTIVES),
    *(plugins.OBJECTIVE_GROUP, plugins.OBJECTIVE_KEYS_GROUP, lambda name: describe(name).keys),
)
STRATEGY = Section(
    *(StrategyConfig, "strategy.engine", plugins.ENGINES),
    *(plugins.STRATEGY_GROUP, plugins.STRATEGY_KEYS_GROUP, lambda name: None),
)
LAUNCH = Section(
    *(LaunchConfig, "launch.type", plugins.LAUNCHERS),
    *(plugins.LAUNCH_GROUP, plugins.LAUNCH_KEYS_GROUP, _launcher_keys),
)
SECTIONS: dict[type, Section] = {section.base: section for section in (DATA, OBJECTIVE, STRATEGY, LAUNCH)}


@functools.lru_cache(maxsize=None)
def hints(cls: type) -> dict[str, Any]:
    """Resolved type of every field of a dataclass, without its class variables."""
    types = get_type_hints(cls)
    return {field.name: types[field.name] for field in fields(cast(Any, cls))}


@functools.lru_cache(maxsize=None)
def all_hints(cls: type) -> dict[str, Any]:
    """Like :func:`hints`, with the keys of every plug-in of a section."""
    if cls not in SECTIONS:
        return hints(cls)
    return {name: hint for keys in (cls, *SECTIONS[cls].all_keys().values()) for name, hint in hints(keys).items()}


def own_keys(keys: type) -> list[str]:
    """Keys of a section's dataclass beyond those that the section always has."""
    base = next((base for base in SECTIONS if issubclass(keys, base)), keys)
    return [field.name for field in fields(cast(Any, keys)) if field.name not in hints(base)]


@dataclass(frozen=True)
class Option:
    """An option of a group."""

    name: str
    description: str
    is_default: bool


def list_groups(group: str | None = None) -> dict[str, list[Option]]:
    """Groups with options in the order of the defaults, or ``group`` and those in it; BadInputError for a wrong
    name."""
    shipped, local = conf_dir(), own_conf()
    defaults = _defaults(shipped)
    order = {name: index for index, name in enumerate(defaults)}
    roots = [shipped] if local is None else [shipped, local]
    folders = {file.parent.relative_to(root) for root in roots for file in root.rglob("*.yaml") if file.parent != root}
    sorted_folders = sorted(folders, key=lambda folder: (order.get(folder.parts[0], len(order)), folder))
    names = [folder.as_posix() for folder in sorted_folders]
    if group is not None and group not in names:
        raise BadInputError(f"mgpu-pipe ls {group}: no such group; {choose_from(group, names)}")
    return {
        name: [
            *(
                Option(file.stem, _description(file, root == local), defaults.get(name) == file.stem)
                for root in roots
                for file in sorted((root / name).glob("*.yaml"))
            ),
            *_registered_options(name, [file.stem for root in roots for file in (root / name).glob("*.yaml")]),
        ]
        for name in names
        if group is None or f"{name}/".startswith(f"{group}/")
    }


def _registered_options(group: str, files: Collection[str]) -> Iterator[Option]:
    """Options that installed packages add to a group, except those with a file of the same name."""
    for section in SECTIONS.values():
        for name in sorted(set(plugins.entry_names(section.code)).difference(files)) if section.name == group else ():
            yield Option(name, f"Of an installed package: {section.chooser}={name}", False)


def _defaults(root: Path) -> dict[str, str | None]:
    """Default option by group, from the primary configuration's defaults list."""
    content = yaml.safe_load((root / f"{CONFIG_NAME}.yaml").read_text(encoding="utf-8"))
    entries = [entry for entry in content["defaults"] if isinstance(entry, dict)]
    return {group: option for entry in entries for group, option in entry.items() if " " not in group}


def _description(file: Path, is_local: bool) -> str:
    """First comment line that is neither a package directive nor an experiment's command."""
    try:
        lines = read_bytes(file, MAX_CONFIG_BYTES, file.parents[1]).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{file}: cannot be read ({error})") from error
    comments = (line.lstrip("# ").rstrip() for line in lines if line.startswith("#"))
    texts = [text for text in comments if text and not text.startswith("@package")]
    text = next((text for text in texts if not text.startswith("mgpu-pipe ")), texts[0] if texts else "")
    return f"{text} (./{OWN})".lstrip() if is_local else text
