"""Prepares pictures, videos and recordings in prompts of a model that sees or hears."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mgpu_pipe.architectures.find import image_token, sight_of, takes_media
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.audio.chat_sounds import LONGEST, chat_window
from mgpu_pipe.data.audio.decode_audio import decode as decode_sound
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.bad_samples import BadSampleError
from mgpu_pipe.data.images.decode_image import decode
from mgpu_pipe.data.images.grids import TOO_LONG, GridPixels, chat_pixels
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.images.videos import ONE, ClipFacts, choose_frames, frames_in, frames_of, look, pyav
from mgpu_pipe.data.images.visual_inputs import PlaceholderTokens, VisualInput, opener_of
from mgpu_pipe.data.text.conversations import AUDIO, PLACE, VIDEO
from mgpu_pipe.errors import BadInputError, ConfigError
from mgpu_pipe.objectives.chat_recordings import Recording
from mgpu_pipe.objectives.patch_pictures import PatchPictures, build_picture_inputs
from mgpu_pipe.objectives.picture_inputs import NativeSizePictures, Picture, PictureInputs
from mgpu_pipe.system.local_files import expand_home, is_file, is_folder

if TYPE_CHECKING:
    from mgpu_pipe.inference.open import LoadedRun


@dataclass(frozen=True)
class VisualReader:
    """Prepares pictures, videos and recordings for a model.

    Attributes:
        kind: builds the model's inputs.
        token: stands for a picture in a prompt; None for a model that sees none.
        written: the tokens that replace it, or that of a video.
        pixels: the form in which the model takes pictures.
        window: that of recordings; None for a model that hears none.
        data: settings of the run's pictures.
    """

    model_class: str
    model_type: str
    kind: PictureInputs
    token: int | None
    written: PlaceholderTokens
    pixels: Any
    window: LogMel | None
    data: PictureChatConfig

    @classmethod
    def from_run(cls, run: LoadedRun) -> VisualReader:
        """The reader of a run's model, which takes pictures or recordings."""
        config, data = run.model.config, picture_settings(run)
        model = ModelConfig(path=str(run.source)) if run.config is None else run.config.model
        pixels, kind = chat_pixels(data, model), build_picture_inputs(config)
        assert run.tokenizer_folder is not None, "the caller has read it"
        opener = opener_of(run.tokenizer_folder, config.model_type, lambda name: getattr(config, name, None))
        opened = None if opener is None else (opener, kind.token)
        written = PlaceholderTokens(run.tokenizer_folder, getattr(pixels, "parts", None), opened)
        token = (kind.token if opener is None else opener) if sees_pictures(run) else None
        name, window = type(run.model).__name__, chat_window(model)
        return cls(name, config.model_type, kind, token, written, pixels, window, data)

    def read(
        self,
        pictures: Sequence[Path],
        videos: Sequence[Path] = (),
        rates: Sequence[float] = (),
        sounds: Sequence[Path] = (),
        options: tuple[str, str, str] = ("", "", ""),
    ) -> PromptVisuals:
        """Reads the pictures, videos (files or folders of frames) and recordings of a prompt.

        Args:
            rates: frames a second of each video; 0, or none at all, for a video file and for the run's setting.
            options: what errors write before a picture's, a video's and a recording's name.

        Raises:
            BadInputError: a file is no picture, video or recording, or the model takes none.
        """
        picture_option, video_option, sound_option = options
        pixels, kind = self.pixels, self.kind
        if pictures and self.token is None:
            raise BadInputError(f"{picture_option}{pictures[0]}: {self.model_class} sees no pictures; leave it out")
        if sounds and self.window is None:
            raise BadInputError(f"{sound_option}{sounds[0]}: {self.model_class} hears no recordings; leave it out")
        if videos:
            first = f"{video_option}{videos[0]}"
            if not (isinstance(pixels, GridPixels) and sight_of(self.model_type).videos):
                raise BadInputError(f"{first}: {self.model_class} sees no videos; leave it out")
            if kind.video is None or not self.written.knows(kind.video):
                raise BadInputError(f"{first}: the model was shown no videos in training; leave it out")
        clips = [
            _video(f"{video_option}{file}", expand_home(file), pixels, self.data, rate)
            for file, rate in zip(videos, rates or [0.0] * len(videos), strict=True)
        ]
        read = [_picture(f"{picture_option}{file}", file, pixels, kind) for file in pictures]
        if pictures and isinstance(kind, PatchPictures) and sum(picture.tokens for picture in read) < kind.fewest:
            reason = f"{self.model_class} of transformers fails for a picture of one place"
            raise BadInputError(f"{picture_option}{pictures[0]}: {reason}; give a larger picture")
        recordings = [_recording(f"{sound_option}{file}", file, self.window) for file in sounds if self.window]
        return PromptVisuals(self, read, clips, recordings)


