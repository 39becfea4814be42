"""Checks of sources of pictures and recordings; each imports what it takes when it is called."""

from __future__ import annotations

from collections.abc import Iterator

from mgpu_pipe.config.schema import DataConfig, ModelConfig


def check_pictures(model: ModelConfig, data: DataConfig) -> None:
    from mgpu_pipe.data.images import check_images

    check_images.check_pictures(model, data)


def check_picture_chats(model: ModelConfig, data: DataConfig) -> None:
    from mgpu_pipe.data.images import check_images

    check_images.check_picture_chats(model, data)


def check_recordings(model: ModelConfig, data: DataConfig) -> None:
    from mgpu_pipe.data.audio import check_recordings

    check_recordings.check_recordings(model, data)


def labels_of_recordings(data: DataConfig) -> Iterator[str]:
    from mgpu_pipe.data.audio import check_recordings

    return check_recordings.labels_of_recordings(data)
