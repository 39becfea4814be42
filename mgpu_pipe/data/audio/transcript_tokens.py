"""Transcript tokens of a decoder: a tokenizer in a folder that transformers reads."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.audio.alphabet import PREPROCESSOR, STRANGE
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.cache import build_once, digest_of, write_json
from mgpu_pipe.data.model_field import model_field, transcripts_vocab_size
from mgpu_pipe.data.text.tokenizer import resolve_tokenizer
from mgpu_pipe.data.text.tokenizer_folder import CONFIG, FILES, TOKENIZER, existing_file, json_file, special_tokens
from mgpu_pipe.data.text.tokenizer_train import END_OF_TEXT, train_bpe
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FORMAT = 1
START = "<|startoftranscript|>"
"""Start token of Whisper's tokenizer."""


@dataclass(frozen=True)
class Words:
    """A tokenizer of transcripts.

    Attributes:
        folder: of the tokenizer.
    """

    folder: Path
    between_words: ClassVar[int] = -1
    """Words have no separator token."""

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.folder / TOKENIZER))

    @cached_property
    def end(self) -> int:
        """End token of a transcript."""
        token = self._tokenizer.token_to_id(special_tokens(self.folder)["eos_token"])
        assert token is not None  # it was looked up when the folder was made
        return token

    @cached_property
    def start(self) -> int:
        """First token of the decoder; the end token where the tokenizer has no start token."""
        token = self._tokenizer.token_to_id(START)
        return self.end if token is None else token

    @property
    def model_fields(self) -> dict[str, Any]:
        """Configuration fields of a new model that writes these tokens."""
        ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), self.end)
        suppressed = dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"))
        return {**ends, **suppressed, "decoder_start_token_id": self.start}

    def normalise(self, text: str) -> str:
        """``text`` with single spaces."""
        return " ".join(text.split())

    @cached_property
    def unknown(self) -> int | None:
        """The unknown token; None in a byte-level tokenizer such as Whisper's, which encodes every character."""
        named = special_tokens(self.folder).get("unk_token")
        number = None if named is None else self._tokenizer.token_to_id(named)
        return None if number == self.end else number

    def strange(self, text: str) -> str:
        """Characters of ``text`` without a token."""
        if self.unknown is None:
            return ""
        return "".join(
            sorted(character for character in set(text) if self.unknown in self._tokenizer.encode(character).ids)
        )

    def encode(self, text: str) -> list[int]:
        """Target of the decoder: the tokenizer's prefix without the start token, the text, the end
        token."""
        ids: list[int] = self._tokenizer.encode(text).ids
        ids = ids[1:] if ids[:1] == [self.start] else ids
        return ids if ids[-1:] == [self.end] else [*ids, self.end]

    def decode(self, numbers: Iterable[int]) -> str:
        """Decodes up to the end token; skips special tokens except the unknown one."""
        pieces = [list[int]()]
        for number in numbers:
            if number == self.end:
                break
            if number == self.unknown:
                pieces.append([])
            else:
                pieces[-1].append(number)
        return self.normalise(STRANGE.join(self._tokenizer.decode(piece, skip_special_tokens=True) for piece in pieces))


def words_of(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, texts: Iterable[str], window: LogMel, cache: Path
) -> Words:
    """The transcript tokenizer, else trained on these texts, in the cache; ConfigError or ModelFolderError if it does
    not fit."""
    if existing_file(model, data) is None:
        return Words(_train(model, list(texts), window, cache))
    known = resolve_tokenizer(model, data, objective, [], cache)
    folder = cache / "words" / digest_of(_FORMAT, known.digest, window.settings())

    def copy(out: Path) -> dict[str, Any]:
        for name in FILES:
            if (known.folder / name).is_file():
                shutil.copyfile(known.folder / name, out / name)
        write_json(out / PREPROCESSOR, window.settings())
        return {}

    build_once(folder, copy)
    words = Words(folder)
    if model.path is not None:
        for name, expected in (("decoder_start_token_id", words.start), ("eos_token_id", words.end)):
            if (said := model_field(model, name)) not in (None, expected):
                reason = f"the model's {name} is {said}, the tokenizer's {expected}"
                raise ConfigError("data.tokenizer", data.tokenizer, "use the model's own tokenizer", reason)
    return words


def _train(model: ModelConfig, texts: list[str], window: LogMel, cache: Path) -> Path:
    size = transcripts_vocab_size(model)
    folder = cache / "words" / digest_of(_FORMAT, "trained", texts, size, window.settings())

    def train(out: Path) -> dict[str, Any]:
        from tokenizers import Tokenizer, processors

        train_bpe(texts, size, out, (START,))
        tokenizer = Tokenizer.from_file(str(out / TOKENIZER))
        around = f"{START} $A {END_OF_TEXT}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=[(name, tokenizer.token_to_id(name)) for name in (START, END_OF_TEXT)]
        )
        tokenizer.save(str(out / TOKENIZER))
        write_json(out / CONFIG, {**json_file(out / CONFIG), "processor_class": "WhisperProcessor"})
        write_json(out / PREPROCESSOR, {**window.settings(), "processor_class": "WhisperProcessor"})
        return {}

    build_once(folder, train)
    return folder
