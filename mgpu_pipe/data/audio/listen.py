"""Scans recordings once: the length and transcript of each, or why it cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.architectures.config_source import config_class
from mgpu_pipe.architectures.family import Frames
from mgpu_pipe.config.schema import Auto, DataConfig, ModelConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.audio import synthesis
from mgpu_pipe.data.audio.clap_mel import RATE, reads_clap_spectrograms
from mgpu_pipe.data.audio.decode_audio import Wave, decode, resample, soundfile
from mgpu_pipe.data.audio.filter_bank import reads_filter_banks, window_of
from mgpu_pipe.data.audio.log_mel import USUAL_RATE, reads_spectrograms
from mgpu_pipe.data.audio.speech_source import AudioConfig, speech_source
from mgpu_pipe.data.bad_samples import BadSampleError, check_rule, unusable_files
from mgpu_pipe.data.cache import Progress, build_once, digest_of, write_json
from mgpu_pipe.data.file_lists import ClassFolders, Entry, entries_of
from mgpu_pipe.data.fingerprint import ChangedFileError, Fingerprint, fingerprints, read_part
from mgpu_pipe.data.model_field import model_field, preprocessor_of
from mgpu_pipe.data.ordered_work import scan_in_order
from mgpu_pipe.data.tables import Keep, keep_in
from mgpu_pipe.data.text.heldout_split import document_hash
from mgpu_pipe.data.text.token_store import save_array
from mgpu_pipe.errors import ConfigError, ConfigErrors, DataError, check_all

_LEAST_VARIANCE = 1e-7
"""Floor of the variance in transformers' Wav2Vec2FeatureExtractor."""


@dataclass(frozen=True)
class Sound:
    """Converts a recording to the model's input.

    Attributes:
        rate: samples a second.
        normalise: to mean 0 and variance 1, each recording by itself.
    """

    rate: int
    normalise: bool = True

    @classmethod
    def from_config(cls, data: AudioConfig, model: ModelConfig) -> Sound:
        """Rate and normalisation; ConfigError for another rate than the model's, DataError for a broken model
        folder."""
        said = preprocessor_of(model.path, "feature_extractor")
        trained_rate = said.get("sampling_rate")
        if isinstance(trained_rate, int) and data.sampling_rate not in ("auto", trained_rate):
            reason = f"the model was trained on {trained_rate} samples a second"
            raise ConfigError("data.sampling_rate", data.sampling_rate, "leave it out", reason)
        is_clap = reads_clap_spectrograms(model)
        usual = RATE if is_clap else USUAL_RATE
        usual = trained_rate if isinstance(trained_rate, int) and trained_rate > 0 else usual
        rate = usual if data.sampling_rate == "auto" else data.sampling_rate
        # The field is of the filter banks; Whisper's extractor leaves it unread.
        if is_clap or reads_filter_banks(model) or reads_spectrograms(model):
            return cls(rate, normalise=False)
        return cls(rate, bool(said.get("do_normalize", True)))

    def augment(self, wave: Wave, data: AudioConfig, random: np.random.Generator) -> Wave:
        """Changes a training recording at random: speed and noise."""
        rate, loudness = random.uniform(-1, 1), random.random()
        if data.speed:
            wave = resample(wave, 1 / (1 + data.speed * rate))
        if data.noise:
            level = np.float32(data.noise * loudness * np.sqrt(np.square(wave, dtype=np.float64).mean()))
            wave = wave + level * random.standard_normal(len(wave), np.float32)
        return wave

    def standardise(self, wave: Wave) -> Wave:
        if not self.normalise:
            return wave
        values = wave.astype(np.float64)
        normed: Wave = ((values - values.mean()) / np.sqrt(values.var() + _LEAST_VARIANCE)).astype(np.float32)
        return normed


def frames_of(model: ModelConfig) -> Frames:
    """Frames that the model's convolutions make of a recording."""
    known = config_class(str(model_field(model, "model_type") or model.type))
    usual = known.defaults if known else {}
    return Frames.from_fields(
        {name: model_field(model, name) or usual[name] for name in ("conv_kernel", "conv_stride")}
    )


def read_recording(path: Path, expected: Fingerprint, rate: int, max_seconds: float) -> Wave:
    """Decodes a recording; BadSampleError if it cannot be used, DataError if it is gone or changed since its scan."""
    try:
        return decode(read_part(path, expected), rate, max_seconds)
    except ChangedFileError as error:
        raise DataError(f"{path}: changed since its scan; start the run again") from error


