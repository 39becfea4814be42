"""Recordings with what is said in them, listened to once: what cannot be used is named. No torch.

In the cache a source is a folder with ``lengths.npy``, the samples of each recording at the run's rate, ``hashes.npy``,
by which the held-out ones are chosen, and ``texts.json``; ``files.json`` tells the paths and what each held, the spoken
digits have ``waves.npy`` instead. What the run's alphabet and model make of it is a second folder: ``kept.npy``, the
recordings that can be used, and the numbers of their characters. Recordings themselves stay where they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from mgpu_pipe.config.hub import local_folder
from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.alphabet import Alphabet, own_alphabet
from mgpu_pipe.data.audio.keys import AudioConfig
from mgpu_pipe.data.audio.listen import heard_folders, transcripts
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.audio.read import Sound, frames_of
from mgpu_pipe.data.audio.sorted_steps import SortedSteps
from mgpu_pipe.data.audio.words import Words, words_of
from mgpu_pipe.data.cache import Progress, build_once, digest_of, no_progress, read_manifest, writing_to_cache
from mgpu_pipe.data.order import GlobalOrder, Order
from mgpu_pipe.data.samples import Prepared, Split, evaluated_samples
from mgpu_pipe.data.text.split import held_out
from mgpu_pipe.data.text.token_store import load_array, save_array
from mgpu_pipe.data.text.tokenizer_folder import TOKENIZER
from mgpu_pipe.errors import DataError
from mgpu_pipe.families.frames import Frames

if TYPE_CHECKING:
    from mgpu_pipe.data.audio.dataset import SpeechSamples

_log = logging.getLogger(__name__)
_FORMAT = 1
NAMED = 5
"""Bad recordings that a message names."""


@dataclass(frozen=True, kw_only=True)
class PreparedSpeech(Prepared):
    """All that a worker needs to load recordings with their transcripts; made by :func:`prepare_speech`."""

    kind: ClassVar[str] = "speech"
    places: ClassVar[tuple[str, ...]] = ("folder", "held_out_folder", "labels", "held_out_labels", "tokenizer_folder")
    """The fields that are paths."""

    folder: Path
    """What is known of the training recordings."""
    held_out_folder: Path
    """Of the held-out ones; the same where a share of the recordings is held out."""
    labels: Path
    """What the alphabet and the model make of the training recordings' transcripts."""
    held_out_labels: Path
    fraction: float
    """That share; 1: all of the held-out folder, which is the training recordings' own."""
    tokenizer_folder: Path
    """The alphabet, and how recordings become the model's input, as transformers reads them."""
    new_alphabet: bool
    """The model is new: its vocabulary is the alphabet, or its special tokens are those of the words."""
    recordings: int
    bad_samples: int
    """Recordings that were left out."""
    hours: float
    train_samples: int
    held_out_samples: int
    """Of which an evaluation takes ``validation_samples``."""
    validation_samples: int
    digest: str
    validation_digest: str
    unigram_perplexity: float | None = None

    def open(self, config: RunConfig, split: Split) -> SpeechSamples:
        from mgpu_pipe.data.audio.dataset import SpeechSamples

        if split == "validation" and not self.held_out_samples:
            raise ValueError("this data holds nothing out")
        return SpeechSamples(config, split, self, partial(self.open, config, split))

    def order(self, config: RunConfig, samples: int) -> Order:
        order, data = super().order(config, samples), config.data
        assert isinstance(data, AudioConfig) and isinstance(order, GlobalOrder)
        if data.sort_steps == 1:
            return order
        lengths = load_array(self.folder / "lengths.npy")[self.chosen("train")]
        return SortedSteps(order, lengths, data.global_batch_size, data.sort_steps)

    def folder_of(self, split: Split) -> Path:
        return self.folder if split == "train" else self.held_out_folder

    def labels_of(self, split: Split) -> Path:
        return self.labels if split == "train" else self.held_out_labels

    def among_kept(self, split: Split) -> NDArray[np.int64]:
        """Places of a split's recordings among those of its folder that can be used."""
        kept = load_array(self.labels_of(split) / "kept.npy")
        if self.held_out_folder != self.folder or self.fraction == 1:
            return np.arange(len(kept))
        chosen = held_out(load_array(self.folder_of(split) / "hashes.npy")[kept], self.fraction)
        return np.flatnonzero(chosen if split == "validation" else ~chosen)

    def chosen(self, split: Split) -> NDArray[np.int64]:
        """A split's recordings, in its folder."""
        found: NDArray[np.int64] = load_array(self.labels_of(split) / "kept.npy")[self.among_kept(split)]
        return found

    def evaluated_samples(self) -> NDArray[np.int64]:
        return evaluated_samples(self.held_out_samples, self.validation_samples)

    def is_here(self) -> bool:
        return all(getattr(self, name).exists() for name in self.places)

    def amounts(self) -> list[tuple[int, str]]:
        left_out = [(self.bad_samples, "left out")] if self.bad_samples else []
        return [(self.recordings, "recordings"), (round(60 * self.hours), "minutes"), *left_out]

    def context(self, config: RunConfig) -> float:
        return 0.0

    def alphabet(self) -> Alphabet | Words:
        folder = self.tokenizer_folder
        return Words(folder) if (folder / TOKENIZER).is_file() else Alphabet.of_folder(folder)

    def model_fields(self) -> dict[str, Any]:
        return self.alphabet().model_fields if self.new_alphabet else {}

    def as_dict(self) -> dict[str, Any]:
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        return {"kind": self.kind, **plain}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        fields = {name: entry for name, entry in value.items() if name != "kind"}
        return cls(**{**fields, **{name: Path(fields[name]) for name in cls.places}})


