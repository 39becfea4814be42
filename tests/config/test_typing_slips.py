"""Slips of editors in values are named by their letter, with advice that Hydra reads. Oracle: Hydra by compose."""

from __future__ import annotations

import shlex

import pytest

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.hydra.typing_slips import typing_slip
from mgpu_pipe.errors import ConfigErrors


@pytest.mark.parametrize(
    ("word", "letter", "paths"),
    [
        ("data.paths=[/data/my dir/it\u2019s.txt]", "U+2019", ["/data/my dir/it\u2019s.txt"]),
        ("data.paths=[/a.txt,/data/it\u2019s.txt]", "U+2019", ["/a.txt", "/data/it\u2019s.txt"]),
        ("data.paths=[/data/my dir/a\u2013b.txt]", "U+2013", ["/data/my dir/a\u2013b.txt"]),
    ],
)
def test_marks_in_a_value_are_quoted(word: str, letter: str, paths: list[str]) -> None:
    with pytest.raises(ConfigErrors) as caught:
        compose(["model=llama_tiny", "data=jsonl", word])
    assert f": has {letter} " in str(caught.value)
    advice = str(caught.value).rpartition("quote the value, ")[2].partition(", or type ")[0]
    config, _ = compose(["model=llama_tiny", "data=jsonl", *shlex.split(advice)])
    assert config.data.paths == paths


@pytest.mark.parametrize(
    ("word", "letter", "typed"),
    [
        ("optimizer.lr=1e\u20133", "U+2013", "optimizer.lr=1e-3"),
        ("model=\u201cllama_tiny\u201d", "U+201C", 'model="llama_tiny"'),
        ("model=llama\u200b_tiny", "U+200B", "model=llama_tiny"),
        ("\u201cmodel=llama_tiny\u201d", "U+201C", '"model=llama_tiny"'),
        (" model=llama_tiny", "U+0020", "model=llama_tiny"),
    ],
)
def test_other_slips_are_typed_again(word: str, letter: str, typed: str) -> None:
    error = str(typing_slip(word))
    assert f": has {letter} " in error and error.endswith(f"; type {typed}")
