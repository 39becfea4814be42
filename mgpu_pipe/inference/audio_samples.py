"""Transcripts or predicted classes of held-out recordings, next to the truth."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, cast

import torch

from mgpu_pipe.config.schema import ObjectiveConfig, RunConfig
from mgpu_pipe.data.audio.alphabet import Alphabet
from mgpu_pipe.data.audio.decode_audio import Wave, soundfile
from mgpu_pipe.data.audio.listen import Sound
from mgpu_pipe.data.audio.prepare_audio import PreparedSpeech
from mgpu_pipe.data.audio.prepare_labelled import PreparedLabelledSounds
from mgpu_pipe.data.audio.recordings import LabelledSounds, SpeechSamples
from mgpu_pipe.data.audio.speech_source import AudioConfig
from mgpu_pipe.data.audio.transcript_tokens import Words
from mgpu_pipe.data.samples import SampleSet, evaluation_numbers
from mgpu_pipe.models.speech import greedy_transcripts
from mgpu_pipe.objectives.registry import objective_class
from mgpu_pipe.objectives.transcript_keys import SpeechSeq2SeqConfig, jiwer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRANSCRIBED, SHOWN, SECONDS = 32, 12, 20
"""Recordings to transcribe, recordings to show, and seconds of sound to keep of each."""
NAMED_WORDS = 12
"""Most words that a sample lists for one kind of mistake."""


def recording_samples(
    config: RunConfig, prepared: PreparedSpeech | PreparedLabelledSounds, recordings: SampleSet, model: PreTrainedModel
) -> list[dict[str, str]]:
    """Samples of held-out recordings, wrong ones first: the truth, the transcript with its mistakes or the predicted
    class, and Ogg sound. A collective call for a sharded model.
    """
    chosen = prepared.evaluated_samples()[:TRANSCRIBED]
    assert isinstance(recordings, SpeechSamples | LabelledSounds) and isinstance(config.data, AudioConfig)
    samples = objective_class(config.objective.name).samples(config, recordings)
    was_training, results = model.training, list[tuple[bool, str, str, int]]()
    model.eval()
    try:
        for index in range(len(chosen)):  # one at a time: without a mask, padding changes a plain model's result
            batch = samples.batch(chosen[index : index + 1], evaluation_numbers(chosen[index : index + 1]))
            if isinstance(prepared, PreparedSpeech):
                truth, text = _transcribe(prepared.alphabet(), config.objective, model, batch)
                results.append((truth == text, truth, mark_mistakes(truth, text), int(chosen[index])))
            else:
                inputs = {model.main_input_name: batch[model.main_input_name].to(next(model.parameters()).device)}
                with torch.no_grad():
                    logits = model(**inputs).logits[0].float()
                truth, text, is_right = name_classes(prepared.classes, batch["labels"][0], logits.cpu())
                results.append((is_right, truth, text if is_right else f"{text}, wrong", int(chosen[index])))
    finally:
        model.train(was_training)
    rate = Sound.from_config(config.data, config.model).rate
    return [
        {"prompt": truth, "text": f" \u2192 {text}", "audio": _encode_ogg(recordings.recording(number), rate)}
        for _, truth, text, number in sorted(results, key=lambda result: result[0])[:SHOWN]
    ]


def _transcribe(
    alphabet: Alphabet | Words, objective: ObjectiveConfig, model: PreTrainedModel, batch: dict[str, torch.Tensor]
) -> tuple[str, str]:
    """The true and the predicted transcript of a batch of one recording."""
    device = next(model.parameters()).device
    if isinstance(alphabet, Words):
        most = cast(SpeechSeq2SeqConfig, objective).max_new_tokens
        transcript = alphabet.decode(greedy_transcripts(model, batch["input_features"].to(device), most)[0])
    else:
        with torch.no_grad():
            predicted = model(input_values=batch["input_values"].to(device)).logits[0].argmax(-1).tolist()
        transcript = alphabet.decode(number for number, _ in groupby(predicted) if number != alphabet.blank)
    return alphabet.decode(batch["labels"][0].tolist()), transcript


def name_classes(names: Sequence[str], label: torch.Tensor, logits: torch.Tensor) -> tuple[str, str, bool]:
    """The true class and the likeliest with its share, and whether they are equal; or all true and all likely classes.

    Args:
        label: the class, or for each class whether it is true, (classes,).
        logits: (classes,).
    """
    if label.dim() == 0:
        answer = int(logits.argmax())
        return (
            names[int(label)],
            f"{names[answer]} ({100 * float(logits.softmax(-1)[answer]):.0f}%)",
            answer == int(label),
        )
    is_true, is_said = label > 0.5, logits > 0
    listed = (", ".join(names[place] for place in kind.nonzero().flatten().tolist()) for kind in (is_true, is_said))
    truth, answer_text = (text or "(none)" for text in listed)
    return truth, answer_text, bool((is_true == is_said).all())


def _encode_ogg(wave: Wave, rate: int) -> str:
    content = io.BytesIO()
    soundfile().write(content, wave[: SECONDS * rate], rate, format="OGG", subtype="VORBIS")
    return base64.b64encode(content.getvalue()).decode()


def mark_mistakes(truth: str, transcript: str) -> str:
    """``transcript``, followed by a line of the words that ``truth`` shows as missed, wrong or added."""
    if not transcript.split():
        return "(nothing was heard)"
    true_words, words = truth.split(), transcript.split()
    missed, wrong, added = list[str](), list[str](), list[str]()
    for chunk in jiwer().process_words(truth, transcript).alignments[0]:
        transcribed = words[chunk.hyp_start_idx : chunk.hyp_end_idx]
        expected = true_words[chunk.ref_start_idx : chunk.ref_end_idx]
        if chunk.type == "delete":
            missed += expected
        elif chunk.type == "insert":
            added += transcribed
        elif chunk.type == "substitute":
            wrong += [f"{word} for {right}" for word, right in zip(transcribed, expected, strict=True)]
    kinds = {"missed": missed, "wrong": wrong, "added": added}
    differences = "; ".join(f"{kind}: {_list_words(mistakes)}" for kind, mistakes in kinds.items() if mistakes)
    return f"{transcript}\n  {differences}" if differences else transcript


def _list_words(words: Sequence[str]) -> str:
    """Lists each word once with its number of occurrences, at most :data:`NAMED_WORDS` words."""
    counts = Counter(words)
    more = len(counts) - NAMED_WORDS
    named = [word if times == 1 else f"{word} ({times} times)" for word, times in counts.items()]
    return ", ".join(named[:NAMED_WORDS]) + (f", and {more} more" if more > 0 else "")
