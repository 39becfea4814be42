"""Transcripts or predicted classes of recordings: held-out ones next to the truth, and those of a file."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from mgpu_pipe.config.schema import ModelConfig, ObjectiveConfig, RunConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.audio.alphabet import Alphabet
from mgpu_pipe.data.audio.decode_audio import Wave, decode, soundfile
from mgpu_pipe.data.audio.listen import Sound
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.audio.prepare_audio import PreparedSpeech
from mgpu_pipe.data.audio.prepare_labelled import PreparedLabelledSounds
from mgpu_pipe.data.audio.recordings import LabelledSounds, SpeechSamples
from mgpu_pipe.data.audio.speech_source import AudioConfig
from mgpu_pipe.data.audio.transcript_tokens import Words
from mgpu_pipe.data.bad_samples import BadSampleError
from mgpu_pipe.data.samples import SampleSet, evaluation_numbers
from mgpu_pipe.data.tables import find_file, keep_nothing
from mgpu_pipe.errors import BadInputError, DataError
from mgpu_pipe.inference.batch.prompts import PromptRow
from mgpu_pipe.inference.batch.settings import AnswerSettings
from mgpu_pipe.inference.generation import input_device
from mgpu_pipe.inference.open import LoadedRun
from mgpu_pipe.inference.sampling import StopTexts
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


PREFIX_TOKENS = 4
"""Most tokens before a transcript: start, language, task, no timestamps."""


def is_transcriber(model: PreTrainedModel) -> bool:
    """Whether the model writes what it hears."""
    return model.can_generate() and model.main_input_name == "input_features"


class TranscriptEngine:
    """A run's model that transcribes recordings, by transformers' own ``generate``.

    Raises:
        BadInputError: settings draw tokens.
    """

    room, is_continuous = None, False

    def __init__(self, settings: AnswerSettings, run: LoadedRun) -> None:
        if settings.temperature:
            raise BadInputError(f"--temperature={settings.temperature:g}: transcripts take the likeliest; leave it out")
        self._settings, self._run, self._tokenizer = settings, run, run.tokenizer()
        data = None if run.config is None else run.config.data
        self._data = data if isinstance(data, AudioConfig) else AudioConfig()
        model = ModelConfig(path=str(run.source)) if run.config is None else run.config.model
        self._sound = Sound.from_config(self._data, model)
        window = LogMel.from_model(model, self._sound.rate)
        if window is None:
            raise BadInputError(f"{run.source}: {type(run.model).__name__} reads no spectrograms; use mgpu-pipe eval")
        self._window, self._stops = window, StopTexts(self._tokenizer, settings.stop or ())

    def encode(self, line: int, row: dict[str, Any], origin: str) -> PromptRow:
        """The recording of a row, ``{"path": "a.wav"}``.

        Raises:
            DataError: the row names none, or one that cannot be used.
        """
        column = self._data.audio_column
        name = find_file(row.get(column), keep_nothing(self._settings.input))
        if not isinstance(name, str) or not name:
            raise DataError(f'{origin}: names no recording; write {{"{column}": "a.wav"}}')
        recording = self._settings.input.parent / name
        try:
            fault = self._window.fault([], len(self._read(recording)))
        except OSError as error:
            fault = f"cannot be read ({error.strerror})"
        except BadSampleError as error:
            fault = str(error)
        if fault:
            raise DataError(f"{origin}: {recording}: {fault}; {files.FIX}")
        return PromptRow(line, recording=recording)

    def _read(self, recording: Path) -> Wave:
        return self._sound.standardise(decode(recording.read_bytes(), self._sound.rate, self._data.max_seconds))

    def answer(self, rows: Sequence[PromptRow]) -> Iterator[tuple[int, bytes]]:
        """Yields the line of each row and its transcript, a line of JSON."""
        model: Any = self._run.model
        waves = [self._read(row.recording) for row in rows if row.recording is not None]
        features = torch.from_numpy(self._window.extract(waves)).to(input_device(model))
        most = min(self._settings.max_new_tokens, int(model.config.max_target_positions) - PREFIX_TOKENS)
        written = model.generate(features, max_new_tokens=most, do_sample=False)
        end = self._tokenizer.eos_token_id
        for row, ids in zip(rows, written.tolist(), strict=True):
            new = ids[: ids.index(end)] if end in ids else ids
            text = str(self._tokenizer.decode(new, skip_special_tokens=True)).strip()
            cut = self._stops.cut(text)
            yield row.line, answer_record(row.line, cut, len(new) < len(ids) or cut != text, len(new))


def answer_record(line: int, text: str, is_ended: bool, tokens: int) -> bytes:
    """A line of JSON of the output."""
    reason = "stop" if is_ended else "length"
    record = {"line": line, "answer": text, "finish_reason": reason, "tokens": tokens}
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
