"""The alphabet of transcripts: a number per character, as transformers' CTC tokenizers store it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.cache import write_json
from mgpu_pipe.data.text.tokenizer_folder import CONFIG, json_file
from mgpu_pipe.errors import ModelFolderError

VOCABULARY, PREPROCESSOR = "vocab.json", "preprocessor_config.json"
BLANK, UNKNOWN, SPACE = "<pad>", "<unk>", "|"
"""CTC's blank, the token of unknown characters, and the separator of words."""
STRANGE = "\ufffd"
"""Printed for a character without a number."""


def named_alphabet(model: ModelConfig, data: DataConfig) -> Path | None:
    """The folder of ``data.tokenizer``, else the model's where it has an alphabet; None: the data gives a new one."""
    if data.tokenizer != "auto":
        return local_folder(data.tokenizer, "data.tokenizer")
    return own_alphabet(model)


def own_alphabet(model: ModelConfig) -> Path | None:
    """The model's folder, if it has an alphabet; else None."""
    folder = None if model.path is None else local_folder(model.path)
    return folder if folder is not None and (folder / VOCABULARY).is_file() else None


@dataclass(frozen=True)
class Alphabet:
    """Characters of transcripts and their numbers.

    Attributes:
        numbers: of each character; special tokens too.
        blank: the number of CTC's blank.
        space: separator of words.
        unknown: the number of a strange character in evaluated texts; None without such a number.
    """

    numbers: Mapping[str, int]
    blank: int
    space: str = SPACE
    unknown: int | None = None

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Alphabet:
        """Builds an alphabet from every character in ``texts``."""
        there = sorted({character for text in texts for character in text} - {" "})
        return cls({name: number for number, name in enumerate((BLANK, UNKNOWN, SPACE, *there))}, 0, unknown=1)

    @classmethod
    def from_folder(cls, folder: Path) -> Alphabet:
        """Reads the alphabet in a folder; ModelFolderError if its vocabulary is not one number a character."""
        numbers = json_file(folder / VOCABULARY)
        settings = json_file(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        tokens = (("pad_token", BLANK), ("word_delimiter_token", SPACE), ("unk_token", UNKNOWN))
        blank, space, unknown = (_text(settings.get(name)) or usual for name, usual in tokens)
        whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers.values())
        if not whole or blank not in numbers or space not in numbers:
            raise ModelFolderError(
                f"{folder / VOCABULARY}: is no vocabulary of characters with {blank} and {space}; give another model, "
                "or data.tokenizer=<folder with one>"
            )
        return cls(numbers, numbers[blank], space, numbers.get(unknown))

    @property
    def between_words(self) -> int:
        return self.numbers[self.space]

    @property
    def model_fields(self) -> dict[str, Any]:
        """Configuration fields of a new model that learns this alphabet."""
        return {"vocab_size": self.size, "pad_token_id": self.blank}

    @property
    def size(self) -> int:
        return max(self.numbers.values()) + 1

    def normalise(self, text: str) -> str:
        """``text`` with single spaces, in the alphabet's only letter case if it has one."""
        text = " ".join(text.split())
        letters = [name for name in self.numbers if len(name) == 1 and name.upper() != name.lower()]
        if letters and all(name.isupper() for name in letters):
            return text.upper()
        return text.lower() if letters and all(name.islower() for name in letters) else text

    def strange(self, text: str) -> str:
        """Characters of a fitted text that have no number or mean something else."""
        return "".join(sorted(set(text) - (set(self.numbers) - {self.space} | {" "})))

    def encode(self, text: str) -> list[int]:
        """Encodes a fitted text as numbers; KeyError for a strange character without a number."""
        strange = self.strange(text) if self.unknown is not None else ""
        return [self.unknown if name in strange else self.numbers[self.space if name == " " else name] for name in text]  # type: ignore[misc]

    def decode(self, numbers: Iterable[int]) -> str:
        """Decodes numbers without blanks; skips special tokens except the unknown one."""
        names = {number: name for name, number in self.numbers.items() if len(name) == 1}
        if self.unknown is not None:
            names[self.unknown] = STRANGE
        text = "".join(names.get(number, "") for number in numbers)
        return " ".join(text.replace(self.space, " ").split())

    def write(self, folder: Path, sampling_rate: int, normalise: bool) -> None:
        """Writes files that transformers' ``Wav2Vec2Processor`` reads."""
        tokenizer = {
            "tokenizer_class": "Wav2Vec2CTCTokenizer",
            "pad_token": next(name for name, number in self.numbers.items() if number == self.blank),
            "unk_token": next((name for name, number in self.numbers.items() if number == self.unknown), None),
            "bos_token": None,
            "eos_token": None,
            "word_delimiter_token": self.space,
            "do_lower_case": False,
        }
        extractor = wave_extractor(sampling_rate, normalise)
        for name, content in ((VOCABULARY, dict(self.numbers)), (CONFIG, tokenizer), (PREPROCESSOR, extractor)):
            write_json(folder / name, content)


def wave_extractor(sampling_rate: int, normalise: bool) -> dict[str, Any]:
    """Settings of transformers' ``Wav2Vec2FeatureExtractor``."""
    return {
        "feature_extractor_type": "Wav2Vec2FeatureExtractor",
        "feature_size": 1,
        "sampling_rate": sampling_rate,
        "padding_value": 0.0,
        "padding_side": "right",
        "do_normalize": normalise,
        "return_attention_mask": True,
    }


def _text(token: Any) -> str | None:
    """Text of a token in a tokenizer's settings."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None
