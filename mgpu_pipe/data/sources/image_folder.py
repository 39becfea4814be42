"""``data=image_folder``: a folder with a folder of pictures for each class."""

from __future__ import annotations

from collections.abc import Iterator

from mgpu_pipe.config.schema import DataConfig
from mgpu_pipe.data.checks_of_sources import check_pictures
from mgpu_pipe.data.images.image_keys import ImageConfig
from mgpu_pipe.data.images.picture_source import PictureSource
from mgpu_pipe.system.local_files import expand_home


def labels(data: DataConfig) -> Iterator[str]:
    from mgpu_pipe.data.images.picture_files import CLASS_FOLDERS, with_splits

    assert isinstance(data, ImageConfig)
    for root in with_splits(data)[0]:
        for name, paths in CLASS_FOLDERS.classes_in(expand_home(root)).items():
            yield from [name] * len(paths)


SOURCE = PictureSource(
    name="image_folder",
    layout="folder",
    samples="labelled_images",
    keys=ImageConfig,
    reads=("classes",),
    reads_files=True,
    labels=labels,
    check=check_pictures,
)
