"""Rows of two texts as a tokenizer joins them: ``[CLS] query [SEP] document [SEP]`` for BERT."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.cache import write_json
from mgpu_pipe.data.text.cut_texts import special_ends
from mgpu_pipe.data.text.tokenizer_folder import CONFIG, TOKENIZER, load_tokenizer_file, plain_tokenizer, special_tokens

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
    """Makes the tokenizer of ``folder`` join two texts as :func:`pair_template` does, and return the inputs that the
    model takes.

    Args:
        has_kinds: whether the model takes token types.
    """
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
    """The row of two texts, at most ``seq_len`` tokens, and where its tokens of type 1 begin: at its end without any.

    Args:
        query, document: tokens without special ones.
    """
    first, second = kept_tokens(len(query), len(document), seq_len - template.specials)
    parts = (template.before, query[:first], template.between, document[:second], template.after)
    ids = np.concatenate(parts).astype(np.int64)
    kind = template.first_kind
    return ids, len(ids) if kind is None else len(template.before) + first + kind


def kept_tokens(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens of two texts that fit into ``room``: the longer text is cut, both where both are longer than half.

    It is the tokenizers library's ``longest_first``.
    """
    if first + second <= room:
        return first, second
    short = min(first, second)
    long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (long, short) if first > second else (short, long)
