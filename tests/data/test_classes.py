"""Names and numbers of classes."""

from __future__ import annotations

import pytest

from mgpu_pipe.config.schema import DataConfig, ModelConfig, RunConfig
from mgpu_pipe.data.classes import class_names, class_number
from mgpu_pipe.errors import ConfigError

LONG = "9" * 5000
"""More digits than Python reads as a number."""


def test_numbers_come_by_value_before_words() -> None:
    assert class_names(ModelConfig(), DataConfig(), ["b", "10", "-3", "9", "a"]) == ["-3", "9", "10", "a", "b"]


def test_a_class_of_thousands_of_digits_is_a_word() -> None:
    assert class_names(ModelConfig(), DataConfig(), ["a", LONG, "10"]) == ["10", LONG, "a"]
    assert class_number(LONG, ["a", LONG]) == 1


def test_a_strange_class_of_thousands_of_digits_is_named_in_a_short_line() -> None:
    config = RunConfig()
    config.data.classes = ["a", "b"]
    with pytest.raises(ConfigError, match=r"the data has a class '9{80}\.\.\.' besides"):
        class_names(config.model, config.data, ["a", LONG])
