"""Answers a file of prompts: :func:`answer_prompts` is the page to read first."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgpu_pipe.errors import BadInputError, print_line
from mgpu_pipe.inference.batch.prompts import PromptRow, encode_prompts, make_batches, read_prompts, refuse_bad_rows
from mgpu_pipe.inference.batch.settings import AnswerSettings
from mgpu_pipe.inference.batch.share import Share, compute_batches
from mgpu_pipe.inference.generation import continue_batch, end_tokens, generation_mode, keeps_cache
from mgpu_pipe.inference.open import LoadedRun
from mgpu_pipe.inference.sampling import Sampling, row_seed

if TYPE_CHECKING:
    from mgpu_pipe.data.text.render_chat import ChatTemplate


def answer_prompts(
    settings: AnswerSettings, run: LoadedRun, share: Share, forward: Callable[..., Any] | None = None
) -> None:
    """Answer this process's batches; the first process then waits for the others and writes the output.

    Args:
        forward: replaces the model's forward pass; see :func:`~mgpu_pipe.inference.generation.generate_text`.

    Raises:
        DataError: a row is bad and ``settings.on_bad_row`` is ``refuse``.
        BadInputError: the model does not generate text.
    """
    if not run.model.can_generate() or run.model.main_input_name == "input_features":
        raise BadInputError(f"{run.source}: {type(run.model).__name__} does not generate text; use mgpu-pipe eval")
    engine = AnswerEngine(settings, run, use_cache=keeps_cache(forward))
    rows = list(
        encode_prompts(read_prompts(settings.input), settings.input, engine.tokenizer, engine.chat, engine.room)
    )
    if settings.on_bad_row == "refuse":
        refuse_bad_rows(rows)
    batches = make_batches(rows, settings.batch_size, engine.room, settings.max_new_tokens)
    folder, good = settings.folder(), sum(map(len, batches))
    before = set(folder.numbers())
    if share.is_first:
        for row in rows:
            if row.error:
                print_line(f"note: {row.error}; skipped", file=sys.stderr)
    with generation_mode(run.model, forward):
        seconds = compute_batches(folder, share, batches, good, engine.answer, "answer")
    if not share.is_first:
        return
    answers = folder.answered()
    tokens = sum(int(json.loads(row)["tokens"]) for line, row in answers.items() if line not in before)
    bad = {row.line: json.dumps({"line": row.line, "error": row.error}).encode() + b"\n" for row in rows if row.error}
    folder.finish({**answers, **bad})
    speed = f"{tokens:,} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
    print_line(f"{good} answers in {settings.output}; {speed}", file=sys.stderr, flush=True)


class AnswerEngine:
    """A run's model with the settings of a job.

    Args:
        use_cache: whether the model keeps keys and values of earlier tokens.

    Attributes:
        chat: template of the conversation; None continues texts.
        room: most tokens of prompt and answer; None for a model without a limit.
    """

    def __init__(self, settings: AnswerSettings, run: LoadedRun, use_cache: bool = True) -> None:
        self._settings, self._run, self._use_cache = settings, run, use_cache
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

    def answer(self, rows: Sequence[PromptRow]) -> Mapping[int, bytes]:
        """The answers of a batch, a line of JSON for each row."""
        answers = continue_batch(
            self._run.model,
            self.tokenizer,
            [list(row.ids) for row in rows],
            self._sampling,
            self._ends,
            is_answer=self.chat is not None,
            use_cache=self._use_cache,
            row_seeds=[row_seed(self._settings.seed, row.line) for row in rows],
        )
        lead = "" if self.chat is None else self.chat.lead()
        objects = [
            {
                "line": row.line,
                "answer": answer.text.removeprefix(lead),
                "finish_reason": "stop" if answer.is_ended else "length",
                "tokens": answer.num_tokens,
            }
            for row, answer in zip(rows, answers, strict=True)
        ]
        lines = [json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in objects]
        return {row.line: line for row, line in zip(rows, lines, strict=True)}
