"""Reads a class from its source: its definition, its bases and its constructor's parameters.

It imports and calls nothing. So a `_target_` such as ``torch.optim.AdamW`` takes milliseconds to check, and one such
as ``os.system`` has no chance to run. It follows names through the imports of their modules; what source cannot show
(compiled modules, names made at run time) is :class:`Unknown`.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder
from pathlib import Path

from mgpu_pipe.import_path import own_folders

MAX_DEPTH = 24
"""Limit of imports and base classes followed in a row; more means a cycle."""


class Unknown(Exception):
    """The source is not enough; the message says where the search ended."""


class NoSuchName(Exception):
    """The dotted name does not exist; the message names the missing part, ``options`` the existing names."""

    def __init__(self, message: str, options: list[str]) -> None:
        super().__init__(message)
        self.options = options


class NotAClass(Exception):
    """The dotted name is not a class; the message says what it is."""


@dataclass(frozen=True)
class SourceClass:
    """A class definition found in source."""

    module: str
    name: str

    @property
    def node(self) -> ast.ClassDef:
        body: list[ast.stmt] = _module(self.module).body
        for part in self.name.split("."):
            node = next(n for n in _statements(body) if isinstance(n, ast.ClassDef) and n.name == part)
            body = node.body
        return node


@dataclass(frozen=True)
class Signature:
    """Parameters of a constructor, without ``self``."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_any_keyword: bool
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Source of the annotations, by annotated argument."""


@functools.lru_cache(maxsize=1024)
def find_class(dotted: str) -> SourceClass:
    """Definition of the class at a dotted path; or NoSuchName, NotAClass, Unknown."""
    parts = dotted.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        if find_module(module) is not None:
            if len(parts) - length > 1:
                return _read_nested(module, parts[length:])
            return _attribute(module, parts[length], 0)
    raise NoSuchName(f"no module {parts[0]}", [])


def is_subclass(cls: SourceClass, base: SourceClass, depth: int = 0) -> bool:
    """Whether ``cls`` is ``base`` or inherits from it; Unknown if only a base that cannot be followed may."""
    if cls == base:
        return True
    if depth > MAX_DEPTH:
        raise Unknown(f"too many base classes below {cls.module}.{cls.name}")
    lost: Unknown | None = None
    for name in _base_names(cls):
        try:
            if is_subclass(_in_module(cls.module, name, depth), base, depth + 1):
                return True
        except Unknown as error:
            lost = error
        except (NoSuchName, NotAClass) as error:
            lost = Unknown(str(error))
    if lost is not None:
        raise lost
    return False


def inherited_names(target: str, package: str) -> set[str]:
    """Names of the classes of ``package`` among the class at a dotted path and its ancestors, as known from source."""
    try:
        lineage = [find_class(target)]
    except (NoSuchName, NotAClass, Unknown):
        return set()
    for cls in lineage:  # grows
        for name in _base_names(cls):
            with suppress(NoSuchName, NotAClass, Unknown):
                base = _in_module(cls.module, name, 0)
                lineage += [base] if base not in lineage else []
    return {cls.name for cls in lineage if f"{cls.module}.".startswith(f"{package}.")}


def signature(cls: SourceClass, depth: int = 0) -> Signature:
    """Parameters of the constructor, from the first ``__init__``; Unknown where something else may define it."""
    node = cls.node
    for statement in _statements(node.body):
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return _read_signature(statement.args)
        if isinstance(statement, ast.FunctionDef) and statement.name == "__new__":
            raise Unknown(f"{cls.module}.{cls.name} has a __new__")
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list) or depth > MAX_DEPTH:
        raise Unknown(f"{cls.module}.{cls.name} has a generated constructor")
    for name in _base_names(cls):
        try:
            inherited = signature(_in_module(cls.module, name, 0), depth + 1)
        except (NoSuchName, NotAClass) as error:
            raise Unknown(str(error)) from error
        if inherited.names or inherited.takes_any_keyword:
            return inherited
    return Signature((), (), False)


def find_module(name: str) -> ModuleSpec | None:
    """Spec of a module, found without importing its parents; None without such a module."""
    search: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for index in range(len(parts)):
        partial = ".".join(parts[: index + 1])
        spec = _top_level(partial) if index == 0 else PathFinder.find_spec(partial, search)
        if spec is None:
            return None
        search = list(spec.submodule_search_locations or [])
        if not search and index + 1 < len(parts):
            return None
    return spec


def _top_level(name: str) -> ModuleSpec | None:
    """Spec of a top-level module, the user's folder last. Frozen standard modules are looked up as files."""
    return _find_installed(name) or PathFinder.find_spec(name, own_folders())


def is_own(module: str) -> bool:
    """Whether an existing module is in the user's folder only."""
    return _find_installed(module.partition(".")[0]) is None


def _find_installed(name: str) -> ModuleSpec | None:
    if BuiltinImporter.find_spec(name) is not None:
        return BuiltinImporter.find_spec(name)
    try:
        spec = PathFinder.find_spec(name) or importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, such as __main__
        return None
    return spec


