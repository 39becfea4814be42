"""Imports inside functions: ``python -m scripts.inner_imports`` lists those that keep no package out.

An import inside a function has a reason if it loads a package that its file does not load otherwise: torch, or one
that is installed only for some runs. Without a reason it belongs at the top of the file.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scripts.house import PACKAGE, module_files

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
LIGHT = frozenset({*sys.stdlib_module_names, PACKAGE.name, "typing_extensions"})
"""Packages that every command loads."""


@dataclass
class Imports:
    """Modules that a file names at its top, and by line in its functions."""

    top: set[str] = field(default_factory=set)
    inner: list[tuple[int, set[str]]] = field(default_factory=list)


def needless() -> Iterator[tuple[str, int]]:
    """Module and line of every import inside a function that keeps no package out."""
    imports = {name: _imports(file, files) for files in [module_files()] for name, file in files.items()}
    packages = _packages(imports)
    for name, found in imports.items():
        for line, targets in found.inner:
            loaded = set().union(*(packages.get(target, _package(target)) for target in targets))
            if not loaded - packages[name]:
                yield name, line


def count_inner() -> tuple[int, int]:
    """Imports inside functions, and those of them that keep no package out."""
    files = module_files()
    return sum(len(_imports(file, files).inner) for file in files.values()), len([*needless()])


def _imports(file: Path, files: dict[str, Path]) -> Imports:
    imports = Imports()

    def walk(node: ast.AST, is_inner: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            targets = _targets(child, files)
            if targets and is_inner:
                imports.inner.append((child.lineno, targets))  # type: ignore[attr-defined]
            elif targets:
                imports.top |= targets
            walk(child, is_inner or isinstance(child, Function))

    walk(ast.parse(file.read_text(encoding="utf-8")), False)
    return imports


def _targets(node: ast.AST, files: dict[str, Path]) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return {full if full in files else str(node.module) for full in names.values()}
    return set()


def _package(module: str) -> set[str]:
    return {module.partition(".")[0]} - LIGHT


def _packages(imports: dict[str, Imports]) -> dict[str, set[str]]:
    """Packages that importing each module loads, through all that it imports at its top."""
    packages = {name: set().union(*map(_package, found.top)) for name, found in imports.items()}
    has_grown = True
    while has_grown:
        has_grown = False
        for name, found in imports.items():
            parts = name.split(".")
            parents = {".".join(parts[:end]) for end in range(1, len(parts))}
            loaded = packages[name].union(*(packages[other] for other in found.top | parents if other in packages))
            has_grown |= loaded != packages[name]
            packages[name] = loaded
    return packages


if __name__ == "__main__":
    for module, line in sorted(needless()):
        print(f"{module}:{line}")
