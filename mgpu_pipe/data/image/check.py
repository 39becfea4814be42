"""What can be known to be wrong with pictures before any is looked at. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.image.chat_rows import COLUMN, QUESTIONS, SHAPES, ChatRow, first_rows
from mgpu_pipe.data.image.clips import pyav
from mgpu_pipe.data.image.decode import pillow
from mgpu_pipe.data.image.grids import chat_pixels
from mgpu_pipe.data.image.keys import ImageConfig, PictureChatConfig
from mgpu_pipe.data.image.pixels import Pixels
from mgpu_pipe.data.image.sources import DIGITS, digits_file, entries
from mgpu_pipe.data.image.tars import TARS, check_tars
from mgpu_pipe.data.text.chat_templates import check_chat
from mgpu_pipe.data.text.conversations import is_trained
from mgpu_pipe.data.text.tokenizer import model_field
from mgpu_pipe.errors import BadInputError, ConfigError, ConfigErrors, DataError
from mgpu_pipe.families.pictures import READ_QUESTIONS_WHOLE, SEE_VIDEOS


def check_pictures(config: RunConfig) -> None:
    """The packages are there, folders hold pictures, lists name files, and the model takes such pictures.

    Raises:
        ConfigErrors: the errors found.
    """
    data = config.data
    assert isinstance(data, ImageConfig)
    checks: list[Callable[[], object]] = [pillow, lambda: Pixels.of(data, config.model)]
    if data.source in DIGITS:
        checks.append(digits_file)
    else:
        looked: Callable[[list[str], str], object] = check_tars if data.source in TARS else partial(entries, data)
        checks.append(lambda: looked(data.paths, "data.paths"))
        if data.validation_paths:
            checks.append(lambda: looked(data.validation_paths, "data.validation_paths"))
    _raise_all(checks)


def check_picture_chats(config: RunConfig) -> None:
    """The same, and conversations have as many places as pictures, and the chat template takes them.

    Raises:
        ConfigErrors: the errors found.
    """
    data = config.data
    assert isinstance(data, PictureChatConfig)

    def rows(patterns: list[str], key: str) -> None:
        looked = first_rows(data, patterns, key)
        check_chat(config, (looked[0].text, looked[0].origin))
        check_rows(config, looked)

    checks: list[Callable[[], object]] = [pillow, lambda: chat_pixels(data, config.model)]
    if data.source == QUESTIONS:
        checks.append(digits_file)
    elif data.source == SHAPES:
        checks.append(lambda: sees_videos(config, f"data.source={SHAPES}"))
    elif data.paths:
        checks.append(lambda: rows(data.paths, "data.paths"))
        if data.validation_paths:
            checks.append(lambda: rows(data.validation_paths, "data.validation_paths"))
    _raise_all(checks)


def check_rows(config: RunConfig, rows: Iterable[ChatRow]) -> None:
    """Where a row has a video, the model takes it; where it is a file, PyAV is there; where the model reads what stands
    before an answer from both sides, one answer alone is learned.

    Raises:
        ConfigError: not so.
        DataError: several answers.
    """
    kind = config.model.type or model_field(config.model, "model_type")
    for row in rows:
        if kind in READ_QUESTIONS_WHOLE:
            messages = json.loads(row.text)[COLUMN]
            answers = sum(one["role"] == "assistant" and is_trained(one) for one in messages)
            if answers > 1:
                reason = f"has {answers} answers to learn, and {kind} reads all before the first from both sides"
                raise DataError(f'{row.origin}: {reason}; give the others "train": false, or a row each')
        if any(row.videos):
            sees_videos(config, row.origin)
        if any(video and path.is_file() for path, video in zip(row.pictures, row.videos, strict=True)):
            pyav()


def sees_videos(config: RunConfig, origin: str) -> None:
    """The model is given videos; raises ConfigError otherwise."""
    kind = config.model.type or model_field(config.model, "model_type")
    if kind not in SEE_VIDEOS:
        reason = f"{origin} has a video, which no model of {kind} is given"
        raise ConfigError("model.type", kind, f"use one of {', '.join(SEE_VIDEOS)}", reason)


def _raise_all(checks: Sequence[Callable[[], object]]) -> None:
    errors = list[BadInputError]()
    for check in checks:
        try:
            check()
        except BadInputError as error:
            errors.append(error)
    if errors:
        raise ConfigErrors(errors)
