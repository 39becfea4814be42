"""Private names of other libraries: each is used in one file, and is still there in the release that is installed."""

from __future__ import annotations

import ast
import importlib
import inspect
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[2] / "mgpu_pipe"
COMPAT = PACKAGE / "system" / "compat"
DISTRIBUTIONS = {"pytorch_lightning": "pytorch-lightning", "hydra": "hydra-core"}
PUBLIC = {"_target_", "_replace", "_asdict", "_exit", "_getframe", "_parameters", "_buffers", "_modules"}
"""Names with an underscore that are documented, and the tables of torch's modules, whose contract is held here."""


def compat_modules() -> list[str]:
    return sorted(file.stem for file in COMPAT.glob("*_private.py"))


def contracts() -> list[tuple[str, str]]:
    return [
        (file, name)
        for file in compat_modules()
        for name in importlib.import_module(f"mgpu_pipe.system.compat.{file}").PRIVATE
    ]


def has(owner: Any, name: str) -> bool:
    """Whether a module, class or function has an attribute; of a class, also one that its methods set; of a function,
    also one that it reads by name."""
    if hasattr(owner, name):
        return True
    if inspect.isfunction(owner):
        return f'"{name}"' in inspect.getsource(owner)
    if not isinstance(owner, type):
        return False
    sources = (inspect.getsource(cls) for cls in owner.__mro__ if cls.__module__ not in ("builtins", "abc", "typing"))
    return any(f"self.{name} " in source or f"self.{name}:" in source or f"    {name}:" in source for source in sources)


def gone(place: str) -> str | None:
    """What is missing of ``module:Class.name``."""
    where, _, path = place.partition(":")
    try:
        owner: Any = importlib.import_module(where)
    except ModuleNotFoundError:
        return where
    *holders, name = path.split(".")
    for holder in holders:
        if not hasattr(owner, holder):
            return f"{where}.{holder}"
        owner = getattr(owner, holder)
    return None if has(owner, name) else f"{where}.{path}"


@pytest.mark.parametrize(("file", "place"), contracts(), ids=lambda value: str(value).rpartition(":")[2])
def test_a_private_name_is_still_there(file: str, place: str) -> None:
    library = place.partition(":")[0].partition(".")[0]
    missing = gone(place)
    release = "" if file == "python_private" else version(DISTRIBUTIONS.get(library, library))
    assert missing is None, f"{library} {release} has no {missing} any more; mgpu_pipe/compat/{file}.py uses it"


def test_a_name_that_went_is_told() -> None:
    assert gone("torch:_gone") == "torch._gone"
    assert gone("torch.nn:Module._gone") == "torch.nn.Module._gone"
    assert gone("torch.nn._gone:Module") == "torch.nn._gone"


def test_atens_operators_are_still_there() -> None:
    from mgpu_pipe.system.compat.torch_private import OPERATORS, operator

    for name in OPERATORS:
        try:
            operator(name)
        except AttributeError as error:
            raise AssertionError(f"torch {version('torch')} has no operator {name} any more") from error


def test_what_stands_in_a_modules_table_is_its_parameter() -> None:
    import torch

    module, other = torch.nn.Linear(1, 1), torch.nn.Parameter(torch.ones(1, 1))
    module._parameters["weight"] = other
    assert module.weight is other and next(iter(dict(module.named_parameters()).values())) is other


def private_uses(file: Path) -> list[str]:
    """Places of ``file`` that reach into another library's private names; its own are those that it defines."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _of_self(node)
    }
    own |= {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    uses = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and _is_private(node.attr)
            and node.attr not in PUBLIC | own
            and not _of_self(node)
        ):
            uses.append(f"{file.relative_to(PACKAGE)}:{node.lineno} .{node.attr}")
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("mgpu_pipe"):
            path = f"{node.module}.{'.'.join(alias.name for alias in node.names)}"
            if node.module != "__future__" and any(_is_private(part) for part in path.split(".")):
                uses.append(f"{file.relative_to(PACKAGE)}:{node.lineno} {path}")
    return uses


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


@pytest.mark.slow
def test_private_names_are_used_in_compat_alone() -> None:
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file.parent != COMPAT]
    assert not [use for file in files for use in private_uses(file)]


@pytest.mark.parametrize("file", compat_modules())
def test_what_a_compat_file_uses_is_in_its_contract(file: str) -> None:
    module: ModuleType = importlib.import_module(f"mgpu_pipe.system.compat.{file}")
    listed = " ".join([*module.PRIVATE, *getattr(module, "OPERATORS", ())])
    used = {use.rpartition(" ")[2].rpartition(".")[2] for use in private_uses(COMPAT / f"{file}.py")}
    assert not {name for name in used if name not in listed}
