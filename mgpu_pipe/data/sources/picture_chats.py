"""``data=picture_chats``: conversations with pictures and videos, a row each."""

from __future__ import annotations

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.data.checks_of_sources import check_picture_chats
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.images.picture_source import PictureChatSource

SOURCE = PictureChatSource(
    name="picture_chats",
    documents="chat",
    keys=PictureChatConfig,
    reads=(*TEXT_KEYS, "messages_column"),
    reads_files=True,
    check=check_picture_chats,
)
