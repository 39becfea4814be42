"""A data set of pictures with a class. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.arrays import ArrayData
from mgpu_pipe.data.fingerprint import Fingerprint
from mgpu_pipe.data.image.decode import MODES, pillow
from mgpu_pipe.data.image.keys import ImageConfig
from mgpu_pipe.data.image.pixels import Pixels
from mgpu_pipe.data.image.sources import FILES, read_picture
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.text.token_store import load_array

if TYPE_CHECKING:
    from PIL.Image import Image

    from mgpu_pipe.data.image.prepare import PreparedImages


class StoredPictures:
    """Pictures that were looked through.

    Args:
        folder: of the cache; see :mod:`mgpu_pipe.data.image.prepare`.
        channels: of the model.
    """

    def __init__(self, folder: Path, channels: int) -> None:
        self._channels, self._pixels = channels, None
        if (folder / "pixels.npy").is_file():
            self._pixels = load_array(folder / "pixels.npy")
        else:
            self._files = json.loads((folder / FILES).read_text(encoding="utf-8"))

    def picture(self, place: int) -> Image:
        """That of a place in the folder, in the model's channels."""
        if self._pixels is not None:
            image: Image = pillow()[0].fromarray(np.ascontiguousarray(self._pixels[place]))
            return image.convert(MODES[self._channels])
        known = Fingerprint(self._files["sizes"][place], tuple(self._files["blocks"][place]))
        offset = self._files["offsets"][place] if "offsets" in self._files else None
        return read_picture(Path(self._files["paths"][place]), known, self._channels, offset)


class LabelledImages(ArrayData):
    """One split. A sample is ``pixel_values``, float32 of shape (channels, size, size), and ``labels``, int64; where
    the tower's features are kept also its number, ``shown``, int64."""

    def __init__(self, config: RunConfig, split: Split, prepared: PreparedImages) -> None:
        super().__init__(config, split)
        assert isinstance(config.data, ImageConfig)
        self._data, self._pixels = config.data, Pixels.of(config.data, config.model)
        self._digest = prepared.digest if split == "train" else prepared.validation_digest
        self._pictures, self._labels = prepared.pictures(split), prepared.labels(split)
        self._stored = StoredPictures(prepared.folder_of(split), self._pixels.channels)

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def valid_units(self) -> NDArray[np.int64]:
        return np.ones(len(self._pictures), np.int64)

    def sample(self, index: int, random: np.random.Generator) -> Mapping[str, NDArray[Any]]:
        image = self.picture(index)
        fitted = (
            self._pixels.changed(image, self._data, random) if self.split == "train" else self._pixels.fitted(image)
        )
        shown = {"shown": np.int64(index)} if self._data.cache_features else {}
        return {"pixel_values": self._pixels.array(fitted), "labels": self._labels[index], **shown}

    def picture(self, index: int) -> Image:
        """As it is stored, in the model's channels."""
        return self._stored.picture(int(self._pictures[index]))
