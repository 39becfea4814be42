"""Trains a byte-level BPE tokenizer on the training documents, for runs without one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mgpu_pipe.data.cache import Progress, write_json
from mgpu_pipe.data.text.document_encoder import library_threads
from mgpu_pipe.data.text.documents import Text
from mgpu_pipe.data.text.heldout_split import document_hash, held_out
from mgpu_pipe.data.text.tokenizer_folder import MODEL_VOCABULARY
from mgpu_pipe.errors import DataError

END_OF_TEXT = "<|endoftext|>"
_TRAINING_CHARACTERS = 256 << 20
"""Characters of training text: more do not change the merges. Larger corpora use a keyed share of their documents."""
_PIECE_CHARACTERS = 1 << 18
"""Characters of a piece of text: the trainer takes a hundred times a text's size in memory."""
_SEARCHED_CHARACTERS = 1 << 12
"""Characters searched at once for the end of a word."""
_WORD_ENDS = re.compile(r"\S(?=[ \n])")
"""Matches where words of the byte-level pre-tokenizer end, whatever follows."""


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path, special: Sequence[str] = ()) -> None:
    """Trains a byte-level BPE (Sennrich et al., 2016; Radford et al., 2019) and writes its tokenizer folder.

    The same texts give the same file, whatever the number of threads.

    Args:
        special: further tokens that are never cut, from a chat template.

    Raises:
        DataError: there is no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *special],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    with library_threads(True):
        tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_tokenizer_config(folder, vocab_size)


def write_number_tokenizer(vocab_size: int, folder: Path) -> None:
    """Writes the tokenizer of ``data=synthetic``: id 0 ends a text, id ``i`` is the word ``i``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {END_OF_TEXT: 0, **{str(number): number for number in range(1, vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_tokenizer_config(folder, vocab_size)


def write_tokenizer_config(folder: Path, model_vocab_size: int) -> None:
    """Writes the files that let ``transformers.AutoTokenizer`` load a bare ``tokenizer.json``.

    Args:
        model_vocab_size: of its model. Short text gives the tokenizer fewer tokens; this records that the two still
            belong together (``models/weights/folder.py``).
    """
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    write_json(folder / "special_tokens_map.json", special)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **special,
            MODEL_VOCABULARY: model_vocab_size,
        },
    )


def training_texts(
    documents: Iterable[tuple[Text | bytes, Text]],
    again: Iterable[tuple[Text | bytes, Text]],
    fraction: float,
    progress: Progress,
) -> Iterator[str]:
    """Yields texts of documents that are not held out, at most about 256 Mi characters.

    The first pass ends before this returns; the second runs while the texts are read.

    Args:
        documents, again: two passes over the same ``(key, text)`` pairs; ``key`` decides the split.
        fraction: share of the documents that is held out.
    """
    keyed = [(document_hash(key), len(text)) for key, text in documents]
    hashes = np.array([key for key, _ in keyed], dtype=np.uint64)
    train = ~held_out(hashes, fraction)
    characters = int(sum(size for (_, size), use in zip(keyed, train, strict=True) if use))
    if not characters:
        raise DataError("data.tokenizer=auto: there is no training text to learn a tokenizer from")
    share = _TRAINING_CHARACTERS / characters
    # The low bits are independent of the order in the split.
    train &= (hashes & np.uint64(0xFFFF)) < np.uint64(min(max(int(share * 65536), 1), 65536))
    total = int(sum(size for (_, size), use in zip(keyed, train, strict=True) if use))

    def choose() -> Iterator[str]:
        done = 0
        for (_, text), use in zip(again, train, strict=True):
            if use:
                yield from _pieces(text)
                done += len(text)
                progress("train tokenizer", done, total)

    return choose()


def _pieces(text: Text) -> Iterator[str]:
    """Cuts a text into pieces between words."""
    start = 0
    while start < len(text):
        end = _word_end(text, start + _PIECE_CHARACTERS)
        yield text[start:end]
        start = end


def _word_end(text: Text, start: int) -> int:
    """Finds the first end of a word after the character ``start``; the text's end without one."""
    while start < len(text):
        if word_end := _WORD_ENDS.search(text[start : start + _SEARCHED_CHARACTERS]):
            return start + word_end.end()
        start += _SEARCHED_CHARACTERS - 1  # the last character may end a word, which the next shows
    return len(text)
