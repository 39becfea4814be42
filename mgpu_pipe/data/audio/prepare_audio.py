"""Prepares recordings with transcripts: scans each once and names those that cannot be used.

The cache has two folders for a source. One holds ``lengths.npy``, the samples of each recording at the run's rate,
``hashes.npy``, which decide the held-out split, ``texts.json``, and ``files.json``, paths and content hashes (the
spoken digits have ``waves.npy`` instead). The other depends on the run's alphabet and model: ``kept.npy``, the usable
recordings, and the numbers of their characters. Recordings stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.architectures.family import Frames
from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.audio.alphabet import Alphabet, named_alphabet
from mgpu_pipe.data.audio.listen import Sound, frames_of, transcripts
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.audio.prepared_sounds import PreparedSounds, bad_in, scan_recordings
from mgpu_pipe.data.audio.speech_source import AudioConfig
from mgpu_pipe.data.audio.transcript_tokens import Words, words_of
from mgpu_pipe.data.bad_samples import describe_too_long, report_bad_samples
from mgpu_pipe.data.cache import Progress, build_once, digest_of, read_manifest, run_cache
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.text.heldout_split import held_out
from mgpu_pipe.data.text.token_store import load_array, save_array
from mgpu_pipe.data.text.tokenizer_folder import TOKENIZER
from mgpu_pipe.errors import DataError

if TYPE_CHECKING:
    from mgpu_pipe.data.audio.recordings import SpeechSamples

_FORMAT = 3
TOO_LONG = ("lasts ", "has a text of ", "has a text that needs ")
"""Beginnings of the reasons for too long: for the decoder, for the window, and for CTC's frames."""


@dataclass(frozen=True, kw_only=True)
class PreparedSpeech(PreparedSounds):
    """Everything a worker needs to load recordings with transcripts; :func:`prepare_speech` makes it.

    ``on_too_long`` is the rule; it is empty with auto, where too long recordings count as bad samples.
    """

    kind: ClassVar[str] = "speech"

    labels: Path
    """Cache folder of the training transcripts' numbers."""
    held_out_labels: Path
    tokenizer_folder: Path
    """Alphabet and feature extractor in transformers' form."""
    new_alphabet: bool
    """The model is new: it takes its vocabulary from the alphabet, or its special tokens from the tokenizer."""

    def samples(
        self, seed: int, model: ModelConfig, data: DataConfig, split: Split, reopen: Callable[[], Any]
    ) -> SpeechSamples:
        from mgpu_pipe.data.audio.recordings import SpeechSamples

        return SpeechSamples(seed, model, data, split, self, reopen)

    def labels_of(self, split: Split) -> Path:
        return self.labels if split == "train" else self.held_out_labels

    def among_kept(self, split: Split) -> NDArray[np.int64]:
        """Indices of a split's recordings among the usable ones of its folder."""
        chosen = self._side(split)
        if split == "train":  # characters without a number cannot be learnt, but they are evaluated
            chosen &= ~load_array(self.labels / "strange.npy")
        return np.flatnonzero(chosen)

    def unlearnable(self) -> list[tuple[str, str]]:
        """Names of training recordings with characters outside the alphabet, and these characters."""
        texts, names = transcripts(self.folder)
        stored_rows, strange = (load_array(self.labels / f"{name}.npy") for name in ("kept", "strange"))
        alphabet = self.alphabet()
        places = stored_rows[self._side("train") & strange].tolist()
        return [(names[place], _has_strange(alphabet.strange(alphabet.normalise(texts[place])))) for place in places]

    def _side(self, split: Split) -> NDArray[np.bool_]:
        stored_rows = load_array(self.labels_of(split) / "kept.npy")
        return self.in_split(split, load_array(self.folder_of(split) / "hashes.npy")[stored_rows])

    def indices(self, split: Split) -> NDArray[np.int64]:
        rows: NDArray[np.int64] = load_array(self.labels_of(split) / "kept.npy")[self.among_kept(split)]
        return rows

    def too_long(self, data: DataConfig) -> str:
        assert isinstance(data, AudioConfig)
        limit = f"data.max_seconds={data.max_seconds:g} or the model takes"
        return describe_too_long(self.too_long_samples, "recordings or their texts", self.on_too_long, limit)

    def alphabet(self) -> Alphabet | Words:
        folder = self.tokenizer_folder
        return Words(folder) if (folder / TOKENIZER).is_file() else Alphabet.from_folder(folder)

    def model_fields(self) -> dict[str, Any]:
        return self.alphabet().model_fields if self.new_alphabet else {}


