"""Hashes of configurations, digests of data, parameters and random numbers are those of the earlier version.

``tables.json`` was written by ``python -m tests.old_runs.make tables`` at the version whose runs are kept here.
The hash of ``experiment=quickstart`` is newer: the experiment itself was changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.old_runs import tables
from tests.old_runs.make import HERE, TABLES

OLD = json.loads(TABLES.read_text(encoding="utf-8"))


def every(sampled: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize ``names``: these, and all of a table for ``make test-all``."""
    cases = [pytest.param(sampled, id="sampled"), pytest.param(None, id="all", marks=pytest.mark.exhaustive)]
    return pytest.mark.parametrize("names", cases)


@every(tables.SAMPLED_OPTIONS)
def test_configurations_have_the_same_hash(names: Sequence[str] | None) -> None:
    names = names or list(OLD["configurations"])
    assert tables.configuration_hashes(names) == {name: OLD["configurations"][name] for name in names}


@pytest.mark.slow
@every(tables.SAMPLED_DATA)
def test_data_has_the_same_digest(names: Sequence[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    names = names or list(OLD["data"])
    assert tables.data_digests(names, tmp_path) == {name: OLD["data"][name] for name in names}


@every(tables.SAMPLED_MODELS)
def test_parameters_have_the_same_names_and_weights(names: Sequence[str] | None) -> None:
    names = names or list(OLD["parameters"])
    for name, table in tables.parameters(names).items():
        expected = OLD["parameters"][name]
        assert table["names"] == expected["names"], name
        assert table["weights"] == pytest.approx(expected["weights"], rel=1e-6), name  # processors round differently


def test_random_numbers_are_the_same() -> None:
    assert tables.random_numbers() == OLD["random_numbers"]
