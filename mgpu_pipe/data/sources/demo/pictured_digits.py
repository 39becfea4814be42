"""scikit-learn's handwritten digits, 1,797 grey pictures: with classes, written captions, or questions and answers."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.images.picture_source import ChatRules, PictureChatSource
from mgpu_pipe.data.sources.labelled_pictures import captioned, labelled
from mgpu_pipe.data.sources.picture_chats import check_picture_chats
from mgpu_pipe.errors import check_all

if TYPE_CHECKING:
    from mgpu_pipe.data.images.demo_pictures import Question
    from mgpu_pipe.data.images.visual_inputs import VisualInput


def labels(data: DataConfig) -> Iterator[str]:
    from mgpu_pipe.data.images.picture_files import digits_file

    with gzip.open(digits_file(), "rt", encoding="ascii") as file:
        yield from (str(int(float(line.rpartition(",")[2]))) for line in file)


def ask_about_digits(together: int) -> tuple[list[Question], list[VisualInput]]:
    from mgpu_pipe.data.images.demo_pictures import digit_questions
    from mgpu_pipe.data.images.picture_files import digits_file, read_digits
    from mgpu_pipe.data.images.visual_inputs import VisualInput

    digits = [int(label) for label in read_digits(digits_file())[1]]
    return list(digit_questions(digits)), [VisualInput((number,)) for number in range(len(digits))]


def build_digits(cache: Path, identity: str) -> Path:
    from mgpu_pipe.data.images.scan_images import prepare_digits

    return prepare_digits(cache)


def check_digits(model: ModelConfig, data: DataConfig) -> None:
    from mgpu_pipe.data.images.picture_files import digits_file

    check_all([lambda: check_picture_chats(model, data), digits_file])


SOURCES = (
    labelled(name="digits", layout="digits", reads_files=False, reads=("classes",), labels=labels),
    captioned(name="captioned_digits", layout="digits", reads_files=False),
    PictureChatSource(name="digit_questions", check=check_digits, rules=ChatRules(ask_about_digits, build_digits)),
)
