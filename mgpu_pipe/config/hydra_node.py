"""What may stand below ``hydra.``: Hydra instantiates, imports and runs what it finds there.

A configuration file is data, whoever wrote it. Below ``hydra.`` it may choose among what Hydra, this project and the
installed plug-ins provide, and give arguments; what would run or write anything else has to be typed on the command
line. A ``_target_`` must be a subclass of its slot's base in either case. Every composition of the process is checked
before Hydra acts on it: those of a sweep's jobs and those that Hydra makes to answer by itself too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mgpu_pipe.compat.hydra_private import file_name, file_source_class, loader_class
from mgpu_pipe.config import source_class
from mgpu_pipe.config.build import TARGET, check_class
from mgpu_pipe.config.dotted import leaves
from mgpu_pipe.config.plain_files import MAX_CONFIG_BYTES, check_yaml, read_bytes
from mgpu_pipe.config.source_class import NoSuchName, NotAClass, Unknown
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors

PLUGIN_BASES = {"launcher": "hydra.plugins.launcher.Launcher", "sweeper": "hydra.plugins.sweeper.Sweeper"}
CALLBACK_BASE = "hydra.experimental.callback.Callback"
LOGGING = ("job_logging", "hydra_logging")
TRUSTED_PACKAGES = ("hydra", "mgpu_pipe")

TYPED_ALONE: Mapping[str, tuple[object, ...]] = {
    "job.env_set": ({},),
    "job.env_copy": ([],),
    "job.chdir": (None, False),
    "output_subdir": (None, ".hydra"),
}
"""Settings that reach every worker's environment or write over files: what a file may leave them at."""

UNTYPED = "a configuration file cannot bring code that neither Hydra nor an installed plug-in provides"

_typed: dict[str, Any] = {}


def typed_on_command_line(overrides: Sequence[str]) -> None:
    """Remember which keys below ``hydra.`` were typed; every later check takes them into account."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    _typed.clear()
    parser = OverridesParser.create()
    for text in overrides:
        if not text.lstrip("+~").startswith("hydra."):
            continue
        try:
            override = parser.parse_override(text)
        except HydraException:
            continue  # told by whoever composes
        value = _plain(override.value())
        key = override.key_or_group
        _typed.update(leaves(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(_plain(name)): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return getattr(value, "text", value)


def _was_typed(key: str) -> bool:
    """Whether this key, or a section that it stands in, was typed whole."""
    return any(key == typed or key.startswith(f"{typed}.") for typed in _typed)


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
    if config_name is None or "hydra.searchpath" in _typed:
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


def errors_below(config: DictConfig, loader: Any) -> Iterator[BadInputError]:
    """Everything below ``hydra.`` that must not be acted on; nothing is imported for what was not typed."""
    node = config.hydra
    raw: Any = OmegaConf.to_container(node, resolve=False)
    slots = {name: base for name, base in PLUGIN_BASES.items() if raw.get(name) != "???"}
    callbacks = raw.get("callbacks") or {}
    if not isinstance(callbacks, Mapping):
        yield _written_out("hydra.callbacks", callbacks)
        callbacks = {}
    slots |= {f"callbacks.{name}": CALLBACK_BASE for name in callbacks}
    for slot, base in slots.items():
        given = callbacks[slot.partition(".")[2]] if slot not in raw else raw[slot]
        yield from _slot_errors(slot, base, given, node, loader)
    for key, target in _targets(raw, ""):
        if key.removesuffix(f".{TARGET}") not in slots and target not in _provided(loader).classes:
            yield ConfigError(f"hydra.{key}", target, "remove it", "a _target_ stands in declared slots only")
    for name in LOGGING:
        yield from _logging_errors(name, raw.get(name), loader)
    yield from _setting_errors(node)


def _slot_errors(slot: str, base: str, given: object, node: DictConfig, loader: Any) -> Iterator[BadInputError]:
    key = f"hydra.{slot}"
    if not isinstance(given, Mapping):
        yield (
            _written_out(key, given)
            if isinstance(given, str)
            else ConfigError(key, given, f"give a mapping whose {TARGET} is a subclass of {base}")
        )
        return
    yield from _target_errors(f"{key}.{TARGET}", base, given.get(TARGET), slot in PLUGIN_BASES, loader)
    for inner, text in _interpolations(given, ()):
        where = ".".join([key, *map(str, inner)])
        if not (
            _is_plain(node, (*slot.split(".", 1), *inner))
            or _was_typed(where)
            or text in _provided(loader).interpolations
        ):
            yield _written_out(where, text)


def _target_errors(where: str, base: str, target: object, plugins_alone: bool, loader: Any) -> Iterator[BadInputError]:
    """Told by source first, so that what a file names is never imported to find out what it is."""
    if not isinstance(target, str) or "${" in target or not target:
        yield ConfigError(where, target, f"give the dotted path of a subclass of {base}")
        return
    if plugins_alone and target in _plugins(base):
        return
    trusted = target.split(".")[0] in TRUSTED_PACKAGES or target in _provided(loader).classes
    try:
        inherits = source_class.is_subclass(source_class.find_class(target), source_class.find_class(base))
    except (NoSuchName, NotAClass, Unknown):
        inherits = False
    if not trusted and _typed.get(where) != target:
        if inherits:
            yield ConfigError(where, target, f"type {where}={target} on the command line if you trust it", UNTYPED)
        else:
            yield ConfigError(where, target, f"use a subclass of {base}", UNTYPED)
        return
    try:
        check_class(target, base, where)
    except ConfigError as error:
        yield error
        return
    if plugins_alone:
        yield ConfigError(
            where, target, f"use one of {', '.join(sorted(_plugins(base)))}", "Hydra takes installed plug-ins only"
        )


def _plugins(base: str) -> set[str]:
    from hydra.core.plugins import Plugins
    from hydra.plugins.launcher import Launcher
    from hydra.plugins.sweeper import Sweeper

    kind: Any = Launcher if base == PLUGIN_BASES["launcher"] else Sweeper
    return {f"{plugin.__module__}.{plugin.__name__}" for plugin in Plugins.instance().discover(kind)}


def _logging_errors(name: str, raw: object, loader: Any) -> Iterator[BadInputError]:
    """Python's logging configuration calls what it names and opens the files it names."""
    key = f"hydra.{name}"
    if raw in (None, "???") or (isinstance(raw, Mapping) and raw.get("root", "") is None):  # Hydra leaves it alone
        return
    if not isinstance(raw, Mapping):
        yield _written_out(key, raw)
        return
    fewest: list[str] | None = None
    for option in _provided(loader).logging[name]:
        one, other = leaves(raw), leaves(option)
        apart = [
            path
            for path in dict.fromkeys([*one, *other])
            if one.get(path, _NOTHING) != other.get(path, _NOTHING) and not _was_typed(f"{key}.{path}")
        ]
        if not apart:
            return
        if fewest is None or len(apart) < len(fewest):
            fewest = apart
    first = (fewest or [""])[0]
    fix = f"type it on the command line, or choose hydra/{name}=none"
    reason = "a configuration file cannot change how Python's logging is set up"
    yield ConfigError(f"{key}.{first}", leaves(raw).get(first), fix, reason)


