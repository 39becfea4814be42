"""Answers a file of prompts: :func:`answer_prompts` is the page to read first."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_pipe.architectures.find import takes_media
from mgpu_pipe.data.images.chat_rows import ChatRow
from mgpu_pipe.data.text.chat_templates import places_taken
from mgpu_pipe.data.text.conversations import tools_of
from mgpu_pipe.errors import BadInputError, print_line
from mgpu_pipe.inference.audio_samples import TranscriptEngine, answer_record, is_transcriber
from mgpu_pipe.inference.batch.continuous import Row, RowBatch, answer_rows, takes_rows
from mgpu_pipe.inference.batch.job_folder import Share, compute_batches
from mgpu_pipe.inference.batch.prompts import (
    PromptRow,
    digest_files,
    has_places,
    make_batches,
    names_visuals,
    prompt_of,
    read_prompts,
    refuse_bad_rows,
    visual_prompt_of,
)
from mgpu_pipe.inference.batch.settings import AnswerSettings
from mgpu_pipe.inference.generation import (
    Answer,
    continue_batch,
    decode_answer,
    encode,
    end_tokens,
    generation_mode,
    input_device,
    keeps_cache,
    require_rows,
)
from mgpu_pipe.inference.open import LoadedRun
from mgpu_pipe.inference.sampling import RowDraws, Sampling, StopTexts, row_seed
from mgpu_pipe.inference.visual_prompts import (
    PromptVisuals,
    VisualReader,
    picture_settings,
    reads_questions_whole,
    visual_inputs,
)

if TYPE_CHECKING:
    from mgpu_pipe.data.text.render_chat import ChatTemplate


MOST_BATCHES, LEAST_PARTS = 8, 16
"""Most batches of a part, and least parts of a file; within a part waiting rows replace rows that ended. One process
computes a whole part, so neither the number of processes nor a kill changes which rows go through the model together.
"""


def answer_prompts(
    settings: AnswerSettings,
    run: LoadedRun,
    share: Share,
    forward: Callable[..., Any] | None = None,
    is_cut: bool = False,
) -> None:
    """Answer this process's batches; the first process then waits for the others and writes the output.

    ``forward`` replaces the model's forward pass (:func:`~mgpu_pipe.inference.generation.generate_text`). With
    ``is_cut`` this process holds a part of the model alone, and rows are texts. DataError for a bad row if
    ``settings.on_bad_row`` is ``refuse``, BadInputError for a model that generates no text.
    """
    if not run.model.can_generate():
        raise BadInputError(f"{run.source}: {type(run.model).__name__} does not generate text; use mgpu-pipe eval")
    engine: AnswerEngine | TranscriptEngine
    if is_transcriber(run.model):
        if is_cut:
            raise BadInputError(f"{run.source}: transcribes with the whole model in each process; use strategy=ddp")
        engine = TranscriptEngine(settings, run)
    else:
        engine = AnswerEngine(settings, run, use_cache=keeps_cache(forward), is_cut=is_cut)
    rows = read_prompts(settings.input, engine.encode)
    if settings.on_bad_row == "refuse":
        refuse_bad_rows(rows)
    batch_size = settings.batch_size
    if engine.is_continuous:
        batch_size = max(batch_size, min(MOST_BATCHES * batch_size, len(rows) // LEAST_PARTS))
    batches = make_batches(rows, batch_size, engine.room, settings.max_new_tokens)
    folder, good = settings.folder(), sum(map(len, batches))
    before = set(folder.numbers())
    if share.is_first:
        folder.compare_files(digest_files(rows))
        _print_notes(rows, settings.input)
    with generation_mode(run.model, forward):
        seconds = compute_batches(folder, share, batches, good, engine.answer, "answer")
    if not share.is_first:
        return
    answers = folder.answers()
    tokens = sum(int(json.loads(row)["tokens"]) for line, row in answers.items() if line not in before)
    bad = {row.line: json.dumps({"line": row.line, "error": row.error}).encode() + b"\n" for row in rows if row.error}
    keys = {row.line: row.keys for row in rows if row.keys}
    folder.finish({line: _with_keys(row, keys.get(line)) for line, row in {**answers, **bad}.items()})
    speed = f"{tokens:,} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
    print_line(f"{good} answers in {settings.output}; {speed}", file=sys.stderr, flush=True)


def _print_notes(rows: Sequence[PromptRow], path: Path) -> None:
    """Name the rows that are skipped, and settings that a job has for all rows."""
    lines = [f"{row.error}; skipped" for row in rows if row.error]
    if unread := dict.fromkeys(name for row in rows for name in row.unread):
        lines.append(f"{path}: the {', '.join(unread)} of its rows are not read; give options of generate")
    for line in lines:
        print_line(f"note: {line}", file=sys.stderr)


def _with_keys(record: bytes, keys: Mapping[str, Any] | None) -> bytes:
    """A line of the output with the keys of its row."""
    return record if keys is None else json.dumps({**json.loads(record), **keys}, ensure_ascii=False).encode() + b"\n"


class AnswerEngine:
    """A run's model with the settings of a job.

    Args:
        use_cache: whether the model keeps keys and values of earlier tokens.
        is_cut: whether rows must be texts, as other processes hold the other parts of the model.

    Attributes:
        chat: template of the conversation; None continues texts.
        room: most tokens of prompt and answer; None for a model without a limit.
        is_continuous: whether prompts take the places of rows that ended.
    """

    def __init__(self, settings: AnswerSettings, run: LoadedRun, use_cache: bool = True, is_cut: bool = False) -> None:
        self._settings, self._run, self._use_cache, self._is_cut = settings, run, use_cache, is_cut
        self.tokenizer = run.tokenizer()
        is_encoder_decoder = bool(run.model.config.is_encoder_decoder)
        self.chat: ChatTemplate | None = None if settings.raw or is_encoder_decoder else run.chat()
        text: Any = run.model.config.get_text_config()
        self.room: int | None = None if is_encoder_decoder else getattr(text, "max_position_embeddings", None)
        temperature = settings.temperature
        if temperature is None:
            temperature = 0.0 if is_encoder_decoder else 0.8
        self._sampling = Sampling(
            settings.max_new_tokens, temperature, settings.top_k, settings.top_p, settings.min_p, settings.stop or ()
        )
        self._ends = end_tokens(self.tokenizer, self.chat)
        self._lead = "" if self.chat is None else self.chat.lead()
        self._stops = StopTexts(self.tokenizer, self._sampling.stop, lead=self._lead)
        self.is_continuous = not is_cut and takes_rows(run.model)

    @cached_property
    def _reader(self) -> VisualReader:
        return VisualReader.from_run(self._run)

    def encode(self, line: int, row: dict[str, Any], origin: str) -> PromptRow:
        """The prompt of a row.

        Raises:
            DataError, BadInputError: the row is bad, has no template, or has no room in the context.
        """
        chat_row, name = None, type(self._run.model).__name__
        data = picture_settings(self._run)
        takes_files = takes_media(self._run.model.config)
        if names_visuals(row, data) and (self._is_cut or not takes_files):
            what = "strategy=ddp" if self._is_cut else "a vision-language model"
            raise BadInputError(f"names pictures or videos, which {name} does not see here; use {what}")
        if names_visuals(row, data) or (takes_files and not self._is_cut and has_places(row)):
            config = self._run.model.config
            taken = places_taken(config.model_type, getattr(config, "audio_config", None))
            prompt, chat_row = visual_prompt_of(row, origin, data, self._settings.input.parent, taken)
        else:
            prompt = prompt_of(row, origin)
        if self.chat is None and not isinstance(prompt, str):
            raise BadInputError("the model has no chat template for messages; give a prompt without system or history")
        ids = encode(self.tokenizer, prompt, self.chat, tools_of(row, origin) if self.chat is not None else None)
        if chat_row is None:
            require_rows(self._run.model, self.tokenizer, ids)
        ids = ids if chat_row is None else self._read(chat_row).expand(ids)
        if self.room is not None and len(ids) >= self.room:
            raise BadInputError(
                f"prompt of {len(ids)} tokens: the model's context is {self.room}; give a shorter prompt"
            )
        return PromptRow(line, tuple(ids), chat_row)

    def _read(self, chat_row: ChatRow | None) -> PromptVisuals:
        if chat_row is None:
            return self._reader.read([])
        files: dict[str, list[Path]] = {"picture": [], "video": [], "sound": []}
        for file, kind in zip(chat_row.pictures, chat_row.kinds, strict=True):
            files[kind].append(file)
        rates = [rate for rate, is_video in zip(chat_row.rates, chat_row.videos, strict=True) if is_video]
        return self._reader.read(files["picture"], files["video"], rates, files["sound"])

    def _visual_inputs(self, rows: Sequence[PromptRow]) -> Mapping[str, Any] | None:
        """The model's inputs next to the prompts; None where it needs none."""
        is_needed = reads_questions_whole(self._run) and not self._is_cut
        if not is_needed and all(row.chat_row is None for row in rows):
            return None
        visuals = [self._read(row.chat_row) for row in rows]
        return visual_inputs([row.ids for row in rows], visuals, input_device(self._run.model))

    def answer(self, rows: Sequence[PromptRow]) -> Iterator[tuple[int, bytes]]:
        """Yields the line of each row and its answer, a line of JSON."""
        if self.is_continuous and all(row.chat_row is None for row in rows):
            answers = self._answer_continuously(rows)
        else:
            answers = zip([row.line for row in rows], self._answer_together(rows), strict=True)
        for line, answer in answers:
            yield line, answer_record(line, answer.text.removeprefix(self._lead), answer.is_ended, answer.num_tokens)

    def _answer_continuously(self, prompts: Sequence[PromptRow]) -> Iterator[tuple[int, Answer]]:
        """The answers in the order in which they end; at most a batch of rows goes through the model at a time."""
        most, seed, draws = self._settings.max_new_tokens, self._settings.seed, RowDraws(self._sampling)
        rooms = [most if self.room is None else min(most, self.room - len(prompt.ids)) for prompt in prompts]
        waiting = [
            Row(place, prompt.ids, room, draws.numbers(row_seed(seed, prompt.line)))
            for place, (prompt, room) in enumerate(zip(prompts, rooms, strict=True))
        ]
        filler = self.tokenizer.eos_token_id or 0
        device = input_device(self._run.model)
        batch = RowBatch(self._run.model, self._sampling, self._ends, filler, device, self._stops.is_in)
        for row in answer_rows(batch, waiting, self._settings.batch_size):
            text = decode_answer(self.tokenizer, row.prompt, row.new, self.chat is not None)
            yield prompts[row.number].line, Answer(self._stops.cut(text), len(row.new), row.is_ended)

    def _answer_together(self, rows: Sequence[PromptRow]) -> list[Answer]:
        """The answers of rows that go through the model together, to the end of the longest."""
        return continue_batch(
            self._run.model,
            self.tokenizer,
            [list(row.ids) for row in rows],
            self._sampling,
            self._ends,
            is_answer=self.chat is not None,
            use_cache=self._use_cache,
            encoder_alone=not self._is_cut,
            row_seeds=[row_seed(self._settings.seed, row.line) for row in rows],
            visual_inputs=self._visual_inputs(rows),
            lead=self._lead,
        )
