"""Whether values fit the annotations of transformers' configuration classes."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from mgpu_pipe.architectures.config_source import ConfigClass

IN_WORDS = {"None": "null", "int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
PRIMITIVES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "list": (list,),
    "dict": (dict,),
    "tuple": (list, tuple),
    "None": (type(None),),
}


def accepts(annotation: ast.expr, value: Any) -> bool:
    """Whether ``value`` fits ``annotation``; True for annotations unknown here. A float may be a whole number."""
    for option in _alternatives(annotation):
        name = _name(option)
        if name == "Literal" and isinstance(option, ast.Subscript):
            if value in ast.literal_eval(
                option.slice if isinstance(option.slice, ast.Tuple) else ast.Tuple([option.slice])
            ):
                return True
        elif name not in PRIMITIVES:
            return True
        elif isinstance(value, bool):
            if name == "bool":
                return True
        elif isinstance(value, PRIMITIVES[name]):
            return True
    return False


def describe(annotation: ast.expr) -> str:
    """Kinds of values that an annotation names, in words."""
    names = [ast.unparse(option) for option in _alternatives(annotation)]
    return " or ".join(IN_WORDS.get(name, name) for name in names)


def floats_of(fields: Mapping[str, Any], known: ConfigClass) -> dict[str, Any]:
    """``fields`` with floats instead of whole numbers where ``known`` declares floats and no whole numbers."""
    exact = dict(fields)
    for name, value in fields.items():
        annotation = known.annotations.get(known.attribute_map.get(name, name))
        if annotation is None or type(value) is not int:
            continue
        names = {_name(option) for option in _alternatives(annotation)}
        if "float" in names and names <= {"float", "None"}:
            exact[name] = float(value)
    return exact


def _alternatives(annotation: ast.expr) -> list[ast.expr]:
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return _alternatives(annotation.left) + _alternatives(annotation.right)
    return [annotation]


def _name(option: ast.expr) -> str:
    base = option.value if isinstance(option, ast.Subscript) else option
    return "None" if isinstance(option, ast.Constant) and option.value is None else getattr(base, "id", "")