@functools.lru_cache(maxsize=256)
def _module(name: str) -> ast.Module:
    spec = find_module(name)
    if spec is None:
        raise NoSuchName(f"no module {name}", [])
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise Unknown(f"module {name} has no Python source")
    try:
        return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise Unknown(f"module {name} cannot be read ({error})") from error


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, including those under ``if``, ``try`` and ``with``."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(statement, part, []))
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from _statements(handler.body)


def _read_nested(module: str, parts: list[str]) -> SourceClass:
    """Definition of a nested class; refuses anything else between module and name, such as an imported module."""
    outer = _attribute(module, parts[0], 0)
    for part in parts[1:]:
        inner = [n.name for n in outer.node.body if isinstance(n, ast.ClassDef)]
        if part not in inner:
            raise NoSuchName(f"{outer.module}.{outer.name} has no class {part}", inner)
        outer = SourceClass(outer.module, f"{outer.name}.{part}")
    return outer


@functools.lru_cache(maxsize=1024)
def _attribute(module: str, name: str, depth: int) -> SourceClass:
    """Definition of the class ``name`` in ``module``."""
    if depth > MAX_DEPTH:
        raise Unknown(f"{module}.{name} is imported in a circle")
    stars: list[str] = []
    known: list[str] = []
    for statement in _statements(_module(module).body):
        if isinstance(statement, ast.ClassDef):
            known.append(statement.name)
            if statement.name == name:
                return SourceClass(module, name)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef) and statement.name == name:
            raise NotAClass("a function")
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                if (alias.asname or alias.name.split(".")[0]) == name:
                    raise NotAClass("a module")
        elif isinstance(statement, ast.ImportFrom):
            source = _absolute(module, statement)
            for alias in statement.names:
                if alias.name == "*":
                    stars.append(source)
                elif (alias.asname or alias.name) == name:
                    is_module = find_module(f"{source}.{alias.name}") is not None
                    if is_module and (source == module or not _defines(source, alias.name, depth + 1)):
                        raise NotAClass("a module")
                    return _attribute(source, alias.name, depth + 1)
                else:
                    known.append(alias.asname or alias.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                if isinstance(statement.value, ast.Name | ast.Attribute) and ast.unparse(statement.value) != name:
                    return _in_module(module, ast.unparse(statement.value), depth + 1)
                raise Unknown(f"{module}.{name} is made at run time")
    return _through_stars(module, name, stars, known, depth)


def _through_stars(module: str, name: str, stars: list[str], known: list[str], depth: int) -> SourceClass:
    for source in stars:
        try:
            return _attribute(source, name, depth + 1)
        except NoSuchName as error:
            known.extend(error.options)
    dynamic = any(isinstance(n, ast.FunctionDef) and n.name == "__getattr__" for n in _module(module).body)
    if dynamic:
        raise Unknown(f"{module} makes its names at run time")
    if find_module(f"{module}.{name}") is not None:
        raise NotAClass("a module")
    raise NoSuchName(f"{module} has no {name}", known)


def _defines(module: str, name: str, depth: int) -> bool:
    try:
        _attribute(module, name, depth)
    except (NoSuchName, NotAClass, Unknown):
        return False
    return True


def _absolute(module: str, statement: ast.ImportFrom) -> str:
    if not statement.level:
        return statement.module or ""
    spec = find_module(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    parts = module.split(".")
    keep = len(parts) - statement.level + (1 if is_package else 0)
    return ".".join([*parts[:keep], *([statement.module] if statement.module else [])])


def _in_module(module: str, expression: str, depth: int) -> SourceClass:
    """Class that an expression such as ``Callback`` or ``pl.Callback`` means inside ``module``."""
    first, _, rest = expression.partition(".")
    if not rest:
        return _attribute(module, first, depth + 1)
    for statement in _statements(_module(module).body):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if alias.asname == first:
                    return find_class(f"{alias.name}.{rest}")
                if alias.asname is None and alias.name.split(".")[0] == first:
                    return find_class(expression)
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == first:
                    return find_class(f"{_absolute(module, statement)}.{alias.name}.{rest}")
    raise Unknown(f"{expression} in {module}")


def _base_names(cls: SourceClass) -> list[str]:
    """Bases of a class as dotted expressions; ``Generic[T]`` without its parameters."""
    names = []
    for base in cls.node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(plain, ast.Name | ast.Attribute) and ast.unparse(plain) != "object":
            names.append(ast.unparse(plain))
    return names


def _read_signature(arguments: ast.arguments) -> Signature:
    positional = [item.arg for item in (*arguments.posonlyargs, *arguments.args)][1:]
    optional = positional[len(positional) - len(arguments.defaults) :] if arguments.defaults else []
    keywords = [item.arg for item in arguments.kwonlyargs]
    wanted = [
        item.arg for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    ]
    required = [name for name in positional if name not in optional] + wanted
    items = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    annotations = {item.arg: ast.unparse(item.annotation) for item in items if item.annotation is not None}
    return Signature((*positional, *keywords), tuple(required), arguments.kwarg is not None, annotations)