_NOTHING = object()


def _setting_errors(node: DictConfig) -> Iterator[BadInputError]:
    for name, harmless in TYPED_ALONE.items():
        try:
            setting = OmegaConf.select(node, name)
        except OmegaConfBaseException as error:
            yield _written_out(f"hydra.{name}", str(error).splitlines()[0])
            continue
        value: Any = OmegaConf.to_container(setting, resolve=False) if isinstance(setting, Container) else setting
        if any(value == one and type(value) is type(one) for one in harmless):
            continue
        for key in leaves({name: value}, "hydra."):  # the values may be those of the environment
            if not _was_typed(key):
                yield ConfigError(
                    key, "...", "type it on the command line, or remove it", "a configuration file cannot set it"
                )
    try:
        name = str(node.job.name)
    except OmegaConfBaseException:
        return
    if "/" in name or name in (".", ".."):
        yield ConfigError("hydra.job.name", name, "use a plain name, without slashes")


def _written_out(key: str, text: object) -> ConfigError:
    return ConfigError(key, text, "write it out", "nothing may be put in here by an interpolation")


def _targets(value: object, path: str) -> Iterator[tuple[str, object]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        where = f"{path}.{name}" if path else str(name)
        if name == TARGET:
            yield where, item
        else:
            yield from _targets(item, where)


def _interpolations(value: object, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        if isinstance(item, str) and "${" in item and name != TARGET:
            yield (*path, name), item
        else:
            yield from _interpolations(item, (*path, name))


def _is_plain(node: Any, path: tuple[Any, ...]) -> bool:
    """Whether an interpolation resolves, and to a single value: a section might hold a ``_target_``."""
    try:
        for name in path:
            node = node[name]
    except OmegaConfBaseException:
        return False
    return not isinstance(node, Container)


class _Provided:
    """What Hydra's own and the installed plug-ins' configurations below ``hydra/`` hold."""

    def __init__(self, loader: Any) -> None:
        self.classes: set[object] = set()
        self.interpolations: set[str] = set()
        self.logging: dict[str, list[dict[str, Any]]] = {name: [] for name in LOGGING}
        for source in loader.repository.get_sources():
            if source.provider not in ("main", "command-line") and not source.provider.startswith("hydra.searchpath"):
                self._read(source, "hydra")

    def _read(self, source: Any, group: str) -> None:
        from hydra.core.object_type import ObjectType

        if not source.is_group(group):
            return
        for name in source.list(group, ObjectType.GROUP):
            self._read(source, f"{group}/{name}")
        for name in source.list(group, ObjectType.CONFIG):
            content: Any = OmegaConf.to_container(source.load_config(f"{group}/{name}").config, resolve=False)
            if not isinstance(content, Mapping):
                continue
            self.classes.update(target for _, target in _targets(content, ""))
            self.interpolations.update(text for _, text in _interpolations(content, ()))
            kind = group.removeprefix("hydra/")
            if kind in self.logging:
                self.logging[kind].append({key: value for key, value in content.items() if key != "defaults"})


_provided_by: dict[int, tuple[Any, _Provided]] = {}


def _provided(loader: Any) -> _Provided:
    """Read once a loader, and only where a configuration is not the plain one."""
    if id(loader) not in _provided_by:
        _provided_by.clear()
        _provided_by[id(loader)] = (loader, _Provided(loader))
    return _provided_by[id(loader)][1]
