"""Prepares conversations with pictures: each is a sample, one row and its pictures.

A token store holds the conversations; each picture or video is one token in it. Cache folders hold the scanned pictures
(:mod:`mgpu_pipe.data.images.scan_images`), the scanned videos (:mod:`mgpu_pipe.data.images.videos`) and the index of
what each conversation shows (:mod:`mgpu_pipe.data.images.visual_inputs`). Reading a sample repeats each picture's token
once for each vector that the language model gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.architectures.config_source import config_class
from mgpu_pipe.architectures.find import family_of
from mgpu_pipe.architectures.pictures import Grid, Parts, PatchGrid, PooledGrid, RowGrid
from mgpu_pipe.architectures.tiles import Canvas, Mosaic, Tiles
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.audio.chat_sounds import chat_window, tokens_of_sounds
from mgpu_pipe.data.audio.log_mel import FrameMel, LogMel
from mgpu_pipe.data.bad_samples import LengthLimit, describe_too_long, refuse_too_long
from mgpu_pipe.data.cache import Progress, digest_of, no_progress, read_manifest, run_cache
from mgpu_pipe.data.data_source import held_out_data
from mgpu_pipe.data.images.chat_source import ChatSource
from mgpu_pipe.data.images.grids import chat_pixels, known_shapes, places_of_shapes, shapes_in
from mgpu_pipe.data.images.image_keys import PictureChatConfig
from mgpu_pipe.data.images.parts import picture_tokens_of
from mgpu_pipe.data.images.pixels import Pixels
from mgpu_pipe.data.images.videos import StoredClips
from mgpu_pipe.data.images.visual_inputs import (
    SOUND,
    PlaceholderTokens,
    VisualIndex,
    audio_token,
    opener_of,
    placeholder_texts,
    placeholder_tokens,
)
from mgpu_pipe.data.model_field import model_field, model_field_or_default, resolve_packing
from mgpu_pipe.data.prepared_splits import held_out_share
from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.text.notes import notes_of
from mgpu_pipe.data.text.prepared_rows import PreparedRows
from mgpu_pipe.data.text.token_store import TokenStore
from mgpu_pipe.data.text.tokenizer import resolve_tokenizer

_FORMAT = 1
CUTS: dict[str, type[Any]] = {
    "grid": Grid,
    "parts": Parts,
    "tiles": Tiles,
    "canvas": Canvas,
    "mosaic": Mosaic,
    "rows": RowGrid,
    "pooled": PooledGrid,
}
"""Class of each cut of pictures, by its field in :class:`PreparedPictureChats`."""


@dataclass(frozen=True, kw_only=True)
class PreparedPictureChats(PreparedRows):
    """Everything a worker needs to load conversations with pictures; :func:`prepare_picture_chats` makes it."""

    kind: ClassVar[str] = "picture_chats"

    shown: Path
    """Folder of the :class:`VisualIndex` of the conversations in ``folder``."""
    held_out_shown: Path
    pictures: Path
    """Folder of the scan of these pictures."""
    held_out_pictures: Path
    clips: Path
    """Folder of the scan of these video files."""
    held_out_clips: Path
    sounds: Path | None = None
    """Folder of the scan of these recordings; None where the model hears none."""
    held_out_sounds: Path | None = None
    image_token_id: int | None
    """None where the model sees no pictures."""
    video_token_id: int | None = None
    """None where there are no videos."""
    tokens_a_picture: int
    """0 where pictures keep their native sizes."""
    grid: Grid | None = None
    """Cuts native pictures into patches."""
    parts: Parts | None = None
    """Cuts pictures into parts; a part takes ``tokens_a_picture``."""
    tiles: Tiles | None = None
    """Cuts pictures into tiles; a tile takes ``tokens_a_picture``."""
    canvas: Canvas | None = None
    """Lays pictures onto tiles; a tile takes ``tokens_a_picture``."""
    mosaic: Mosaic | None = None
    """Lays pictures onto tiles, whose tokens depend on the picture's patches."""
    rows: RowGrid | None = None
    """Cuts pictures into patches, with a token after each row of places."""
    pooled: PooledGrid | None = None
    """Cuts pictures into patches, which are averaged for each place."""
    window: LogMel | None = None
    """How recordings become spectrograms."""
    audio_token_id: int | None = None
    opener: int | None = None
    """Token that stands for a picture where the template writes another one than ``image_token_id``."""
    num_conversations: int
    packing: str
    """``data.packing`` with auto resolved."""

    def samples(
        self, seed: int, model: ModelConfig, data: DataConfig, split: Split, reopen: Callable[[], Any]
    ) -> SampleSet:
        from mgpu_pipe.data.images.chat_tensors import PackedChats, PictureChatSamples

        chats = PictureChatSamples(seed, model, data, self, split, reopen)
        # Held-out conversations are not packed: an evaluation judges each answer by its own row.
        return chats if self.packing == "none" else PackedChats(chats, self.seq_len, split == "train", reopen)

    def visual_index(self, split: Split) -> VisualIndex:
        """Index of what a split's conversations show."""
        return VisualIndex.open(self.shown if split == "train" else self.held_out_shown)

    @property
    def standing(self) -> list[int]:
        """Placeholder tokens of pictures, videos and recordings."""
        tokens = (self.written_token, self.video_token_id, self.audio_token_id)
        return [token for token in tokens if token is not None]

    @property
    def placeholders(self) -> list[int]:
        """:attr:`standing`, and the token of a picture's places."""
        return [*self.standing, *([] if self.image_token_id is None else [self.image_token_id])]

    @property
    def written_token(self) -> int | None:
        """Token that the chat template writes for a picture."""
        return self.image_token_id if self.opener is None else self.opener

    @property
    def cut(self) -> Grid | Parts | Tiles | PatchGrid | None:
        """Cut of the pictures; None where they have one size."""
        return self.grid or self.named_parts

    @property
    def named_parts(self) -> Parts | Tiles | PatchGrid | None:
        """Cut on which the text of a picture depends."""
        return self.parts or self.tiles or self.canvas or self.mosaic or self.rows or self.pooled

    def pictures_of(self, split: Split) -> Path:
        return self.pictures if split == "train" else self.held_out_pictures

    def clips_of(self, split: Split) -> Path:
        return self.clips if split == "train" else self.held_out_clips

    def sounds_of(self, split: Split) -> Path | None:
        return self.sounds if split == "train" else self.held_out_sounds

    def places_in(self, split: Split) -> NDArray[np.int64]:
        """Places in time, down and across of a split's pictures, (pictures, 3), or parts; 0 for an unusable one."""
        visuals, cut = self.visual_index(split), self.cut
        if cut is None:  # each visual is one picture
            places = np.where(visuals.frames[:, None] < 0, 0, np.array([[1, self.tokens_a_picture, 1]]))
        else:
            sizes = shapes_in(known_shapes(self.pictures_of(split)))
            clips = np.array([fact[1:3] for fact in StoredClips(self.clips_of(split)).facts], np.int64)
            places = visuals.places(cut, *(places_of_shapes(cut, shapes) for shapes in (sizes, clips)))
        folder, is_sound = self.sounds_of(split), visuals.clips == SOUND
        if folder is not None and self.window is not None:
            tokens = np.append(tokens_of_sounds(folder, self.window), 0)[visuals.frames[visuals.starts[:-1][is_sound]]]
            places[is_sound] = np.stack([np.ones_like(tokens), tokens, np.ones_like(tokens)], 1)
            places[is_sound] *= (tokens > 0)[:, None]
        return places[visuals.pictures]

    def more_tokens(self, split: Split) -> NDArray[np.int64]:
        """Tokens that the pictures add to each conversation of a split's folder."""
        written, visuals, places = self.placeholder_tokens(), self.visual_index(split), self.places_in(split)
        # A recording counts its places alone.
        lengths = places.prod(1) if self.written_token is None else written.lengths(self.written_token, places)
        if self.grid is not None and self.grid.has_timestamps and self.video_token_id is not None:
            for index in np.flatnonzero(~np.isnan(visuals.seconds[visuals.pictures])):
                times = visuals.visual(int(visuals.pictures[index])).times(self.grid.frames)
                lengths[index] = len(written.ids(self.video_token_id, places[index].tolist(), times))
        return _sums_between(lengths - 1, visuals.offsets)

    def placeholder_tokens(self) -> PlaceholderTokens:
        """Placeholder tokens of pictures and videos, by size."""
        opened = None if self.opener is None or self.image_token_id is None else (self.opener, self.image_token_id)
        return PlaceholderTokens(self.tokenizer_folder, self.named_parts, opened)

    def lengths(self, split: Split) -> NDArray[np.int64]:
        """Row length of each conversation of a split's folder, pictures included."""
        return np.diff(TokenStore.open(self.folder_of(split)).offsets) + self.more_tokens(split)

    def faults(self, split: Split) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which conversations of a split's folder have an unusable picture, and which others are too long."""
        bad = _sums_between(self.places_in(split).prod(1) == 0, self.visual_index(split).offsets) > 0
        return bad, (self.lengths(split) > self.seq_len) & ~bad

    def documents(self, split: Split) -> NDArray[np.int64]:
        hashes, leaders = TokenStore.open(self.folder_of(split)).hashes, VisualIndex.leaders(self.shown)
        bad, long = self.faults(split)
        return np.flatnonzero(self.in_split(split, hashes, leaders) & ~(bad | long))

    def long_documents(self, folder: Path) -> NDArray[np.bool_]:
        return self.faults("train" if folder == self.folder else "validation")[1]

    @property
    def file_kinds(self) -> str:
        """Kinds of files that the model takes."""
        seen = [] if self.image_token_id is None else ["pictures"]
        return " and ".join([*seen, *([] if self.window is None else ["recordings"])])

    def too_long(self, data: DataConfig) -> str:
        each = "with their pictures" if self.cut else f"each picture takes {self.tokens_a_picture}"
        each = each if self.window is None else f"with their {self.file_kinds}"
        limit = f"data.seq_len={self.seq_len} tokens ({each})"
        return describe_too_long(self.too_long_samples, "conversations", self.on_too_long, limit)

    def amounts(self) -> list[tuple[int, str]]:
        return [(self.num_conversations, "conversations"), *self.left_out()]

    def model_fields(self) -> dict[str, Any]:
        if self.image_token_id is None:
            name = "audio_token_id" if self.window is not None and self.window.filled else "audio_token_index"
            return {name: self.audio_token_id}
        if self.grid is not None:
            video = {} if self.video_token_id is None else {"video_token_id": self.video_token_id}
            audio = {} if self.audio_token_id is None else {"audio_token_index": self.audio_token_id}
            return {"image_token_id": self.image_token_id, "image_token_index": self.image_token_id, **audio, **video}
        if self.named_parts is not None:
            audio = {} if self.audio_token_id is None else {"audio_token_id": self.audio_token_id}
            return {"image_token_id": self.image_token_id, **audio}
        return {"image_token_index": self.image_token_id, "image_seq_length": self.tokens_a_picture}

    def complete_model(self, model: ModelConfig, objective: ObjectiveConfig) -> ModelConfig:
        """Adds :meth:`model_fields` to a new model's configuration, as far as its family has these fields."""
        if model.path is not None:
            return model
        known, decided = config_class(str(model.type)), self.model_fields()
        fields = {name: value for name, value in decided.items() if known is None or name in known.names}
        if not fields and (tower := config_class(f"{model.type}_vision")) is not None:  # its tower has them
            inside = {name: value for name, value in decided.items() if name in tower.names}
            fields = {"vision_config": {**model.config.get("vision_config", {}), **inside}}
        return replace(model, config={**model.config, **fields})

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        kinds = {**CUTS, "window": FrameMel if "extractor" in (value.get("window") or {}) else LogMel}
        built = {name: kind(**value[name]) for name, kind in kinds.items() if value.get(name)}
        return super().from_dict({**value, **built})


