"""Encodes texts and pairs of texts as rows of one length at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mgpu_pipe.data.text.document_encoder import EncodedBatch, library_threads, token_dtype
from mgpu_pipe.data.text.file_source import Row
from mgpu_pipe.data.text.heldout_split import document_hash
from mgpu_pipe.data.text.pair_template import separates_pairs
from mgpu_pipe.data.text.tokenizer import TokenizerInfo
from mgpu_pipe.data.text.tokenizer_folder import plain_tokenizer
from mgpu_pipe.errors import ConfigError


class RowEncoder:
    """Encodes texts and pairs as rows of at most ``seq_len`` tokens, each with an end token.

    A tokenizer that separates the texts of a pair ([CLS] a [SEP] b [SEP]) does so; otherwise the end-of-sequence token
    separates them.

    Raises:
        ConfigError: ``seq_len`` leaves no room for a text's token.
    """

    def __init__(self, tokenizer: TokenizerInfo, seq_len: int) -> None:
        self._tokenizer = plain_tokenizer(tokenizer.folder)
        self._eos, self._dtype, self._seq_len = tokenizer.eos_token_id, token_dtype(tokenizer.vocab_size), seq_len
        self._ends = 0 if self._tokenizer.encode("a").ids[-1:] == [self._eos] else 1
        self._pairs = separates_pairs(self._tokenizer)
        least = self._tokenizer.num_special_tokens_to_add(True) + 2 * self._ends + 2
        if seq_len < least:
            raise ConfigError("data.seq_len", seq_len, f"use at least {least}", "a row holds its texts and their ends")

    def encode(self, rows: Sequence[Row]) -> tuple[EncodedBatch, list[int]]:
        """Encodes rows; returns also where each second text begins: at the row's end without one."""
        encoded = [self._joined(row.texts) if len(row.texts) > 1 and not self._pairs else None for row in rows]
        self._tokenizer.enable_truncation(self._seq_len - self._ends)
        alone = (row.texts for row, encoded_row in zip(rows, encoded, strict=True) if encoded_row is None)
        inputs = [texts if len(texts) > 1 else texts[0] for texts in alone]
        with library_threads(True):
            results = iter(self._tokenizer.encode_batch(inputs))
        self._tokenizer.no_truncation()
        pairs = [self._own_end(next(results)) if encoded_row is None else encoded_row for encoded_row in encoded]
        return EncodedBatch(
            tokens=np.array([token for ids, _ in pairs for token in ids], self._dtype),
            lengths=np.array([len(ids) for ids, _ in pairs], np.int64),
            hashes=np.array([document_hash(row.joined) for row in rows], np.uint64),
            loss_mask=None,
            size=sum(row.size for row in rows),
        ), [second for _, second in pairs]

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """Tokens that each row's whole texts need."""
        with library_threads(True):
            if self._pairs or all(len(row.texts) == 1 for row in rows):
                inputs = [row.texts if len(row.texts) > 1 else row.texts[0] for row in rows]
                return [len(encoding.ids) + self._ends for encoding in self._tokenizer.encode_batch(inputs)]
            texts = [text for row in rows for text in row.texts]
            tokens = iter([len(encoding.ids) + 1 for encoding in self._tokenizer.encode_batch(texts)])
        return [sum(next(tokens) for _ in row.texts) for row in rows]

    def _own_end(self, encoding: Any) -> tuple[list[int], int]:
        ids = [*encoding.ids, self._eos][: len(encoding.ids) + self._ends]
        kinds = encoding.type_ids
        return ids, kinds.index(1) if 1 in kinds else len(ids)

    def _joined(self, texts: tuple[str, ...]) -> tuple[list[int], int]:
        first, second = (self._tokenizer.encode(text).ids for text in texts)
        room = self._seq_len - 2
        head = first[: max(room - len(second), room - room // 2)]
        ids = [*head, self._eos, *second[: room - len(head)], self._eos]
        return ids, len(head) + 1
