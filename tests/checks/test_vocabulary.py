"""Vocabularies too small for the data's tokenizer are refused by ``check``. Oracle: what the run itself refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mgpu_pipe.checks.check_model import check_tokenizer_size
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.data.audio.alphabet import Alphabet
from mgpu_pipe.data.audio.transcript_tokens import words_of
from mgpu_pipe.data.text.tokenizer import resolve_tokenizer
from mgpu_pipe.data.text.tokenizer_train import write_number_tokenizer
from mgpu_pipe.errors import ConfigError, ModelFolderError

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
    for refuse in (
        lambda: resolve_tokenizer(config.model, config.data, config.objective, [], tmp_path / "cache"),
        lambda: check_tokenizer_size(config.model, config.data, config.objective),
    ):
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
        check_tokenizer_size(config.model, config.data, config.objective)
    assert str(refused.value).startswith(f"{SMALL}: a byte-level tokenizer needs") and least in str(refused.value)


@pytest.mark.parametrize("overrides", ["", "data=synthetic model.config.vocab_size=2", "data.tokenizer=."])
def test_check_takes_vocabularies_that_fit(overrides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_number_tokenizer(300, tmp_path)
    config = compose(["model=llama_tiny", *overrides.split()])[0]
    check_tokenizer_size(config.model, config.data, config.objective)


WHISPER = ("model=whisper_tiny", "objective=speech_seq2seq", "data=audio_list")


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        ("model.config.vocab_size=257", "model.config.vocab_size=257: a byte-level tokenizer needs 256 bytes and the"),
        ("~model.config.vocab_size", "model.config.vocab_size=null: data.tokenizer=auto makes"),
        (f"data.tokenizer=. {SMALL}", f"{SMALL}: the tokenizer has 300 entries; use at least 300"),
    ],
)
def test_check_refuses_vocabularies_too_small_for_transcripts(
    overrides: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_number_tokenizer(300, tmp_path)
    config, _ = compose([*WHISPER, *overrides.split()])
    unread: Any = None
    refusals: list[Callable[[], object]] = [
        lambda: words_of(config.model, config.data, config.objective, [], unread, tmp_path),
        lambda: check_tokenizer_size(config.model, config.data, config.objective),
    ]
    for refuse in refusals:
        with pytest.raises(ConfigError) as refused:
            refuse()
        assert str(refused.value).startswith(error)
    config = compose(WHISPER)[0]
    check_tokenizer_size(config.model, config.data, config.objective)


def test_check_reads_the_alphabet_of_recordings(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder, letters in ((model, "ab"), (other, "abcdef")):
        folder.mkdir()
        Alphabet.from_texts(letters).write(folder, 8000, normalise=True)
    (model / "config.json").write_text('{"model_type": "wav2vec2", "vocab_size": 5}')
    given = ("objective=ctc", "data=audio_list", "model=hf", f"model.path={model}")
    config = compose(given)[0]
    check_tokenizer_size(config.model, config.data, config.objective)
    wider = compose([*given, f"data.tokenizer={other}"])[0]
    with pytest.raises(
        ConfigError, match=r"vocab_size=5: the alphabet of .*other has 9 entries; use at least 9, or the"
    ):
        check_tokenizer_size(wider.model, wider.data, wider.objective)
    (other / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(ModelFolderError, match=r"vocab\.json: is no vocabulary of characters"):
        check_tokenizer_size(wider.model, wider.data, wider.objective)
