"""``data=image_tar``: tar files as WebDataset writes them, a picture and its class a sample."""

from __future__ import annotations

from mgpu_pipe.data.checks_of_sources import check_pictures
from mgpu_pipe.data.images.image_keys import ImageConfig
from mgpu_pipe.data.images.picture_source import PictureSource

SOURCE = PictureSource(
    name="image_tar",
    layout="tar",
    samples="labelled_images",
    keys=ImageConfig,
    reads=("classes", "label_column"),
    reads_files=True,
    check=check_pictures,
)
