"""The characters that transcripts are written in, each with a number, as transformers' CTC tokenizers keep them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import write_json
from mgpu_pipe.data.text.tokenizer_folder import CONFIG, json_file
from mgpu_pipe.errors import ModelFolderError

VOCABULARY, PREPROCESSOR = "vocab.json", "preprocessor_config.json"
BLANK, UNKNOWN, SPACE = "<pad>", "<unk>", "|"
"""What CTC puts between characters, what stands for others, and what stands between words."""


def own_alphabet(config: RunConfig) -> Path | None:
    """The model's folder, where it has an alphabet."""
    folder = None if config.model.path is None else local_folder(config.model.path)
    return folder if folder is not None and (folder / VOCABULARY).is_file() else None


@dataclass(frozen=True)
class Alphabet:
    """Attributes:
    numbers: of each character; special tokens too.
    blank: the number of CTC's blank.
    space: what stands between words.
    """

    numbers: Mapping[str, int]
    blank: int
    space: str = SPACE

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> Alphabet:
        """Of every character that there is."""
        there = sorted({character for text in texts for character in text} - {" "})
        return cls({name: number for number, name in enumerate((BLANK, UNKNOWN, SPACE, *there))}, 0)

    @classmethod
    def of_folder(cls, folder: Path) -> Alphabet:
        """As a model's or a run's folder keeps it.

        Raises:
            ModelFolderError: its vocabulary is not one number a character.
        """
        numbers = json_file(folder / VOCABULARY)
        settings = json_file(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        named = {name: _text(settings.get(name)) for name in ("pad_token", "word_delimiter_token")}
        blank, space = named["pad_token"] or BLANK, named["word_delimiter_token"] or SPACE
        whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers.values())
        if not whole or blank not in numbers or space not in numbers:
            raise ModelFolderError(
                f"{folder / VOCABULARY}: is no vocabulary of characters with {blank} and {space}; give another model, "
                "or data.tokenizer=<folder with one>"
            )
        return cls(numbers, numbers[blank], space)

    @property
    def between_words(self) -> int:
        return self.numbers[self.space]

    @property
    def model_fields(self) -> dict[str, Any]:
        """Of the configuration of a model that learns this alphabet anew."""
        return {"vocab_size": self.size, "pad_token_id": self.blank}

    @property
    def size(self) -> int:
        return max(self.numbers.values()) + 1

    def fitted(self, text: str) -> str:
        """``text`` with single spaces, in capitals or small letters where the alphabet has no others."""
        text = " ".join(text.split())
        letters = [name for name in self.numbers if len(name) == 1 and name.upper() != name.lower()]
        if letters and all(name.isupper() for name in letters):
            return text.upper()
        return text.lower() if letters and all(name.islower() for name in letters) else text

    def strange(self, text: str) -> str:
        """The characters of a fitted text that have no number, or stand for something else."""
        return "".join(sorted(set(text) - (set(self.numbers) - {self.space} | {" "})))

    def encode(self, text: str) -> list[int]:
        """The numbers of a fitted text without strange characters."""
        return [self.numbers[self.space if name == " " else name] for name in text]

    def decode(self, numbers: Iterable[int]) -> str:
        """Numbers without blanks as text; special tokens say nothing."""
        names = {number: name for name, number in self.numbers.items() if len(name) == 1}
        text = "".join(names.get(number, "") for number in numbers)
        return " ".join(text.replace(self.space, " ").split())

    def write(self, folder: Path, sampling_rate: int, normalise: bool) -> None:
        """As transformers' ``Wav2Vec2Processor`` reads it."""
        tokenizer = {
            "tokenizer_class": "Wav2Vec2CTCTokenizer",
            "pad_token": next(name for name, number in self.numbers.items() if number == self.blank),
            "unk_token": UNKNOWN if UNKNOWN in self.numbers else None,
            "bos_token": None,
            "eos_token": None,
            "word_delimiter_token": self.space,
            "do_lower_case": False,
        }
        extractor = {
            "feature_extractor_type": "Wav2Vec2FeatureExtractor",
            "feature_size": 1,
            "sampling_rate": sampling_rate,
            "padding_value": 0.0,
            "padding_side": "right",
            "do_normalize": normalise,
            "return_attention_mask": True,
        }
        for name, content in ((VOCABULARY, dict(self.numbers)), (CONFIG, tokenizer), (PREPROCESSOR, extractor)):
            write_json(folder / name, content)


def _text(token: Any) -> str | None:
    """A token as a tokenizer's settings give it."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None
