"""Preflight checks of pictures, before any is decoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mgpu_pipe.architectures.find import families_with, family_of, sight_of
from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.audio.chat_sounds import chat_window, hears_sounds
from mgpu_pipe.data.audio.decode_audio import soundfile
from mgpu_pipe.data.bad_samples import check_rule
from mgpu_pipe.data.images.chat_rows import COLUMN, ChatRow, first_rows
from mgpu_pipe.data.images.decode_image import pillow
from mgpu_pipe.data.images.grids import chat_pixels
from mgpu_pipe.data.images.image_keys import ImageConfig, PictureChatConfig, layout_of
from mgpu_pipe.data.images.picture_files import check_tars, digits_file, entries, with_splits
from mgpu_pipe.data.images.pixels import Pixels
from mgpu_pipe.data.images.videos import pyav
from mgpu_pipe.data.model_field import model_field
from mgpu_pipe.data.text.chat_templates import check_chat, places_taken
from mgpu_pipe.data.text.conversations import is_trained
from mgpu_pipe.errors import ConfigError, ConfigErrors, DataError, check_all
from mgpu_pipe.system.local_files import is_file


def check_pictures(model: ModelConfig, data: DataConfig) -> None:
    """Checks packages, folders, lists, and that the model takes such pictures; ConfigErrors has all errors."""
    assert isinstance(data, ImageConfig)

    def pixels() -> None:
        if not model.path or local_folder(model.path).is_dir():  # another check names a missing folder
            Pixels.from_config(data, model)

    checks: list[Callable[[], object]] = [pillow, pixels, lambda: check_rule(data), lambda: check_augmentation(data)]
    layout = layout_of(data)
    if layout == "digits":
        checks.append(digits_file)
    else:
        looked: Callable[[list[str], str], object] = partial(check_tars if layout == "tar" else entries, data)
        try:
            paths, held_out = with_splits(data)
        except ConfigError as error:
            raise ConfigErrors([error]) from error
        checks.append(lambda: looked(paths, "data.paths"))
        if held_out:
            checks.append(lambda: looked(held_out, "data.validation_paths"))
    check_all(checks)


def check_augmentation(data: ImageConfig) -> None:
    """Checks the ranges of ``data.augment``; ConfigErrors has all errors."""
    errors = list(data.augment.errors(data.random_crop < 1, not isinstance(data, PictureChatConfig)))
    if errors:
        raise ConfigErrors(errors)


def check_picture_chats(model: ModelConfig, data: DataConfig) -> None:
    """Checks that conversations have as many places as pictures, which the template takes; or ConfigErrors."""
    assert isinstance(data, PictureChatConfig)

    def rows(patterns: list[str], key: str) -> None:
        taken = places_taken(str(model.type or model_field(model, "model_type")), model_field(model, "audio_config"))
        looked = first_rows(data, patterns, key, partial(check_row, model), taken)
        # Rows have normalised messages.
        plain = replace(data, messages_column=COLUMN, format="messages")
        check_chat(model, plain, [(row.text, row.origin) for row in looked])

    checks: list[Callable[[], object]] = [
        *(pillow, lambda: chat_pixels(data, model), lambda: chat_window(model)),
        lambda: check_rule(data),
    ]
    checks.append(lambda: check_augmentation(data))
    if data.paths:
        checks.append(lambda: rows(data.paths, "data.paths"))
        if data.validation_paths:
            checks.append(lambda: rows(data.validation_paths, "data.validation_paths"))
    check_all(checks)


def check_row(model: ModelConfig, row: ChatRow) -> None:
    """Checks that the model takes a row's files, that packages read them, and that a model with bidirectional
    attention before an answer learns only one answer.

    Raises:
        ConfigError: the model or the installation cannot take the row.
        DataError: several answers.
    """
    kind = model.type or model_field(model, "model_type")
    if sight_of(str(kind)).both_ways == "questions":
        messages = json.loads(row.text)[COLUMN]
        answers = sum(message["role"] == "assistant" and is_trained(message) for message in messages)
        if answers > 1:
            reason = f"has {answers} answers to learn, and {kind} reads all before the first from both sides"
            raise DataError(f'{row.origin}: {reason}; give the others "train": false, or a row each')
    family = family_of(str(kind))
    if family.recordings and family.sight is None and len(row.sounds) > sum(row.sounds):
        seeing = families_with(lambda family: family.sight is not None)
        reason = f"{row.origin} has a picture or a video, and models of {kind} take none"
        raise ConfigError("model.type", kind, f"use one of {', '.join(seeing)}", reason)
    if any(row.sounds):
        hears_sounds(model, row.origin)
        soundfile()
    if any(row.videos):
        sees_videos(model, row.origin)
    if any(video and is_file(path) for path, video in zip(row.pictures, row.videos, strict=True)):
        pyav()


def sees_videos(model: ModelConfig, origin: str) -> None:
    """Raises ConfigError where the model takes no videos."""
    kind = model.type or model_field(model, "model_type")
    if not sight_of(str(kind)).videos:
        seeing = families_with(lambda family: family.sight is not None and family.sight.videos)
        reason = f"{origin} has a video, and models of {kind} take none"
        raise ConfigError("model.type", kind, f"use one of {', '.join(seeing)}", reason)
