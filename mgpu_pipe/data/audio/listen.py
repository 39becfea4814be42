"""Listens to recordings once: how long each is, what is said in it, and why one cannot be used. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mgpu_pipe.config.hardware import cpu_cores
from mgpu_pipe.data import files
from mgpu_pipe.data.audio import spoken_digits
from mgpu_pipe.data.audio.decode import BadAudioError
from mgpu_pipe.data.audio.keys import AudioConfig, SpokenDigitsConfig
from mgpu_pipe.data.audio.read import Sound, read_recording
from mgpu_pipe.data.cache import Progress, build_once, digest_of, write_json
from mgpu_pipe.data.fingerprint import Fingerprint, fingerprints
from mgpu_pipe.data.listed import Entry, entries_of
from mgpu_pipe.data.ordered_work import work_in_order
from mgpu_pipe.data.text.split import document_hash
from mgpu_pipe.data.text.token_store import save_array

_FORMAT = 1
_AT_ONCE, _POOL_FROM = 64, 512
"""Recordings that a process listens to before it answers; fewer are listened to here, for processes take a start."""
TEXTS, FILES, WAVES = "texts.json", "files.json", "waves.npy"


def listed(data: AudioConfig, patterns: Sequence[str], key: str) -> list[Entry]:
    """The recordings that lists name, with their transcripts.

    Raises:
        ConfigError, DataError: as :func:`mgpu_pipe.data.listed.entries_of`.
    """
    found = files.expand_paths(patterns, key)
    return [entry for path in found for entry in entries_of(path, data, key, "audio_column", "text_column", "text")]


def heard_folders(data: AudioConfig, sound: Sound, cache: Path, progress: Progress) -> tuple[Path, Path]:
    """The folders in the cache of what is known of the training and of the held-out recordings."""
    if isinstance(data, SpokenDigitsConfig):
        folders = []
        for kind in ("heard", data.held_out):
            count = {
                "heard": data.recordings,
                "voices": min(spoken_digits.UNHEARD_RECORDINGS, data.recordings),
                "synthesiser": min(spoken_digits.FLITE_RECORDINGS, data.recordings),
            }[kind]
            name = digest_of("spoken digits", _FORMAT, kind, count, sound.rate, spoken_digits.version(kind))
            build = partial(_build_spoken, kind, count, sound.rate, progress)
            folders.append(_built(cache, name, build))
        return folders[0], folders[1]
    folder = held = _listened(data, data.paths, "data.paths", sound, cache, progress)
    if data.validation_paths:
        held = _listened(data, data.validation_paths, "data.validation_paths", sound, cache, progress)
    return folder, held


def _built(cache: Path, name: str, build: Callable[[Path], dict[str, Any]]) -> Path:
    folder = cache / "speech" / name
    build_once(folder, build)
    return folder


def _build_spoken(kind: str, count: int, rate: int, progress: Progress, out: Path) -> dict[str, Any]:
    waves, texts, voices = spoken_digits.synthesised(kind, count, rate, progress)
    stored = [np.clip(np.rint(wave * 32767), -32768, 32767).astype(np.int16) for wave in waves]
    save_array(out / WAVES, np.concatenate(stored))
    hashes = [document_hash(wave.tobytes()) for wave in stored]
    names = [f"{number} by {voice}" for number, voice in enumerate(voices)]
    return _write(out, texts, names, [len(wave) for wave in stored], hashes, [], rate)


def _listened(
    data: AudioConfig, patterns: Sequence[str], key: str, sound: Sound, cache: Path, progress: Progress
) -> Path:
    entries = listed(data, patterns, key)
    empty = {one.path for one in entries if not one.path.stat().st_size}
    prints = fingerprints(sorted({one.path for one in entries} - empty), cache, progress)
    digests = {path: one.digest for path, one in prints.items()}
    said = [[str(one.path.absolute()), one.label, digests.get(one.path, "")] for one in entries]
    name = digest_of("speech", _FORMAT, sound.rate, data.max_seconds, said)
    return _built(cache, name, partial(_build_listened, data, entries, prints, sound.rate, progress))


def _build_listened(
    data: AudioConfig,
    entries: Sequence[Entry],
    prints: Mapping[Path, Fingerprint],
    rate: int,
    progress: Progress,
    out: Path,
) -> dict[str, Any]:
    looked = _looked([(one.path, prints.get(one.path)) for one in entries], rate, data, progress)
    good = [(one, length) for one, length in zip(entries, looked, strict=True) if isinstance(length, int)]
    bad = [[str(one.path), fault] for one, fault in zip(entries, looked, strict=True) if isinstance(fault, str)]
    known = [prints[one.path] for one, _ in good]
    described = {
        "paths": [str(one.path.absolute()) for one, _ in good],
        "sizes": [one.size for one in known],
        "blocks": [list(one.blocks) for one in known],
    }
    write_json(out / FILES, described)
    hashes = [document_hash(one.digest) for one in known]
    texts, names = [one.label for one, _ in good], [one.origin for one, _ in good]
    return _write(out, texts, names, [length for _, length in good], hashes, bad, rate)


def _write(
    out: Path,
    texts: Sequence[str],
    names: Sequence[str],
    lengths: Sequence[int],
    hashes: Sequence[int],
    bad: list[list[str]],
    rate: int,
) -> dict[str, Any]:
    write_json(out / TEXTS, {"texts": list(texts), "names": list(names)})
    save_array(out / "lengths.npy", np.array(lengths, np.int64))
    save_array(out / "hashes.npy", np.array(hashes, np.uint64))
    return {"recordings": len(texts), "seconds": sum(lengths) / rate, "rate": rate, "bad": bad}


Look = tuple[Path, Fingerprint | None]


def _looked(recordings: Sequence[Look], rate: int, data: AudioConfig, progress: Progress) -> list[int | str]:
    """For each recording its samples, or why it cannot be used."""
    parts = [list(recordings[at : at + _AT_ONCE]) for at in range(0, len(recordings), _AT_ONCE)]
    workers = cpu_cores() if data.tokenize_workers == "auto" else data.tokenize_workers
    looked: Iterable[list[int | str]]
    if len(recordings) < _POOL_FROM or workers == 1:
        looked = map(_listener(rate, data.max_seconds), parts)
    else:
        told = "a process that listens to recordings died (killed, or out of memory): use data.tokenize_workers=1"
        looked = work_in_order(parts, workers, _listener, (rate, data.max_seconds), ahead=4, what=told)
    found: list[int | str] = []
    for part in looked:
        found += part
        progress("listen", len(found), len(recordings))
    return found


def _listener(rate: int, max_seconds: float) -> Callable[[list[Look]], list[int | str]]:
    return lambda part: [_length_or_fault(path, expected, rate, max_seconds) for path, expected in part]


def _length_or_fault(path: Path, expected: Fingerprint | None, rate: int, max_seconds: float) -> int | str:
    if expected is None:
        return "is empty"
    try:
        return len(read_recording(path, expected, rate, max_seconds))
    except BadAudioError as error:
        return str(error)


def transcripts(folder: Path) -> tuple[list[str], list[str]]:
    """What is said in each recording of a folder of the cache, and where that is written."""
    content = json.loads((folder / TEXTS).read_text(encoding="utf-8"))
    return content["texts"], content["names"]
