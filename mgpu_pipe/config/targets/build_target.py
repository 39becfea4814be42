"""Builds `_target_` leaves, and checks them before any worker starts.

A slot declares the base class of its leaf, and only subclasses of it are ever called. A check calls nothing, and
imports nothing if the source is enough (:mod:`source_class`).
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mgpu_pipe.config.hydra.interpolation import hide_environment
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.config.targets import source_class
from mgpu_pipe.config.targets.source_class import NoSuchName, NotAClass, Signature, Unknown
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.import_path import append_own_folders

PLAIN: dict[str, tuple[Callable[[object], bool], str]] = {
    "int": (lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number"),
    "float": (lambda value: isinstance(value, int | float) and not isinstance(value, bool), "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "text"),
    "None": (lambda value: value is None, "null"),
}
LISTS = ("list", "List", "tuple", "Tuple", "Sequence", "Iterable", "Collection")
MAPPINGS = ("dict", "Dict", "Mapping", "MutableMapping")


def wanted_instead(annotation: str, value: object) -> str | None:
    """Words for the annotated type if ``value`` certainly does not fit it, else None."""
    try:
        node = ast.parse(annotation, mode="eval").body
    except SyntaxError:
        return None
    return None if _fits(node, value) else " or ".join(dict.fromkeys(_words(node)))


def _fits(node: ast.expr, value: object) -> bool:
    name, inside = _name(node), _inside(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return wanted_instead(node.value, value) is None
    if isinstance(node, ast.BinOp):
        return _fits(node.left, value) or _fits(node.right, value)
    if name == "Optional" and inside:
        return value is None or _fits(inside[0], value)
    if name == "Union" and inside:
        return any(_fits(arm, value) for arm in inside)
    if name == "Literal":
        return any(value == choice.value for choice in inside if isinstance(choice, ast.Constant))
    if name in PLAIN:
        return PLAIN[name][0](value)
    if name in LISTS:
        return isinstance(value, list | tuple) and _items_fit(name, inside, value)
    return isinstance(value, Mapping) if name in MAPPINGS else True


def _items_fit(name: str, inside: list[ast.expr], items: list[object] | tuple[object, ...]) -> bool:
    if not inside:
        return True
    if name in ("tuple", "Tuple") and not _is_ellipsis(inside[-1]):
        return len(items) == len(inside) and all(map(_fits, inside, items))
    return all(_fits(inside[0], item) for item in items)


def _words(node: ast.expr) -> list[str]:
    name, inside = _name(node), _inside(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _words(ast.parse(node.value, mode="eval").body)
    if isinstance(node, ast.BinOp):
        return [*_words(node.left), *_words(node.right)]
    if name == "Optional":
        return [*_words(inside[0]), "null"]
    if name == "Union":
        return [word for arm in inside for word in _words(arm)]
    if name == "Literal":
        return [str(choice.value) for choice in inside if isinstance(choice, ast.Constant)]
    if name in ("tuple", "Tuple") and inside and not _is_ellipsis(inside[-1]):
        places = ",".join("ab"[: len(inside)]) if len(inside) < 3 else "a,b,..."
        return [f"a list of {len(inside)} values, [{places}]"]
    if name in LISTS:
        return ["a list of " + " or ".join(_words(inside[0])) if inside else "a list, [a,b,...]"]
    return ["a mapping, {name: value}"] if name in MAPPINGS else [PLAIN[name][1] if name in PLAIN else name]


def _name(node: ast.expr) -> str:
    """Last word of an annotation, without its parameters."""
    plain = node.value if isinstance(node, ast.Subscript) else node
    if isinstance(plain, ast.Constant):
        return "None" if plain.value is None else ""
    return plain.attr if isinstance(plain, ast.Attribute) else plain.id if isinstance(plain, ast.Name) else ""


def _inside(node: ast.expr) -> list[ast.expr]:
    if not isinstance(node, ast.Subscript):
        return []
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


TARGET = "_target_"
HYDRA_WORDS = ("_partial_", "_args_", "_recursive_", "_convert_")


def check_target(
    node: object, base: str, key: str, provided: Sequence[str] = (), arguments_key: str | None = None
) -> list[ConfigError]:
    """Errors of a leaf: its class, its arguments' names and the leaves nested in it.

    Args:
        node: the leaf, a mapping with ``_target_`` and the constructor's keyword arguments.
        base: dotted path of the class that the slot takes.
        key: key of the leaf, e.g. ``logger.tensorboard``.
        provided: arguments that the framework passes.
        arguments_key: key of the arguments, if not next to ``_target_``.
    """
    where = f"{key}.{TARGET}"
    if not isinstance(node, Mapping) or not isinstance(node.get(TARGET), str):
        value = node.get(TARGET) if isinstance(node, Mapping) else node
        return [ConfigError(where, value, f"give the dotted path of a subclass of {base}")]
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
    """Import the class of a leaf and check it and its arguments without calling it.

    Returns:
        The class and the leaf's keyword arguments.

    Raises:
        ConfigErrors: the class is no subclass of ``base``, or does not take these arguments.
    """
    where = f"{key}.{TARGET}"
    target = node.get(TARGET) if isinstance(node, Mapping) else None
    wanted = base if isinstance(base, str) else f"{base.__module__}.{base.__qualname__}"
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")):
        raise ConfigErrors([ConfigError(where, target, f"give the dotted path of a subclass of {wanted}")])
    errors = _nested_errors(node, key)
    try:
        cls = _import_class(target, where, wanted)
        base_class = _import_class(base, where, wanted) if isinstance(base, str) else base
    except ConfigError as error:
        raise ConfigErrors([error, *errors]) from error
    if not issubclass(cls, base_class):
        errors.insert(0, _not_a_subclass(where, target, wanted))
    arguments = {name: value for name, value in node.items() if name != TARGET}
    signature = _inspect(cls)
    if not errors and signature is not None:
        errors += _argument_errors(signature, list(arguments), node, target, key, signature.required)
    if errors:
        raise ConfigErrors(errors)
    return cls, arguments


def build(node: Mapping[str, Any], base: type | str, key: str, **extra: Any) -> Any:
    """Build the object of a leaf.

    Args:
        extra: arguments of the framework, passed if the constructor takes them; the leaf's take precedence.

    Raises:
        ConfigErrors: see :func:`resolve_target`; or the constructor refuses its arguments.
    """
    cls, arguments = resolve_target(node, base, key)
    signature = _inspect(cls)
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
    """Signature of ``target``, by source if possible; ConfigError names ``where`` if it is no subclass of ``base``."""
    if "." not in target or not all(part.isidentifier() for part in target.split(".")):
        meant = f"{base.rpartition('.')[0]}.{target}"
        fix = f"did you mean {meant}?" if _is_class(meant) else f"give the whole dotted path of a subclass of {base}"
        raise ConfigError(where, target, fix, "is not a whole dotted path")
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


def _is_class(target: str) -> bool:
    try:
        source_class.find_class(target)
    except (NotAClass, NoSuchName, Unknown):
        return False
    return True


def _judge_imported(target: str, base: str, where: str) -> Signature | None:
    """Check a class by importing it, if the source is not enough."""
    cls = _import_class(target, where, base)
    if not issubclass(cls, _import_class(base, where, base)):
        raise _not_a_subclass(where, target, base)
    return _inspect(cls)


def _import_class(target: str, where: str, base: str) -> type:
    """Class of a dotted path; follows only the modules named in the path, never a module's imports."""
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        if source_class.find_module(module_name) is None:
            continue
        if source_class.is_own(module_name):
            append_own_folders()
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
    raise _missing(where, target, NoSuchName(f"no module {parts[0]}", []))


