"""Whether values fit the annotations of transformers' configuration classes, and the fields of rotary embeddings.

transformers 5 has rotary fields in ``rope_parameters``, older configurations in ``rope_theta``, ``rope_scaling`` and
``partial_rotary_factor``.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from typing import Any

from mgpu_pipe.architectures.config_source import ConfigClass
from mgpu_pipe.config.suggest import nearest
from mgpu_pipe.errors import ConfigError

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


PARAMETERS, SCALING = "rope_parameters", "rope_scaling"
THETA, PARTIAL = "rope_theta", "partial_rotary_factor"
BASES = (THETA, PARTIAL, "rotary_emb_base", "global_rope_theta", "local_rope_theta", "rope_local_base_freq")
"""Single fields, some of them of one family, that ``rope_parameters`` replaced."""
KIND = ("rope_type", "type")
ABOVE_ZERO = (*BASES, "factor", "original_max_position_embeddings")


def check_rotary(overrides: Mapping[str, Any], known: set[str], within: str) -> Iterator[ConfigError]:
    """Errors of rotary fields below the key ``within``; ``known`` names of ``rope_parameters`` are empty if unknown."""
    yield from _check_entries(within, {name: overrides[name] for name in BASES if name in overrides}, set())
    for name in (PARAMETERS, SCALING):
        if isinstance(overrides.get(name), Mapping):
            yield from _check_entries(f"{within}.{name}", overrides[name], known)


def _check_entries(key: str, entries: Mapping[str, Any], known: set[str]) -> Iterator[ConfigError]:
    """Errors of misspelt names and impossible numbers. Entries that are mappings are of a type of layers."""
    for name, value in entries.items():
        if isinstance(value, Mapping):
            yield from _check_entries(f"{key}.{name}", value, known)
        elif name in ABOVE_ZERO and value is not None:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                yield ConfigError(f"{key}.{name}", value, "give a number above 0")
        elif value is not None and known and name not in (*known, *KIND) and (close := nearest(name, known)):
            yield ConfigError(f"{key}.{name}", value, f"did you mean {close}?", "no such rope parameter")
