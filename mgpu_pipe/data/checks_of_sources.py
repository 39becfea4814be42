"""Checks of sources of pictures and recordings; each imports what it takes when it is called."""

from __future__ import annotations

from collections.abc import Iterator

from mgpu_pipe.config.schema import DataConfig, RunConfig


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