def _inspect(cls: type) -> Signature | None:
    """Parameters of the constructor; None if Python does not know them (compiled classes)."""
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
    """Errors of every `_target_` inside a leaf's arguments, outside declared slots."""
    if isinstance(value, Mapping):
        here = (
            [ConfigError(f"{key}.{TARGET}", value[TARGET], "remove it", "a _target_ stands in declared slots only")]
            if TARGET in value
            else []
        )
        return here + [error for name, item in value.items() for error in _targets_below(item, f"{key}.{name}")]
    if isinstance(value, list | tuple):
        return [error for index, item in enumerate(value) for error in _targets_below(item, f"{key}[{index}]")]
    return []


def _argument_errors(
    signature: Signature, names: list[str], node: Mapping[str, Any], target: str, key: str, provided: Sequence[str]
) -> list[ConfigError]:
    """Errors of unknown and missing arguments; values may be secrets, so only numbers and booleans are shown."""
    errors = []
    strange = [name for name in names if name not in signature.names and not signature.takes_any_keyword]
    if strange:  # one error: they are probably left over from another class
        first, rest = strange[0], ", ".join(strange[1:])
        close = nearest(first, signature.names) if len(strange) == 1 else None
        taken = ", ".join(name for name in signature.names if name not in provided)
        removed = " ".join(f"~{key}.{name}" for name in strange)
        fix = (
            f"did you mean {close}?"
            if close
            else f"remove {'them' if rest else 'it'} ({removed}) or use one of {taken}"
        )
        value = node[first] if isinstance(node[first], bool | int | float) else "..."
        reason = f"{target} takes no such argument{f', nor {rest}' if rest else ''}"
        errors.append(ConfigError(f"{key}.{first}", value, fix, reason))
    for name in names:
        if name in strange:
            continue
        if wanted := wanted_instead(signature.annotations.get(name, "Any"), node[name]):
            errors.append(ConfigError(f"{key}.{name}", hide_environment(node[name]), f"use {wanted}"))
    for name in signature.required:
        if name not in names and name not in provided and name != "kwargs":
            errors.append(ConfigError(f"{key}.{name}", None, f"give {key}.{name}=...", f"{target} needs it"))
    return errors
