"""Pictures in prompts: how a vision-language model gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.image.decode import BadImageError, decode
from mgpu_pipe.data.image.grids import TOO_LONG, GridPixels, chat_pixels
from mgpu_pipe.data.image.keys import PictureChatConfig
from mgpu_pipe.data.image.parts import PartPixels
from mgpu_pipe.data.image.written import Written
from mgpu_pipe.data.text.conversations import PLACE
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.families.pictures import READ_QUESTIONS_WHOLE
from mgpu_pipe.objectives.pictures import Picture, Pictures, pictures_of

if TYPE_CHECKING:
    from mgpu_pipe.inference.load import LoadedRun


@dataclass(frozen=True)
class Sight:
    """What a prompt's pictures become.

    Attributes:
        kind: what the model wants to be given.
        written: the tokens that stand for a picture.
        pictures: in their order.
    """

    kind: Pictures
    written: Written
    pictures: list[Picture]

    @classmethod
    def of(cls, run: LoadedRun, files: Sequence[Path]) -> Sight | None:
        """The pictures in ``files``, as the run's model takes them; None without any where it asks for nothing else.

        Raises:
            BadInputError: a file that is no picture, or a model that reads none.
        """
        config = run.model.config
        if not files and config.model_type not in READ_QUESTIONS_WHOLE:
            return None
        if getattr(config, "image_token_id", None) is None:
            raise BadInputError(f"--image={files[0]}: {type(run.model).__name__} sees no pictures; leave it out")
        model = ModelConfig(path=str(run.source)) if run.config is None else run.config.model
        data = PictureChatConfig() if run.config is None else run.config.data
        assert isinstance(data, PictureChatConfig)
        pixels, kind = chat_pixels(data, model), pictures_of(config)
        shown = [_picture(file, pixels.channels) for file in files]
        parts = pixels.parts if isinstance(pixels, PartPixels) else None
        cut = pixels.grid if isinstance(pixels, GridPixels) else parts
        if cut is not None:
            places = [(1, *cut.places(image.height, image.width)) for image in shown]
            for file, sides in zip(files, places, strict=True):
                if not all(sides):
                    raise BadInputError(f"--image={file}: {TOO_LONG}; give another picture")
        else:
            places = [kind.blank().places] * len(shown)
        values = (torch.from_numpy(pixels.clip([pixels.fitted(image)])) for image in shown)
        assert run.tokenizer_folder is not None, "the caller has read it"
        written = Written(run.tokenizer_folder, parts)
        return cls(kind, written, [Picture(*one) for one in zip(values, places, strict=True)])

    def inputs(self, prompts: Sequence[Sequence[int]], device: torch.device) -> dict[str, torch.Tensor]:
        """What the model gets beside these expanded prompts, each of which has the pictures."""
        longest = max(map(len, prompts))
        rows = torch.tensor([[*[0] * (longest - len(ids)), *ids] for ids in prompts])
        if not self.pictures:
            return {name: value.to(device) for name, value in self.kind.asked(rows).items()}
        given = self.kind.inputs({"input_ids": rows, **self.kind.collated(rows, [self.pictures] * len(prompts))})
        return {name: value.to(device) for name, value in given.items() if name not in ("input_ids", "use_cache")}

    def expanded(self, ids: Sequence[int]) -> list[int]:
        """A prompt's token ids with the places of its pictures.

        Raises:
            BadInputError: it has not as many pictures as there are.
        """
        found, token = list(ids).count(self.kind.token), self.kind.token
        if found != len(self.pictures):
            fix = f"write {PLACE} where each belongs, or nowhere"
            raise BadInputError(f"the prompt has {found} places for {len(self.pictures)} pictures; {fix}")
        pictures = iter(self.pictures)
        several = ([int(one)] if one != token else self.written.ids(token, next(pictures).places) for one in ids)
        return [int(one) for part in several for one in part]


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
