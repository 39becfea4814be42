"""Prepares each kind of samples; imports what that takes when it is called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mgpu_pipe.config.schema import DataConfig, RunConfig
from mgpu_pipe.data.cache import Progress

if TYPE_CHECKING:
    from mgpu_pipe.data.samples import Prepared


def prepare_packed_text(config: RunConfig, progress: Progress | None) -> Prepared:
    from mgpu_pipe.data.text.prepare_text import prepare

    return prepare(config, progress)


def prepare_labelled_text(config: RunConfig, progress: Progress | None) -> Prepared:
    from mgpu_pipe.data.text.labels import prepare_labelled

    return prepare_labelled(config, progress)


def prepare_pairs(config: RunConfig, progress: Progress | None) -> Prepared:
    from mgpu_pipe.data.text import pairs

    return pairs.prepare_pairs(config, progress)


def prepare_preferences(config: RunConfig, progress: Progress | None) -> Prepared:
    from mgpu_pipe.data.text import preferences

    return preferences.prepare_preferences(config, progress)


def prepare_unpaired(config: RunConfig, progress: Progress | None) -> Prepared:
    from mgpu_pipe.data.text import unpaired

    return unpaired.prepare_unpaired(config, progress)


def prepare_embedding_pairs(config: RunConfig, progress: Progress | None) -> Prepared:
    from mgpu_pipe.data.text import prepare_embedding_pairs as pairs

    return pairs.prepare_embedding_pairs(config, progress)


def prepare_scored_pairs(config: RunConfig, progress: Progress | None) -> Prepared:
    from mgpu_pipe.data.text import prepare_scored_pairs as pairs

    return pairs.prepare_scored_pairs(config, progress)


def prepare_labelled_images(config: RunConfig, progress: Progress | None) -> Prepared:
    from mgpu_pipe.data.images.prepare_images import prepare_images

    return prepare_images(config, progress)


def prepare_captioned_images(config: RunConfig, progress: Progress | None) -> Prepared:
    from mgpu_pipe.data.images.prepare_captions import prepare_captions

    return prepare_captions(config, progress)


def prepare_picture_chats(config: RunConfig, progress: Progress | None) -> Prepared:
    from mgpu_pipe.data.images import prepare_chats

    return prepare_chats.prepare_picture_chats(config, progress)


def prepare_speech(config: RunConfig, progress: Progress | None) -> Prepared:
    from mgpu_pipe.data.audio import prepare_audio

    return prepare_audio.prepare_speech(config, progress)


def prepare_labelled_sounds(config: RunConfig, progress: Progress | None) -> Prepared:
    from mgpu_pipe.data.audio import prepare_labelled

    return prepare_labelled.prepare_labelled_sounds(config, progress)


def prepare_tagged_sounds(config: RunConfig, progress: Progress | None) -> Prepared:
    from mgpu_pipe.data.audio import prepare_labelled

    return prepare_labelled.prepare_tagged_sounds(config, progress)


def check_pictures(config: RunConfig) -> None:
    from mgpu_pipe.data.images import check_images

    check_images.check_pictures(config.model, config.data)


def check_picture_chats(config: RunConfig) -> None:
    from mgpu_pipe.data.images import check_images

    check_images.check_picture_chats(config)


def check_recordings(config: RunConfig) -> None:
    from mgpu_pipe.data.audio import check_recordings

    check_recordings.check_recordings(config.model, config.data)


def labels_of_recordings(data: DataConfig) -> Iterator[str]:
    from mgpu_pipe.data.audio import check_recordings

    return check_recordings.labels_of_recordings(data)
