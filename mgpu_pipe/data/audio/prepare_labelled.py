"""Prepares recordings with one class or several: scans each once, names the unusable ones, and numbers the classes."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.audio.filter_bank import window_of
from mgpu_pipe.data.audio.listen import FILES, Sound, frames_of, notes_of_folders, transcripts
from mgpu_pipe.data.audio.prepared_sounds import PreparedSounds, bad_in, scan_recordings
from mgpu_pipe.data.audio.speech_source import LabelledAudioConfig, speech_source
from mgpu_pipe.data.bad_samples import report_bad_samples
from mgpu_pipe.data.cache import Progress, digest_of
from mgpu_pipe.data.classes import class_fields, class_names, class_number, classes_in_digest
from mgpu_pipe.data.prepared_splits import majority_accuracy, note_of_several_classes
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.text.token_store import load_array
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from mgpu_pipe.data.audio.recordings import LabelledSounds

_FORMAT = 1
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, kw_only=True)
class PreparedLabelledSounds(PreparedSounds):
    """Everything a worker needs to load recordings with a class; :func:`prepare_labelled_sounds` makes it."""

    kind: ClassVar[str] = "labelled_sounds"

    classes: list[str]
    """Class names in the order of their numbers."""
    fewest_samples: int
    """Samples that a recording needs for one frame of the model."""
    most_samples: int | None
    """Samples of the longest recording that the model takes; None without a limit."""
    segment_samples: int | None
    """Samples of the longest part that the model gets; None: it gets recordings whole."""
    majority_accuracy: float | None = None
    """Accuracy of always predicting the most frequent training class, on the evaluated samples."""

    def samples(
        self, seed: int, model: ModelConfig, data: DataConfig, split: Split, reopen: Callable[[], Any]
    ) -> LabelledSounds:
        from mgpu_pipe.data.audio.recordings import LabelledSounds

        return LabelledSounds(seed, model, data, split, self, reopen)

    def shown_lengths(self, folder: Path) -> NDArray[np.int64]:
        lengths = super().shown_lengths(folder)
        return lengths if self.segment_samples is None else np.minimum(lengths, self.segment_samples)

    def indices(self, split: Split) -> NDArray[np.int64]:
        folder = self.folder_of(split)
        side = self.in_split(split, load_array(folder / "hashes.npy"))
        return np.flatnonzero(side & ~self._is_short(folder) & ~self._is_long(folder))

    def labels(self, split: Split) -> NDArray[Any]:
        """Class of each recording of a split, in the order of :meth:`indices`; int64, (recordings,)."""
        names = transcripts(self.folder_of(split))[0]
        number_of = {name: class_number(name, self.classes) for name in set(names)}
        return np.array([number_of[names[place]] for place in self.indices(split).tolist()], np.int64)

    def unfit_recordings(self, rate: int) -> list[tuple[str, str]]:
        """Names of recordings that are too short or too long for the model, and their lengths."""
        unfit = list[tuple[str, str]]()
        most = (self.most_samples or 0) / rate
        for folder in self.folders:
            lengths, names = load_array(folder / "lengths.npy"), transcripts(folder)[1]
            needs = f"the model needs {self.fewest_samples / rate:.3f} s"
            takes = f"the model takes {most:.3f} s: use data.segment_seconds={most:g}"
            for is_unfit, reason in ((self._is_short(folder), needs), (self._is_long(folder), takes)):
                for place in np.flatnonzero(is_unfit).tolist():
                    unfit.append((names[place], f"lasts {lengths[place] / rate:.3f} s; {reason}"))
        return unfit

    def _is_short(self, folder: Path) -> NDArray[np.bool_]:
        return self.shown_lengths(folder) < self.fewest_samples

    def _is_long(self, folder: Path) -> NDArray[np.bool_]:
        lengths = self.shown_lengths(folder)
        return np.zeros(len(lengths), np.bool_) if self.most_samples is None else lengths > self.most_samples

    def amounts(self) -> list[tuple[int, str]]:
        recordings, minutes, *left_out = super().amounts()
        return [recordings, minutes, (len(self.classes), "classes"), *left_out]

    def model_fields(self) -> dict[str, Any]:
        return class_fields(self.classes)


@dataclass(frozen=True, kw_only=True)
class PreparedTaggedSounds(PreparedLabelledSounds):
    """Everything a worker needs to load recordings with several classes or none."""

    kind: ClassVar[str] = "tagged_sounds"

    def labels(self, split: Split) -> NDArray[Any]:
        """Whether a class is one of a recording's, in the order of :meth:`indices`; float32, (recordings, classes)."""
        texts, chosen = transcripts(self.folder_of(split))[0], self.indices(split).tolist()
        labels = np.zeros((len(chosen), len(self.classes)), np.float32)
        for row, place in enumerate(chosen):
            for name in tags_in(texts[place]):
                labels[row, class_number(name, self.classes)] = 1
        return labels


def tags_in(text: str) -> list[str]:
    """Names of a recording's classes: a JSON list, or the words that are spoken."""
    names: list[str] = json.loads(text) if text.startswith("[") else text.split()
    return names


