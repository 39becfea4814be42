"""The fields of transformers' configuration classes, read from their source.

An import costs seconds, and the classes silently accept unknown keywords. Parsing a few files takes milliseconds and
imports neither torch nor transformers.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NO_DEFAULT = object()
"""Marker of a default that is not a literal."""
BASE_CLASSES = {"PreTrainedConfig": "configuration_utils.py", "PretrainedConfig": "configuration_utils.py"}
PAIR = re.compile(r'\(\s*"([^"]+)",\s*"([^"]+)",?\s*\)|^\s*"([^"]+)":\s*"([^"]+)"', re.MULTILINE)
NEXT_STATEMENT = re.compile(r"^[^\s)#]", re.MULTILINE)
ROPE_KEY = re.compile(r'rope_parameters(?:\.get\(|\[)"(\w+)"')
IMPORTED = re.compile(r"^from (\.+)([\w.]+) import", re.MULTILINE)
LOOKED_UP = re.compile(r'getattr\(\s*(?:self\.)?config,\s*"(\w+)"')


@dataclass
class ConfigClass:
    """Fields of a configuration class and its bases, read from source."""

    annotations: dict[str, ast.expr] = field(default_factory=dict)
    """Annotations of declared fields."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Literal defaults of the fields; NO_DEFAULT for others."""
    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest value of fields that are declared with an interval."""
    keywords: set[str] = field(default_factory=set)
    """Other keywords of the class: constructor arguments, names taken from ``kwargs``."""
    attribute_map: dict[str, str] = field(default_factory=dict)
    """Standard names to the class's names, e.g. hidden_size -> n_embd."""
    computed: set[str] = field(default_factory=set)
    """Properties, which cannot be set unless the class has a setter (Falcon's head_dim has none)."""
    heads_divide: bool = False
    """Whether it refuses a width that is no multiple of the number of heads, even with ``head_dim``."""

    @property
    def names(self) -> set[str]:
        return set(self.annotations) | self.keywords | set(self.attribute_map) | set(self.attribute_map.values())


@lru_cache(maxsize=1)
def package_folder() -> Path | None:
    """Folder of transformers, without importing it; None if not installed."""
    spec = find_spec("transformers")
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


@lru_cache(maxsize=16)
def auto_mapping(name: str) -> dict[str, str]:
    """Table of ``transformers.models.auto`` such as ``CONFIG_MAPPING_NAMES``: model_type -> class or module."""
    folder = package_folder()
    mapping: dict[str, str] = {}
    for file in ("auto_mappings.py", "configuration_auto.py", "modeling_auto.py"):
        path = folder / "models" / "auto" / file if folder else None
        if path is None or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        table = rf"^{name}\b(?:[^\n=]*=\s*OrderedDict|\.update)\((.*?)^\)"
        for match in re.finditer(table, text, re.MULTILINE | re.DOTALL):
            for key, value, other_key, other_value in PAIR.findall(match.group(1)):
                mapping[key or other_key] = value or other_value
        for match in re.finditer(rf"^{name} = OrderedDict\(\*\*\{{\"([^\"]+)\": \"([^\"]+)\"\}}", text, re.MULTILINE):
            mapping[match.group(1)] = match.group(2)
    return mapping


@lru_cache(maxsize=16)
def config_class(model_type: str) -> ConfigClass | None:
    """Configuration class of ``model_type``; None if transformers has none in the usual place."""
    folder, place = package_folder(), _place(model_type)
    if folder is None or place is None:
        return None
    cls = _read_class(*place, folder)
    looked_up = _undeclared_names(_modeling(place[0]))
    cls.keywords |= looked_up - cls.computed
    return cls


@lru_cache(maxsize=16)
def modeling_source(model_type: str) -> tuple[str, str] | None:
    """Source of the modules of ``model_type``, and of the files they import from; None if in an unusual place."""
    place = _place(model_type)
    modeling = _modeling(place[0]) if place else None
    if modeling is None or not modeling.is_file():
        return None
    source, texts = modeling.read_text(encoding="utf-8"), list[str]()
    for dots, module in IMPORTED.findall(source):
        file = modeling.parents[len(dots) - 1].joinpath(*module.split(".")).with_suffix(".py")
        if file.is_file():
            texts.append(file.read_text(encoding="utf-8"))
    return source, "\n".join(texts)


def _modeling(configuration: Path) -> Path:
    return configuration.with_name(configuration.name.replace("configuration_", "modeling_"))


def class_statement(model_type: str) -> ast.ClassDef | None:
    """AST of the configuration class of ``model_type``."""
    place = _place(model_type)
    return None if place is None else _class_node(*place)


def _place(model_type: str) -> tuple[Path, str] | None:
    """File and name of the configuration class of ``model_type``."""
    folder, class_name = package_folder(), auto_mapping("CONFIG_MAPPING_NAMES").get(model_type)
    if folder is None or class_name is None:
        return None
    module = auto_mapping("SPECIAL_MODEL_TYPE_TO_MODULE_NAME").get(model_type, model_type.replace("-", "_"))
    usual = folder / "models" / module / f"configuration_{module}.py"
    others = sorted((folder / "models").glob("*/configuration_*.py")) if not usual.is_file() else []
    for file in (usual, *others):
        if file.is_file() and f"class {class_name}(" in file.read_text(encoding="utf-8"):
            return file, class_name
    return None


