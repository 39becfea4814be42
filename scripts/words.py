"""Counts words that the house does without: ``python -m scripts.words [room]`` lists each place, and a line a room.

Names that are bound (functions, classes, parameters, variables, attributes) are compared with :data:`NAMES`, the first
words of docstrings with :data:`OPENINGS`. A test holds the numbers at zero.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "mgpu_pipe"
NAMES = frozenset(
    {
        *("told", "heard", "tells", "hears", "one", "own", "of", "held", "found", "given", "shown", "made", "kept"),
        *("at", "counted", "drawn", "asked", "met", "beside", "begun"),
    }
)
"""Participles that say what happened and not what a thing is, and words that name nothing."""
STORED = frozenset(
    {
        *("prepared_splits.told", "prepare_chats.shown", "samples.told", "mixed_samples.told", "prepare_text.told"),
        *("listing.begun", "point.begun", "memory_use.held", "rank_times.own"),
    }
)
"""Fields whose names stand in the files of runs, by ``file.field``."""
PARTICIPLE = re.compile("[a-z]+(ed|en)|bound|built|gone|known|lost")
NO_PARTICIPLES = frozenset(
    {
        *("of_data", "of_run", "untrained", "cancelled", "passed"),
        *(
            "deepspeed",
            "embed",
            "feed",
            "len",
            "listen",
            "open",
            "seed",
            "shorten",
            "speed",
            "token",
            "uneven",
            "widen",
        ),
    }
)
"""Methods that packages of others define, properties that are true or false, and names that look like participles."""
OPENINGS = re.compile(r"(As above|Of |What |Whether what|See the module|Likewise|The same)")


def places(file: Path) -> Iterator[tuple[int, str]]:
    """Line and word of every banned name and opening in a file."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        for name in _bound(node):
            if (name.strip("_") in NAMES or _is_no_verb(node, name)) and f"{file.stem}.{name}" not in STORED:
                yield getattr(node, "lineno", 1), name
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if OPENINGS.match(text):
                yield getattr(node, "lineno", 1), f'"{text.splitlines()[0][:60]}"'


def _is_no_verb(node: ast.AST, name: str) -> bool:
    """Whether a function's name begins with ``of_`` or is a participle alone."""
    name = name.strip("_")
    if not isinstance(node, ast.FunctionDef) or name in NO_PARTICIPLES:
        return False
    return name.startswith("of_") or PARTICIPLE.fullmatch(name) is not None


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.id if isinstance(node, ast.Name) else node.attr


def room_of(file: Path) -> str:
    """The room of a file: its first folder below the package."""
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "."


def main(rooms: list[str]) -> None:
    """Print the places in ``rooms``, or in all, then the number of each room."""
    numbers = Counter[str]()
    for file in sorted(PACKAGE.rglob("*.py")):
        for line, word in places(file):
            numbers[room_of(file)] += 1
            if room_of(file) in rooms:
                print(f"{file.relative_to(PACKAGE.parent)}:{line}: {word}")
    for room, number in numbers.most_common():
        print(f"{number:5} {room}")
    print(f"{numbers.total():5} in all")


if __name__ == "__main__":
    main(sys.argv[1:])
