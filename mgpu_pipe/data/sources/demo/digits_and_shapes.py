"""Pictures of the recipes: scikit-learn's handwritten digits, 1,797 grey pictures, with classes, written captions, or
questions and answers; and short clips of a moving shape, with the question which way it moves."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.cache import build_once
from mgpu_pipe.data.images.image_keys import ChatRules, PictureChatSource
from mgpu_pipe.data.sources.picture_sets import captioned, check_picture_chats, labelled
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


def ask_about_shapes(together: int) -> tuple[list[Question], list[VisualInput]]:
    from mgpu_pipe.data.images.demo_pictures import FRAMES, SECONDS, moving_shapes
    from mgpu_pipe.data.images.visual_inputs import VisualInput

    _, questions = moving_shapes()
    moments = tuple(number * SECONDS for number in range(FRAMES))
    firsts = range(0, len(questions) * FRAMES, FRAMES)
    visuals = [
        VisualInput(tuple(range(first, first + FRAMES)), together * SECONDS, moments=moments) for first in firsts
    ]
    return questions, visuals


def build_frames(cache: Path, identity: str) -> Path:
    folder = cache / "images" / identity
    build_once(folder, _write_frames)
    return folder


def _write_frames(out: Path) -> dict[str, Any]:
    import numpy as np

    from mgpu_pipe.data.images.demo_pictures import moving_shapes

    frames, _ = moving_shapes()
    np.save(out / "pixels.npy", frames)
    return {"pictures": len(frames), "bad": []}


def check_shapes(model: ModelConfig, data: DataConfig) -> None:
    """Checks that the model takes videos."""
    from mgpu_pipe.data.images.check_images import sees_videos

    check_all([lambda: check_picture_chats(model, data), lambda: sees_videos(model, "data.source=moving_shapes")])


SOURCES = (
    labelled(name="digits", layout="digits", reads_files=False, reads=("classes",), labels=labels),
    captioned(name="captioned_digits", layout="digits", reads_files=False),
    PictureChatSource(name="digit_questions", check=check_digits, rules=ChatRules(ask_about_digits, build_digits)),
    PictureChatSource(name="moving_shapes", check=check_shapes, rules=ChatRules(ask_about_shapes, build_frames)),
)
