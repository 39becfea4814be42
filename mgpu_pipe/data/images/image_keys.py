"""Keys and sources of pictures and of conversations about pictures; random changes are torchvision's and timm's.

Imports no numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mgpu_pipe.config.data_sources import TEXT_KEYS, DocumentKind
from mgpu_pipe.config.schema import Auto, DataConfig
from mgpu_pipe.data.data_source import DataSource, shipped_source
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from mgpu_pipe.data.cache import Progress
    from mgpu_pipe.data.images.demo_pictures import Question
    from mgpu_pipe.data.images.visual_inputs import VisualInput

MAX_SIDES = 100.0
"""Most width over height of a crop or an erased part; the least is its inverse."""


@dataclass
class AugmentConfig:
    crop_area: list[float] = field(default_factory=list)
    """Least and most share of the area that a random crop keeps, [0.08,1] in torchvision's and timm's recipes; empty
    crops none. The first of the changes, which follow in the order of these keys."""
    crop_shape: list[float] = field(default_factory=lambda: [3 / 4, 4 / 3])
    """Least and most width over height of that crop, drawn evenly by logarithm (Szegedy et al. 2015)."""
    jitter: float = field(default=1.0, metadata={"at_least": 0, "at_most": 1})
    """Share of the pictures whose colours change by the next four keys, in a random order."""
    brightness: float = field(default=0.0, metadata={"at_least": 0})
    """Brightness is multiplied by a factor from 1 - this, at least 0, to 1 + this; saturation and contrast alike."""
    contrast: float = field(default=0.0, metadata={"at_least": 0})
    """Furthest from 1 that the factor of the contrast is."""
    saturation: float = field(default=0.0, metadata={"at_least": 0})
    """Furthest from 1 that the factor of the saturation is; grey pictures have none."""
    hue: float = field(default=0.0, metadata={"at_least": 0, "at_most": 0.5})
    """Share of the colour circle that the hue turns by at most, either way; grey pictures have none."""
    rand_ops: int = field(default=0, metadata={"at_least": 0, "at_most": 14})
    """RandAugment (Cubuk et al. 2020): operators that each picture gets, drawn from torchvision's 14; 0 for none."""
    rand_magnitude: int = field(default=9, metadata={"at_least": 0, "at_most": 30})
    """Strength of these operators, on torchvision's scale of 0 to 30."""
    erase: float = field(default=0.0, metadata={"at_least": 0, "at_most": 1})
    """Share of the pictures that lose a rectangle (Zhong et al. 2020)."""
    erase_area: list[float] = field(default_factory=lambda: [0.02, 0.33])
    """Least and most share of the area that is erased."""
    erase_shape: list[float] = field(default_factory=lambda: [0.3, 3.3])
    """Least and most height over width of what is erased, drawn evenly by logarithm."""
    erase_with: Literal["mean", "noise"] = "mean"
    """Content of the erased area: the mean colour (0 after normalisation), or normal noise (timm's pixel mode)."""

    @property
    def has_jitter(self) -> bool:
        """Whether colours change."""
        return self.jitter > 0 and any((self.brightness, self.contrast, self.saturation, self.hue))

    def errors(self, crops_already: bool, can_erase: bool) -> Iterator[ConfigError]:
        """Yields what cannot work, with ``data.random_crop``, or with samples of more than one picture's array."""
        for name, most in (
            ("crop_area", 1.0),
            ("crop_shape", MAX_SIDES),
            ("erase_area", 1.0),
            ("erase_shape", MAX_SIDES),
        ):
            values, least = getattr(self, name), 1 / most if most > 1 else 0.0
            if name == "crop_area" and not values:
                continue
            if len(values) != 2 or not least <= values[0] <= values[1] <= most:
                limits = f"{least:g} <= least <= most <= {most:g}"
                yield ConfigError(f"data.augment.{name}", values, f"give two numbers, [least,most], {limits}")
            elif values[0] == 0:
                yield ConfigError(f"data.augment.{name}", values, "let the least be above 0", "no area is no picture")
        if self.crop_area and crops_already:
            fix = "use data.random_crop=1, or leave it out"
            yield ConfigError("data.augment.crop_area", self.crop_area, fix, "data.random_crop crops already")
        if self.erase and not can_erase:
            reason = "the pictures of a conversation are cut into patches"
            yield ConfigError("data.augment.erase", self.erase, "use 0", reason)


