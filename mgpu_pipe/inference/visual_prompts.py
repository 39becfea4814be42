"""Prepares pictures and videos in prompts of a vision-language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mgpu_pipe.architectures.find import sight_of
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.bad_samples import BadSampleError
from mgpu_pipe.data.images.decode_image import SUFFIXES, decode
from mgpu_pipe.data.images.grids import TOO_LONG, GridPixels, chat_pixels
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.images.placeholders import opener_of
from mgpu_pipe.data.images.videos import ONE, ClipFacts, choose_frames, frames_of, look, pyav
from mgpu_pipe.data.images.visual_inputs import PlaceholderTokens, VisualInput
from mgpu_pipe.data.text.conversations import PLACE, VIDEO
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.objectives.patch_pictures import PatchPictures, build_picture_inputs
from mgpu_pipe.objectives.picture_inputs import NativeSizePictures, Picture, PictureInputs
from mgpu_pipe.system.local_files import expand_home, is_file, is_folder

if TYPE_CHECKING:
    from mgpu_pipe.inference.open import LoadedRun


@dataclass(frozen=True)
class PromptVisuals:
    """Prepared pictures and videos of a prompt.

    Attributes:
        kind: builds the model's inputs.
        token: stands for a picture in a prompt.
        written: the tokens that replace it, or that of a video.
        pictures, videos: in their order.
    """

    kind: PictureInputs
    token: int
    written: PlaceholderTokens
    pictures: list[Picture]
    videos: list[Picture]

    @classmethod
    def from_files(cls, run: LoadedRun, files: Sequence[Path], videos: Sequence[Path] = ()) -> PromptVisuals | None:
        """Prepares the pictures in ``files`` and the ``videos`` (files or folders of frames) for the run's model; None
        if there are none and the model needs no inputs next to the text.

        Raises:
            BadInputError: a file is no picture or no video, or the model takes none.
        """
        config = run.model.config
        if not files and not videos and sight_of(config.model_type).both_ways != "questions":
            return None
        first = f"--image={files[0]}" if files else f"--video={videos[0]}" if videos else ""
        if getattr(config, "image_token_id", None) is None:
            what = "pictures" if files else "videos"
            raise BadInputError(f"{first}: {type(run.model).__name__} sees no {what}; leave it out")
        model = ModelConfig(path=str(run.source)) if run.config is None else run.config.model
        data = PictureChatConfig() if run.config is None else run.config.data
        assert isinstance(data, PictureChatConfig)
        pixels, kind = chat_pixels(data, model), build_picture_inputs(config)
        assert run.tokenizer_folder is not None, "the caller has read it"
        opener = opener_of(run.tokenizer_folder, config.model_type, lambda name: getattr(config, name, None))
        opened = None if opener is None else (opener, kind.token)
        written = PlaceholderTokens(run.tokenizer_folder, getattr(pixels, "parts", None), opened)
        if videos and not (isinstance(pixels, GridPixels) and sight_of(config.model_type).videos):
            raise BadInputError(f"--video={videos[0]}: {type(run.model).__name__} sees no videos; leave it out")
        if videos and (kind.video is None or not written.knows(kind.video)):
            raise BadInputError(f"--video={videos[0]}: the model was shown no videos in training; leave it out")
        clips = [_video(expand_home(file), pixels, data) for file in videos if isinstance(pixels, GridPixels)]
        token, pictures = kind.token if opener is None else opener, [_picture(file, pixels, kind) for file in files]
        if isinstance(kind, PatchPictures) and sum(picture.tokens for picture in pictures) < kind.fewest:
            reason = f"{type(run.model).__name__} of transformers fails for a picture of one place"
            raise BadInputError(f"{first}: {reason}; give a larger picture")
        return cls(kind, token, written, pictures, clips)

    def inputs(self, prompts: Sequence[Sequence[int]], device: torch.device) -> dict[str, torch.Tensor]:
        """The model's inputs next to these expanded prompts, each of which has all pictures and videos."""
        longest = max(map(len, prompts))
        rows = torch.tensor([[*[0] * (longest - len(ids)), *ids] for ids in prompts])
        if not self.pictures and not self.videos:
            return {name: value.to(device) for name, value in self.kind.text_inputs(rows).items()}
        visuals = [self._in_order(ids) for ids in prompts]
        inputs = self.kind.inputs({"input_ids": rows, **self.kind.collate(rows, visuals)})
        if self.videos and isinstance(self.kind, NativeSizePictures):  # the prompt's ids keep the token of a video
            several = [visual for row in visuals for visual in row]
            inputs = {"position_ids": inputs["position_ids"], **self.kind.image_and_video_inputs(several)}
        return {name: value.to(device) for name, value in inputs.items() if name not in ("input_ids", "use_cache")}

    def _in_order(self, ids: Sequence[int]) -> list[Picture]:
        """Pictures and videos in the order of an expanded prompt's tokens."""
        if not self.videos:
            return self.pictures
        remaining = {self.kind.token: iter(self.pictures), self.kind.video: iter(self.videos)}
        visual_ids, ordered = [token for token in ids if token in remaining], list[Picture]()
        while (position := sum(visual.tokens for visual in ordered)) < len(visual_ids):
            ordered.append(next(remaining[visual_ids[position]]))
        return ordered

    def expand(self, ids: Sequence[int]) -> list[int]:
        """A prompt's token ids, with each place replaced by the tokens of its picture or video.

        Raises:
            BadInputError: the prompt has another number of places than pictures or videos.
        """
        remaining = dict[int | None, Iterator[Picture]]()
        for token, place, what, visuals in (
            (self.token, PLACE, "pictures", self.pictures),
            (self.kind.video, VIDEO, "videos", self.videos),
        ):
            num_places = sum(prompt_id == token for prompt_id in ids)
            if token is not None and num_places != len(visuals):
                fix = f"write {place} where each belongs, or nowhere"
                raise BadInputError(f"the prompt has {num_places} places for {len(visuals)} {what}; {fix}")
            remaining[token] = iter(visuals)
        parts = (
            [int(token)] if token not in remaining else self._tokens(token, next(remaining[token])) for token in ids
        )
        return [int(token) for part in parts for token in part]

    def _tokens(self, token: int, visual: Picture) -> list[int]:
        tokens: list[int] = self.written.ids(token, visual.places, visual.times).tolist()
        return tokens