_FORMAT = 3
SUFFIXES = (
    *(".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aif", ".aiff", ".au", ".snd", ".caf", ".w64", ".sph"),
    *(".m4a", ".mp4", ".3gp", ".aac", ".amr", ".webm", ".wma", ".wave", ".aifc", ".spx", ".mp2", ".m4b", ".mka"),
    *(".3g2", ".awb", ".mov", ".mkv", ".avi", ".flv"),
)
"""Suffixes of the recordings in a folder of classes."""
CLASS_FOLDERS = ClassFolders("recordings", SUFFIXES)
_POOL_FROM = 512
_INEXACT_SECONDS = 0.25
"""Seconds that a recording may last longer than a table states; a part of it is a tenth shorter, too."""
WORDS = {"text": "text_column", "caption": "caption_column"}
"""Key of the column of a recording's text or caption; that of classes is another."""
TEXTS, FILES, WAVES = "texts.json", "files.json", "waves.npy"


Look = tuple[Path, Fingerprint | str]
"""File of a recording, and its fingerprint or why it cannot be opened."""


def list_recordings(data: AudioConfig, patterns: Sequence[str], key: str, keep: Keep | None = None) -> list[Entry]:
    """Lists recordings, named or embedded, with transcripts or classes; like
    :func:`~mgpu_pipe.data.file_lists.entries_of`."""
    says = speech_source(data).says
    if says == "folder":
        return [entry for pattern in patterns for entry in CLASS_FOLDERS.entries(pattern, key)]
    columns = ("audio_column", WORDS.get(says, "label_column"), says)
    return list(entries_of(files.expand_paths(patterns, key), data, key, *columns, keep=keep))


def check_recordings(model: ModelConfig, data: DataConfig) -> None:
    """Checks that packages and programs exist, lists name files, and the model takes such recordings.

    Raises:
        ConfigErrors: the errors found.
    """
    assert isinstance(data, AudioConfig)
    checks = [*(soundfile, lambda: window_of(model, Sound.from_config(data, model).rate)), lambda: check_rule(data)]
    if speech_source(data).speak is None:
        try:
            paths, held_out = with_splits(data)
        except ConfigError as error:
            raise ConfigErrors([error]) from error
        checks.append(lambda: list_recordings(data, paths, "data.paths"))
        if held_out:
            checks.append(lambda: list_recordings(data, held_out, "data.validation_paths"))
    check_all(checks)


def prepare_recordings(data: AudioConfig, sound: Sound, cache: Path, progress: Progress) -> tuple[Path, Path]:
    """Builds or finds the cache folders of the training and the held-out recordings."""
    source = speech_source(data)
    if source.speak is not None:
        return source.speak(data, sound.rate, cache, progress)
    paths, held_out = with_splits(data)
    folder = held_out_folder = _listen(data, paths, "data.paths", sound, cache, progress)
    if held_out:
        held_out_folder = _listen(data, held_out, "data.validation_paths", sound, cache, progress)
    return folder, held_out_folder


def with_splits(data: AudioConfig) -> tuple[list[str], list[str]]:
    """Paths of training and of held-out recordings; see :meth:`ClassFolders.with_splits`."""
    if speech_source(data).says != "folder":
        return data.paths, data.validation_paths
    return CLASS_FOLDERS.with_splits(data)


def notes_of_folders(data: AudioConfig) -> list[str]:
    """See :meth:`ClassFolders.notes`; none of other sources."""
    return CLASS_FOLDERS.notes(data) if speech_source(data).says == "folder" else []


def _build_folder(cache: Path, name: str, build: Callable[[Path], dict[str, Any]]) -> Path:
    folder = cache / "speech" / name
    build_once(folder, build)
    return folder


def keep_spoken(
    kind: str, count: int, rate: int, cache: Path, progress: Progress, digits: tuple[int, int] = synthesis.DIGITS
) -> Path:
    """Builds or finds the cache folder of synthesised recordings, of a kind in :data:`synthesis.SEEDS`."""
    length = () if digits == synthesis.DIGITS else digits
    name = digest_of("spoken digits", _FORMAT, kind, count, rate, synthesis.version(kind), *length)
    return _build_folder(cache, name, partial(_build_spoken, kind, count, rate, digits, name, progress))


def _build_spoken(
    kind: str, count: int, rate: int, digits: tuple[int, int], content: str, progress: Progress, out: Path
) -> dict[str, Any]:
    waves, texts, voices = synthesis.synthesise(kind, count, rate, progress, digits)
    stored = [np.clip(np.rint(wave * 32767), -32768, 32767).astype(np.int16) for wave in waves]
    save_array(out / WAVES, np.concatenate(stored))
    hashes = [document_hash(wave.tobytes()) for wave in stored]
    names = [f"{number} by {voice}" for number, voice in enumerate(voices)]
    return _write(out, texts, names, [len(wave) for wave in stored], hashes, [], rate, content)


def _listen(
    data: AudioConfig, patterns: Sequence[str], key: str, sound: Sound, cache: Path, progress: Progress
) -> Path:
    entries = list_recordings(data, patterns, key, keep_in(cache))
    return listen_to(entries, sound.rate, data.max_seconds, data.tokenize_workers, cache, progress)


