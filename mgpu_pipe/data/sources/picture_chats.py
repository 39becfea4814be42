"""``data=picture_chats``: conversations with pictures and videos, a row each."""

from __future__ import annotations

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.images.picture_source import PictureChatSource
from mgpu_pipe.data.kinds import check_picture_chats, prepare_picture_chats

SOURCE = PictureChatSource(
    name="picture_chats",
    samples="picture_chats",
    documents="chat",
    keys=PictureChatConfig,
    reads=(*TEXT_KEYS, "messages_column"),
    reads_files=True,
    check=check_picture_chats,
    prepare=prepare_picture_chats,
)
