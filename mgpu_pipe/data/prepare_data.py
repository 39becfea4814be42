"""Prepares the data of a run, of any kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mgpu_pipe.config.schema import DataConfig, ModelConfig, ObjectiveConfig, RunConfig
from mgpu_pipe.data import arrays
from mgpu_pipe.data.audio import prepare_audio, prepare_labelled, prepare_sound_captions
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.data_source import shipped_source
from mgpu_pipe.data.images import prepare_captions, prepare_chats, prepare_images
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.data.text import labelled_text, mixed_samples, pairs, preferences, prepare_text, scored_groups

Prepare = Callable[[ModelConfig, DataConfig, ObjectiveConfig, Progress | None], Prepared]
PREPARE: dict[type[Prepared], Prepare] = {
    labelled_text.PreparedLabelled: labelled_text.prepare_labelled,
    pairs.PreparedPairs: pairs.prepare_pairs,
    preferences.PreparedPreferences: preferences.prepare_preferences,
    preferences.PreparedUnpaired: preferences.prepare_unpaired,
    scored_groups.PreparedEmbeddingPairs: scored_groups.prepare_embedding_pairs,
    scored_groups.PreparedScoredPairs: scored_groups.prepare_scored_pairs,
    prepare_images.PreparedImages: prepare_images.prepare_images,
    prepare_captions.PreparedCaptions: prepare_captions.prepare_captions,
    prepare_chats.PreparedPictureChats: prepare_chats.prepare_picture_chats,
    prepare_audio.PreparedSpeech: prepare_audio.prepare_speech,
    prepare_labelled.PreparedLabelledSounds: prepare_labelled.prepare_labelled_sounds,
    prepare_labelled.PreparedTaggedSounds: prepare_labelled.prepare_tagged_sounds,
    prepare_sound_captions.PreparedSoundCaptions: prepare_sound_captions.prepare_sound_captions,
}
"""Kinds of samples, and the functions that prepare them from the sections that they read."""
PREPARE_RUN: dict[type[Prepared], Callable[[RunConfig, Progress | None], Prepared]] = {
    prepare_text.PreparedData: prepare_text.prepare,
    mixed_samples.PreparedMixture: mixed_samples.prepare_mixture,
    arrays.PreparedArrays: arrays.prepare_arrays,
}
"""Kinds that a package may provide, whose functions get the whole configuration."""
KINDS = {kind.kind: kind for kind in (*PREPARE, *PREPARE_RUN)}


def prepare(config: RunConfig, progress: Progress | None = None) -> Prepared:
    """Prepares the data of ``config``, or finds it (:func:`mgpu_pipe.data.text.prepare_text.prepare`); or
    BadInputError."""
    source = shipped_source(config.data.source)
    if source is not None:
        kind = KINDS[source.prepared or source.samples]
    else:
        is_text = arrays.array_class(config.data.source) is None
        kind = prepare_text.PreparedData if is_text else arrays.PreparedArrays
    if kind in PREPARE_RUN:
        return PREPARE_RUN[kind](config, progress)
    return PREPARE[kind](config.model, config.data, config.objective, progress)


def read_prepared(value: Mapping[str, Any]) -> Prepared:
    """Reads the JSON form of :meth:`Prepared.as_dict`; without a kind, as in earlier versions, it is text."""
    return KINDS[value.get("kind", prepare_text.PreparedData.kind)].from_dict(value)
