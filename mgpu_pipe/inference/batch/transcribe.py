"""Transcripts of a file of recordings, by an encoder and a decoder (Whisper)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data import files
from mgpu_pipe.data.audio.decode_audio import Wave, decode
from mgpu_pipe.data.audio.listen import Sound
from mgpu_pipe.data.audio.log_mel import LogMel
from mgpu_pipe.data.audio.speech_source import AudioConfig
from mgpu_pipe.data.bad_samples import BadSampleError
from mgpu_pipe.data.tables import find_file, keep_nothing
from mgpu_pipe.errors import BadInputError, DataError
from mgpu_pipe.inference.batch.prompts import PromptRow
from mgpu_pipe.inference.batch.settings import AnswerSettings
from mgpu_pipe.inference.generation import input_device
from mgpu_pipe.inference.open import LoadedRun

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        self._window = window

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
        return self._sound.fitted(decode(recording.read_bytes(), self._sound.rate, self._data.max_seconds))

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
            yield row.line, answer_record(row.line, text, len(new) < len(ids), len(new))


def answer_record(line: int, text: str, is_ended: bool, tokens: int) -> bytes:
    """A line of JSON of the output."""
    reason = "stop" if is_ended else "length"
    record = {"line": line, "answer": text, "finish_reason": reason, "tokens": tokens}
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