def prepare_picture_chats(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, progress: Progress | None = None
) -> PreparedPictureChats:
    """Prepares the conversations and pictures of ``data``, or finds them in the cache.

    Raises:
        ConfigError: a path, tokenizer or model that cannot work.
        DataError: a row that is broken; a picture that cannot be used, with ``data.on_bad_sample=stop``; no sample.
    """
    assert isinstance(data, PictureChatConfig)
    pixels = chat_pixels(data, model)
    cut: Any = getattr(pixels, "grid", None) or getattr(pixels, "parts", None)
    window = chat_window(model)
    kind = str(model.type or model_field(model, "model_type"))
    sees = family_of(kind).sight is not None or window is None
    if isinstance(cut, Parts | Tiles):
        tokens = cut.tokens
    else:
        tokens = picture_tokens_of(model, pixels.size) if cut is None and sees else 0
    report = progress or no_progress
    with run_cache(data) as cache:
        sources = _open_sources(model, data, pixels, cache, report)
        tokenizer = resolve_tokenizer(model, data, objective, [(sources[0].plain, sources[0].source)], cache, report)
        has_videos = any(visual.is_video for source in sources for visual in source.visuals)
        image, video = placeholder_tokens(model, data, tokenizer, has_videos) if sees else (None, None)
        audio = None if window is None else audio_token(model, data, tokenizer)
        opener = opener_of(tokenizer.folder, kind, partial(model_field_or_default, model))
        standing = [token for token in (image if opener is None else opener, video, audio) if token is not None]
        literals = placeholder_texts(model, tokenizer)
        folders = [source.prepare(pixels, window, tokenizer, standing, cache, report, literals) for source in sources]
    folder, index, pictures, clips, sounds = folders[0]
    held_folder, held_shown, held_pictures, held_clips, held_sounds = folders[-1]
    notes = notes_of(map(read_manifest, dict.fromkeys((folder, held_folder))))
    num_bad = notes.bad + sum(len(source.skipped) for source in sources)
    for source in sources:
        notes.add(source.notes)
    known = PreparedPictureChats(
        folder=folder,
        held_out_folder=held_folder,
        fraction=held_out_share(data, folder, held_folder),
        tokenizer_folder=tokenizer.folder,
        padding_token_id=tokenizer.eos_token_id,
        seq_len=data.seq_len,
        shown=index,
        held_out_shown=held_shown,
        pictures=pictures,
        held_out_pictures=held_pictures,
        clips=clips,
        held_out_clips=held_clips,
        sounds=sounds,
        held_out_sounds=held_sounds,
        window=window,
        audio_token_id=audio,
        image_token_id=image,
        video_token_id=video,
        tokens_a_picture=tokens,
        **{name: cut for name, kind in CUTS.items() if type(cut) is kind},
        opener=opener,
        num_conversations=sum(TokenStore.open(store).num_documents for store in {folder, held_folder}),
        packing=resolve_packing(model, data, objective),
        bad_samples=num_bad,
        told=notes.summary(),
    )
    return _add_figures(known, data, pixels)


