"""Answers and losses of a model for evaluation tasks, under any strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from mgpu_pipe.config.group_keys import EvalTask
from mgpu_pipe.data.step_batch import IGNORE_INDEX, StepBatch
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.generation import Prompt, encode, generate_text
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.objectives.protocols import RowScorer
from mgpu_pipe.training.strategy import EngineStrategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mgpu_pipe.data.text.render_chat import ChatTemplate

LENGTHS = 64
"""Tokens; rows are padded to a multiple of this to limit the number of shapes."""


@dataclass
class Judge:
    """A model under evaluation.

    Attributes:
        chat: its template; None for a model that continues texts.
        window: most tokens of a text in one forward pass.
        strategy: of the run that trains it; None for a model that is whole in this process only.
    """

    objective: Objective
    tokenizer: PreTrainedTokenizerBase
    chat: ChatTemplate | None
    window: int
    strategy: EngineStrategy | None = None

    @property
    def _answers_alone(self) -> bool:
        """Whether this process answers its own questions; with a sharded model all processes answer each together."""
        return self.strategy is None or self.strategy.holds_whole_model

    def share(self, count: int) -> range:
        """The indices of the questions, of ``count``, that this process answers."""
        if self.strategy is None or not self._answers_alone:
            return range(count)
        rank, size = self.strategy.global_rank, self.strategy.world_size
        return range(count * rank // size, count * (rank + 1) // size)

    def all_reduce(self, values: list[float]) -> list[float]:
        """All-reduces the values of all questions; each process passes its own values and 0 for the others."""
        if self.strategy is None or not self._answers_alone or self.strategy.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.strategy.root_device)
        dist.all_reduce(total)
        return cast(list[float], total.tolist())

    def answers(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        task: EvalTask,
        tools: Sequence[list[Any] | None] | None = None,
    ) -> list[str]:
        """The likeliest answer to each conversation; without a template, the line after the last message.

        Args:
            tools: that the template offers the model in each conversation.
        """
        strategy, prompts = self.strategy, list[Prompt](conversations)
        if self.chat is None:
            prompts = [str(messages[-1]["content"]) for messages in conversations]
        # Compiling for these shapes would change the compiled training step.
        with torch.compiler.set_stance("force_eager"):
            answers = generate_text(
                cast("PreTrainedModel", self.objective.model),
                self.tokenizer,
                prompts,
                chat=self.chat,
                tools=tools,
                max_new_tokens=task.max_new_tokens,
                temperature=0.0,
                together=not self._answers_alone,
                forward=None if strategy is None else strategy.sampling_forward(),
                batch_size=task.batch_size,
            )
        if strategy is not None:
            strategy.free_gathered()
        return answers if self.chat is not None else [text.strip().partition("\n")[0] for text in answers]

    def encode_choice(self, prompt: str, choice: str) -> tuple[list[int], list[int]]:
        """The ids of a prompt, and the ids of a choice after it.

        Raises:
            BadInputError: together they are longer than the window.
        """
        if self.chat is not None:
            prompt_ids, choice_ids = encode(self.tokenizer, prompt, self.chat), self._ids(self.chat.lead() + choice)
        else:
            prompt_ids = encode(self.tokenizer, prompt, None)
            choice_ids = list(self.tokenizer(prompt + choice)["input_ids"])[len(prompt_ids) :]
        if len(prompt_ids) + len(choice_ids) > self.window + 1:
            tokens = len(prompt_ids) + len(choice_ids)
            raise BadInputError(
                f"{prompt[:60]!r}: has {tokens} tokens with its choice; raise data.seq_len={self.window}"
            )
        return prompt_ids, choice_ids

    def encode_windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """A document's ids with its end, cut into windows; each id but the first is a target once."""
        ids = [*encode(self.tokenizer, text, None), *self._ids(str(self.tokenizer.eos_token or ""))]
        return [
            (ids[start : start + 1], ids[start + 1 : start + 1 + self.window])
            for start in range(0, len(ids) - 1, self.window)
        ]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def losses(self, texts: Sequence[tuple[list[int], list[int]]], rows: int) -> list[float]:
        """The summed loss of each text's targets, the ids after its context. A collective call.

        Args:
            texts: ids of the context and of the targets.
            rows: texts of a process in one forward pass.
        """
        strategy = self.strategy
        size = 1 if strategy is None else strategy.dims.data_parallel_size
        rank = 0 if strategy is None else strategy.dims.data_parallel_rank(strategy.global_rank)
        losses: list[float] = []
        for start in range(0, len(texts), rows * size):
            group = texts[start : start + rows * size]
            longest = max(len(context) + len(targets) for context, targets in group) - 1
            length = -(-longest // LENGTHS) * LENGTHS
            of_rank = group[rank * rows : (rank + 1) * rows]
            sums = self._row_losses(self._batch([*of_rank, *[([], [])] * (rows - len(of_rank))], length))
            if strategy is not None:
                sums_of_ranks = torch.zeros(size * rows, dtype=torch.float64, device=strategy.root_device)
                sums_of_ranks[rank * rows : (rank + 1) * rows] = sums
                sums = strategy.sum_over_data(sums_of_ranks)
            losses += sums[: len(group)].tolist()
        return losses

    def _batch(self, texts: Sequence[tuple[list[int], list[int]]], length: int) -> dict[str, torch.Tensor]:
        device = self._device
        ids = torch.zeros(len(texts), length, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORE_INDEX)
        for row, (context, targets) in enumerate(texts):
            ids_of_text = torch.tensor([*context, *targets], dtype=torch.int64)
            if len(ids_of_text) > 1:
                ids[row, : len(ids_of_text) - 1] = ids_of_text[:-1]
                labels[row, max(len(context), 1) - 1 : len(ids_of_text) - 1] = ids_of_text[max(len(context), 1) :]
        positions = torch.arange(length).expand_as(ids).contiguous()
        batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
        for name, field in self.objective.batch_spec.fields.items():
            if name not in batch:
                shape = [len(texts), *field.shape]
                if field.sequence_dim is not None:
                    shape.insert(field.sequence_dim, length)
                batch[name] = torch.full(shape, field.padding, dtype=getattr(torch, field.dtype))
        return {name: value.to(device) for name, value in batch.items()}

    @torch.no_grad()
    def _row_losses(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        objective, model = self.objective, self.objective.model
        if not isinstance(objective, RowScorer):
            raise BadInputError(f"eval.tasks: {type(objective).__name__} scores no text; define row_losses")
        was_training = model.training
        model.eval()
        try:
            if self.strategy is None:
                return objective.row_losses(batch)
            rows = len(batch["input_ids"])
            with _score_rows(objective):
                return self.strategy.run_evaluation(StepBatch(0, 0, rows, [batch], rows))
        finally:
            model.train(was_training)

    @property
    def _device(self) -> torch.device:
        return next(self.objective.model.parameters()).device if self.strategy is None else self.strategy.root_device


@contextmanager
def _score_rows(objective: RowScorer) -> Iterator[None]:
    """Context in which an evaluation returns :meth:`RowScorer.row_losses` instead of the objective's sums."""
    objective.__dict__["evaluation_sums"] = objective.row_losses
    try:
        yield
    finally:
        del objective.__dict__["evaluation_sums"]