def prepare_speech(config: RunConfig, progress: Progress | None = None) -> PreparedSpeech:
    """Listen to the recordings of ``config``, or find that done.

    Raises:
        ConfigError: a path or a rate that cannot work; a package or program that is missing.
        DataError: a list that is broken; a recording that cannot be used, with ``data.on_bad_sample=stop``; none to
            train on.
        ModelFolderError: the model's alphabet cannot be read.
    """
    data, told = config.data, progress or no_progress
    assert isinstance(data, AudioConfig)
    sound = Sound.of(data, config.model)
    window = LogMel.of(config.model, sound.rate)
    limits = frames_of(config.model) if window is None else window
    cache = cache_folder(data.cache_dir).absolute()
    with writing_to_cache(cache):
        private_folder(cache)
        folder, held = heard_folders(data, sound, cache, told)
        alphabet: Alphabet | Words
        if window is None:
            alphabet, new = _alphabet(config, folder)
            tokenizer = _alphabet_folder(alphabet, sound, cache)
        else:
            alphabet = words_of(config, _training_texts(config, folder, held), window, cache)
            tokenizer, new = alphabet.folder, config.model.path is None
        written = (alphabet, limits, tokenizer.name)
        labels = _labels(folder, *written, data.speed, cache)
        held_labels = labels if held == folder else _labels(held, *written, 0.0, cache)
    manifests = [read_manifest(one) or {} for one in dict.fromkeys((folder, held, labels, held_labels))]
    bad = [(path, reason) for one in manifests for path, reason in one["bad"]]
    _say(bad, data.on_bad_sample)
    own = held != folder or bool(data.validation_paths)
    known = PreparedSpeech(
        folder=folder,
        held_out_folder=held,
        labels=labels,
        held_out_labels=held_labels,
        fraction=float(held == folder) if own else data.validation_fraction,
        tokenizer_folder=tokenizer,
        new_alphabet=new,
        recordings=sum(one.get("recordings", 0) for one in manifests),
        bad_samples=len(bad),
        hours=sum(one.get("seconds", 0.0) for one in manifests) / 3600,
        train_samples=0,
        held_out_samples=0,
        validation_samples=0,
        digest="",
        validation_digest="",
    )
    train, available = len(known.chosen("train")), len(known.chosen("validation"))
    if not train:
        raise DataError(f"data.source={data.source}: there is nothing to train on")
    identity = (_FORMAT, asdict(sound), tokenizer.name)
    return replace(
        known,
        train_samples=train,
        held_out_samples=available,
        validation_samples=min(available, data.validation_max_samples or available),
        digest=digest_of(folder.name, labels.name, known.fraction, data.speed, data.noise, data.sort_steps, *identity),
        validation_digest=digest_of(held.name, held_labels.name, *identity) if own and available else "",
    )