def _open_sources(
    model: ModelConfig, data: DataConfig, pixels: Pixels, cache: Path, report: Progress
) -> list[ChatSource]:
    """The conversations of ``data.paths``, and after them those of ``data.validation_paths`` where there are any."""
    keys = {"data.paths": data}
    if data.validation_paths:
        keys["data.validation_paths"] = held_out_data(data)
    return [ChatSource.from_config(model, each, key, pixels, cache, report) for key, each in keys.items()]


def _add_figures(known: PreparedPictureChats, data: PictureChatConfig, pixels: Pixels) -> PreparedPictureChats:
    """Adds sample counts and digests to ``known``."""
    apart = known.is_apart
    window = () if known.window is None else (known.window.identity(),)
    seen: tuple[object, ...] = (
        pixels.identity(),
        *window,
        *data.changes(),
        known.tokens_a_picture,
        data.seq_len,
        _FORMAT,
    )
    splits: tuple[Split, ...] = ("train", "validation") if apart else ("train",)
    faults = [known.faults(split) for split in splits]
    bad, long = (sum(int(fault[kind].sum()) for fault in faults) for kind in (0, 1))
    train, held_out = (len(known.documents(split)) for split in ("train", "validation"))
    if data.on_too_long == "refuse":
        for split in splits:
            lengths = np.where(known.faults(split)[0], 0, known.lengths(split))
            refuse_too_long(
                LengthLimit("data.seq_len", data.seq_len, f"conversations, with their {known.file_kinds},"), lengths
            )
    left = f"{long} conversations are longer than data.seq_len={data.seq_len}, {bad} have bad {known.file_kinds}"
    if train and known.packing != "none":
        from mgpu_pipe.data.images.chat_tensors import rows_of_lengths

        chosen = known.lengths("train")[known.documents("train")]
        train, seen = len(rows_of_lengths(chosen, data.seq_len)[0]) - 1, (*seen, known.packing)
    return known.with_counts(
        data,
        train,
        held_out,
        f"{left}, {held_out} are held out",
        bad_samples=known.bad_samples + bad,
        too_long_samples=long,
        digest=digest_of(known.folder.name, VisualIndex.content(known.shown), known.fraction, *seen),
        validation_digest=digest_of(VisualIndex.content(known.held_out_shown), *seen) if apart and held_out else "",
    )


def _sums_between(values: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums of the values between consecutive offsets."""
    before = np.concatenate([[0], np.cumsum(values)])
    summed: NDArray[np.int64] = before[offsets[1:]] - before[offsets[:-1]]
    return summed
