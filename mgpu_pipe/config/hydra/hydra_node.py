"""Checks of the settings below ``hydra.``, which Hydra instantiates, imports and runs.

A configuration file is data, whoever wrote it. Below ``hydra.`` it may choose among the options of Hydra, this project
and installed plug-ins, and give arguments. Anything else that runs or writes must be typed on the command line. A
``_target_`` must be a subclass of its slot's base in either case. :mod:`.guard` runs these checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mgpu_pipe.config.convert import leaves
from mgpu_pipe.config.targets import source_class
from mgpu_pipe.config.targets.build_target import TARGET, check_class
from mgpu_pipe.config.targets.source_class import NoSuchName, NotAClass, Unknown
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.import_path import append_own_folders
from mgpu_pipe.system.conf_folders import PROVIDER

PLUGIN_BASES = {"launcher": "hydra.plugins.launcher.Launcher", "sweeper": "hydra.plugins.sweeper.Sweeper"}
CALLBACK_BASE = "hydra.experimental.callback.Callback"
LOGGING = ("job_logging", "hydra_logging")
TRUSTED_PACKAGES = ("hydra", "mgpu_pipe")

COMMAND_LINE_ONLY: Mapping[str, tuple[object, ...]] = {
    "job.env_set": ({},),
    "job.env_copy": ([],),
    "job.chdir": (None, False),
    "output_subdir": (None, ".hydra"),
}
"""Values that a file may give to settings that change the workers' environment or overwrite files."""

UNTYPED = "a configuration file cannot bring code that neither Hydra nor an installed plug-in provides"

_typed: dict[str, Any] = {}


