"""Conversations with pictures, each a sample of its own: one row, and its pictures. No torch.

The conversations' tokens lie in a token store, where each picture and each video is one token. What is known of the
pictures lies as that of pictures with a class (:mod:`mgpu_pipe.data.image.prepare`), what is known of video files by
:mod:`mgpu_pipe.data.image.clips`, and which conversation shows what by :mod:`mgpu_pipe.data.image.shown`. When a sample
is read, each picture's token becomes as many as the language model gets vectors of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.cache import Progress, digest_of, no_progress, writing_to_cache
from mgpu_pipe.data.image.chat_source import ChatSource
from mgpu_pipe.data.image.clips import StoredClips
from mgpu_pipe.data.image.grids import GridPixels, chat_pixels, known_shapes, places_of_shapes, shapes_in
from mgpu_pipe.data.image.keys import PictureChatConfig
from mgpu_pipe.data.image.parts import PartPixels
from mgpu_pipe.data.image.pixels import of_vision
from mgpu_pipe.data.image.shown import Shown
from mgpu_pipe.data.image.written import Written
from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.text.conversations import PLACE, VIDEO
from mgpu_pipe.data.text.prepared_rows import FOLDERS, PreparedRows
from mgpu_pipe.data.text.sources import validation_source_config
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.data.text.tokenizer import TokenizerInfo, model_field, resolve_tokenizer
from mgpu_pipe.errors import ConfigError, DataError
from mgpu_pipe.families.config_source import config_class
from mgpu_pipe.families.pictures import Grid, Parts, picture_places

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class PreparedPictureChats(PreparedRows):
    """All that a worker needs to load conversations with pictures; made by :func:`prepare_picture_chats`."""

    kind: ClassVar[str] = "picture_chats"
    places: ClassVar[tuple[str, ...]] = (
        *FOLDERS,
        *(f"{held}{name}" for held in ("", "held_out_") for name in ("shown", "pictures", "clips")),
    )
    """The fields that are paths."""

    shown: Path
    """Which pictures the conversations of ``folder`` have."""
    held_out_shown: Path
    pictures: Path
    """What is known of these pictures."""
    held_out_pictures: Path
    clips: Path
    """What is known of its video files."""
    held_out_clips: Path
    image_token_id: int
    video_token_id: int | None = None
    """None where there are no videos."""
    tokens_a_picture: int
    """0 where pictures have sizes of their own."""
    grid: Grid | None = None
    """How these are cut."""
    parts: Parts | None = None
    """How pictures that are seen in parts are cut; a part takes ``tokens_a_picture``."""
    num_conversations: int
    bad_samples: int
    """Conversations that were left out for a picture that cannot be used."""
    long_samples: int
    """Likewise for their length."""
    told: str = ""

    def samples(self, config: RunConfig, split: Split, reopen: Callable[[], Any]) -> SampleSet:
        from mgpu_pipe.data.image.chat_samples import PictureChatSamples

        if config.data.packing == "none":
            return PictureChatSamples(config, self, split, reopen)
        from mgpu_pipe.data.image.chat_packs import PackedChats

        # Held-out ones have a row each: an answer is judged by its own.
        return PackedChats(PictureChatSamples(config, self, split, reopen), self.seq_len, split == "train", reopen)

    def shown_in(self, split: Split) -> Shown:
        """What the conversations of a split's folder show."""
        return Shown.open(self.shown if split == "train" else self.held_out_shown)

    @property
    def standing(self) -> list[int]:
        """The tokens that stand for a picture or a video."""
        return [one for one in (self.image_token_id, self.video_token_id) if one is not None]

    def pictures_of(self, split: Split) -> Path:
        return self.pictures if split == "train" else self.held_out_pictures

    def clips_of(self, split: Split) -> Path:
        return self.clips if split == "train" else self.held_out_clips

    def places_in(self, split: Split) -> NDArray[np.int64]:
        """Places in time, down and across of each of a split's shown pictures, (pictures, 3); zeros for one that cannot
        be used.

        A picture of the one size that all have counts as so many down, and one across; of one that is seen in parts
        it is these that count.
        """
        shown, cut = self.shown_in(split), self.grid or self.parts
        if cut is None:  # each thing is one picture
            places = np.where(shown.frames[:, None] < 0, 0, np.array([[1, self.tokens_a_picture, 1]]))
        else:
            sizes = shapes_in(known_shapes(self.pictures_of(split)))
            clips = np.array([fact[1:3] for fact in StoredClips(self.clips_of(split)).facts], np.int64)
            places = shown.places(cut, *(places_of_shapes(cut, one) for one in (sizes, clips)))
        return places[shown.pictures]

    def more_tokens(self, split: Split) -> NDArray[np.int64]:
        """By how many tokens the pictures of each conversation of a split's folder make it longer."""
        written, shown, places = self.written(), self.shown_in(split), self.places_in(split)
        lengths = written.lengths(self.image_token_id, places)
        if self.grid is not None and self.grid.told and self.video_token_id is not None:
            for at in np.flatnonzero(~np.isnan(shown.seconds[shown.pictures])):
                times = shown.thing(int(shown.pictures[at])).times(self.grid.frames)
                lengths[at] = len(written.ids(self.video_token_id, places[at].tolist(), times))
        return _summed(lengths - 1, shown.offsets)

    def written(self) -> Written:
        """The tokens that stand for what is shown."""
        return Written(self.tokenizer_folder, self.parts)

    def lengths(self, split: Split) -> NDArray[np.int64]:
        """Of the rows of each conversation of a split's folder, pictures included."""
        return np.diff(TokenStore.open(self.folder_of(split)).offsets) + self.more_tokens(split)

    def faults(self, split: Split) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which conversations of a split's folder have a picture that cannot be used, and which others are too long."""
        bad = _summed(self.places_in(split).prod(1) == 0, self.shown_in(split).offsets) > 0
        return bad, (self.lengths(split) > self.seq_len) & ~bad

    def documents(self, split: Split) -> NDArray[np.int64]:
        documents = super().documents(split)
        bad, long = self.faults(split)
        return documents[~(bad | long)[documents]]

    def is_here(self) -> bool:
        return all(Path(getattr(self, name)).exists() for name in self.places)

    def amounts(self) -> list[tuple[int, str]]:
        left = [(self.bad_samples, "left out for a picture"), (self.long_samples, "left out, above data.seq_len")]
        return [(self.num_conversations, "conversations"), *[entry for entry in left if entry[0]]]

    def model_fields(self) -> dict[str, Any]:
        if self.grid is not None:
            video = {} if self.video_token_id is None else {"video_token_id": self.video_token_id}
            return {"image_token_id": self.image_token_id, **video}
        if self.parts is not None:
            return {"image_token_id": self.image_token_id}
        return {"image_token_index": self.image_token_id, "image_seq_length": self.tokens_a_picture}

    def complete(self, config: RunConfig) -> RunConfig:
        """A model folder's knows the token already; a number of places is not every family's."""
        if config.model.path is not None:
            return config
        known = config_class(str(config.model.type))
        fields = {name: value for name, value in self.model_fields().items() if known is None or name in known.names}
        return replace(config, model=replace(config.model, config={**config.model.config, **fields}))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        fields = {name: entry for name, entry in value.items() if name != "kind"}
        cut = {name: kind(**fields[name]) for name, kind in (("grid", Grid), ("parts", Parts)) if fields.get(name)}
        return cls(**{**fields, **cut, **{name: Path(fields[name]) for name in cls.places}})


