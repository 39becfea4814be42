"""Prepares recordings with captions: scans each recording once and tokenizes the different captions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig
from mgpu_pipe.data.audio.clap_mel import ClapMel
from mgpu_pipe.data.audio.listen import Sound, transcripts
from mgpu_pipe.data.audio.prepared_sounds import PreparedSounds, bad_in, scan_recordings
from mgpu_pipe.data.audio.speech_source import CaptionedAudioConfig
from mgpu_pipe.data.bad_samples import report_bad_samples
from mgpu_pipe.data.cache import Progress, digest_of, no_progress, run_cache
from mgpu_pipe.data.samples import Split
from mgpu_pipe.data.text.caption_tokens import PreparedWithCaptions, are_too_long, tokenize_captions
from mgpu_pipe.data.text.token_store import load_array

if TYPE_CHECKING:
    from mgpu_pipe.data.audio.recordings import CaptionedSounds

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class PreparedSoundCaptions(PreparedWithCaptions, PreparedSounds):
    """Everything a worker needs to load recordings with captions; :func:`prepare_sound_captions` makes it."""

    kind: ClassVar[str] = "captioned_sounds"

    segment_samples: int
    """Samples of the model's window: the longest part of a recording that the model gets."""

    def samples(
        self, seed: int, model: ModelConfig, data: DataConfig, split: Split, reopen: Callable[[], Any]
    ) -> CaptionedSounds:
        from mgpu_pipe.data.audio.recordings import CaptionedSounds

        return CaptionedSounds(seed, model, data, split, self, reopen)

    def shown_lengths(self, folder: Path) -> NDArray[np.int64]:
        return np.minimum(super().shown_lengths(folder), self.segment_samples)

    def indices(self, split: Split) -> NDArray[np.int64]:
        """Indices of a split's samples in its folder; those with too long captions may be left out."""
        every = self._in_split(split)
        return every[~self.long_captions(split)] if self.on_too_long == "drop" else every

    def long_captions(self, split: Split) -> NDArray[np.bool_]:
        rows: NDArray[np.bool_] = are_too_long(self.table_of(split))[self._numbers(split)[self._in_split(split)]]
        return rows

    def labels(self, split: Split) -> NDArray[np.int64]:
        """Number of each sample's caption among those of its folder, in the order of :meth:`indices`; (samples,)."""
        return self._numbers(split)[self.indices(split)]

    def recording_ids(self, split: Split) -> NDArray[np.int64]:
        """Numbers that are equal for equal recordings, in the order of :meth:`indices`; (samples,)."""
        hashes = load_array(self.folder_of(split) / "hashes.npy")[self.indices(split)]
        return np.unique(hashes, return_inverse=True)[1].reshape(-1)

    def amounts(self) -> list[tuple[int, str]]:
        samples, *others = super().amounts()
        return [(samples[0], "recordings with a caption"), *others]

    def _in_split(self, split: Split) -> NDArray[np.int64]:
        return np.flatnonzero(self.in_split(split, load_array(self.folder_of(split) / "hashes.npy")))

    def _numbers(self, split: Split) -> NDArray[np.int64]:
        texts = transcripts(self.folder_of(split))[0]
        numbers = {text: number for number, text in enumerate(_captions(self.folder_of(split)))}
        return np.array([numbers[text] for text in texts], np.int64)


def prepare_sound_captions(
    model: ModelConfig, data: DataConfig, objective: ObjectiveConfig, progress: Progress | None = None
) -> PreparedSoundCaptions:
    """Scans the recordings of ``data`` and tokenizes their captions, or finds both in the cache.

    Raises:
        ConfigError: a path, a rate or a tokenizer that cannot work; a package or program that is missing.
        DataError: a list that is broken; a recording that cannot be used, with ``data.on_bad_sample=stop``; none to
            train on.
        ModelFolderError: the folder's feature extractor does not fit its model.
    """
    assert isinstance(data, CaptionedAudioConfig)
    sound = Sound.from_config(data, model)
    window = ClapMel.from_model(model, sound.rate)
    assert window is not None
    scan = scan_recordings(model, data, progress)
    report_bad_samples(bad_in(scan.manifests), data.on_bad_sample, ("the recording or its caption", "recordings"))
    texts = {folder: _captions(folder) for folder in dict.fromkeys((scan.folder, scan.held_out_folder))}
    with run_cache(data) as cache:
        captions, tables = tokenize_captions(model, data, objective, texts, cache, progress or no_progress)
    known = PreparedSoundCaptions(
        **scan.fields(), **captions, segment_samples=window.most_samples, bad_samples=len(bad_in(scan.manifests))
    )
    long = known.count_long()
    identity = (_FORMAT, asdict(sound), window.settings(), known.on_too_long if long else "")
    train, available = len(known.indices("train")), len(known.indices("validation"))
    contents = [
        (manifest["content"], tables[folder].name) for manifest, folder in zip(scan.manifests, texts, strict=True)
    ]
    changes = (known.fraction, data.speed, data.noise, data.sort_steps)
    apart = (known.is_apart or known.fraction == 1) and available
    return replace(known, too_long_samples=long).with_counts(
        data,
        train,
        available,
        digest=digest_of(*contents[0], *changes, *identity),
        validation_digest=digest_of(*contents[-1], *identity) if apart else "",
    )


def _captions(folder: Path) -> list[str]:
    """The different captions of a folder's recordings."""
    return sorted(set(transcripts(folder)[0]))
