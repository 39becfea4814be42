"""``data=moving_shapes``: short clips of a moving shape, and the question which way it moves."""

from __future__ import annotations

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.kinds import check_picture_chats, prepare_picture_chats
from mgpu_pipe.data.source import DataSource

SOURCE = DataSource(
    name="moving_shapes",
    samples="picture_chats",
    documents="chat",
    keys=PictureChatConfig,
    reads=(*TEXT_KEYS, "messages_column"),
    check=check_picture_chats,
    prepare=prepare_picture_chats,
)
