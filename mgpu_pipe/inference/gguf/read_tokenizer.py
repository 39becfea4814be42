"""Writes the tokenizer folder that the metadata of a GGUF file describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mgpu_pipe.data.text.tokenizer_folder import CONFIG, TEMPLATE, TOKENIZER, load_tokenizer_file
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.gguf.file import GgufFile
from mgpu_pipe.inference.gguf.pre_tokenizers import OTHER_NAMES, PRE_TOKENIZERS
from mgpu_pipe.inference.gguf.sentence_pieces import tokenizer_parts

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of ``tokenizer.ggml.token_type`` of tokens that a text is searched for before it is cut into words."""
SPECIAL_IDS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def write_tokenizer_folder(file: GgufFile, out: Path) -> None:
    """Write ``tokenizer.json``, its configuration and the chat template into the existing folder ``out``.

    Raises:
        BadInputError: the tokenizer is of another kind, or its lists do not fit together.
    """
    source = _Vocabulary(file)
    (out / TOKENIZER).write_text(json.dumps(source.tokenizer(), ensure_ascii=False), encoding="utf-8")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **source.special_tokens(),
    }
    (out / CONFIG).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (out / TEMPLATE).write_text(template, encoding="utf-8")
    load_tokenizer_file(out / TOKENIZER)


class _Vocabulary:
    """The tokenizer's part of the metadata."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.tokens = self._list("tokens", str)
        if len(set(self.tokens)) != len(self.tokens):
            raise self._refuse("lists a token twice")
        self.kinds = self._list("token_type", int) if self._has("token_type") else [1] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            raise self._refuse(f"has {len(self.kinds)} kinds for {len(self.tokens)} tokens")

    def _refuse(self, problem: str) -> BadInputError:
        return BadInputError(f"--from={self.file.path}: its tokenizer {problem}; copy the file again, or give another")

    def _has(self, key: str) -> bool:
        return f"tokenizer.ggml.{key}" in self.file.metadata

    def _get(self, key: str) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}")

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self._get(key)
        if not isinstance(values, list) or not values or any(type(value) is not kind for value in values):
            raise self._refuse(f"has no list {key}")
        return values

    def special_tokens(self) -> dict[str, str]:
        """Texts of the special tokens, by their name in transformers."""
        texts = {}
        for key, name in SPECIAL_IDS.items():
            number = self._get(f"{key}_token_id")
            if number is None:
                continue
            if type(number) is not int or not 0 <= number < len(self.tokens):
                raise self._refuse(f"has {number!r} as {key}_token_id and {len(self.tokens)} tokens")
            texts[name] = self.tokens[number]
        return texts

    def tokenizer(self) -> dict[str, Any]:
        """The content of ``tokenizer.json``."""
        readers = {"gpt2": self._byte_pairs, "llama": self._sentence_pieces}
        model = self._get("model")
        if model not in readers:
            raise self._refuse(f"is of the kind {model!r}, which cannot be imported")
        added = [
            {
                "id": number,
                "content": self.tokens[number],
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                "special": kind != USER_DEFINED,
            }
            for number, kind in enumerate(self.kinds)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
        return {
            "version": "1.0",
            **dict.fromkeys(("truncation", "padding", "normalizer")),
            "added_tokens": added,
            **readers[model](),
            "post_processor": self._first_token(),
        }

    def _byte_pairs(self) -> dict[str, Any]:
        """A byte-level BPE: pre-tokenizer, decoder and model."""
        name = self._get("pre")
        chosen = PRE_TOKENIZERS.get(OTHER_NAMES.get(str(name), str(name)))
        if chosen is None:
            raise self._refuse(f"cuts texts by the unknown tokenizer.ggml.pre={name}")
        merges = [merge.split(" ") for merge in self._list("merges", str)]
        vocabulary = {token: number for number, token in enumerate(self.tokens)}
        strange = [pair for pair in merges if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys()]
        if strange:
            raise self._refuse(f"merges {' '.join(strange[0])!r}, which are not two of its tokens")
        return {
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": chosen.steps()},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
                **dict.fromkeys(("fuse_unk", "byte_fallback"), False),
                "ignore_merges": chosen.ignores_merges,
                "vocab": vocabulary,
                "merges": merges,
            },
        }

    def _sentence_pieces(self) -> dict[str, Any]:
        """Pieces with scores: normaliser, decoder and model."""
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise self._refuse(f"has {len(scores)} scores for {len(self.tokens)} tokens")
        unknown = self.special_tokens().get("unk_token")
        prefix = self._get("add_space_prefix") is not False
        return tokenizer_parts(self.tokens, scores, self.kinds, unknown, prefix)

    def _first_token(self) -> dict[str, Any] | None:
        """The post-processor that puts the first token before a text, where the file says so."""
        first = self.special_tokens().get("bos_token")
        if self._get("add_bos_token") is not True or first is None:
            return None
        return {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"SpecialToken": {"id": first, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": first, "type_id": 1}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {first: {"id": first, "ids": [self._get("bos_token_id")], "tokens": [first]}},
        }
