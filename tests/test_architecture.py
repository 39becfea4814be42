"""The house: no circle among its modules or rooms; the architecture page and CONTRIBUTING.md name what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from setuptools import find_packages

from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.training.strategy import EngineStrategy
from scripts.house import PACKAGE, circle, drawn, module_files, module_graph, room_graph
from scripts.words import places

ROOT = Path(__file__).parents[1]


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert not circle(module_graph())


def test_no_room_imports_itself_by_way_of_others() -> None:
    assert not circle(room_graph(module_graph()))


def test_a_circle_is_found_and_what_follows_is_not_drawn() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert drawn({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == ["a  -> b", "b  -> c", "c"]


def test_no_name_and_no_docstring_is_of_the_words_that_the_house_does_without() -> None:
    assert not [(file.name, *place) for file in PACKAGE.rglob("*.py") for place in places(file)]


def test_such_words_are_found(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        'def told(one: int) -> None:\n    """As above."""\n    _own = one\ndef _of_model(): ...\ndef joined(): ...\n'
    )
    assert [word for _, word in places(file)] == ["told", '"As above."', "_of_model", "joined", "one", "_own"]


def test_tests_and_benchmarks_import_modules_that_are_there() -> None:
    """Most of them import inside functions or run only on some machines, so that a renamed module would be missed."""
    modules = {*module_files(), *_modules_of_tests()}
    files = [file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    assert not [
        (str(file.relative_to(ROOT)), node.lineno, node.module)
        for file in files
        if "old_runs" not in file.parts
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and str(node.module).partition(".")[0] in ("mgpu_pipe", "tests")
        and node.module not in modules
    ]


def _modules_of_tests() -> set[str]:
    """Dotted names of the modules and packages below ``tests``."""
    paths = [file.relative_to(ROOT).with_suffix("") for file in (ROOT / "tests").rglob("*.py")]
    return {".".join(part) for path in paths for part in (path.parts, path.parent.parts)}


def test_the_documents_name_every_room_in_the_order_of_the_layers() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    contract = (ROOT / "pyproject.toml").read_text().partition("layers = [")[2]
    layers = re.findall(r'^    "mgpu_pipe\.([^"]+)",$', contract, re.MULTILINE)
    assert listed == [room.removeprefix("mgpu_pipe.") for layer in layers for room in layer.split(" | ")]
    assert set(room_graph(module_graph())) == {*listed, "import_path", "__main__"}


def test_the_files_that_contributors_are_sent_to_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:mgpu_pipe|conf|tests|docs|config|launch|checks|training|data)/[\w/]+\.\w+)`", text)
    assert len(named) > 5
    for name in named:
        assert any((folder / name).is_file() for folder in (ROOT, ROOT / "mgpu_pipe")), name


def test_the_functions_of_one_step_are_there() -> None:
    page = (ROOT / "docs" / "explanation" / "one_step.md").read_text()
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", page, re.MULTILINE)
    assert len(rows) > 30
    for file, function in rows:
        assert function in _functions(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))), f"{file}: {function}"


def _functions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> set[str]:
    """Names of the functions, and of methods as ``Class.method``."""
    functions = {prefix + node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return functions.union(*(_functions(node, f"{node.name}.") for node in classes))


def test_the_wheel_holds_every_package() -> None:
    """Every folder with code is a package; tests/test_cli.py builds the wheel."""
    there = {".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("mgpu_pipe/**/*.py")}
    assert {*find_packages(str(ROOT), include=["mgpu_pipe", "mgpu_pipe.*"])} == there


@pytest.mark.parametrize("base", [EngineStrategy, Objective])
def test_a_base_class_of_plug_ins_asks_for_at_most_eight_methods(base: type) -> None:
    assert 0 < len(base.__abstractmethods__) <= 8  # type: ignore[attr-defined]