def prepare_speech(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, progress: Progress | None = None
) -> PreparedSpeech:
    """Scans the recordings of ``data``, or finds them in the cache.

    Raises:
        ConfigError: a path or a rate that cannot work; a package or program that is missing.
        DataError: a list that is broken; a recording that cannot be used, with ``data.on_bad_sample=stop``; none to
            train on.
        ModelFolderError: the model's alphabet cannot be read.
    """
    assert isinstance(data, AudioConfig)
    scan = scan_recordings(model, data, progress)
    folder, held_folder, sound = scan.folder, scan.held_out_folder, scan.sound
    window = LogMel.from_model(model, sound.rate)
    limits = frames_of(model) if window is None else window
    with run_cache(data) as cache:
        alphabet: Alphabet | Words
        if window is None:
            alphabet, new = _alphabet(model, data, folder)
            tokenizer = _alphabet_folder(alphabet, sound, cache)
        else:
            texts = _training_texts(data, folder, held_folder)
            alphabet = words_of(model, data, objective, texts, window, cache)
            tokenizer, new = alphabet.folder, model.path is None
        written = (alphabet, limits, tokenizer.name)
        labels = _labels(folder, *written, data.speed, cache)
        held_labels = labels if held_folder == folder else _labels(held_folder, *written, 0.0, cache)
    bad = bad_in(scan.manifests + [read_manifest(each) or {} for each in dict.fromkeys((labels, held_labels))])
    known = PreparedSpeech(
        **scan.fields(), labels=labels, held_out_labels=held_labels, tokenizer_folder=tokenizer, new_alphabet=new
    )
    return _add_counts(known, data, sound, bad + known.unlearnable())


def _add_counts(known: PreparedSpeech, data: AudioConfig, sound: Sound, bad: list[tuple[str, str]]) -> PreparedSpeech:
    """Adds counts and digests to ``known``, and reports bad recordings or raises DataError for them."""
    long, bad = _among_rules(bad, data)
    report_bad_samples(bad, data.on_bad_sample, ("the recording or its text", "recordings"))
    is_apart = known.is_apart or bool(data.validation_paths)
    train, available = len(known.indices("train")), len(known.indices("validation"))
    identity = (_FORMAT, asdict(sound), known.tokenizer_folder.name)
    trained = (_content(known.folder), _content(known.labels), known.fraction, data.speed, data.noise, data.sort_steps)
    evaluated = (_content(known.held_out_folder), _content(known.held_out_labels))
    return known.with_counts(
        data,
        train,
        available,
        bad_samples=len(bad),
        too_long_samples=len(long),
        on_too_long="" if data.on_too_long == "auto" else data.on_too_long,
        told=_note_of_strange(known),
        digest=digest_of(*trained, *identity),
        validation_digest=digest_of(*evaluated, *identity) if is_apart and available else "",
    )


def _among_rules(bad: list[tuple[str, str]], data: AudioConfig) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Bad recordings that ``data.on_too_long`` rules, and the others; DataError where it refuses one."""
    if data.on_too_long == "auto":
        return [], bad
    long = [(name, reason) for name, reason in bad if reason.startswith(TOO_LONG)]
    if long and data.on_too_long == "refuse":
        name, reason = long[0]
        more = f", and {len(long) - 1:,} more recordings or their texts are too long" if len(long) > 1 else ""
        fix = "cut them up, or leave them out by data.on_too_long=drop"
        raise DataError(f"data.on_too_long=refuse: {name} {reason}{more}; {fix}")
    return long, [fault for fault in bad if fault not in long]


def _content(folder: Path) -> str:
    """Digest of a cache folder's content, independent of where the files lie."""
    return str((read_manifest(folder) or {})["content"])


