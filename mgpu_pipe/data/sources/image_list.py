"""``data=image_list``: tables with the path of a picture and its class."""

from __future__ import annotations

from collections.abc import Iterator

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.checks_of_sources import check_pictures
from mgpu_pipe.data.images.image_keys import ImageConfig
from mgpu_pipe.data.images.picture_source import PictureSource
from mgpu_pipe.data.tables import entries_of


def labels(data: DataConfig) -> Iterator[str]:
    paths = files.expand_paths(data.paths, "data.paths")
    for entry in entries_of(paths, data, "data.paths", "image_column", "label_column", "class"):
        if not entry.fault:
            yield entry.label


SOURCE = PictureSource(
    name="image_list",
    layout="list",
    samples="labelled_images",
    keys=ImageConfig,
    reads=("classes", "label_column"),
    reads_files=True,
    labels=labels,
    check=check_pictures,
)
