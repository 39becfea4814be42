"""Encodes a file of texts as vectors: :func:`encode_texts` is the page to read first."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mgpu_pipe.errors import print_line
from mgpu_pipe.inference.batch.job_folder import Share, VectorFolder, compute_batches
from mgpu_pipe.inference.batch.settings import EncodeSettings
from mgpu_pipe.inference.batch.texts import TextRow, no_tokens, read_texts, vectors_of
from mgpu_pipe.inference.open import LoadedRun
from mgpu_pipe.models.field_sizes import usable_positions
from mgpu_pipe.objectives.text_vectors import pool

WINDOW = 1 << 14
"""Texts in memory at once, which are sorted by length."""


def encode_texts(settings: EncodeSettings, run: LoadedRun, share: Share) -> None:
    """Encode this process's batches; the first process then waits for the others and writes the output."""
    folder, encoder = (
        VectorFolder(settings.output, settings.size),
        TextEncoder(run, settings.input, settings.prompt, settings.size),
    )

    def compute(rows: Sequence[TextRow]) -> Iterable[tuple[int, bytes]]:
        vectors = encoder.encode(rows)
        return folder.records([row.line for row in rows], vectors.cpu().numpy()).items()

    texts = read_texts(settings.input, settings.column)
    seconds = compute_batches(folder, share, batches_of(texts, settings.batch_size), settings.rows, compute, "vector")
    if share.is_first:
        folder.finish(settings.rows)
        speed = f"{seconds:.1f} s, {settings.rows / max(seconds, 1e-9):,.0f} texts/s"
        what = f"{settings.rows:,} vectors of {settings.size} numbers"
        print_line(f"{what} in {settings.output}; {speed}", file=sys.stderr, flush=True)


def batches_of(rows: Iterable[TextRow], batch_size: int) -> Iterator[list[TextRow]]:
    """Batches of texts of about equal length, the longest of each :data:`WINDOW` first.

    They depend on the file and the size alone, so that every number of processes computes the same batches.
    """
    rows = iter(rows)
    while window := list(islice(rows, WINDOW)):
        window.sort(key=lambda row: (-len(row.text), row.line))
        for first in range(0, len(window), batch_size):
            yield window[first : first + batch_size]


class TextEncoder:
    """A run's model, which makes vectors of texts as the run was trained to.

    Args:
        input: file of the texts, for errors.
        prompt: text before every text.
        size: numbers of a vector.
    """

    def __init__(self, run: LoadedRun, input: Path, prompt: str, size: int) -> None:
        self._input, self._prompt, self._size = input, prompt, size
        self._vectors = vectors_of(run.config, run.source)
        self._model: Any = run.model.base_model
        self._tokenizer: Any = run.tokenizer()
        config: Any = run.model.config
        padding = config.pad_token_id
        self._padding = max(0, int((self._tokenizer.pad_token_id if padding is None else padding) or 0))
        positions = usable_positions(config.max_position_embeddings, padding, config.model_type)
        self._room = min(self._vectors.max_tokens or self._tokenizer.model_max_length, positions)

    @torch.no_grad()
    def encode(self, texts: Sequence[TextRow]) -> torch.Tensor:
        """Vectors, (texts, size), float32 on the model's device.

        Raises:
            DataError: a text has no tokens.
        """
        prompted = [self._prompt + row.text for row in texts]
        if self._vectors.lower_case:
            prompted = [text.lower() for text in prompted]
        rows = self._tokenizer(prompted, truncation=True, max_length=self._room, return_attention_mask=False)
        every, device = [list(ids) for ids in rows["input_ids"]], self._model.device
        for row, tokens in zip(texts, every, strict=True):
            if not tokens:
                raise no_tokens(self._input, row)
        lengths = torch.tensor([len(ids) for ids in every])
        ids = torch.full((len(every), int(lengths.max())), self._padding)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        ids[mask] = torch.tensor([token for row in every for token in row])
        mask = mask.long().to(device)
        hidden = self._model(input_ids=ids.to(device), attention_mask=mask).last_hidden_state
        vectors = pool(hidden, mask, self._vectors.pooling)[:, : self._size]
        return (F.normalize(vectors, dim=-1) if self._vectors.normalize else vectors).float()