def prepare_labelled_sounds(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, progress: Progress | None = None
) -> PreparedLabelledSounds:
    """Scans the recordings of ``data``, or finds them in the cache.

    Raises:
        ConfigError: a path, a rate, a segment or a list of classes that cannot work; a package or program that is
            missing.
        DataError: a list that is broken; a recording that cannot be used, with ``data.on_bad_sample=stop``; none to
            train on.
    """
    known, decided = _scan(model, data, progress, PreparedLabelledSounds, lambda text: [text])
    train, held_labels = known.labels("train"), known.labels("validation")
    majority = majority_accuracy(train, held_labels, data)
    numbers = np.unique(transcripts(known.folder)[0], return_inverse=True)[1]
    known = replace(known, told=note_of_several_classes(known.folder / FILES, numbers, "recordings"))
    return _add_counts(known, model, data, decided, set(train.tolist()), set(held_labels.tolist()), majority)


def prepare_tagged_sounds(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, progress: Progress | None = None
) -> PreparedLabelledSounds:
    """Scans the recordings with several classes of ``data``; raises as :func:`prepare_labelled_sounds`."""
    known, decided = _scan(model, data, progress, PreparedTaggedSounds, tags_in)
    train, held_labels = (set(np.flatnonzero(known.labels(split).any(0)).tolist()) for split in SPLITS)
    return _add_counts(known, model, data, decided, train, held_labels, None)


def _scan(
    model: ModelConfig,
    data: DataConfig,
    progress: Progress | None,
    prepared: type[PreparedLabelledSounds],
    names_in: Callable[[str], Iterable[str]],
) -> tuple[PreparedLabelledSounds, tuple[list[str], list[str]]]:
    """The data without counts, and its classes and the contents of its folders for the digest; reports the bad
    recordings."""
    assert isinstance(data, LabelledAudioConfig)
    rate = Sound.from_config(data, model).rate
    fewest, most, segment = _limits(model, data, rate)
    scan = scan_recordings(model, data, progress)
    trained, evaluated = (_names(folder, names_in) for folder in (scan.folder, scan.held_out_folder))
    known = prepared(
        **scan.fields(),
        classes=_classes(model, data, trained, evaluated),
        fewest_samples=fewest,
        most_samples=most,
        segment_samples=segment,
    )
    bad = bad_in(scan.manifests) + known.unfit_recordings(rate)
    report_bad_samples(bad, data.on_bad_sample, ("the recording", "recordings"))
    classes = classes_in_digest(model, data, known.classes, trained | evaluated)
    return replace(known, bad_samples=len(bad)), (classes, [manifest["content"] for manifest in scan.manifests])


def _add_counts(
    known: PreparedLabelledSounds,
    model: ModelConfig,
    data: DataConfig,
    decided: tuple[Sequence[str], Sequence[str]],
    trained: set[int],
    evaluated: set[int],
    majority: float | None,
) -> PreparedLabelledSounds:
    """Adds sample counts and digests to ``known``, and notices of classes that are never trained on and of files."""
    assert isinstance(data, LabelledAudioConfig)
    sound = Sound.from_config(data, model)
    classes, contents = decided
    identity = (_FORMAT, asdict(sound), classes, known.fewest_samples, known.most_samples, known.segment_samples)
    changes = (contents[0], known.fraction, data.speed, data.noise, data.sort_steps)
    available = len(known.indices("validation"))
    has_held_paths = known.is_apart or known.fraction == 1
    missing = ", ".join(known.classes[number] for number in sorted(evaluated - trained))
    notes = [*notes_of_folders(data), *([known.told] if known.told else [])]
    if missing:
        notes.append(f"no training recording has the class {missing}: it is evaluated and cannot be learnt")
    return known.with_counts(
        data,
        len(known.indices("train")),
        available,
        told="; ".join(notes),
        majority_accuracy=majority,
        digest=digest_of(*changes, *identity),
        validation_digest=digest_of(contents[-1], *identity) if has_held_paths and available else "",
    )


def _limits(model: ModelConfig, data: LabelledAudioConfig, rate: int) -> tuple[int, int | None, int | None]:
    """Fewest and most samples that the model takes at any ``data.speed``, and a segment's; ConfigError if it is
    outside."""
    window = window_of(model, rate)
    fewest = frames_of(model).min_samples(1) if window is None else window.fewest_samples
    most = None if window is None else window.most_samples
    segment = None if data.segment_seconds is None else round(data.segment_seconds * rate)
    fewest = math.ceil(fewest * (1 + data.speed))
    for limit, is_beyond, what in ((fewest, operator.lt, "least"), (most, operator.gt, "most")):
        if segment is not None and limit is not None and is_beyond(segment, limit):
            fix = f"use at {what} {limit / rate:g}"
            reason = f"the model takes at {what} {limit} samples of {rate} a second"
            raise ConfigError("data.segment_seconds", data.segment_seconds, fix, reason)
    if most is not None and segment is None:
        most = int(most * (1 - data.speed))
    return fewest, most, segment


def _names(folder: Path, names_in: Callable[[str], Iterable[str]]) -> set[str]:
    """Names of the classes of a folder's recordings."""
    return {name for text in set(transcripts(folder)[0]) for name in names_in(text)}


def _classes(model: ModelConfig, data: DataConfig, trained: set[str], evaluated: set[str]) -> list[str]:
    """Class names of the run; generated speech may evaluate words that it does not train."""
    generated = speech_source(data).speak is not None
    return class_names(model, data, trained | evaluated if generated else trained, evaluated)
