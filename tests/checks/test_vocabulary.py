"""Vocabularies too small for the data's tokenizer are refused by ``check``. Oracle: what the run itself refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from mgpu_pipe.checks.model import check_tokenizer_size
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.text.tokenizer import resolve_tokenizer
from mgpu_pipe.data.text.tokenizer_train import write_number_tokenizer
from mgpu_pipe.errors import ConfigError

SMALL = "model.config.vocab_size=10"


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (f"data=synthetic data.tokenizer=. {SMALL}", f"{SMALL}: the tokenizer has 300 entries; use at least 300"),
        ("data=synthetic model.config.vocab_size=1", "model.config.vocab_size=1: use at least 2"),
        ("data=synthetic ~model.config.vocab_size", "model.config.vocab_size=null: data.tokenizer=auto makes"),
    ],
)
def test_check_refuses_what_the_run_refuses(
    overrides: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_number_tokenizer(300, tmp_path)
    config, _ = compose(["model=llama_tiny", *overrides.split()])
    for refuse in (lambda: resolve_tokenizer(config, [], tmp_path / "cache"), lambda: check_tokenizer_size(config)):
        with pytest.raises(ConfigError) as refused:
            refuse()
        assert str(refused.value).startswith(error)


@pytest.mark.parametrize(
    ("overrides", "least"),
    [("", "use at least 257"), ("data=chat_jsonl data.chat_template=chatml", "use at least 259")],
)
def test_check_refuses_vocabularies_that_no_tokenizer_can_be_trained_for(overrides: str, least: str) -> None:
    config, _ = compose(["model=llama_tiny", SMALL, *overrides.split()])
    with pytest.raises(ConfigError) as refused:
        check_tokenizer_size(config)
    assert str(refused.value).startswith(f"{SMALL}: a byte-level tokenizer needs") and least in str(refused.value)


@pytest.mark.parametrize("overrides", ["", "data=synthetic model.config.vocab_size=2", "data.tokenizer=."])
def test_check_takes_vocabularies_that_fit(overrides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_number_tokenizer(300, tmp_path)
    check_tokenizer_size(compose(["model=llama_tiny", *overrides.split()])[0])
