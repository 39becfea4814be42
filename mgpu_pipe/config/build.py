"""The one function that builds a `_target_` leaf, and the check of it before any worker starts.

A slot declares the base class that its leaf must inherit from. Nothing is called that is not such a class; while
checking nothing is called at all, and where source tells enough (:mod:`source_class`) nothing is imported either.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mgpu_pipe.config import source_class
from mgpu_pipe.config.argument_types import wanted_instead
from mgpu_pipe.config.interpolation import written
from mgpu_pipe.config.source_class import NoSuchName, NotAClass, Signature, Unknown
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import ConfigError, ConfigErrors

TARGET = "_target_"
HYDRA_WORDS = ("_partial_", "_args_", "_recursive_", "_convert_")


def check_target(
    node: object, base: str, key: str, provided: Sequence[str] = (), arguments_key: str | None = None
) -> list[ConfigError]:
    """Everything wrong with a leaf: its class, its arguments' names, what is nested in it.

    Args:
        node: the leaf, a mapping with ``_target_`` and the constructor's keyword arguments.
        base: dotted path of the class that the slot takes.
        key: where the leaf stands, e.g. ``logger.tensorboard``.
        provided: arguments that the framework gives.
        arguments_key: where the arguments stand, if not beside ``_target_``.
    """
    where = f"{key}.{TARGET}"
    if not isinstance(node, Mapping) or not isinstance(node.get(TARGET), str):
        shown = node.get(TARGET) if isinstance(node, Mapping) else node
        return [ConfigError(where, shown, f"give the dotted path of a subclass of {base}")]
    arguments_key = arguments_key or key
    errors = _nested_errors(node, arguments_key)
    target = node[TARGET]
    try:
        signature = check_class(target, base, where)
    except ConfigError as error:
        return [error, *errors]
    if signature is not None and not errors:
        names = [name for name in node if name != TARGET]
        errors += _argument_errors(signature, names, node, target, arguments_key, provided)
    return errors


def resolve_target(node: Mapping[str, Any], base: type | str, key: str) -> tuple[type, dict[str, Any]]:
    """Import the class that a leaf names, and check it and its arguments; nothing is called.

    Returns:
        The class and the leaf's keyword arguments.

    Raises:
        ConfigErrors: it is no subclass of ``base``, or takes no such arguments.
    """
    where = f"{key}.{TARGET}"
    target = node.get(TARGET) if isinstance(node, Mapping) else None
    wanted = base if isinstance(base, str) else f"{base.__module__}.{base.__qualname__}"
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        raise ConfigErrors([ConfigError(where, target, f"give the dotted path of a subclass of {wanted}")])
    errors = _nested_errors(node, key)
    try:
        cls = _imported(target, where, wanted)
        base_class = _imported(base, where, wanted) if isinstance(base, str) else base
    except ConfigError as error:
        raise ConfigErrors([error, *errors]) from error
    if not issubclass(cls, base_class):
        errors.insert(0, _not_a_subclass(where, target, wanted))
    arguments = {name: value for name, value in node.items() if name != TARGET}
    signature = _inspected(cls)
    if not errors and signature is not None:
        errors += _argument_errors(signature, list(arguments), node, target, key, signature.required)
    if errors:
        raise ConfigErrors(errors)
    return cls, arguments


def build(node: Mapping[str, Any], base: type | str, key: str, **extra: Any) -> Any:
    """Build the object that a leaf describes.

    Args:
        extra: arguments of the framework's, given where the constructor takes them; the leaf's own come first.

    Raises:
        ConfigErrors: as :func:`resolve_target`; and where the constructor itself refuses its arguments.
    """
    cls, arguments = resolve_target(node, base, key)
    signature = _inspected(cls)
    taken = {
        name: value
        for name, value in extra.items()
        if signature is None or signature.takes_any_keyword or name in signature.names
    }
    try:
        return cls(**(taken | arguments))
    except (TypeError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        fix = f"correct its arguments ({reason})"
        raise ConfigErrors([ConfigError(f"{key}.{TARGET}", node[TARGET], fix, "cannot be built")]) from error


def check_class(target: str, base: str, where: str) -> Signature | None:
    """Check that ``target`` is a subclass of ``base``, by source if possible; its signature, None if unknown.

    Raises:
        ConfigError: it is not; ``where`` is the key named in it.
    """
    if "." not in target or not all(part.isidentifier() for part in target.split(".")):
        raise ConfigError(where, target, f"give the whole dotted path of a subclass of {base}")
    try:
        cls = source_class.find_class(target)
        inherits = source_class.is_subclass(cls, source_class.find_class(base))
    except NotAClass as error:
        raise ConfigError(where, target, f"use a subclass of {base}", f"this is {error}, not a class") from error
    except NoSuchName as error:
        raise _missing(where, target, error) from error
    except Unknown:
        return _judge_imported(target, base, where)
    if not inherits:
        raise _not_a_subclass(where, target, base)
    try:
        return source_class.signature(cls)
    except Unknown:
        return None


def _judge_imported(target: str, base: str, where: str) -> Signature | None:
    """Source did not tell: import the module, look at the class."""
    cls = _imported(target, where, base)
    if not issubclass(cls, _imported(base, where, base)):
        raise _not_a_subclass(where, target, base)
    return _inspected(cls)


def _imported(target: str, where: str, base: str) -> type:
    """The class of a dotted path. Only modules named by the path itself are walked, never a module's imports."""
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        if source_class.find_module(module_name) is None:
            continue
        try:
            value: Any = importlib.import_module(module_name)
        except ImportError as error:
            reason = f"module {module_name} cannot be imported ({error})"
            raise ConfigError(where, target, "install what it needs or correct the path", reason) from error
        for index, part in enumerate(parts[length:]):
            if not hasattr(value, part):
                options = [name for name in vars(value) if not name.startswith("_")]
                raise _missing(where, target, NoSuchName(f"{'.'.join(parts[: length + index])} has no {part}", options))
            value = getattr(value, part)
            if not isinstance(value, type):
                kind = "a module" if inspect.ismodule(value) else "a function" if callable(value) else "a value"
                raise ConfigError(where, target, f"use a subclass of {base}", f"this is {kind}, not a class")
        return value
    raise _missing(where, target, NoSuchName(f"there is no module {parts[0]}", []))


