"""What a model hears in held-out recordings, beside what is said in them."""

from __future__ import annotations

import base64
import io
from itertools import groupby
from typing import TYPE_CHECKING, cast

import torch

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.decode import Wave, soundfile
from mgpu_pipe.data.audio.keys import AudioConfig
from mgpu_pipe.data.audio.prepare import PreparedSpeech
from mgpu_pipe.data.audio.read import Sound
from mgpu_pipe.data.audio.words import Words
from mgpu_pipe.data.samples import evaluation_numbers
from mgpu_pipe.models.dictation import dictated
from mgpu_pipe.objectives.registry import objective_class
from mgpu_pipe.objectives.speech_seq2seq_keys import SpeechSeq2SeqConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LISTENED_TO, SHOWN, SECONDS = 32, 12, 20
"""Recordings that are listened to, those of them that are kept, and how much of one is kept as sound."""


def transcript_samples(config: RunConfig, prepared: PreparedSpeech, model: PreTrainedModel) -> list[dict[str, str]]:
    """Some held-out recordings, those first in which the model hears something else: what is said, and what is heard,
    wrong words between asterisks, and its sound as Ogg. Of a sharded model a collective call.
    """
    chosen = prepared.evaluated_samples()[:LISTENED_TO]
    if not len(chosen):
        return []
    recordings = prepared.open(config, "validation")
    samples = objective_class(config.objective.name).samples(config, recordings)
    alphabet = prepared.alphabet()
    was_training, device, found = model.training, next(model.parameters()).device, list[tuple[str, str, int]]()
    model.eval()
    try:
        for at in range(len(chosen)):  # one by one: plain models look at padding
            batch = samples.batch(chosen[at : at + 1], evaluation_numbers(chosen[at : at + 1]))
            if isinstance(alphabet, Words):
                most = cast(SpeechSeq2SeqConfig, config.objective).max_new_tokens
                heard = alphabet.decode(dictated(model, batch["input_features"].to(device), most)[0])
            else:
                with torch.no_grad():
                    best = model(input_values=batch["input_values"].to(device)).logits[0].argmax(-1).tolist()
                heard = alphabet.decode(number for number, _ in groupby(best) if number != alphabet.blank)
            found.append((alphabet.decode(batch["labels"][0].tolist()), heard, int(chosen[at])))
    finally:
        model.train(was_training)
    found.sort(key=lambda one: one[0] == one[1])
    return [
        {
            "prompt": said,
            "text": f" \u2192 {marked(said, heard)}",
            "audio": _ogg(recordings.recording(number), _sound(config).rate),
        }
        for said, heard, number in found[:SHOWN]
    ]


def _sound(config: RunConfig) -> Sound:
    assert isinstance(config.data, AudioConfig)
    return Sound.of(config.data, config.model)


def _ogg(wave: Wave, rate: int) -> str:
    content = io.BytesIO()
    soundfile().write(content, wave[: SECONDS * rate], rate, format="OGG", subtype="VORBIS")
    return base64.b64encode(content.getvalue()).decode()


def marked(said: str, heard: str) -> str:
    """``heard`` with asterisks round each word that is not said, and ``*`` for each that is not heard."""
    from mgpu_pipe.objectives.transcripts import jiwer

    words, shown = heard.split(), list[str]()
    for chunk in jiwer().process_words(said, heard).alignments[0]:
        there = words[chunk.hyp_start_idx : chunk.hyp_end_idx]
        missing = ["*"] * (chunk.ref_end_idx - chunk.ref_start_idx if chunk.type == "delete" else 0)
        shown += [*(there if chunk.type == "equal" else [f"*{word}*" for word in there]), *missing]
    return " ".join(shown)
