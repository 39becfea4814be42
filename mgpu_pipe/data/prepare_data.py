"""Prepares the data of a run, of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data import arrays
from mgpu_pipe.data.audio.prepare_audio import PreparedSpeech
from mgpu_pipe.data.audio.prepare_labelled import PreparedLabelledSounds, PreparedTaggedSounds
from mgpu_pipe.data.cache import Progress
from mgpu_pipe.data.data_source import shipped_source
from mgpu_pipe.data.images.prepare_captions import PreparedCaptions
from mgpu_pipe.data.images.prepare_chats import PreparedPictureChats
from mgpu_pipe.data.images.prepare_images import PreparedImages
from mgpu_pipe.data.kinds import prepare_packed_text
from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.data.text.labels import PreparedLabelled
from mgpu_pipe.data.text.mixed_samples import PreparedMixture
from mgpu_pipe.data.text.pairs import PreparedPairs
from mgpu_pipe.data.text.preferences import PreparedPreferences
from mgpu_pipe.data.text.prepare_embedding_pairs import PreparedEmbeddingPairs
from mgpu_pipe.data.text.prepare_scored_pairs import PreparedScoredPairs
from mgpu_pipe.data.text.prepare_text import PreparedData
from mgpu_pipe.data.text.unpaired import PreparedUnpaired

KINDS: dict[str, type[Prepared]] = {
    kind.kind: kind
    for kind in (
        *(PreparedData, PreparedLabelled, PreparedPairs, PreparedPreferences, PreparedMixture),
        *(PreparedEmbeddingPairs, PreparedScoredPairs, PreparedUnpaired),
        *(PreparedImages, PreparedCaptions, PreparedPictureChats, arrays.PreparedArrays),
        *(PreparedSpeech, PreparedLabelledSounds, PreparedTaggedSounds),
    )
}


def prepare(config: RunConfig, progress: Progress | None = None) -> Prepared:
    """Prepares the data of ``config``, or finds it in the cache; see :func:`mgpu_pipe.data.text.prepare_text.prepare`.

    Raises:
        BadInputError: the data cannot be used.
    """
    source = shipped_source(config.data.source)
    if source is not None:
        return source.prepare(config, progress)
    if arrays.array_class(config.data.source) is not None:
        return arrays.prepare_arrays(config)
    return prepare_packed_text(config, progress)


def read_prepared(value: Mapping[str, Any]) -> Prepared:
    """Reads the JSON form of :meth:`Prepared.as_dict`; without a kind, as in earlier versions, it is text."""
    return KINDS[value.get("kind", PreparedData.kind)].from_dict(value)