def _inspected(cls: type) -> Signature | None:
    """The constructor's parameters; None where Python cannot tell them (compiled classes)."""
    try:
        parameters = list(inspect.signature(cls).parameters.values())
    except (TypeError, ValueError):
        return None
    named = [item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
    required = tuple(item.name for item in named if item.default is item.empty)
    annotations = {
        item.name: inspect.formatannotation(item.annotation) for item in named if item.annotation is not item.empty
    }
    any_keyword = any(item.kind is item.VAR_KEYWORD for item in parameters)
    return Signature(tuple(item.name for item in named), required, any_keyword, annotations)


def _missing(where: str, target: str, error: NoSuchName) -> ConfigError:
    close = nearest(target.rpartition(".")[2], error.options)
    return ConfigError(where, target, f"did you mean {close}?" if close else "correct the dotted path", str(error))


def _not_a_subclass(where: str, target: str, base: str) -> ConfigError:
    return ConfigError(where, target, f"use a subclass of {base}", f"this class is no {base}")


def _nested_errors(node: Mapping[str, Any], key: str) -> list[ConfigError]:
    errors = [
        ConfigError(f"{key}.{word}", "...", "remove it", "a leaf takes a _target_ and its arguments only")
        for word in HYDRA_WORDS
        if word in node
    ]
    for name, value in node.items():
        errors += _targets_below(value, f"{key}.{name}")
    return errors


def _targets_below(value: object, key: str) -> list[ConfigError]:
    """A `_target_` inside a leaf's arguments stands in no declared slot."""
    if isinstance(value, Mapping):
        own = (
            [ConfigError(f"{key}.{TARGET}", value[TARGET], "remove it", "a _target_ stands in declared slots only")]
            if TARGET in value
            else []
        )
        return own + [error for name, item in value.items() for error in _targets_below(item, f"{key}.{name}")]
    if isinstance(value, list | tuple):
        return [error for index, item in enumerate(value) for error in _targets_below(item, f"{key}[{index}]")]
    return []


def _argument_errors(
    signature: Signature, names: list[str], node: Mapping[str, Any], target: str, key: str, provided: Sequence[str]
) -> list[ConfigError]:
    """Arguments the constructor does not take, and arguments it needs and nobody gives. Values are not shown
    where they may be secrets: an argument's value appears only if it is a number or a truth value."""
    errors = []
    for name in names:
        if name not in signature.names and not signature.takes_any_keyword:
            close = nearest(name, signature.names)
            taken = ", ".join(own for own in signature.names if own not in provided)
            fix = f"did you mean {close}?" if close else f"remove it (~{key}.{name}) or use one of {taken}"
            shown = node[name] if isinstance(node[name], bool | int | float) else "..."
            errors.append(ConfigError(f"{key}.{name}", shown, fix, f"{target} takes no such argument"))
        elif wanted := wanted_instead(signature.annotations.get(name, "Any"), node[name]):
            errors.append(ConfigError(f"{key}.{name}", written(node[name]), f"use {wanted}"))
    for name in signature.required:
        if name not in names and name not in provided and name != "kwargs":
            errors.append(ConfigError(f"{key}.{name}", None, f"give {key}.{name}=...", f"{target} needs it"))
    return errors
