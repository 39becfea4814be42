"""Figures of the house: ``python -m scripts.figures`` prints how large it is, and how much of it a reader must hold."""

from __future__ import annotations

import ast
import re
from collections import Counter

from scripts.house import PACKAGE, drawn, module_graph, room_graph
from scripts.inner_imports import count_inner
from scripts.words import places

ROOT = PACKAGE.parent
LONG_FILE, LONG_FUNCTION = 400, 50
Function = ast.FunctionDef | ast.AsyncFunctionDef


def figures() -> dict[str, str]:
    """Figures by what they count."""
    files = sorted(PACKAGE.rglob("*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    lines = {file: text.count("\n") for file, text in texts.items()}
    trees = [ast.parse(text) for text in texts.values()]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, Function)]
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in functions]
    names = Counter(file.stem for file in files if file.stem != "__init__")
    tests = [file for file in (ROOT / "tests").rglob("*.py") if "old_runs" not in file.parts]
    rooms = room_graph(module_graph())
    arrows = [line for line in drawn(rooms) if "->" in line]
    return {
        "lines of the product": f"{sum(lines.values()):,}",
        "files, mean lines": f"{len(files)}, {sum(lines.values()) / len(files):.0f}",
        f"files over {LONG_FILE} lines": str(sum(number > LONG_FILE for number in lines.values())),
        f"functions over {LONG_FUNCTION} lines, longest": f"{sum(n > LONG_FUNCTION for n in lengths)}, {max(lengths)}",
        "functions that take RunConfig": str(sum(_takes_run_config(node) for node in functions)),
        "imports inside functions, keeping no package out": ", ".join(map(str, count_inner())),
        "banned names and openings": str(sum(len([*places(file)]) for file in files)),
        "files of the same base name": str(sum(number for number in names.values() if number > 1)),
        "rooms, arrows between them": f"{len(rooms)}, {sum(line.count(',') + 1 for line in arrows)}",
        "lines of tests": f"{sum(file.read_text(encoding='utf-8').count(chr(10)) for file in tests):,}",
        "lines of README.md": str((ROOT / "README.md").read_text(encoding="utf-8").count("\n")),
    }


def _takes_run_config(node: Function) -> bool:
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return any(a.annotation is not None and re.search(r"\bRunConfig\b", ast.unparse(a.annotation)) for a in arguments)


if __name__ == "__main__":
    for name, figure in figures().items():
        print(f"{name:50}{figure:>12}")
