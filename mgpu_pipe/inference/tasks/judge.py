"""What a task asks of a model, whichever strategy holds it: answers, and the losses of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from mgpu_pipe.config.eval_tasks import EvalTask
from mgpu_pipe.data.step_batch import IGNORE_INDEX, StepBatch
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.generation import Prompt, encode, generate_text
from mgpu_pipe.objectives.base import Objective
from mgpu_pipe.strategies.base import EngineStrategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from mgpu_pipe.data.text.chat import ChatTemplate

LENGTHS = 64
"""Rows are padded to a multiple of this, so that there are few shapes."""


@dataclass
class Judge:
    """A model that is measured.

    Attributes:
        chat: its template; None for a model that continues texts.
        window: most tokens of a text that go through the model together.
        strategy: of the run that trains it; None for a model that this process alone holds.
    """

    objective: Objective
    tokenizer: PreTrainedTokenizerBase
    chat: ChatTemplate | None
    window: int
    strategy: EngineStrategy | None = None

    @property
    def _alone(self) -> bool:
        """Whether this process answers by itself: where the model is spread, all answer the same together."""
        return self.strategy is None or self.strategy.holds_whole_model

    def share(self, count: int) -> range:
        """Which of ``count`` questions this process answers."""
        if self.strategy is None or not self._alone:
            return range(count)
        rank, size = self.strategy.global_rank, self.strategy.world_size
        return range(count * rank // size, count * (rank + 1) // size)

    def gathered(self, values: list[float]) -> list[float]:
        """The values of all questions: each process has those of its own, and 0 for the others. Collective."""
        if self.strategy is None or not self._alone or self.strategy.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.strategy.root_device)
        dist.all_reduce(total)
        return cast(list[float], total.tolist())

    def answers(self, conversations: Sequence[Sequence[Mapping[str, Any]]], task: EvalTask) -> list[str]:
        """The likeliest answer to each; of a model without a template the line that follows the last message."""
        strategy, prompts = self.strategy, list[Prompt](conversations)
        if self.chat is None:
            prompts = [str(messages[-1]["content"]) for messages in conversations]
        # A compilation for other shapes than the training's would change the training's own.
        with torch.compiler.set_stance("force_eager"):
            said = generate_text(
                cast("PreTrainedModel", self.objective.model),
                self.tokenizer,
                prompts,
                chat=self.chat,
                max_new_tokens=task.max_new_tokens,
                temperature=0.0,
                together=not self._alone,
                forward=None if strategy is None else strategy.sampling_forward(),
                batch_size=task.batch_size,
            )
        if strategy is not None:
            strategy.sampled()
        return said if self.chat is not None else [text.strip().partition("\n")[0] for text in said]

    def continued(self, prompt: str, choice: str) -> tuple[list[int], list[int]]:
        """The ids of a prompt, and those of what is said behind it.

        Raises:
            BadInputError: together they are longer than the window.
        """
        if self.chat is not None:
            given, counted = encode(self.tokenizer, prompt, self.chat), self._ids(choice)
        else:
            given = encode(self.tokenizer, prompt, None)
            counted = list(self.tokenizer(prompt + choice)["input_ids"])[len(given) :]
        if len(given) + len(counted) > self.window + 1:
            tokens = len(given) + len(counted)
            raise BadInputError(
                f"{prompt[:60]!r}: has {tokens} tokens with its choice; raise data.seq_len={self.window}"
            )
        return given, counted

    def pieces(self, text: str) -> list[tuple[list[int], list[int]]]:
        """A document's ids with its end, cut into windows; all but the first id are counted once."""
        ids = [*encode(self.tokenizer, text, None), *self._ids(str(self.tokenizer.eos_token or ""))]
        return [(ids[at : at + 1], ids[at + 1 : at + 1 + self.window]) for at in range(0, len(ids) - 1, self.window)]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def losses(self, texts: Sequence[tuple[list[int], list[int]]], rows: int) -> list[float]:
        """Of each text, the ids that are given and those behind them, the sum of the latter's losses. Collective.

        Args:
            rows: texts of a process that go through the model together.
        """
        strategy = self.strategy
        size = 1 if strategy is None else strategy.dims.data_parallel_size
        mine = 0 if strategy is None else strategy.dims.data_parallel_rank(strategy.global_rank)
        found: list[float] = []
        for start in range(0, len(texts), rows * size):
            together = texts[start : start + rows * size]
            longest = max(len(given) + len(counted) for given, counted in together) - 1
            length = -(-longest // LENGTHS) * LENGTHS
            own = together[mine * rows : (mine + 1) * rows]
            sums = self._row_losses(self._batch([*own, *[([], [])] * (rows - len(own))], length))
            if strategy is not None:
                every = torch.zeros(size * rows, dtype=torch.float64, device=strategy.root_device)
                every[mine * rows : (mine + 1) * rows] = sums
                sums = strategy.sum_over_data(every)
            found += sums[: len(together)].tolist()
        return found

    def _batch(self, texts: Sequence[tuple[list[int], list[int]]], length: int) -> dict[str, torch.Tensor]:
        device = self._device
        ids = torch.zeros(len(texts), length, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORE_INDEX)
        for row, (given, counted) in enumerate(texts):
            whole = torch.tensor([*given, *counted], dtype=torch.int64)
            if len(whole) > 1:
                ids[row, : len(whole) - 1] = whole[:-1]
                labels[row, max(len(given), 1) - 1 : len(whole) - 1] = whole[max(len(given), 1) :]
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
        was_training = model.training
        model.eval()
        try:
            if self.strategy is None:
                return objective.row_losses(batch)
            rows = len(batch["input_ids"])
            with objective.by_row():
                return self.strategy.run_evaluation(StepBatch(0, 0, rows, [batch], rows))
        finally:
            model.train(was_training)

    @property
    def _device(self) -> torch.device:
        return next(self.objective.model.parameters()).device if self.strategy is None else self.strategy.root_device
