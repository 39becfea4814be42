"""``data=digits``: scikit-learn's handwritten digits, 1,797 grey pictures and their classes."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.checks_of_sources import check_pictures
from mgpu_pipe.data.images.image_keys import ImageConfig
from mgpu_pipe.data.images.picture_source import PictureSource


def labels(data: DataConfig) -> Iterator[str]:
    from mgpu_pipe.data.images.picture_files import digits_file

    with gzip.open(digits_file(), "rt", encoding="ascii") as file:
        yield from (str(int(float(line.rpartition(",")[2]))) for line in file)


SOURCE = PictureSource(
    name="digits",
    layout="digits",
    samples="labelled_images",
    keys=ImageConfig,
    reads=("classes",),
    labels=labels,
    check=check_pictures,
)