def with_places(text: str, pictures: int, videos: int = 0) -> str:
    """``text`` with a place in front for each picture and video, unless the text has places."""
    counts = ((PLACE, pictures), (VIDEO, videos))
    return "".join(place * count for place, count in counts if place not in text) + text


def _picture(file: Path, pixels: Any, kind: PictureInputs) -> Picture:
    image, places = _decode_file("--image", file, pixels.channels), kind.blank().places
    cut = getattr(pixels, "grid", None) or getattr(pixels, "parts", None)
    if cut is not None:
        places = (1, *cut.places(image.height, image.width))
    if not all(places):
        raise BadInputError(f"--image={file}: {TOO_LONG}; give another picture")
    return Picture(torch.from_numpy(pixels.clip([pixels.fitted(image)])), places)


def _video(file: Path, pixels: GridPixels, data: PictureChatConfig) -> Picture:
    """The frames of a video file or a folder."""
    option, grid = f"--video={file}", pixels.grid
    if is_folder(file):
        frames = [frame for frame in sorted(file.iterdir()) if frame.suffix.lower() in SUFFIXES and is_file(frame)]
        total = len(frames)
        if total < 2:
            raise BadInputError(f"{option}: {ONE if total else 'it has no pictures'}; give another video")
        facts: ClipFacts | str = ClipFacts(total, 0, 0, data.frames_per_second)
    else:
        try:
            pyav()
        except ConfigError as error:
            raise BadInputError(f"{option}: {error.reason}; {error.fix}") from error
        facts = look(file) if is_file(file) else "no such file or folder"
        if isinstance(facts, str):
            raise BadInputError(f"{option}: {facts}; give another video")
    assert isinstance(facts, ClipFacts)
    selection = choose_frames(facts, data, grid.frames, grid.has_timestamps)
    if is_folder(file):
        images = [_decode_file("--video", frames[number], pixels.channels) for number in selection.numbers]
    else:
        images = frames_of(file, None, selection.numbers, pixels.channels)
    if len({image.size for image in images}) > 1:
        raise BadInputError(f"{option}: has frames of different sizes; give another video")
    places = (-(-len(images) // grid.frames), *grid.places(images[0].height, images[0].width))
    if not all(places):
        raise BadInputError(f"{option}: {TOO_LONG}; give another video")
    times = (
        VisualInput((), selection.seconds, moments=selection.moments).times(grid.frames) if grid.has_timestamps else ()
    )
    return Picture(
        torch.from_numpy(pixels.clip([pixels.fitted(image) for image in images])), places, selection.seconds, times
    )


def _decode_file(option: str, file: Path, channels: int) -> Any:
    try:
        return decode(expand_home(file).read_bytes(), channels)
    except OSError as error:
        raise BadInputError(f"{option}={file}: cannot be read ({error.strerror}); give a picture's file") from error
    except BadSampleError as error:
        raise BadInputError(f"{option}={file}: {error}; give another picture") from error
