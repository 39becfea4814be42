"""Pictures with classes or captions, in a folder for each class, in tables of paths, or in WebDataset's tar files; and
conversations with pictures and videos, a row each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mgpu_pipe.config.data_sources import TEXT_KEYS
from mgpu_pipe.config.schema import DataConfig, ModelConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.file_lists import entries_of
from mgpu_pipe.data.images.image_keys import CaptionConfig, ImageConfig, PictureChatSource, PictureSource
from mgpu_pipe.system.local_files import expand_home


def check_picture_chats(model: ModelConfig, data: DataConfig) -> None:
    """Checks that conversations have as many places as pictures, which the template takes; ConfigErrors has all."""
    from mgpu_pipe.data.images import check_images

    check_images.check_picture_chats(model, data)


def check_pictures(model: ModelConfig, data: DataConfig) -> None:
    """Checks packages, folders and lists, and that the model takes such pictures; ConfigErrors has all errors."""
    from mgpu_pipe.data.images import check_images

    check_images.check_pictures(model, data)


def labels_of_folders(data: DataConfig) -> Iterator[str]:
    from mgpu_pipe.data.images.picture_files import CLASS_FOLDERS, with_splits

    assert isinstance(data, ImageConfig)
    for root in with_splits(data)[0]:
        for name, paths in CLASS_FOLDERS.classes_in(expand_home(root)).items():
            yield from [name] * len(paths)


def labels_of_lists(data: DataConfig) -> Iterator[str]:
    paths = files.expand_paths(data.paths, "data.paths")
    for entry in entries_of(paths, data, "data.paths", "image_column", "label_column", "class"):
        if not entry.fault:
            yield entry.label


labelled = partial(PictureSource, check=check_pictures)
captioned = partial(labelled, samples="captioned_images", keys=CaptionConfig, reads=TEXT_KEYS)
SOURCES = (
    labelled(name="image_folder", layout="folder", reads=("classes",), labels=labels_of_folders),
    labelled(name="image_list", layout="list", reads=("classes", "label_column"), labels=labels_of_lists),
    labelled(name="image_tar", layout="tar", reads=("classes", "label_column")),
    captioned(name="captioned_folder", layout="folder"),
    captioned(name="captions", layout="list"),
    captioned(name="captioned_tar", layout="tar"),
    PictureChatSource(name="picture_chats", reads_files=True, check=check_picture_chats),
)
