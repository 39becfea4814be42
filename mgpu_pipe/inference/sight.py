"""Pictures and videos in prompts: how a vision-language model gets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.image.clips import ONE, chosen_frames, frames_of, look, pyav
from mgpu_pipe.data.image.decode import SUFFIXES, BadImageError, decode
from mgpu_pipe.data.image.grids import TOO_LONG, GridPixels, chat_pixels
from mgpu_pipe.data.image.keys import PictureChatConfig
from mgpu_pipe.data.image.parts import PartPixels
from mgpu_pipe.data.image.shown import Thing
from mgpu_pipe.data.image.written import Written
from mgpu_pipe.data.text.conversations import PLACE, VIDEO
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.families.pictures import READ_QUESTIONS_WHOLE, SEE_VIDEOS
from mgpu_pipe.objectives.pictures import OwnSizes, Picture, Pictures, pictures_of

if TYPE_CHECKING:
    from mgpu_pipe.inference.load import LoadedRun


@dataclass(frozen=True)
class Sight:
    """What a prompt's pictures and videos become.

    Attributes:
        kind: what the model wants to be given.
        written: the tokens that stand for one.
        pictures, videos: in their order.
    """

    kind: Pictures
    written: Written
    pictures: list[Picture]
    videos: list[Picture]

    @classmethod
    def of(cls, run: LoadedRun, files: Sequence[Path], videos: Sequence[Path] = ()) -> Sight | None:
        """The pictures in ``files`` and the ``videos``, files or folders of frames, as the run's model takes them; None
        without any where it asks for nothing else.

        Raises:
            BadInputError: a file that is no picture, or no video, or a model that sees none.
        """
        config = run.model.config
        if not files and not videos and config.model_type not in READ_QUESTIONS_WHOLE:
            return None
        first = f"--image={files[0]}" if files else f"--video={videos[0]}" if videos else ""
        if getattr(config, "image_token_id", None) is None:
            what = "pictures" if files else "videos"
            raise BadInputError(f"{first}: {type(run.model).__name__} sees no {what}; leave it out")
        model = ModelConfig(path=str(run.source)) if run.config is None else run.config.model
        data = PictureChatConfig() if run.config is None else run.config.data
        assert isinstance(data, PictureChatConfig)
        pixels, kind = chat_pixels(data, model), pictures_of(config)
        assert run.tokenizer_folder is not None, "the caller has read it"
        written = Written(run.tokenizer_folder, pixels.parts if isinstance(pixels, PartPixels) else None)
        if videos and not (isinstance(pixels, GridPixels) and config.model_type in SEE_VIDEOS):
            raise BadInputError(f"--video={videos[0]}: {type(run.model).__name__} sees no videos; leave it out")
        if videos and (kind.video is None or not written.knows(kind.video)):
            raise BadInputError(f"--video={videos[0]}: the model was shown no videos in training; leave it out")
        seen = [_video(file.expanduser(), pixels, data) for file in videos if isinstance(pixels, GridPixels)]
        return cls(kind, written, [_picture(file, pixels, kind) for file in files], seen)

    def inputs(self, prompts: Sequence[Sequence[int]], device: torch.device) -> dict[str, torch.Tensor]:
        """What the model gets beside these expanded prompts, each of which has the pictures."""
        longest = max(map(len, prompts))
        rows = torch.tensor([[*[0] * (longest - len(ids)), *ids] for ids in prompts])
        if not self.pictures and not self.videos:
            return {name: value.to(device) for name, value in self.kind.asked(rows).items()}
        shown = [self._in_order(ids) for ids in prompts]
        given = self.kind.inputs({"input_ids": rows, **self.kind.collated(rows, shown)})
        if self.videos and isinstance(self.kind, OwnSizes):  # the prompt's ids keep the token of a video
            several = [one for row in shown for one in row]
            given = {"position_ids": given["position_ids"], **self.kind.in_two(several)}
        return {name: value.to(device) for name, value in given.items() if name not in ("input_ids", "use_cache")}

    def _in_order(self, ids: Sequence[int]) -> list[Picture]:
        """Pictures and videos as an expanded prompt has them."""
        if not self.videos:
            return self.pictures
        left = {self.kind.token: iter(self.pictures), self.kind.video: iter(self.videos)}
        standing, shown = [one for one in ids if one in left], list[Picture]()
        while (at := sum(one.tokens for one in shown)) < len(standing):
            shown.append(next(left[standing[at]]))
        return shown

    def expanded(self, ids: Sequence[int]) -> list[int]:
        """A prompt's token ids with the places of its pictures and videos.

        Raises:
            BadInputError: it has not as many as there are.
        """
        left = dict[int | None, Iterator[Picture]]()
        for token, place, what, there in (
            (self.kind.token, PLACE, "pictures", self.pictures),
            (self.kind.video, VIDEO, "videos", self.videos),
        ):
            found = sum(one == token for one in ids)
            if token is not None and found != len(there):
                fix = f"write {place} where each belongs, or nowhere"
                raise BadInputError(f"the prompt has {found} places for {len(there)} {what}; {fix}")
            left[token] = iter(there)
        several = ([int(one)] if one not in left else self._tokens(one, next(left[one])) for one in ids)
        return [int(one) for part in several for one in part]

    def _tokens(self, token: int, one: Picture) -> list[int]:
        found: list[int] = self.written.ids(token, one.places, one.times).tolist()
        return found


def with_places(text: str, pictures: int, videos: int = 0) -> str:
    """``text`` with a place for each picture and video in front, where it has none of its own."""
    more = ((PLACE, pictures), (VIDEO, videos))
    return "".join(place * number for place, number in more if place not in text) + text


def _picture(file: Path, pixels: Any, kind: Pictures) -> Picture:
    image, places = _decoded("--image", file, pixels.channels), kind.blank().places
    cut = getattr(pixels, "grid", None) or getattr(pixels, "parts", None)
    if cut is not None:
        places = (1, *cut.places(image.height, image.width))
    if not all(places):
        raise BadInputError(f"--image={file}: {TOO_LONG}; give another picture")
    return Picture(torch.from_numpy(pixels.clip([pixels.fitted(image)])), places)


def _video(file: Path, pixels: GridPixels, data: PictureChatConfig) -> Picture:
    """A video file's or a folder's frames."""
    named, grid, rate = f"--video={file}", pixels.grid, data.frames_per_second
    if file.is_dir():
        frames = [one for one in sorted(file.iterdir()) if one.suffix.lower() in SUFFIXES and one.is_file()]
        total = len(frames)
        if total < 2:
            raise BadInputError(f"{named}: {ONE if total else 'holds no pictures'}; give another video")
    else:
        try:
            pyav()
        except ConfigError as error:
            raise BadInputError(f"{named}: {error.reason}; {error.fix}") from error
        facts = look(file) if file.is_file() else "there is no such file or folder"
        if isinstance(facts, str):
            raise BadInputError(f"{named}: {facts}; give another video")
        total, _, _, rate = facts
    chosen, seconds = chosen_frames(total, rate, data, grid.frames, grid.told)
    numbers = chosen.tolist()
    if file.is_dir():
        images = [_decoded("--video", frames[at], pixels.channels) for at in numbers]
    else:
        images = frames_of(file, None, numbers, pixels.channels)
    if len({image.size for image in images}) > 1:
        raise BadInputError(f"{named}: has frames of different sizes; give another video")
    places = (-(-len(images) // grid.frames), *grid.places(images[0].height, images[0].width))
    if not all(places):
        raise BadInputError(f"{named}: {TOO_LONG}; give another video")
    times = Thing((), seconds, moments=tuple((chosen / rate).tolist())).times(grid.frames) if grid.told else ()
    return Picture(torch.from_numpy(pixels.clip([pixels.fitted(one) for one in images])), places, seconds, times)


def _decoded(option: str, file: Path, channels: int) -> Any:
    try:
        return decode(file.expanduser().read_bytes(), channels)
    except OSError as error:
        raise BadInputError(f"{option}={file}: cannot be read ({error.strerror}); give a picture's file") from error
    except BadImageError as error:
        raise BadInputError(f"{option}={file}: {error}; give another picture") from error