def sees_pictures(run: LoadedRun) -> bool:
    """Whether the run's model takes pictures."""
    return image_token(run.model.config) is not None


def reads_questions_whole(run: LoadedRun) -> bool:
    """Whether the model needs inputs next to a question without pictures, as it reads questions in both directions."""
    return sight_of(run.model.config.model_type).both_ways == "questions"


def picture_settings(run: LoadedRun) -> PictureChatConfig:
    """The keys of the data that the run was trained on; the defaults for a model folder or a run on texts."""
    data = None if run.config is None else run.config.data
    return data if isinstance(data, PictureChatConfig) else PictureChatConfig()


@dataclass(frozen=True)
class PromptVisuals:
    """Prepared pictures, videos and recordings of a prompt, in their order."""

    reader: VisualReader
    pictures: list[Picture]
    videos: list[Picture]
    sounds: list[Recording]

    @classmethod
    def from_files(
        cls, run: LoadedRun, files: Sequence[Path], videos: Sequence[Path] = (), sounds: Sequence[Path] = ()
    ) -> PromptVisuals | None:
        """Prepares the pictures in ``files``, the ``videos`` (files or folders of frames) and the recordings for the
        run's model; None if there are none and the model needs no inputs next to the text.

        Raises:
            BadInputError: a file is no picture, video or recording, or the model takes none.
        """
        if not files and not videos and not sounds and not reads_questions_whole(run):
            return None
        if not takes_media(run.model.config):
            named = [*(("image", "sees no pictures", file) for file in files)]
            named += [("video", "sees no videos", file) for file in videos]
            option, problem, first = (*named, *(("audio", "hears no recordings", file) for file in sounds))[0]
            raise BadInputError(f"--{option}={first}: {type(run.model).__name__} {problem}; leave it out")
        options = ("--image=", "--video=", "--audio=")
        return VisualReader.from_run(run).read(files, videos, sounds=sounds, options=options)

    def inputs(self, prompts: Sequence[Sequence[int]], device: torch.device) -> dict[str, torch.Tensor]:
        """The model's inputs next to these expanded prompts, each of which has all pictures, videos and recordings."""
        return visual_inputs(prompts, [self] * len(prompts), device)

    def in_order(self, ids: Sequence[int]) -> list[Picture]:
        """Pictures, videos and recordings in the order of an expanded prompt's tokens."""
        if not self.videos:
            return [*self.pictures, *self.sounds]
        kind = self.reader.kind
        remaining = {kind.token: iter(self.pictures), kind.video: iter(self.videos)}
        visual_ids, ordered = [token for token in ids if token in remaining], list[Picture]()
        while (position := sum(visual.tokens for visual in ordered)) < len(visual_ids):
            ordered.append(next(remaining[visual_ids[position]]))
        return ordered

    def expand(self, ids: Sequence[int]) -> list[int]:
        """A prompt's token ids, with each place replaced by the tokens of its picture, video or recording.

        Raises:
            BadInputError: the prompt has another number of places than pictures, videos or recordings.
        """
        remaining = dict[int | None, Iterator[Picture]]()
        kinds: tuple[tuple[int | None, str, str, Sequence[Picture]], ...] = (
            (self.reader.token, PLACE, "pictures", self.pictures),
            (self.reader.kind.video, VIDEO, "videos", self.videos),
            (self.reader.kind.audio, AUDIO, "recordings", self.sounds),
        )
        for token, place, what, visuals in kinds:
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
        tokens: list[int] = self.reader.written.ids(token, visual.places, visual.times).tolist()
        return tokens


