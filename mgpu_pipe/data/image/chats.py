"""Conversations with pictures, each a sample of its own: one row, and its pictures. No torch.

The conversations' tokens lie in a token store, where each picture is one token. What is known of the pictures lies as
that of pictures with a class (:mod:`mgpu_pipe.data.image.prepare`), and beside it a folder with ``offsets.npy`` and
``pictures.npy``: conversation ``c`` has the pictures ``pictures[offsets[c] : offsets[c + 1]]``, -1 for one that cannot
be used. When a sample is read, each picture's token becomes as many as the language model gets vectors of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.cache import Progress, build_once, digest_of, no_progress, read_manifest, writing_to_cache
from mgpu_pipe.data.compressed import identity_of
from mgpu_pipe.data.fingerprint import fingerprints
from mgpu_pipe.data.image.chat_rows import COLUMN, QUESTIONS, ChatRow, rows_of
from mgpu_pipe.data.image.digit_questions import digit_questions
from mgpu_pipe.data.image.grids import GridPixels, chat_pixels, known_shapes, places_of_shapes, shapes_in, too_long
from mgpu_pipe.data.image.keys import PictureChatConfig
from mgpu_pipe.data.image.pixels import Pixels, of_vision
from mgpu_pipe.data.image.prepare import known_digits, known_files, say_bad
from mgpu_pipe.data.image.sources import FILES, Entry, digits_file, read_digits
from mgpu_pipe.data.samples import SampleSet, Split
from mgpu_pipe.data.text.conversations import PLACE
from mgpu_pipe.data.text.documents import Document, Source
from mgpu_pipe.data.text.prepare import tokenise
from mgpu_pipe.data.text.prepared_rows import FOLDERS, PreparedRows
from mgpu_pipe.data.text.sources import validation_source_config
from mgpu_pipe.data.text.token_store import TokenStore, load_array, save_array
from mgpu_pipe.data.text.tokenizer import TokenizerInfo, model_field, resolve_tokenizer
from mgpu_pipe.errors import ConfigError, DataError
from mgpu_pipe.families.pictures import Grid, picture_places

_FORMAT = 1
TRAINED = "no picture"
"""The key of questions without a picture. Its hash is one of the largest, so that they are trained on and not held
out."""


@dataclass(frozen=True, kw_only=True)
class PreparedPictureChats(PreparedRows):
    """All that a worker needs to load conversations with pictures; made by :func:`prepare_picture_chats`."""

    kind: ClassVar[str] = "picture_chats"
    places: ClassVar[tuple[str, ...]] = (*FOLDERS, "shown", "held_out_shown", "pictures", "held_out_pictures")
    """The fields that are paths."""

    shown: Path
    """Which pictures the conversations of ``folder`` have."""
    held_out_shown: Path
    pictures: Path
    """What is known of these pictures."""
    held_out_pictures: Path
    image_token_id: int
    tokens_a_picture: int
    """0 where pictures have sizes of their own."""
    grid: Grid | None = None
    """How these are cut."""
    num_conversations: int
    bad_samples: int
    """Conversations that were left out for a picture that cannot be used."""
    long_samples: int
    """Likewise for their length."""
    told: str = ""

    def samples(self, config: RunConfig, split: Split, reopen: Callable[[], Any]) -> SampleSet:
        from mgpu_pipe.data.image.chat_samples import PictureChatSamples

        return PictureChatSamples(config, self, split, reopen)

    def shown_in(self, split: Split) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``offsets`` and ``pictures`` of a split's folder."""
        folder = self.shown if split == "train" else self.held_out_shown
        return load_array(folder / "offsets.npy"), load_array(folder / "pictures.npy")

    def pictures_of(self, split: Split) -> Path:
        return self.pictures if split == "train" else self.held_out_pictures

    def places_in(self, split: Split) -> NDArray[np.int64]:
        """Places down and across of each of a split's shown pictures, (pictures, 2); zeros for one that cannot be used.

        A picture of the one size that all have counts as so many down, and one across.
        """
        _, pictures = self.shown_in(split)
        if self.grid is None:
            return np.where(pictures[:, None] < 0, 0, np.array([[self.tokens_a_picture, 1]]))
        places = places_of_shapes(self.grid, shapes_in(known_shapes(self.pictures_of(split))))
        return np.concatenate([places, np.zeros((1, 2), np.int64)])[pictures]

    def more_tokens(self, split: Split) -> NDArray[np.int64]:
        """By how many tokens the pictures of each conversation of a split's folder make it longer."""
        return _summed(self.places_in(split).prod(1) - 1, self.shown_in(split)[0])

    def faults(self, split: Split) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which conversations of a split's folder have a picture that cannot be used, and which others are too long."""
        bad = _summed(self.places_in(split).prod(1) == 0, self.shown_in(split)[0]) > 0
        store = TokenStore.open(self.folder_of(split))
        return bad, (np.diff(store.offsets) + self.more_tokens(split) > self.seq_len) & ~bad

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
            return {"image_token_id": self.image_token_id}
        return {"image_token_index": self.image_token_id, "image_seq_length": self.tokens_a_picture}

    def complete(self, config: RunConfig) -> RunConfig:
        """A model folder's knows the token already."""
        return config if config.model.path is not None else super().complete(config)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        fields = {name: entry for name, entry in value.items() if name != "kind"}
        grid = Grid(**fields["grid"]) if fields.get("grid") else None
        return cls(**{**fields, "grid": grid, **{name: Path(fields[name]) for name in cls.places}})


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
    tokens = _tokens_a_picture(config) if grid is None else 0
    cache, told = cache_folder(data.cache_dir).absolute(), progress or no_progress
    with writing_to_cache(cache):
        private_folder(cache)
        train = held = _Rows.of(config, "data.paths", cache, told)
        if data.validation_paths:
            held = _Rows.of(validation_source_config(config), "data.validation_paths", cache, told)
        tokenizer = resolve_tokenizer(config, [(train.plain, train.source)], cache, told)
        image = _image_token(config, tokenizer)
        both = {id(one): one.known(pixels, tokenizer, image, cache, told) for one in (train, held)}
    (folder, shown, pictures), (held_folder, held_shown, held_pictures) = both[id(train)], both[id(held)]
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
        image_token_id=image,
        tokens_a_picture=tokens,
        grid=grid,
        num_conversations=sum(TokenStore.open(one).num_documents for one in {folder, held_folder}),
        bad_samples=0,
        long_samples=0,
        train_samples=0,
        held_out_samples=0,
        validation_samples=0,
        digest="",
        validation_digest="",
    )
    seen = (asdict(pixels), data.shift, data.turn, data.flip, data.random_crop, tokens, data.seq_len, _FORMAT)
    return _counted(known, config, seen)