def _alphabet(config: RunConfig, folder: Path) -> tuple[Alphabet, bool]:
    """The chosen folder's, else the model's own, else all characters of the training transcripts, which is new."""
    if config.data.tokenizer != "auto":
        return Alphabet.of_folder(local_folder(config.data.tokenizer, "data.tokenizer")), config.model.path is None
    own = own_alphabet(config)
    if own is not None:
        return Alphabet.of_folder(own), False
    return Alphabet.of_texts(transcripts(folder)[0]), True


def _alphabet_folder(alphabet: Alphabet, sound: Sound, cache: Path) -> Path:
    folder = cache / "alphabets" / digest_of(_FORMAT, asdict(alphabet), asdict(sound))

    def build(out: Path) -> dict[str, Any]:
        alphabet.write(out, sound.rate, sound.normalise)
        return {"characters": alphabet.size}

    build_once(folder, build)
    return folder


def _training_texts(config: RunConfig, folder: Path, held: Path) -> list[str]:
    texts = transcripts(folder)[0]
    if held != folder or config.data.validation_paths:
        return texts
    kept = ~held_out(load_array(folder / "hashes.npy"), config.data.validation_fraction)
    return [text for text, use in zip(texts, kept.tolist(), strict=True) if use] or texts


def _labels(
    folder: Path, alphabet: Alphabet | Words, limits: Frames | LogMel, written: str, speed: float, cache: Path
) -> Path:
    """The folder with the numbers of what the transcripts are written in, of those recordings that can be used.

    Args:
        written: name of the alphabet's folder.
        speed: share by which recordings are played faster or slower at most.
    """
    name = digest_of("labels", _FORMAT, folder.name, written, asdict(limits), speed)

    def build(out: Path) -> dict[str, Any]:
        texts, names = transcripts(folder)
        lengths = load_array(folder / "lengths.npy").tolist()
        kept, labels, bad = list[int](), list[list[int]](), list[list[str]]()
        for at, (text, named, length) in enumerate(zip(texts, names, lengths, strict=True)):
            fitted = alphabet.fitted(text)
            worst = 1 - speed if isinstance(limits, LogMel) else 1 + speed  # too long, or too short
            fault = _fault_of(fitted, alphabet, limits, int(length / worst))
            if fault is None:
                kept.append(at)
                labels.append(alphabet.encode(fitted))
            else:
                bad.append([named, fault])
        save_array(out / "kept.npy", np.array(kept, np.int64))
        save_array(out / "labels.npy", np.array([number for one in labels for number in one], np.int32))
        save_array(out / "starts.npy", np.cumsum([0, *map(len, labels)], dtype=np.int64))
        return {"bad": bad}

    out = cache / "speech_labels" / name
    build_once(out, build)
    return out


def _fault_of(text: str, alphabet: Alphabet | Words, limits: Frames | LogMel, samples: int) -> str | None:
    """Why a transcript cannot be learnt from a recording of so many samples."""
    if not text:
        return "has an empty text"
    strange = alphabet.strange(text)
    if strange:
        return f"has {strange!r} in its text, which the model's alphabet has not"
    return limits.fault(alphabet.encode(text), samples)


def _say(bad: Sequence[tuple[str, str]], on_bad_sample: str) -> None:
    if not bad:
        return
    more = f"; and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    listed_ones = "; ".join(f"{path} {reason}" for path, reason in bad[:NAMED]) + more
    if on_bad_sample == "stop":
        one = len(bad) == 1
        what = "the recording or its text" if one else f"{len(bad)} recordings or their texts"
        fix = f"correct {what}, or leave {'it' if one else 'them'} out by data.on_bad_sample=skip"
        raise DataError(f"{listed_ones}: {fix}")
    _log.warning("%d of the recordings are left out: %s", len(bad), listed_ones)
