"""Prepares recordings with a class: scans each once, names those that cannot be used, and numbers the classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.paths import cache_folder, private_folder
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.audio.listen import Sound, frames_of, prepare_recordings, transcripts
from mgpu_pipe.data.audio.prepared_sounds import PreparedSounds
from mgpu_pipe.data.audio.speech_keys import AudioConfig
from mgpu_pipe.data.bad_samples import report_bad_samples
from mgpu_pipe.data.cache import Progress, digest_of, no_progress, read_manifest, writing_to_cache
from mgpu_pipe.data.classes import class_names, class_number
from mgpu_pipe.data.prepared_splits import majority_accuracy
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.text.token_store import load_array
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.system.local_files import shortened

if TYPE_CHECKING:
    from mgpu_pipe.data.audio.recordings import LabelledSounds

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class PreparedLabelledSounds(PreparedSounds):
    """Everything a worker needs to load recordings with a class; :func:`prepare_labelled_sounds` makes it."""

    kind: ClassVar[str] = "labelled_sounds"

    classes: list[str]
    """Class names in the order of their numbers."""
    fewest_samples: int
    """Samples that a recording needs for one frame of the model."""
    majority_accuracy: float | None = None
    """Accuracy of always predicting the most frequent training class, on the evaluated samples."""

    def samples(self, config: RunConfig, split: Split, reopen: Callable[[], Any]) -> LabelledSounds:
        from mgpu_pipe.data.audio.recordings import LabelledSounds

        return LabelledSounds(config, split, self, reopen)

    def chosen(self, split: Split) -> NDArray[np.int64]:
        folder = self.folder_of(split)
        is_usable = load_array(folder / "lengths.npy") >= self.fewest_samples
        return np.flatnonzero(self.in_split(split, load_array(folder / "hashes.npy")) & is_usable)

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Class of each recording of a split, in the order of :meth:`chosen`."""
        names = transcripts(self.folder_of(split))[0]
        number_of = {name: class_number(name, self.classes) for name in set(names)}
        return np.array([number_of[names[place]] for place in self.chosen(split).tolist()], np.int64)

    def short_recordings(self, rate: int) -> list[tuple[str, str]]:
        """Names of recordings that are too short for the model, and their lengths."""
        short = list[tuple[str, str]]()
        for folder in self.folders:
            lengths, names = load_array(folder / "lengths.npy"), transcripts(folder)[1]
            needs = f"the model needs {self.fewest_samples / rate:.3f} s"
            for place in np.flatnonzero(lengths < self.fewest_samples).tolist():
                short.append((names[place], f"lasts {lengths[place] / rate:.3f} s; {needs}"))
        return short

    def amounts(self) -> list[tuple[int, str]]:
        recordings, minutes, *left_out = super().amounts()
        return [recordings, minutes, (len(self.classes), "classes"), *left_out]

    def model_fields(self) -> dict[str, Any]:
        return {
            "id2label": {str(number): name for number, name in enumerate(self.classes)},
            "label2id": {name: number for number, name in enumerate(self.classes)},
        }


def prepare_labelled_sounds(config: RunConfig, progress: Progress | None = None) -> PreparedLabelledSounds:
    """Scans the recordings of ``config``, or finds them in the cache.

    Raises:
        ConfigError: a path, a rate or a list of classes that cannot work; a package or program that is missing.
        DataError: a list that is broken; a recording that cannot be used, with ``data.on_bad_sample=stop``; none to
            train on.
    """
    data, report = config.data, progress or no_progress
    assert isinstance(data, AudioConfig)
    sound = Sound.from_config(data, config.model)
    cache = cache_folder(data.cache_dir).absolute()
    with writing_to_cache(cache):
        private_folder(cache)
        folder, held_folder = prepare_recordings(data, sound, cache, report)
    manifests = [read_manifest(each) or {} for each in dict.fromkeys((folder, held_folder))]
    has_held_paths = held_folder != folder or bool(data.validation_paths)
    known = PreparedLabelledSounds(
        folder=folder,
        held_out_folder=held_folder,
        fraction=float(held_folder == folder) if has_held_paths else data.validation_fraction,
        classes=_classes(config, folder, held_folder),
        fewest_samples=fewest_samples(config.model, data),
        recordings=sum(manifest.get("recordings", 0) for manifest in manifests),
        hours=sum(manifest.get("seconds", 0.0) for manifest in manifests) / 3600,
    )
    bad = [(path, reason) for manifest in manifests for path, reason in manifest["bad"]]
    bad += known.short_recordings(sound.rate)
    report_bad_samples(bad, data.on_bad_sample, ("the recording", "recordings"))
    train, held_labels = known.labels("train"), known.labels("validation")
    identity = (_FORMAT, asdict(sound), known.classes, known.fewest_samples)
    contents = [manifest["content"] for manifest in manifests]
    trained = (contents[0], known.fraction, data.speed, data.noise, data.sort_steps)
    return known.with_counts(
        data,
        len(train),
        len(held_labels),
        bad_samples=len(bad),
        told=_note_of_untrained(known, train, held_labels),
        majority_accuracy=majority_accuracy(train, held_labels, data),
        digest=digest_of(*trained, *identity),
        validation_digest=digest_of(contents[-1], *identity) if has_held_paths and len(held_labels) else "",
    )


def fewest_samples(model: ModelConfig, data: AudioConfig) -> int:
    """Samples of a recording that give a frame, also when it is played as fast as ``data.speed`` allows."""
    return -(-frames_of(model).min_samples(1) * (100 + round(100 * data.speed)) // 100)


def _classes(config: RunConfig, folder: Path, held_folder: Path) -> list[str]:
    """Class names of the run.

    Raises:
        ConfigError: as :func:`class_names`; or held-out files have a class that no training file has.
    """
    trained = set(transcripts(folder)[0])
    evaluated = set(transcripts(held_folder)[0])
    unknown = sorted(evaluated - trained)
    if unknown and not config.data.classes:
        reason = f"no training recording has the class {shortened(unknown[0])!r}"
        fix = "give training recordings of it, or name all classes by data.classes"
        raise ConfigError("data.validation_paths", config.data.validation_paths, fix, reason)
    return class_names(config, trained | evaluated)


def _note_of_untrained(known: PreparedLabelledSounds, train: NDArray[np.int64], held_labels: NDArray[np.int64]) -> str:
    """Notice of classes that are evaluated and never trained on."""
    missing = sorted(set(held_labels.tolist()) - set(train.tolist()))
    if not missing:
        return ""
    names = ", ".join(known.classes[number] for number in missing)
    return f"no training recording has the class {names}: it is evaluated and cannot be learnt"