def remember_typed_keys(overrides: Sequence[str]) -> None:
    """Remember the keys below ``hydra.`` on the command line, for every later check."""
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
            continue  # reported by the composition
        value = _plain(override.value())
        key = override.key_or_group
        _typed.update(leaves(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(_plain(name)): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return getattr(value, "text", value)


def was_typed(key: str) -> bool:
    """Whether this key or a section around it was typed."""
    return any(key == typed or key.startswith(f"{typed}.") for typed in _typed)


def errors_below(config: DictConfig, loader: Any) -> Iterator[BadInputError]:
    """Errors of every setting below ``hydra.`` that must not take effect; imports only typed classes."""
    node = config.hydra
    raw: Any = OmegaConf.to_container(node, resolve=False)
    slots = {name: base for name, base in PLUGIN_BASES.items() if raw.get(name) != "???"}
    callbacks = raw.get("callbacks") or {}
    if not isinstance(callbacks, Mapping):
        yield _interpolation_error("hydra.callbacks", callbacks)
        callbacks = {}
    slots |= {f"callbacks.{name}": CALLBACK_BASE for name in callbacks}
    for slot, base in slots.items():
        setting = callbacks[slot.partition(".")[2]] if slot not in raw else raw[slot]
        yield from _slot_errors(slot, base, setting, node, loader)
    for key, target in _targets(raw, ""):
        if key.removesuffix(f".{TARGET}") not in slots and target not in _read_provided(loader).classes:
            yield ConfigError(f"hydra.{key}", target, "remove it", "a _target_ stands in declared slots only")
    for name in LOGGING:
        yield from _logging_errors(name, raw.get(name), loader)
    yield from _setting_errors(node)


def _slot_errors(slot: str, base: str, setting: object, node: DictConfig, loader: Any) -> Iterator[BadInputError]:
    key = f"hydra.{slot}"
    if not isinstance(setting, Mapping):
        yield (
            _interpolation_error(key, setting)
            if isinstance(setting, str)
            else ConfigError(key, setting, f"give a mapping whose {TARGET} is a subclass of {base}")
        )
        return
    yield from _target_errors(f"{key}.{TARGET}", base, setting.get(TARGET), slot in PLUGIN_BASES, loader)
    for inner, text in _interpolations(setting, ()):
        where = ".".join([key, *map(str, inner)])
        if not (
            _is_plain(node, (*slot.split(".", 1), *inner))
            or was_typed(where)
            or text in _read_provided(loader).interpolations
        ):
            yield _interpolation_error(where, text)


def _target_errors(where: str, base: str, target: object, plugins_alone: bool, loader: Any) -> Iterator[BadInputError]:
    """Errors of a ``_target_``, read from source first, so that a file's class is never imported for the check."""
    if not isinstance(target, str) or "${" in target or not target:
        yield ConfigError(where, target, f"give the dotted path of a subclass of {base}")
        return
    if plugins_alone and target in _plugins(base):
        return
    trusted = target.split(".")[0] in TRUSTED_PACKAGES or target in _read_provided(loader).classes
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
    if source_class.is_own(target):
        append_own_folders()  # Hydra imports it
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
    """Errors of a logging section: Python's logging calls the classes and opens the files named there."""
    key = f"hydra.{name}"
    if raw in (None, "???") or (isinstance(raw, Mapping) and raw.get("root", "") is None):  # Hydra ignores it
        return
    if not isinstance(raw, Mapping):
        yield _interpolation_error(key, raw)
        return
    best: list[str] | None = None
    for option in _read_provided(loader).logging[name]:
        ours, theirs = leaves(raw), leaves(option)
        changed = [
            path
            for path in dict.fromkeys([*ours, *theirs])
            if ours.get(path, _NOTHING) != theirs.get(path, _NOTHING) and not was_typed(f"{key}.{path}")
        ]
        if not changed:
            return
        if best is None or len(changed) < len(best):
            best = changed
    first = (best or [""])[0]
    fix = f"type it on the command line, or choose hydra/{name}=none"
    reason = "a configuration file cannot change how Python's logging is set up"
    yield ConfigError(f"{key}.{first}", leaves(raw).get(first), fix, reason)


_NOTHING = object()


def _setting_errors(node: DictConfig) -> Iterator[BadInputError]:
    for name, harmless in COMMAND_LINE_ONLY.items():
        try:
            setting = OmegaConf.select(node, name)
        except OmegaConfBaseException as error:
            yield _interpolation_error(f"hydra.{name}", str(error).splitlines()[0])
            continue
        value: Any = OmegaConf.to_container(setting, resolve=False) if isinstance(setting, Container) else setting
        if any(value == allowed and type(value) is type(allowed) for allowed in harmless):
            continue
        for key in leaves({name: value}, "hydra."):  # values may come from the environment
            if not was_typed(key):
                yield ConfigError(
                    key, "...", "type it on the command line, or remove it", "a configuration file cannot set it"
                )
    try:
        name = str(node.job.name)
    except OmegaConfBaseException:
        return
    if "/" in name or name in (".", ".."):
        yield ConfigError("hydra.job.name", name, "use a plain name, without slashes")


def _interpolation_error(key: str, text: object) -> ConfigError:
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
    """Whether an interpolation resolves to a single value: a section might hold a ``_target_``."""
    try:
        for name in path:
            node = node[name]
    except OmegaConfBaseException:
        return False
    return not isinstance(node, Container)


class _Provided:
    """Classes, interpolations and logging options in the configurations of Hydra and installed plug-ins."""

    def __init__(self, loader: Any) -> None:
        self.classes: set[object] = set()
        self.interpolations: set[str] = set()
        self.logging: dict[str, list[dict[str, Any]]] = {name: [] for name in LOGGING}
        for source in loader.repository.get_sources():
            own_providers = ("main", "command-line", PROVIDER)
            if source.provider not in own_providers and not source.provider.startswith("hydra.searchpath"):
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


def _read_provided(loader: Any) -> _Provided:
    """Cached :class:`_Provided` of a loader, read only for a configuration that needs it."""
    if id(loader) not in _provided_by:
        _provided_by.clear()
        _provided_by[id(loader)] = (loader, _Provided(loader))
    return _provided_by[id(loader)][1]