@dataclass
class ImageConfig(DataConfig):
    image_column: str = "image"
    """Name of the field with a picture's path, seen from its list's folder (image_list)."""
    image_size: int | Auto = field(default="auto", metadata={"at_least": 1})
    """Height and width of the pictures that the model gets; auto is the model's own image_size."""
    fit: Literal["auto", "squash", "crop"] = "auto"
    """How a picture of another shape becomes a square: squashed, or its middle cut out, scaled bilinearly; auto is as
    the preprocessor_config.json of the model's folder states it, with its filter, else squash."""
    mean: list[float] = field(default_factory=list)
    """Taken from each channel, whose values are 0 to 1; empty: the model folder's, else 0.5."""
    std: list[float] = field(default_factory=list)
    """Standard deviation of each channel; empty: the model folder's, else 0.5."""
    shift: int = field(default=0, metadata={"at_least": 0})
    """Pixels that a training picture is moved by at most, across and down; this and the next three are drawn by seed
    and sample alone, so they are the same on any number of processes."""
    turn: float = field(default=0.0, metadata={"at_least": 0})
    """Degrees that a training picture is turned by at most, either way."""
    flip: bool = False
    """Mirror every other training picture, left to right."""
    random_crop: float = field(default=1.0, metadata={"at_least": 0.01, "at_most": 1})
    """Least share of the area that a random crop of a training picture keeps; 1 crops none."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """Further changes of training pictures, drawn by seed and sample alone."""
    cache_features: bool = False
    """Run a frozen vision tower (model.freeze=[vision]) once over every picture, before the first step, and keep its
    output in the run's folder, four bytes a value."""

    def sample_text(self) -> str:
        size = (
            "the model's image size" if self.image_size == "auto" else f"{self.image_size} x {self.image_size} pixels"
        )
        return f"pictures of {size}"

    def tokens(self) -> int:
        return 0

    def changes(self) -> tuple[object, ...]:
        """Settings that change training pictures, for the digest of the data."""
        usual = (self.shift, self.turn, self.flip, self.random_crop)
        return usual if self.augment == AugmentConfig() else (*usual, asdict(self.augment))


@dataclass
class CaptionConfig(ImageConfig):
    caption_column: str = "caption"
    """Name of the field with a picture's caption (captions; captioned_tar where it is JSON)."""
    captions: list[str] = field(default_factory=lambda: ["{}"])
    """What is said of a picture of a class, whose name takes the place of {} (captioned_digits, captioned_folder); each
    time a picture is trained on, one of them is drawn by seed and sample."""

    def sample_text(self) -> str:
        return f"{super().sample_text()} with captions of {self.seq_len} tokens"


@dataclass
class PictureChatConfig(ImageConfig):
    image_column: str = "images"
    """Name of the field with the paths of a conversation's pictures, seen from its list's folder; without it image is
    looked at (picture_chats)."""
    min_pixels: int | Auto = field(default="auto", metadata={"at_least": 1})
    """Pixels below which a picture is scaled up, for a model that takes pictures in sizes of their own (Qwen-VL); auto
    is the model folder's, else as many as four places in the text have."""
    max_pixels: int | Auto = field(default="auto", metadata={"at_least": 1})
    """Pixels above which it is scaled down; auto is the model folder's, else as many as 1280 places have."""
    max_side: int | Auto = field(default="auto", metadata={"at_least": 1})
    """Pixels that a picture's longer side is scaled to, for a model that sees it in parts and whole (SmolVLM): the
    more, the more parts; auto is the model folder's, else those of four parts."""
    video_column: str = "videos"
    """Name of the field with the paths of a conversation's videos, files or folders of frames; without it video is
    looked at (picture_chats)."""
    frames_per_second: float = field(default=2.0, metadata={"at_least": 0.01})
    """Frames a second that the model sees of a video; a folder of frames holds as many, unless its row states
    sample_fps or fps."""
    max_frames: int = field(default=768, metadata={"at_least": 2})
    """Frames that it sees of a video at most; of a longer one they are further apart."""

    def sample_text(self) -> str:
        return f"conversations of {self.seq_len} tokens with {super().sample_text()}"

    def tokens(self) -> int:
        return self.seq_len


Layout = Literal["digits", "folder", "list", "tar"]
"""Place of pictures: scikit-learn's digits, a folder for each class, files that a table names, or tar files."""


@dataclass(frozen=True, kw_only=True)
class PictureSource(DataSource):
    """A shipped source of pictures with classes or captions."""

    samples: str = "labelled_images"
    keys: type[Any] | None = ImageConfig
    reads_files: bool = True
    layout: Layout


def layout_of(data: DataConfig) -> Layout:
    """Place of the pictures of ``data.source``."""
    source = shipped_source(data.source)
    assert isinstance(source, PictureSource)
    return source.layout


@dataclass(frozen=True)
class ChatRules:
    """Rules that make conversations about pictures.

    Attributes:
        questions: makes the questions and their visual inputs, given the frames of a patch.
        build_pictures: builds or finds the folder of pictures, given the cache folder and the source's identity; None
            where there are none.
        build_sounds: the same of recordings, given the cache folder and their samples a second.
    """

    questions: Callable[[int], tuple[list[Question], list[VisualInput]]]
    build_pictures: Callable[[Path, str], Path] | None = None
    build_sounds: Callable[[Path, int, Progress], Path] | None = None


@dataclass(frozen=True, kw_only=True)
class PictureChatSource(DataSource):
    """A shipped source of conversations with pictures; ``rules`` is None where files hold them."""

    samples: str = "picture_chats"
    documents: DocumentKind = "chat"
    reads: tuple[str, ...] = (*TEXT_KEYS, "messages_column")
    keys: type[Any] | None = PictureChatConfig
    rules: ChatRules | None = None


def chat_rules(data: DataConfig) -> ChatRules | None:
    """The rules of the conversations of ``data.source``; None where files hold them."""
    source = shipped_source(data.source)
    assert isinstance(source, PictureChatSource)
    return source.rules
