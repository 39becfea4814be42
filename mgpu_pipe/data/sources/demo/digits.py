"""``data=digits``: scikit-learn's handwritten digits, 1,797 grey pictures and their classes."""

from __future__ import annotations

from mgpu_pipe.data.images.image_keys import ImageConfig
from mgpu_pipe.data.kinds import check_pictures, prepare_labelled_images
from mgpu_pipe.data.source import DataSource

SOURCE = DataSource(
    name="digits",
    samples="labelled_images",
    keys=ImageConfig,
    reads=("classes",),
    check=check_pictures,
    prepare=prepare_labelled_images,
)