def visual_inputs(
    prompts: Sequence[Sequence[int]], visuals: Sequence[PromptVisuals], device: torch.device
) -> dict[str, torch.Tensor]:
    """The model's inputs next to expanded prompts, each with its pictures, videos and recordings.

    Args:
        prompts: token ids; shorter ones are filled up on the left.
    """
    kind, longest = visuals[0].reader.kind, max(map(len, prompts))
    rows = torch.tensor([[*[0] * (longest - len(ids)), *ids] for ids in prompts])
    pictures = [visual.in_order(ids) for ids, visual in zip(prompts, visuals, strict=True)]
    if not any(pictures):
        return {name: value.to(device) for name, value in kind.text_inputs(rows).items()}
    # Without its empty fields a kind of files gets no blank row, which a prompt does not have.
    fields = {name: value for name, value in kind.collate(rows, pictures).items() if value.numel()}
    inputs = kind.inputs({"input_ids": rows, **fields})
    if isinstance(kind, NativeSizePictures) and any(visual.videos for visual in visuals):
        several = [picture for row in pictures for picture in row]  # the prompt's ids keep the token of a video
        inputs = {"position_ids": inputs["position_ids"], **kind.image_and_video_inputs(several)}
    return {name: value.to(device) for name, value in inputs.items() if name not in ("input_ids", "use_cache")}


def with_places(text: str, pictures: int, videos: int = 0, sounds: int = 0) -> str:
    """``text`` with a place in front for each picture, video and recording, unless the text has places."""
    counts = ((PLACE, pictures), (VIDEO, videos), (AUDIO, sounds))
    return "".join(place * count for place, count in counts if place not in text) + text


def _picture(named: str, file: Path, pixels: Any, kind: PictureInputs) -> Picture:
    image, places = decode_file(named, file, pixels.channels), kind.blank().places
    cut = getattr(pixels, "grid", None) or getattr(pixels, "parts", None)
    if cut is not None:
        places = (1, *cut.places(image.height, image.width))
    if not all(places):
        raise BadInputError(f"{named}: {TOO_LONG}; give another picture")
    return Picture(torch.from_numpy(pixels.clip([pixels.scale(image)])), places)


def _recording(named: str, file: Path, window: LogMel) -> Recording:
    """The recording in a file, which errors call ``named``."""
    try:
        wave = decode_sound(expand_home(file).read_bytes(), window.rate, LONGEST)
        if fault := window.chat_fault(len(wave)):
            raise BadSampleError(fault)
    except OSError as error:
        raise BadInputError(f"{named}: cannot be read ({error.strerror}); give a recording's file") from error
    except BadSampleError as error:
        raise BadInputError(f"{named}: {error}; give another recording") from error
    frames = int(window.num_frames(len(wave)))
    values = torch.from_numpy(window.spectrogram(wave))[None]
    return Recording(values, (1, int(window.num_tokens(frames)), 1), frames=frames)


def _video(named: str, file: Path, pixels: GridPixels, data: PictureChatConfig, rate: float) -> Picture:
    """The frames of a video file or a folder, which has ``rate`` of them a second; 0 for the run's setting."""
    grid = pixels.grid
    if is_folder(file):
        frames = frames_in(file)
        total = len(frames)
        if total < 2:
            raise BadInputError(f"{named}: {ONE if total else 'it has no pictures'}; give another video")
        facts: ClipFacts | str = ClipFacts(total, 0, 0, rate or data.frames_per_second)
    else:
        try:
            pyav()
        except ConfigError as error:
            raise BadInputError(f"{named}: {error.reason}; {error.fix}") from error
        facts = look(file) if is_file(file) else "no such file or folder"
        if isinstance(facts, str):
            raise BadInputError(f"{named}: {facts}; give another video")
    assert isinstance(facts, ClipFacts)
    selection = choose_frames(facts, data, grid.frames, grid.has_timestamps)
    if is_folder(file):
        images = [
            decode_file(f"{named}/{frames[number].name}", frames[number], pixels.channels)
            for number in selection.numbers
        ]
    else:
        images = frames_of(file, None, selection.numbers, pixels.channels)
    if len({image.size for image in images}) > 1:
        raise BadInputError(f"{named}: has frames of different sizes; give another video")
    places = (-(-len(images) // grid.frames), *grid.places(images[0].height, images[0].width))
    if not all(places):
        raise BadInputError(f"{named}: {TOO_LONG}; give another video")
    times = (
        VisualInput((), selection.seconds, moments=selection.moments).times(grid.frames) if grid.has_timestamps else ()
    )
    return Picture(
        torch.from_numpy(pixels.clip([pixels.scale(image) for image in images])), places, selection.seconds, times
    )


def decode_file(named: str, file: Path, channels: int) -> Any:
    """The picture in a file, which errors call ``named``."""
    try:
        return decode(expand_home(file).read_bytes(), channels)
    except OSError as error:
        raise BadInputError(f"{named}: cannot be read ({error.strerror}); give a picture's file") from error
    except BadSampleError as error:
        raise BadInputError(f"{named}: {error}; give another picture") from error
