"""``data=picture_chats``: conversations with pictures and videos, a row each."""

from __future__ import annotations

from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data.images.picture_source import PictureChatSource


def check_picture_chats(model: ModelConfig, data: DataConfig) -> None:
    """Checks that conversations have as many places as pictures, and that the chat template takes them.

    Raises:
        ConfigErrors: the errors found.
    """
    from mgpu_pipe.data.images import check_images

    check_images.check_picture_chats(model, data)


SOURCE = PictureChatSource(name="picture_chats", reads_files=True, check=check_picture_chats)
