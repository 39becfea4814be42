"""Every file of ``data/sources`` is a source with an option of ``conf/data``, and its declaration is true."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import mgpu_pipe
from mgpu_pipe.config.data_sources import all_sources, find_source, source_names, unread_keys
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.objective import descriptions
from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import sources
from mgpu_pipe.data.data_source import DataSource, shipped_source
from mgpu_pipe.data.sources import demo

PACKAGE = Path(mgpu_pipe.__file__).parent


def test_the_sources_are_the_options_of_data() -> None:
    options = {path.stem for path in (PACKAGE.parent / "conf/data").glob("*.yaml")}
    assert set(source_names()) == options


@pytest.mark.parametrize("name", source_names())
def test_a_source_is_declared_under_its_name(name: str) -> None:
    source = shipped_source(name)
    assert isinstance(source, DataSource) and source.name == name
    assert set(source.reads) <= {key.name for key in fields(DataConfig)}
    assert source.keys is None or issubclass(source.keys, DataConfig)
    assert source.samples in {objective.samples for objective in descriptions()}
    data = compose([f"data={name}"])[0].data
    assert data.source == name and type(data) is (source.keys or DataConfig)


@pytest.mark.parametrize("package", [sources, demo])
def test_a_file_of_variants_has_each_once(package: ModuleType) -> None:
    for file, names in package.VARIANTS.items():
        module = import_module(f"{package.__name__}.{file}")
        assert [source.name for source in module.SOURCES] == list(names), file


def test_declarations_import_neither_torch_nor_numpy() -> None:
    code = "import sys; from mgpu_pipe.config.data_sources import all_sources; all_sources(); "
    code += "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_table_of_unused_keys_is_derived() -> None:
    digits = find_source("digits")
    assert digits is not None
    assert {"seq_len", "text_column", "synthetic"} <= unread_keys(digits)
    assert not unread_keys(digits) & {"classes", "paths", "source"}
    for source in all_sources():
        assert not unread_keys(source) & set(source.reads)


def test_an_unknown_name_is_no_source() -> None:
    assert find_source("poems") is None and find_source("__init__") is None
