"""Prepares the data of a run, of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgpu_pipe.config.plugins import (
    AUDIO_SOURCES,
    CAPTION_SOURCES,
    IMAGE_SOURCES,
    PAIR_SOURCES,
    PICTURE_CHAT_SOURCES,
    PREFERENCE_SOURCES,
)
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data import arrays
from mgpu_pipe.data.audio import prepare_audio as speech
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.images import captions
from mgpu_pipe.data.images import prepare_chats as chats
from mgpu_pipe.data.images import prepare_images as images
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.data.sources import mixture
from mgpu_pipe.data.text import labels as labelled
from mgpu_pipe.data.text import pairs, preferences
from mgpu_pipe.data.text import prepare_text as text

KINDS: dict[str, type[Prepared]] = {
    kind.kind: kind
    for kind in (
        text.PreparedData,
        arrays.PreparedArrays,
        labelled.PreparedLabelled,
        pairs.PreparedPairs,
        preferences.PreparedPreferences,
        images.PreparedImages,
        mixture.PreparedMixture,
        captions.PreparedCaptions,
        chats.PreparedPictureChats,
        speech.PreparedSpeech,
    )
}


def prepare(config: RunConfig, progress: Progress | None = None) -> Prepared:
    """Prepares the data of ``config``, or finds it in the cache; see :func:`mgpu_pipe.data.text.prepare_text.prepare`.

    Raises:
        BadInputError: the data cannot be used.
    """
    if arrays.array_class(config.data.source) is not None:
        return arrays.prepare_arrays(config)
    if config.data.source == labelled.SOURCE:
        return labelled.prepare_labelled(config, progress)
    if config.data.source in PAIR_SOURCES:
        return pairs.prepare_pairs(config, progress)
    if config.data.source in PREFERENCE_SOURCES:
        return preferences.prepare_preferences(config, progress)
    if config.data.source in IMAGE_SOURCES:
        return images.prepare_images(config, progress)
    if config.data.source == mixture.SOURCE:
        return mixture.prepare_mixture(config, progress)
    if config.data.source in CAPTION_SOURCES:
        return captions.prepare_captions(config, progress)
    if config.data.source in PICTURE_CHAT_SOURCES:
        return chats.prepare_picture_chats(config, progress)
    if config.data.source in AUDIO_SOURCES:
        return speech.prepare_speech(config, progress)
    return text.prepare(config, progress)


def read_prepared(value: Mapping[str, Any]) -> Prepared:
    """Reads the JSON form of :meth:`Prepared.as_dict`; without a kind, as in earlier versions, it is text."""
    return KINDS[value.get("kind", text.PreparedData.kind)].from_dict(value)
