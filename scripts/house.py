"""Draws the rooms of mgpu_pipe from their imports: ``python -m scripts.house``.

The drawing stands in docs/explanation/architecture.md. A room is a folder or file of the package. Imports inside
functions count, those for type checkers alone do not. An arrow that follows from others is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mgpu_pipe"
Graph = dict[str, set[str]]


def module_graph() -> Graph:
    """Every module and those that it imports."""
    modules = module_files()
    return {
        name: {other for other in _imported(ast.parse(file.read_text(encoding="utf-8")), modules) if other != name}
        for name, file in modules.items()
    }


def module_files() -> dict[str, Path]:
    """Files of the package by their modules' names."""
    files = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


def _imported(node: ast.AST, modules: Mapping[str, Path]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and (child.module or "").partition(".")[0] == "mgpu_pipe":
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                yield full if full in modules else str(child.module)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in modules)
        yield from _imported(child, modules)


def room_graph(modules: Graph) -> Graph:
    """Every room below the package itself, and those that it imports."""
    rooms: Graph = {}
    for module, imported in modules.items():
        room = _room(module)
        rooms.setdefault(room, set()).update(_room(one) for one in imported)
    return {room: {one for one in imported if one not in (room, "")} for room, imported in rooms.items() if room}


def _room(module: str) -> str:
    return (module.split(".") + [""])[1]


def circle(graph: Graph) -> list[str]:
    """One circle of imports, or nothing."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            if found := walk(other, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := walk(node, []))), [])


def reach(graph: Graph, node: str) -> set[str]:
    """What can be reached from ``node`` in a graph without circles."""
    return set().union(*({one} | reach(graph, one) for one in graph.get(node, ())))


def drawn(graph: Graph) -> list[str]:
    """A line a room, the highest first; each arrow leads down."""
    below = {room: reach(graph, room) for room in graph}
    width = max(map(len, graph))
    lines = []
    for room in sorted(graph, key=lambda one: (-len(below[one]), one)):
        implied = set().union(*(below[one] for one in graph[room]))
        arrows = sorted(graph[room] - implied, key=lambda one: (-len(below[one]), one))
        lines.append(f"{room:<{width}}  -> {', '.join(arrows)}" if arrows else room)
    return lines


if __name__ == "__main__":
    print("\n".join(drawn(room_graph(module_graph()))))