def _note_of_strange(known: PreparedSpeech) -> str:
    """Notice of held-out recordings that no output can transcribe fully."""
    strange = load_array(known.held_out_labels / "strange.npy")[known.among_kept("validation")]
    if not (count := int(strange.sum())):
        return ""
    what = "held-out texts have characters that the model's alphabet has not"
    return f"{count} of {len(strange)} {what}: they count as wrong"


def _alphabet(model: ModelConfig, data: DataConfig, folder: Path) -> tuple[Alphabet, bool]:
    """The configured alphabet, else the model's, else a new one of all training characters; and whether it is new."""
    named = named_alphabet(model, data)
    if named is None:
        return Alphabet.from_texts(transcripts(folder)[0]), True
    return Alphabet.from_folder(named), model.path is None


def _alphabet_folder(alphabet: Alphabet, sound: Sound, cache: Path) -> Path:
    folder = cache / "alphabets" / digest_of(_FORMAT, asdict(alphabet), asdict(sound))

    def build(out: Path) -> dict[str, Any]:
        alphabet.write(out, sound.rate, sound.normalise)
        return {"characters": alphabet.size}

    build_once(folder, build)
    return folder


def _training_texts(data: DataConfig, folder: Path, held_folder: Path) -> list[str]:
    texts = transcripts(folder)[0]
    if held_folder != folder or data.validation_paths:
        return texts
    trained = ~held_out(load_array(folder / "hashes.npy"), data.validation_fraction)
    return [text for text, use in zip(texts, trained.tolist(), strict=True) if use] or texts


def _labels(
    folder: Path, alphabet: Alphabet | Words, limits: Frames | LogMel, written: str, speed: float, cache: Path
) -> Path:
    """Builds the folder ``written`` of the usable transcripts' numbers; ``speed`` is the largest change of pace."""
    settings = limits.identity() if isinstance(limits, LogMel) else asdict(limits)
    parts = ("labels", _FORMAT, written, settings, speed)
    name, content = digest_of(folder.name, *parts), digest_of(_content(folder), *parts)

    def build(out: Path) -> dict[str, Any]:
        texts, names = transcripts(folder)
        lengths = load_array(folder / "lengths.npy").tolist()
        stored_rows, labels, strange, bad = list[int](), list[list[int]](), list[bool](), list[list[str]]()
        for index, (text, named, length) in enumerate(zip(texts, names, lengths, strict=True)):
            fitted = alphabet.normalise(text)
            worst = 1 - speed if isinstance(limits, LogMel) else 1 + speed  # too long, or too short
            fault = _fault_of(fitted, alphabet, limits, int(length / worst))
            if fault is None:
                stored_rows.append(index)
                labels.append(alphabet.encode(fitted))
                strange.append(bool(alphabet.strange(fitted)))
            else:
                bad.append([named, fault])
        save_array(out / "kept.npy", np.array(stored_rows, np.int64))
        save_array(out / "strange.npy", np.array(strange, np.bool_))
        save_array(out / "labels.npy", np.array([number for row in labels for number in row], np.int32))
        save_array(out / "starts.npy", np.cumsum([0, *map(len, labels)], dtype=np.int64))
        return {"bad": bad, "content": content}

    out = cache / "speech_labels" / name
    build_once(out, build)
    return out


def _has_strange(characters: str) -> str:
    return f"has {characters!r} in its text, which the model's alphabet has not"


def _fault_of(text: str, alphabet: Alphabet | Words, limits: Frames | LogMel, samples: int) -> str | None:
    """Why a recording of this length in samples cannot teach a transcript; empty if it can."""
    if not text:
        return "has an empty text"
    strange = alphabet.strange(text)
    if strange and alphabet.unknown is None:
        return _has_strange(strange)
    return limits.fault(alphabet.encode(text), samples)
