"""Values of a constructor's arguments against its annotations, read as text: nothing is imported or evaluated.

Only what an annotation surely excludes is refused: a name that is not Python's own or ``typing``'s takes any value.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

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
    """What the annotation takes, in words, where ``value`` is surely none of it; else None."""
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
        return [f"a list of {len(inside)} values"]
    if name in LISTS:
        return ["a list of " + " or ".join(_words(inside[0])) if inside else "a list, [a,b,...]"]
    return ["a mapping, {name: value}"] if name in MAPPINGS else [PLAIN[name][1] if name in PLAIN else name]


def _name(node: ast.expr) -> str:
    """The last word of what is annotated, its parameters left out."""
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
