"""What a model hears in held-out recordings, beside what is said in them."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch

from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.audio.prepare import PreparedSpeech
from mgpu_pipe.data.samples import evaluation_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LISTENED_TO, SHOWN = 32, 12
"""Recordings that are listened to, and those of them that are kept."""


def transcript_samples(config: RunConfig, prepared: PreparedSpeech, model: PreTrainedModel) -> list[dict[str, str]]:
    """Some held-out recordings, those first in which the model hears something else: what is said, and what is heard,
    wrong words between asterisks. Of a sharded model a collective call.
    """
    chosen = prepared.evaluated_samples()[:LISTENED_TO]
    if not len(chosen):
        return []
    samples, alphabet = prepared.open(config, "validation"), prepared.alphabet()
    was_training, device, found = model.training, next(model.parameters()).device, list[tuple[str, str]]()
    model.eval()
    try:
        for at in range(len(chosen)):  # one by one: plain models look at padding
            batch = samples.batch(chosen[at : at + 1], evaluation_numbers(chosen[at : at + 1]))
            with torch.no_grad():
                best = model(input_values=batch["input_values"].to(device)).logits[0].argmax(-1).tolist()
            heard = alphabet.decode(number for number, _ in groupby(best) if number != alphabet.blank)
            found.append((alphabet.decode(batch["labels"][0].tolist()), heard))
    finally:
        model.train(was_training)
    found.sort(key=lambda one: one[0] == one[1])
    return [{"prompt": said, "text": f" \u2192 {marked(said, heard)}"} for said, heard in found[:SHOWN]]


def marked(said: str, heard: str) -> str:
    """``heard`` with asterisks round each word that is not said, and ``*`` for each that is not heard."""
    from mgpu_pipe.objectives.transcripts import jiwer

    words, shown = heard.split(), list[str]()
    for chunk in jiwer().process_words(said, heard).alignments[0]:
        there = words[chunk.hyp_start_idx : chunk.hyp_end_idx]
        missing = ["*"] * (chunk.ref_end_idx - chunk.ref_start_idx if chunk.type == "delete" else 0)
        shown += [*(there if chunk.type == "equal" else [f"*{word}*" for word in there]), *missing]
    return " ".join(shown)
