"""Answers a file of prompts: :func:`answer_prompts` is the page to read first."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mgpu_pipe.errors import BadInputError, print_line
from mgpu_pipe.inference.batch.job_folder import JobFolder
from mgpu_pipe.inference.batch.prompts import PromptRow, encode_prompts, make_batches, read_prompts, refuse_bad_rows
from mgpu_pipe.inference.batch.settings import BatchSettings
from mgpu_pipe.inference.generation import continue_batch, end_tokens, generation_mode
from mgpu_pipe.inference.open import LoadedRun
from mgpu_pipe.inference.sampling import Sampling, row_seed
from mgpu_pipe.training.progress import Progress

if TYPE_CHECKING:
    from mgpu_pipe.data.text.chat import ChatTemplate


POLL_S = 0.2
"""Seconds between two looks at what other processes have answered."""


@dataclass(frozen=True)
class Share:
    """The part of a job that this process computes.

    Attributes:
        index, of: the batches at ``index``, ``index + processes``, ... are its own.
    """

    index: int = 0
    processes: int = 1


def answer_prompts(settings: BatchSettings, run: LoadedRun, share: Share) -> None:
    """Answer this process's batches; the first process then waits for the others and writes the output.

    Raises:
        DataError: a row is bad and ``settings.on_bad_row`` is ``refuse``.
        BadInputError: the model does not generate text.
    """
    if not run.model.can_generate() or run.model.main_input_name == "input_features":
        raise BadInputError(f"{run.source}: {type(run.model).__name__} does not generate text; use mgpu-pipe eval")
    engine = AnswerEngine(settings, run)
    rows = list(
        encode_prompts(read_prompts(settings.input), settings.input, engine.tokenizer, engine.chat, engine.room)
    )
    if settings.on_bad_row == "refuse":
        refuse_bad_rows(rows)
    batches = make_batches(rows, settings.batch_size, engine.room, settings.max_new_tokens)
    folder, is_first = JobFolder(settings.output), share.index == 0
    done = set(folder.answered())
    good = sum(map(len, batches))
    if is_first:
        _say_start(rows, len(done), good)
    progress, started = Progress(good, unit="answer", run_name="answers"), time.monotonic()
    if is_first:
        progress.start(len(done))
    with folder.writer(share.index) as writer, generation_mode(run.model):
        if share.processes > 1:
            dist.barrier()  # from here on no process needs the folder to begin
        for batch in batches[share.index :: share.processes]:
            missing = {row.line for row in batch} - done
            if not missing:
                continue
            writer.write([answer for answer in engine.answer(batch) if answer["line"] in missing])
            if is_first:
                progress.update(len(folder.answered()))
    if not is_first:
        return
    while len(answers := folder.answered()) < good:
        progress.update(len(answers))
        time.sleep(POLL_S)
    progress.close()
    seconds = time.monotonic() - started
    tokens = sum(int(json.loads(row)["tokens"]) for line, row in answers.items() if line not in done)
    bad = {row.line: json.dumps({"line": row.line, "error": row.error}).encode() + b"\n" for row in rows if row.error}
    folder.finish({**answers, **bad})
    speed = f"{tokens:,} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
    print_line(f"{good} answers in {settings.output}; {speed}", file=sys.stderr, flush=True)


def _say_start(rows: list[PromptRow], done: int, good: int) -> None:
    for row in rows:
        if row.error:
            print_line(f"note: {row.error}; skipped", file=sys.stderr)
    if done:
        print_line(f"note: {done} of {good} answers are there already", file=sys.stderr, flush=True)


class AnswerEngine:
    """A run's model with the settings of a job.

    Attributes:
        chat: template of the conversation; None continues texts.
        room: most tokens of prompt and answer; None for a model without a limit.
    """

    def __init__(self, settings: BatchSettings, run: LoadedRun) -> None:
        self._settings, self._run = settings, run
        self.tokenizer = run.tokenizer()
        is_encoder_decoder = bool(run.model.config.is_encoder_decoder)
        self.chat: ChatTemplate | None = None if settings.raw or is_encoder_decoder else run.chat()
        text: Any = run.model.config.get_text_config()
        self.room: int | None = None if is_encoder_decoder else getattr(text, "max_position_embeddings", None)
        temperature = settings.temperature
        if temperature is None:
            temperature = 0.0 if is_encoder_decoder else 0.8
        self._sampling = Sampling(settings.max_new_tokens, temperature, settings.top_k, settings.top_p)
        self._ends = end_tokens(self.tokenizer, self.chat)

    def answer(self, rows: list[PromptRow]) -> list[dict[str, Any]]:
        """The answers of a batch, one object a row."""
        answers = continue_batch(
            self._run.model,
            self.tokenizer,
            [list(row.ids) for row in rows],
            self._sampling,
            self._ends,
            is_answer=self.chat is not None,
            row_seeds=[row_seed(self._settings.seed, row.line) for row in rows],
        )
        lead = "" if self.chat is None else self.chat.lead()
        return [
            {
                "line": row.line,
                "answer": answer.text.removeprefix(lead),
                "finish_reason": "stop" if answer.is_ended else "length",
                "tokens": answer.num_tokens,
            }
            for row, answer in zip(rows, answers, strict=True)
        ]
