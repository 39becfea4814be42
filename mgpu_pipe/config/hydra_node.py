"""What may stand below ``hydra.``: Hydra instantiates, imports and runs what it finds there.

A configuration file is data, whoever wrote it. Below ``hydra.`` it may choose among what Hydra, this project and the
installed plug-ins provide, and give arguments; what would run or write anything else has to be typed on the command
line. A ``_target_`` must be a subclass of its slot's base in either case. :mod:`.hydra_guard` has all of this checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mgpu_pipe.config import source_class
from mgpu_pipe.config.build import TARGET, check_class
from mgpu_pipe.config.conf_folders import PROVIDER
from mgpu_pipe.config.dotted import leaves
from mgpu_pipe.config.source_class import NoSuchName, NotAClass, Unknown
from mgpu_pipe.errors import BadInputError, ConfigError

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


def was_typed(key: str) -> bool:
    """Whether this key, or a section that it stands in, was typed whole."""
    return any(key == typed or key.startswith(f"{typed}.") for typed in _typed)


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
            or was_typed(where)
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
            if one.get(path, _NOTHING) != other.get(path, _NOTHING) and not was_typed(f"{key}.{path}")
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
            own = ("main", "command-line", PROVIDER)
            if source.provider not in own and not source.provider.startswith("hydra.searchpath"):
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