def prepare_picture_chats(config: RunConfig, progress: Progress | None = None) -> PreparedPictureChats:
    """Make the conversations and pictures of ``config`` ready, or find them ready.

    Raises:
        ConfigError: a path, tokenizer or model that cannot work.
        DataError: a row that is broken; a picture that cannot be used, with ``data.on_bad_sample=stop``; no sample.
    """
    data = config.data
    assert isinstance(data, PictureChatConfig)
    pixels = chat_pixels(data, config.model)
    grid = pixels.grid if isinstance(pixels, GridPixels) else None
    parts = pixels.parts if isinstance(pixels, PartPixels) else None
    tokens = parts.tokens if parts else _tokens_a_picture(config) if grid is None else 0
    cache, told = cache_folder(data.cache_dir).absolute(), progress or no_progress
    with writing_to_cache(cache):
        private_folder(cache)
        train = held = ChatSource.of(config, "data.paths", pixels, cache, told)
        if data.validation_paths:
            held = ChatSource.of(validation_source_config(config), "data.validation_paths", pixels, cache, told)
        tokenizer = resolve_tokenizer(config, [(train.plain, train.source)], cache, told)
        image = _token(config, tokenizer, PLACE, "image_token_index", "image_token_id")
        seen = any(thing.is_video for one in (train, held) for thing in one.things)
        video = _token(config, tokenizer, VIDEO, "video_token_id") if seen else None
        standing = [one for one in (image, video) if one is not None]
        both = {id(one): one.known(pixels, tokenizer, standing, cache, told) for one in (train, held)}
    folder, shown, pictures, clips = both[id(train)]
    held_folder, held_shown, held_pictures, held_clips = both[id(held)]
    known = PreparedPictureChats(
        folder=folder,
        held_out_folder=held_folder,
        fraction=float(held_folder == folder) if data.validation_paths else data.validation_fraction,
        tokenizer_folder=tokenizer.folder,
        padding_token_id=tokenizer.eos_token_id,
        seq_len=data.seq_len,
        shown=shown,
        held_out_shown=held_shown,
        pictures=pictures,
        held_out_pictures=held_pictures,
        clips=clips,
        held_out_clips=held_clips,
        image_token_id=image,
        video_token_id=video,
        tokens_a_picture=tokens,
        grid=grid,
        parts=parts,
        num_conversations=sum(TokenStore.open(one).num_documents for one in {folder, held_folder}),
        bad_samples=0,
        long_samples=0,
        train_samples=0,
        held_out_samples=0,
        validation_samples=0,
        digest="",
        validation_digest="",
    )
    changes = (asdict(pixels), data.shift, data.turn, data.flip, data.random_crop, tokens, data.seq_len, _FORMAT)
    return _counted(known, config, changes)


