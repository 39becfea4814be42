"""Pictures in prompts: how a vision-language model gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.image.decode import BadImageError, decode
from mgpu_pipe.data.image.keys import PictureChatConfig
from mgpu_pipe.data.image.pixels import Pixels
from mgpu_pipe.data.text.conversations import PLACE
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.models.fields import places_of

if TYPE_CHECKING:
    from mgpu_pipe.inference.load import LoadedRun


@dataclass(frozen=True)
class Sight:
    """What a prompt's pictures become.

    Attributes:
        pixels: the values of the pictures, (pictures, channels, height, width).
        token: the id of the token that stands for a picture.
        places: how many of them one takes.
    """

    pixels: torch.Tensor
    token: int
    places: int

    @classmethod
    def of(cls, run: LoadedRun, files: Sequence[Path]) -> Sight | None:
        """The pictures in ``files``, as the run's model takes them; None without any.

        Raises:
            BadInputError: a file that is no picture, or a model that reads none.
        """
        if not files:
            return None
        config = run.model.config
        if getattr(config, "image_token_id", None) is None:
            raise BadInputError(f"--image={files[0]}: {type(run.model).__name__} sees no pictures; leave it out")
        model = ModelConfig(path=str(run.source)) if run.config is None else run.config.model
        data = PictureChatConfig() if run.config is None else run.config.data
        assert isinstance(data, PictureChatConfig)
        pixels = Pixels.of(data, model)
        shown = np.stack([pixels.array(pixels.fitted(_picture(file, pixels.channels))) for file in files])
        return cls(torch.from_numpy(shown), int(config.image_token_id), places_of(config))

    def expanded(self, ids: Sequence[int]) -> list[int]:
        """A prompt's token ids with the places of its pictures.

        Raises:
            BadInputError: it has not as many pictures as there are.
        """
        found = list(ids).count(self.token)
        if found != len(self.pixels):
            fix = f"write {PLACE} where each belongs, or nowhere"
            raise BadInputError(f"the prompt has {found} places for {len(self.pixels)} pictures; {fix}")
        return [one for token in ids for one in [token] * (self.places if token == self.token else 1)]


def with_places(text: str, pictures: int) -> str:
    """``text`` with a place for each picture in front, where it has none of its own."""
    return text if PLACE in text else PLACE * pictures + text


def _picture(file: Path, channels: int) -> Any:
    try:
        return decode(file.expanduser().read_bytes(), channels)
    except OSError as error:
        raise BadInputError(f"--image={file}: cannot be read ({error.strerror}); give a picture's file") from error
    except BadImageError as error:
        raise BadInputError(f"--image={file}: {error}; give another picture") from error