def rope_parameter_names(model_type: str) -> set[str]:
    """Keys of ``rope_parameters``: those of all families, and those that the family's code looks up."""
    folder = package_folder()
    file = folder / "modeling_rope_utils.py" if folder else None
    node = _class_node(file, "RopeParameters") if file and file.is_file() else None
    if node is None:
        return set()
    names = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    place = _place(model_type)
    modeling = _modeling(place[0]) if place else None
    for file in (place[0] if place else None, modeling):
        if file is not None and file.is_file():
            names |= set(ROPE_KEY.findall(file.read_text(encoding="utf-8")))
    return names


@lru_cache(maxsize=16)
def _class_node(file: Path, class_name: str) -> ast.ClassDef | None:
    """AST of a class, parsed alone because files are long."""
    text = file.read_text(encoding="utf-8")
    start = re.search(rf"^class {class_name}\b.*\n", text, re.MULTILINE)
    if start is None:
        return None
    end = NEXT_STATEMENT.search(text, start.end())
    try:
        statements = ast.parse(text[start.start() : end.start() if end else len(text)]).body
    except SyntaxError:  # a string in the class continues in the first column
        statements = ast.parse(text).body
    classes = (statement for statement in statements if isinstance(statement, ast.ClassDef))
    return next((statement for statement in classes if statement.name == class_name), None)


def _read_class(file: Path, class_name: str, folder: Path) -> ConfigClass:
    cls = ConfigClass()
    node = _class_node(file, class_name)
    if node is None:
        return cls
    for base in node.bases:
        if isinstance(base, ast.Name):
            _merge(cls, _read_base(file, base.id, folder))
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            if "ClassVar" not in ast.unparse(item.annotation):
                cls.annotations[item.target.id] = item.annotation
                cls.defaults[item.target.id] = _literal_default(item.value)
                cls.bounds.update({item.target.id: bounds} if (bounds := _bounds(item.value)) else {})
        elif isinstance(item, ast.Assign):
            _read_attribute_map(item, cls)
        elif isinstance(item, ast.FunctionDef):
            _read_method(item, cls)
    rope_shorthands = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
    cls.keywords = (
        cls.keywords | rope_shorthands if "rope_parameters" in cls.annotations else (cls.keywords - rope_shorthands)
    )
    cls.keywords = {name for name in cls.keywords if not name.startswith("_")} - {"self", "kwargs"}
    return cls


def _bounds(value: ast.expr | None) -> tuple[float, float] | None:
    """Bounds of a declaration such as ``interval(min=0.0, max=1.0)(default=0.02)``."""
    call = value.func if isinstance(value, ast.Call) else None
    if not isinstance(call, ast.Call) or getattr(call.func, "id", "") != "interval":
        return None
    try:
        ends = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    except ValueError:  # an expression
        return None
    return ends.get("min", -math.inf), ends.get("max", math.inf)


def _undeclared_names(modeling: Path) -> set[str]:
    """Fields that a model looks up although its configuration class does not declare them (Qwen3-MoE's head_dim)."""
    if not modeling.is_file():
        return set()
    return {name for name in LOOKED_UP.findall(modeling.read_text(encoding="utf-8")) if not name.startswith("_")}


def _read_base(file: Path, base: str, folder: Path) -> ConfigClass:
    if base in BASE_CLASSES:
        return _read_class(folder / BASE_CLASSES[base], "PreTrainedConfig", folder)
    text = file.read_text(encoding="utf-8")
    if re.search(rf"^class {base}\b", text, re.MULTILINE):
        return _read_class(file, base, folder)
    imported = re.search(rf"^from (\.+)([\w.]+) import [^\n]*\b{base}\b", text, re.MULTILINE)
    if imported is None:
        return ConfigClass()
    start = file.parents[len(imported.group(1)) - 1]
    target = start.joinpath(*imported.group(2).split(".")).with_suffix(".py")
    return _read_class(target, base, folder) if target.is_file() else ConfigClass()


def _merge(into: ConfigClass, other: ConfigClass) -> None:
    into.annotations.update(other.annotations)
    into.defaults.update(other.defaults)
    into.bounds.update(other.bounds)
    into.keywords |= other.keywords
    into.attribute_map.update(other.attribute_map)
    into.computed |= other.computed
    into.heads_divide |= other.heads_divide


def _read_attribute_map(item: ast.Assign, cls: ConfigClass) -> None:
    target = item.targets[0]
    if isinstance(target, ast.Name) and target.id == "attribute_map" and isinstance(item.value, ast.Dict):
        cls.attribute_map.update(ast.literal_eval(item.value))


def _read_method(item: ast.FunctionDef, cls: ConfigClass) -> None:
    if item.name == "__init__":
        cls.keywords |= {argument.arg for argument in (*item.args.args, *item.args.kwonlyargs)}
    if any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in item.decorator_list):
        cls.computed.add(item.name)
    if any(isinstance(decorator, ast.Attribute) and decorator.attr == "setter" for decorator in item.decorator_list):
        cls.keywords.add(item.name)
    if item.name == "validate_architecture":
        cls.heads_divide = "self.hidden_size % self.num_attention_heads" in ast.unparse(item)
    if item.name not in ("__init__", "__post_init__", "convert_rope_params_to_dict"):
        return
    for call in ast.walk(item):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in ("pop", "get")
            and isinstance(call.func.value, ast.Name)
            and call.func.value.id == "kwargs"
            and call.args
            and isinstance(call.args[0], ast.Constant)
        ):
            cls.keywords.add(str(call.args[0].value))


def _literal_default(value: ast.expr | None) -> Any:
    """Default of a field: a literal, or the ``default=`` of a validator call such as ``interval(...)(...)``."""
    if isinstance(value, ast.Call):
        value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
    if value is None:
        return NO_DEFAULT
    try:
        return ast.literal_eval(value)
    except ValueError:
        return NO_DEFAULT