def _counted(known: PreparedPictureChats, config: RunConfig, seen: tuple[object, ...]) -> PreparedPictureChats:
    """With its samples, its figures and its identity."""
    data, apart = config.data, known.held_out_folder != known.folder
    faults = [known.faults(split) for split in (("train", "validation") if apart else ("train",))]
    bad, long = (sum(int(of[kind].sum()) for of in faults) for kind in (0, 1))
    train, held = (len(known.documents(split)) for split in ("train", "validation"))
    if not train:
        left = f"{long} conversations are longer than data.seq_len={data.seq_len}, {bad} have a bad picture"
        raise DataError(f"data.source={data.source}: there is nothing to train on: {left}, {held} are held out")
    if data.packing != "none":
        from mgpu_pipe.data.image.chat_packs import rows_of_lengths

        chosen = known.lengths("train")[known.documents("train")]
        train, seen = len(rows_of_lengths(chosen, data.seq_len)[0]) - 1, (*seen, data.packing)
    evaluated = min(held, data.validation_max_samples or held)
    each = "with their pictures" if known.grid or known.parts else f"each picture takes {known.tokens_a_picture}"
    return replace(
        known,
        train_samples=train,
        held_out_samples=held,
        validation_samples=evaluated,
        bad_samples=bad,
        long_samples=long,
        told=f"{long:,} conversations of more than {data.seq_len} tokens ({each}) are left out" if long else "",
        digest=digest_of(known.folder.name, known.shown.name, known.fraction, *seen),
        validation_digest=digest_of(known.held_out_shown.name, *seen) if apart and evaluated else "",
    )


def _summed(values: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of the values between each two offsets."""
    before = np.concatenate([[0], np.cumsum(values)])
    summed: NDArray[np.int64] = before[offsets[1:]] - before[offsets[:-1]]
    return summed


def _token(config: RunConfig, tokenizer: TokenizerInfo, place: str, *fields: str) -> int:
    """The id of the token that stands for a picture, or for a video.

    Args:
        fields: of the model's configuration, where it says it.

    Raises:
        ConfigError: the tokenizer has none, or the model knows another one.
    """
    from tokenizers import Tokenizer

    own = (model_field(config.model, name) for name in fields)
    known = next((one for one in own if one is not None), None)
    read = Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    number: int | None = read.token_to_id(place)
    if number is None and config.model.path is not None and known is not None and read.id_to_token(known) is not None:
        return int(known)  # the model's own chat template writes another token
    if number is None:
        fix = "name a chat template by data.chat_template, with which it gets the token"
        raise ConfigError("data.tokenizer", config.data.tokenizer, fix, f"it has no token {place}")
    if config.model.path is not None and known != number:
        reason = f"its token {place} is {number}, and the model's {fields[0]} {known}"
        raise ConfigError("data.tokenizer", config.data.tokenizer, "use the model's own tokenizer", reason)
    return number


def _tokens_a_picture(config: RunConfig) -> int:
    kind = config.model.type or model_field(config.model, "model_type")
    size, patch = (of_vision(config.model, name) for name in ("image_size", "patch_size"))
    if not isinstance(size, int) or not isinstance(patch, int) or not 1 <= patch <= size:
        fix = "give model.config.vision_config.image_size and patch_size"
        raise ConfigError("model.config.vision_config.patch_size", patch, fix, f"pictures have {size} pixels")
    known, name = config_class(str(kind)), "vision_feature_select_strategy"
    select = model_field(config.model, name) or (known.defaults.get(name, "full") if known else "full")
    return picture_places(str(of_vision(config.model, "model_type")), size, patch, str(select))
