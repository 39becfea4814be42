"""Rows of texts, and of two texts as a tokenizer joins them: ``[CLS] query [SEP] document [SEP]`` for BERT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.cache import write_json
from mgpu_pipe.data.text.cut_texts import special_ends
from mgpu_pipe.data.text.document_encoder import EncodedBatch, library_threads, token_dtype
from mgpu_pipe.data.text.file_source import Row
from mgpu_pipe.data.text.heldout_split import document_hash
from mgpu_pipe.data.text.tokenizer import TokenizerInfo
from mgpu_pipe.data.text.tokenizer_folder import CONFIG, TOKENIZER, load_tokenizer_file, plain_tokenizer, special_tokens
from mgpu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class PairTemplate:
    """Special tokens of a text alone and of a row of two texts.

    Attributes:
        alone: numbers of special tokens before and after a text alone.
        before, between, after: special tokens of a row of two texts.
        first_kind: number of tokens of ``between`` whose token type is 0; the tokens after them have type 1. None where
            all tokens of a row have type 0.
    """

    alone: tuple[int, int]
    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    first_kind: int | None

    @property
    def specials(self) -> int:
        """Special tokens of a row of two texts."""
        return len(self.before) + len(self.between) + len(self.after)

    @property
    def more_tokens(self) -> int:
        """Tokens of a row of two texts less those of both texts alone."""
        return self.specials - 2 * sum(self.alone)


def pair_template(folder: Path) -> PairTemplate:
    """The template of the tokenizer in ``folder``: its own, or for one that does not separate two texts, its
    end-of-sequence token after each."""
    tokenizer = plain_tokenizer(folder)
    starts, ends = special_ends(tokenizer) or ([], [])
    alone = (len(starts), len(ends))
    if not separates_pairs(tokenizer):
        end = tokenizer.token_to_id(special_tokens(folder)["eos_token"])
        assert end is not None
        return PairTemplate(alone, tuple(starts), (end,), (end,), 1)
    row = tokenizer.encode("a", "a")
    ids, texts, kinds = row.ids, row.sequence_ids, row.type_ids
    first, second = ([index for index, text in enumerate(texts) if text == number] for number in (0, 1))
    between = slice(first[-1] + 1, second[0])
    kind = kinds[between].index(1) if 1 in kinds[between] else len(ids[between])
    return PairTemplate(
        alone,
        tuple(ids[: first[0]]),
        tuple(ids[between]),
        tuple(ids[second[-1] + 1 :]),
        kind if kinds[second[0]] else None,
    )


def separates_pairs(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer has more special tokens for two texts than for one."""
    return bool(tokenizer.num_special_tokens_to_add(True) > tokenizer.num_special_tokens_to_add(False))


def adapt_to_pairs(folder: Path, has_kinds: bool) -> None:
    """Makes the tokenizer of ``folder`` join texts as :func:`pair_template` does, with token types if the model
    ``has_kinds``."""
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    inputs = ["input_ids", *(["token_type_ids"] if has_kinds else []), "attention_mask"]
    write_json(folder / CONFIG, {**settings, "model_input_names": inputs})
    tokenizer = load_tokenizer_file(folder / TOKENIZER)
    if not separates_pairs(tokenizer):
        end = tokenizer.token_to_id(special_tokens(folder)["eos_token"])
        assert end is not None
        _separate_pairs(tokenizer, end)
        tokenizer.save(str(folder / TOKENIZER))


def _separate_pairs(tokenizer: Tokenizer, end: int) -> None:
    """Lets ``tokenizer`` add its token ``end`` to each of two texts; the second text has type 1."""
    from tokenizers import processors

    alone = special_ends(tokenizer) or ([], [])
    names = {number: str(tokenizer.id_to_token(number)) for number in (*chain(*alone), end)}
    first, last = (" ".join(names[number] for number in tokens) for tokens in alone)
    joining = processors.TemplateProcessing(
        single=f"{first} $A {last}".strip(),
        pair=f"{first} $A {names[end]} $B:1 {names[end]}:1".strip(),
        special_tokens=[(name, number) for number, name in names.items()],
    )
    before = tokenizer.post_processor
    tokenizer.post_processor = joining if before is None or any(alone) else processors.Sequence([before, joining])


def join_pair(
    template: PairTemplate, query: NDArray[np.int64], document: NDArray[np.int64], seq_len: int
) -> tuple[NDArray[np.int64], int]:
    """The row of two texts without special tokens, at most ``seq_len``, and where its tokens of type 1 begin."""
    first, second = kept_tokens(len(query), len(document), seq_len - template.specials)
    parts = (template.before, query[:first], template.between, document[:second], template.after)
    ids = np.concatenate(parts).astype(np.int64)
    kind = template.first_kind
    return ids, len(ids) if kind is None else len(template.before) + first + kind


def kept_tokens(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens of two texts that fit into ``room``, as the library's ``longest_first``: the longer one is cut."""
    if first + second <= room:
        return first, second
    short = min(first, second)
    long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)


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
        encoded = [self._join(row.texts) if len(row.texts) > 1 and not self._pairs else None for row in rows]
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
            hashes=np.array([document_hash(row.whole_text) for row in rows], np.uint64),
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

    def _join(self, texts: tuple[str, ...]) -> tuple[list[int], int]:
        first, second = (self._tokenizer.encode(text).ids for text in texts)
        room = self._seq_len - 2
        head = first[: max(room - len(second), room - room // 2)]
        ids = [*head, self._eos, *second[: room - len(head)], self._eos]
        return ids, len(head) + 1
