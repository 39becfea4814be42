"""The sections of the configuration that plug-ins extend: a name in them decides which keys they have.

An installed package declares keys of its own as a dataclass, a subclass of the section's, in a module without torch.
It names that class in an entry point group, under the name that chooses its code: ``mgpu_pipe.data_keys`` for
``data.source``, ``mgpu_pipe.strategy_keys`` for ``strategy.engine``, ``mgpu_pipe.launch_keys`` for ``launch.type``.
``mgpu_pipe.objective_keys`` names a :class:`~mgpu_pipe.config.objective.Description`, which holds the class and more.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, cast, get_type_hints

from mgpu_pipe.config import plugins
from mgpu_pipe.config.objective import description as describe
from mgpu_pipe.config.schema import DataConfig, LaunchConfig, ObjectiveConfig
from mgpu_pipe.config.strategy import StrategyConfig
from mgpu_pipe.errors import ConfigError


@dataclass(frozen=True)
class Section:
    """Such a section.

    Attributes:
        base: the dataclass of the keys that it always has.
        chooser: the key that names the plug-in.
        built_in: the names that this project brings.
        code: the entry point group of the plug-ins themselves.
        own: the entry point group of their keys.
        own_built_in: of built-in names with keys of their own, the module, which imports no torch, and its class.
    """

    base: type
    chooser: str
    built_in: tuple[str, ...]
    code: str
    own: str
    own_built_in: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.chooser.partition(".")[0]

    def keys(self, name: str) -> type:
        """The dataclass of the section's keys where its chooser is ``name``.

        Raises:
            ConfigError: what a package registers is no such class, or cannot be imported.
        """
        if self.base is ObjectiveConfig:
            keys = describe(name).keys
        elif name in self.own_built_in:
            module, _, cls = self.own_built_in[name].partition(":")
            keys = getattr(import_module(module), cls)
        elif name in self.built_in or name not in plugins.registered(self.own):
            return self.base
        else:
            keys = plugins.load(self.chooser, name, self.own)
        if not (isinstance(keys, type) and issubclass(keys, self.base) and "__dataclass_fields__" in vars(keys)):
            fix = f"declare them in a dataclass that is a subclass of {self.base.__module__}.{self.base.__name__}"
            raise ConfigError(self.chooser, name, fix, f"its keys, of {self.own}, are no such class")
        return keys

    def chosen_by(self, values: Mapping[str, Any]) -> str:
        """The name that ``values`` of the section choose, or the default one."""
        word = self.chooser.partition(".")[2]
        return str(values.get(word, getattr(self.base, word)))

    def all_keys(self) -> dict[str, type]:
        """The dataclass of every name that declares one."""
        built_in = self.built_in if self.base is ObjectiveConfig else tuple(self.own_built_in)
        return {name: self.keys(name) for name in (*built_in, *plugins.registered(self.own))}

    def owners(self, key: str) -> list[str]:
        """The names whose key this is."""
        return [name for name, keys in self.all_keys().items() if key in own_keys(keys)]


DATA = Section(
    DataConfig,
    "data.source",
    plugins.DATA_SOURCES,
    plugins.DATA_GROUP,
    plugins.DATA_KEYS_GROUP,
    {
        **dict.fromkeys(plugins.IMAGE_SOURCES, "mgpu_pipe.data.image.keys:ImageConfig"),
        "mixture": "mgpu_pipe.data.text.mixture_keys:MixtureConfig",
        **dict.fromkeys(plugins.CAPTION_SOURCES, "mgpu_pipe.data.image.keys:CaptionConfig"),
        **dict.fromkeys(plugins.PICTURE_CHAT_SOURCES, "mgpu_pipe.data.image.keys:PictureChatConfig"),
        "audio_list": "mgpu_pipe.data.audio.keys:AudioConfig",
        "spoken_digits": "mgpu_pipe.data.audio.keys:SpokenDigitsConfig",
    },
)
OBJECTIVE = Section(
    ObjectiveConfig, "objective.name", plugins.OBJECTIVES, plugins.OBJECTIVE_GROUP, plugins.OBJECTIVE_KEYS_GROUP
)
STRATEGY = Section(
    StrategyConfig, "strategy.engine", plugins.ENGINES, plugins.STRATEGY_GROUP, plugins.STRATEGY_KEYS_GROUP
)
LAUNCH = Section(
    LaunchConfig,
    "launch.type",
    plugins.LAUNCHERS,
    plugins.LAUNCH_GROUP,
    plugins.LAUNCH_KEYS_GROUP,
    {"slurm": "mgpu_pipe.launch.slurm_keys:SlurmConfig"},
)
SECTIONS: dict[type, Section] = {section.base: section for section in (DATA, OBJECTIVE, STRATEGY, LAUNCH)}


@functools.lru_cache(maxsize=None)
def hints(cls: type) -> dict[str, Any]:
    """The resolved type of every field of a dataclass."""
    return get_type_hints(cls)


@functools.lru_cache(maxsize=None)
def all_hints(cls: type) -> dict[str, Any]:
    """Like :func:`hints`; of a section that plug-ins extend, with the keys of all of them."""
    if cls not in SECTIONS:
        return hints(cls)
    return {name: hint for keys in (cls, *SECTIONS[cls].all_keys().values()) for name, hint in hints(keys).items()}


def own_keys(keys: type) -> list[str]:
    """The keys of a section's dataclass that the section does not always have."""
    base = next((base for base in SECTIONS if issubclass(keys, base)), keys)
    return [field.name for field in fields(cast(Any, keys)) if field.name not in hints(base)]