def listen_to(
    entries: Sequence[Entry],
    rate: int,
    max_seconds: float,
    tokenize_workers: int | Auto,
    cache: Path,
    progress: Progress,
) -> Path:
    """Builds or finds the cache folder of recordings; those longer than ``max_seconds`` are bad."""
    paths = {entry.path for entry in entries if not entry.fault}
    unusable = unusable_files(sorted(paths))
    prints = fingerprints(sorted(paths - unusable.keys()), cache, progress)
    digests = {path: "" if reason == "is empty" else reason for path, reason in unusable.items()}
    digests |= {path: fingerprint.digest for path, fingerprint in prints.items()}
    rows = [[entry.label, entry.fault_anywhere or digests.get(entry.path, "")] for entry in entries]
    # The cache keeps paths. A run identifies its data by content alone, so it resumes after the files were moved.
    content = digest_of("speech", _FORMAT, rate, max_seconds, rows)
    stated = [entry.seconds for entry in entries] if any(entry.seconds for entry in entries) else None
    name = digest_of(content, [str(entry.path.absolute()) for entry in entries], *([stated] if stated else []))
    work = partial(_length_or_fault, rate=rate, max_seconds=max_seconds)
    look = partial(
        scan_in_order, work=work, workers=tokenize_workers, progress=progress, stage="listen", pool_from=_POOL_FROM
    )
    return _build_folder(cache, name, partial(_build_listened, entries, prints, unusable, look, rate, content))


def _build_listened(
    entries: Sequence[Entry],
    prints: Mapping[Path, Fingerprint],
    unusable: Mapping[Path, str],
    look: Callable[[Sequence[Look]], list[int | str]],
    rate: int,
    content: str,
    out: Path,
) -> dict[str, Any]:
    broken = [[entry.origin, entry.fault] for entry in entries if entry.fault]
    entries = [entry for entry in entries if not entry.fault]
    lengths = look([(entry.path, prints.get(entry.path) or unusable[entry.path]) for entry in entries])
    looked = [_unless_part(entry, length, rate) for entry, length in zip(entries, lengths, strict=True)]
    if looked != lengths:
        content = digest_of(content, looked)
    good = [(entry, length) for entry, length in zip(entries, looked, strict=True) if isinstance(length, int)]
    bad = [
        [entry.name if fault == before else entry.origin, fault]
        for entry, fault, before in zip(entries, looked, lengths, strict=True)
        if isinstance(fault, str)
    ]
    known = [prints[entry.path] for entry, _ in good]
    described = {
        "paths": [str(entry.path.absolute()) for entry, _ in good],
        "sizes": [fingerprint.size for fingerprint in known],
        "blocks": [list(fingerprint.blocks) for fingerprint in known],
    }
    write_json(out / FILES, described)
    hashes = [document_hash(fingerprint.digest) for fingerprint in known]
    texts, names = [entry.label for entry, _ in good], [entry.origin for entry, _ in good]
    return _write(out, texts, names, [length for _, length in good], hashes, broken + bad, rate, content)


def _unless_part(entry: Entry, length: int | str, rate: int) -> int | str:
    """The samples of a recording, or its fault; a fault where its row states a part of it."""
    if isinstance(length, str) or entry.seconds is None or length / rate <= entry.seconds * 1.1 + _INEXACT_SECONDS:
        return length
    stated = f"the {entry.seconds:g} s that its row states"
    return f"lasts {length / rate:.1f} s, more than {stated}, and files are read whole: cut it, or leave out the times"


def _write(
    out: Path,
    texts: Sequence[str],
    names: Sequence[str],
    lengths: Sequence[int],
    hashes: Sequence[int],
    bad: list[list[str]],
    rate: int,
    content: str,
) -> dict[str, Any]:
    write_json(out / TEXTS, {"texts": list(texts), "names": list(names)})
    save_array(out / "lengths.npy", np.array(lengths, np.int64))
    save_array(out / "hashes.npy", np.array(hashes, np.uint64))
    return {"recordings": len(texts), "seconds": sum(lengths) / rate, "rate": rate, "bad": bad, "content": content}


def _length_or_fault(look: Look, rate: int, max_seconds: float) -> int | str:
    """Samples of a recording, or why it cannot be used."""
    path, expected = look
    if isinstance(expected, str):
        return expected
    try:
        return len(read_recording(path, expected, rate, max_seconds))
    except BadSampleError as error:
        return str(error)


def stored_wave(waves: NDArray[np.int16], borders: NDArray[np.int64], number: int) -> Wave:
    """Recording ``number`` of those in one array, which has them between ``borders``."""
    stored: Wave = waves[borders[number] : borders[number + 1]].astype(np.float32)
    return stored / np.float32(32767)


def transcripts(folder: Path) -> tuple[list[str], list[str]]:
    """Transcripts (or classes) of a cache folder's recordings, and where each is written."""
    content = json.loads((folder / TEXTS).read_text(encoding="utf-8"))
    return content["texts"], content["names"]
