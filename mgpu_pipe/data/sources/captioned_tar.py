"""``data=captioned_tar``: tar files as WebDataset writes them, a picture and its caption a sample."""

from __future__ import annotations

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.data.checks_of_sources import check_pictures
from mgpu_pipe.data.images.image_keys import CaptionConfig
from mgpu_pipe.data.images.picture_source import PictureSource

SOURCE = PictureSource(
    name="captioned_tar",
    layout="tar",
    samples="captioned_images",
    keys=CaptionConfig,
    reads=TEXT_KEYS,
    reads_files=True,
    check=check_pictures,
)
