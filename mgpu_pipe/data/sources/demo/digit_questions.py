"""``data=digit_questions``: scikit-learn's handwritten digits with written questions and answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.checks_of_sources import check_picture_chats
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.images.picture_source import ChatRules, PictureChatSource
from mgpu_pipe.errors import check_all

if TYPE_CHECKING:
    from mgpu_pipe.data.images.demo_pictures import Question
    from mgpu_pipe.data.images.visual_inputs import VisualInput


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


SOURCE = PictureChatSource(
    name="digit_questions",
    documents="chat",
    keys=PictureChatConfig,
    reads=(*TEXT_KEYS, "messages_column"),
    check=check_digits,
    rules=ChatRules(ask_about_digits, build_digits),
)