def _counted(known: PreparedPictureChats, config: RunConfig, seen: tuple[object, ...]) -> PreparedPictureChats:
    """With its samples, its figures and its identity."""
    data, apart = config.data, known.held_out_folder != known.folder
    faults = [known.faults(split) for split in (("train", "validation") if apart else ("train",))]
    bad, long = (sum(int(of[kind].sum()) for of in faults) for kind in (0, 1))
    train, held = (len(known.documents(split)) for split in ("train", "validation"))
    if not train:
        left = f"{long} conversations are longer than data.seq_len={data.seq_len}, {bad} have a bad picture"
        raise DataError(f"data.source={data.source}: there is nothing to train on: {left}, {held} are held out")
    evaluated = min(held, data.validation_max_samples or held)
    each = "with their pictures" if known.grid else f"each picture takes {known.tokens_a_picture}"
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


@dataclass(frozen=True)
class _Rows:
    """The conversations of a source, and what makes them known.

    Attributes:
        plain: the configuration that reads :attr:`source`, whose messages are brought into one form.
        pictures: of each conversation its pictures, by their places in ``entries``.
        entries: picture files, each once; empty for the digits.
    """

    plain: RunConfig
    source: Source
    pictures: list[tuple[int, ...]]
    origins: list[str]
    entries: list[Entry]

    @classmethod
    def of(cls, config: RunConfig, key: str, cache: Path, progress: Progress) -> _Rows:
        data = config.data
        assert isinstance(data, PictureChatConfig)
        plain = replace(config, data=replace(data, messages_column=COLUMN, format="messages"))
        if data.source == QUESTIONS:
            _, labels = read_digits(digits_file())
            asked = list(digit_questions([int(label) for label in labels]))
            documents = [
                Document(one.text, f"data.source={QUESTIONS}: {one.pair}", 1, key=one.pair if one.pictures else TRAINED)
                for one in asked
            ]
            content = digest_of(QUESTIONS, [(one.text, one.pictures) for one in asked])
            source = Source(QUESTIONS, content, len(asked), lambda: iter(documents), "chat")
            return cls(plain, source, [one.pictures for one in asked], [one.origin for one in documents], [])
        paths = files.expand_paths(data.paths, key)
        known = fingerprints(paths, cache, progress)

        def rows() -> Iterator[ChatRow]:
            return (row for path in paths for row in rows_of(data, path, known[path]))

        def documents_of() -> Iterator[Document]:
            return (Document(row.text, row.origin, row.size, key=row.key) for row in rows())

        numbers, pictures, origins = dict[Path, int](), list[tuple[int, ...]](), list[str]()
        entries = list[Entry]()
        for row in rows():
            entries += [Entry(one, "", row.origin) for one in dict.fromkeys(row.pictures) if one not in numbers]
            pictures.append(tuple(numbers.setdefault(one, len(numbers)) for one in row.pictures))
            origins.append(row.origin)
        columns = (data.messages_column, data.image_column, data.format)
        content = digest_of("picture_chats", columns, [identity_of(path, known[path]) for path in paths])
        size = sum(known[path].size for path in paths)
        return cls(plain, Source(data.source, content, size, documents_of, "chat"), pictures, origins, entries)

    def known(
        self, pixels: Pixels, tokenizer: TokenizerInfo, image: int, cache: Path, progress: Progress
    ) -> tuple[Path, Path, Path]:
        """The folders of the tokens, of which pictures they have, and of the pictures; made where they are missing."""
        data = self.plain.data
        assert isinstance(data, PictureChatConfig)
        tokens = tokenise(self.plain, self.source, tokenizer, cache, progress)
        if self.source.name == QUESTIONS:
            pictures = known_digits(cache)
        else:
            pictures = known_files(data, self.entries, pixels.channels, cache, progress)
        long = too_long(pixels.grid, pictures) if isinstance(pixels, GridPixels) else []
        say_bad([*(read_manifest(pictures) or {})["bad"], *long], data.on_bad_sample)
        shown = cache / "tokens" / f"{tokens.name}.shown-{digest_of(_FORMAT, pictures.name)}"
        build_once(shown, partial(self._write, tokens, image, pictures))
        return tokens, shown, pictures

    def _write(self, tokens: Path, image: int, pictures: Path, out: Path) -> dict[str, Any]:
        store = TokenStore.open(tokens)
        counts = np.array([len(one) for one in self.pictures], np.int64)
        starts = np.concatenate([[0], np.cumsum(store.tokens == image)])
        kept = starts[store.offsets[1:]] - starts[store.offsets[:-1]]
        for at in np.flatnonzero(kept != counts)[:1]:
            reason = f"the chat template keeps {kept[at]} of {counts[at]} places of pictures"
            raise DataError(f"{self.origins[at]}: {reason}; give another one by data.chat_template")
        flat = np.array([one for several in self.pictures for one in several], np.int64)
        if self.entries:
            good = json.loads((pictures / FILES).read_text(encoding="utf-8"))["paths"]
            place = {path: number for number, path in enumerate(good)}
            flat = np.array([place.get(str(one.path.absolute()), -1) for one in self.entries], np.int64)[flat]
        save_array(out / "offsets.npy", np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
        save_array(out / "pictures.npy", flat)
        return {"conversations": len(counts), "pictures": len(flat)}


def _summed(values: NDArray[Any], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of the values between each two offsets."""
    before = np.concatenate([[0], np.cumsum(values)])
    summed: NDArray[np.int64] = before[offsets[1:]] - before[offsets[:-1]]
    return summed


def _image_token(config: RunConfig, tokenizer: TokenizerInfo) -> int:
    """The id of the token that stands for a picture.

    Raises:
        ConfigError: the tokenizer has none, or the model knows another one.
    """
    from tokenizers import Tokenizer

    own = (model_field(config.model, name) for name in ("image_token_index", "image_token_id"))
    known = next((one for one in own if one is not None), None)
    read = Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    number: int | None = read.token_to_id(PLACE)
    if number is None and config.model.path is not None and known is not None and read.id_to_token(known) is not None:
        return int(known)  # the model's own chat template writes another token
    if number is None:
        fix = "name a chat template by data.chat_template, with which it gets the token"
        raise ConfigError("data.tokenizer", config.data.tokenizer, fix, f"it has no token {PLACE}")
    if config.model.path is not None and known != number:
        reason = f"its token {PLACE} is {number}, and the model's image_token_index {known}"
        raise ConfigError("data.tokenizer", config.data.tokenizer, "use the model's own tokenizer", reason)
    return number


def _tokens_a_picture(config: RunConfig) -> int:
    size, patch = (of_vision(config.model, name) for name in ("image_size", "patch_size"))
    if not isinstance(size, int) or not isinstance(patch, int) or not 1 <= patch <= size:
        fix = "give model.config.vision_config.image_size and patch_size"
        raise ConfigError("model.config.vision_config.patch_size", patch, fix, f"pictures have {size} pixels")
    select = model_field(config.model, "vision_feature_select_strategy") or "default"
    return picture_places(str(of_vision(config.model, "model_type")), size, patch, str(select))
