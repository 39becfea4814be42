"""``data=image_folder``: a folder with a folder of pictures for each class."""

from __future__ import annotations

from mgpu_pipe.data.images.image_keys import ImageConfig
from mgpu_pipe.data.kinds import check_pictures, prepare_labelled_images
from mgpu_pipe.data.source import DataSource

SOURCE = DataSource(
    name="image_folder",
    samples="labelled_images",
    keys=ImageConfig,
    reads=("classes",),
    reads_files=True,
    check=check_pictures,
    prepare=prepare_labelled_images,
)
