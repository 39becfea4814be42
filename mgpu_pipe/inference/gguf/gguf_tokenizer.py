"""The tokenizer in the metadata of a GGUF file: made from a folder, and written as a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mgpu_pipe.data.text.tokenizer_folder import (
    CONFIG,
    TEMPLATE,
    TOKENIZER,
    chat_template,
    json_file,
    load_tokenizer_file,
    special_tokens,
    token_texts,
)
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.gguf.file import GgufFile
from mgpu_pipe.inference.gguf.tokenizer_kinds import (
    NORMAL,
    OTHER_NAMES,
    PRE_TOKENIZERS,
    begins_with_space,
    is_sentence_pieces,
    kind_of_piece,
    same_steps,
    scores_of,
    tokenizer_parts,
)
from mgpu_pipe.system.local_files import is_file

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of ``tokenizer.ggml.token_type`` of tokens that a text is searched for before it is cut into words."""
SPECIAL_IDS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
PIECES, BYTE_PAIRS = "llama", "gpt2"
"""Values of ``tokenizer.ggml.model``."""
DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {PIECES: {"bos": 1, "eos": 2, "unknown": 0}}
"""Ids of special tokens that a file of this kind need not give; source: llama.cpp's ``src/llama-vocab.cpp``."""
PUT_FIRST = ("llama-bpe", "tekken")
"""Pre-tokenizers with which a text begins with the first token unless a file says otherwise; same source."""


def special_ids(file: GgufFile) -> dict[str, int]:
    """Ids of the special tokens by the keys of :data:`SPECIAL_IDS`: the file's, or what llama.cpp takes without them.

    Raises:
        BadInputError: an id is no number.
    """
    model = file.metadata.get("tokenizer.ggml.model")
    ids = dict(DEFAULT_IDS.get(model, {})) if isinstance(model, str) else {}
    for key in SPECIAL_IDS:
        number = file.metadata.get(f"tokenizer.ggml.{key}_token_id", ids.get(key))
        if number is None:
            continue
        if type(number) is not int:
            raise _refuse(file, f"has {number!r} as {key}_token_id")
        ids[key] = number
    return ids


def _refuse(file: GgufFile, problem: str) -> BadInputError:
    return BadInputError(f"--from={file.path}: its tokenizer {problem}; copy the file again, or give another")


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
        self.tokens = self._texts("tokens")
        if len(set(self.tokens)) != len(self.tokens):
            raise self._refuse("lists a token twice")
        self.kinds = self._numbers("token_type", "iu") if self._has("token_type") else [NORMAL] * len(self.tokens)
        self.ids = special_ids(file)

    def _refuse(self, problem: str) -> BadInputError:
        return _refuse(self.file, problem)

    def _has(self, key: str) -> bool:
        return f"tokenizer.ggml.{key}" in self.file.metadata

    def _get(self, key: str) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}")

    def _texts(self, key: str) -> list[str]:
        texts = self._get(key)
        if not isinstance(texts, list) or not texts:
            raise self._refuse(f"has no list {key}")
        return texts

    def _numbers(self, key: str, kinds: str) -> list[Any]:
        """A number for each token; ``kinds``: of NumPy's dtypes."""
        numbers = self._get(key)
        if not isinstance(numbers, np.ndarray) or numbers.dtype.kind not in kinds:
            raise self._refuse(f"has no list {key}")
        if len(numbers) != len(self.tokens):
            raise self._refuse(f"has a {key} of {len(numbers)} numbers for {len(self.tokens)} tokens")
        return numbers.tolist()

    def special_tokens(self) -> dict[str, str]:
        """Texts of the special tokens, by their name in transformers."""
        texts = {}
        for key, number in self.ids.items():
            if not 0 <= number < len(self.tokens):
                raise self._refuse(f"has {number} as {key}_token_id and {len(self.tokens)} tokens")
            texts[SPECIAL_IDS[key]] = self.tokens[number]
        return texts

    def tokenizer(self) -> dict[str, Any]:
        """The content of ``tokenizer.json``."""
        readers = {BYTE_PAIRS: self._byte_pairs, PIECES: self._sentence_pieces}
        model = self._get("model")
        if not isinstance(model, str) or model not in readers:
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
            "post_processor": self._ends(),
        }

    def _byte_pairs(self) -> dict[str, Any]:
        """A byte-level BPE: pre-tokenizer, decoder and model."""
        chosen = PRE_TOKENIZERS.get(self._pre_tokenizer())
        if chosen is None:
            raise self._refuse(f"cuts texts by the unknown tokenizer.ggml.pre={self._get('pre')}")
        merges = [merge.split(" ") for merge in self._texts("merges")]
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
        scores = self._numbers("scores", "f")
        unknown = self.special_tokens().get("unk_token")
        prefix = self._get("add_space_prefix") is not False
        try:
            return tokenizer_parts(self.tokens, scores, self.kinds, unknown, prefix)
        except ValueError as error:
            raise self._refuse(str(error)) from error

    def _pre_tokenizer(self) -> str:
        name = str(self._get("pre"))
        return OTHER_NAMES.get(name, name)

    def _is_put(self, key: str, default: bool) -> bool:
        """Whether the token ``key`` is put before or after a text."""
        value = self._get(f"add_{key}_token")
        if value is not None and type(value) is not bool:
            raise self._refuse(f"has {value!r} as add_{key}_token")
        return (default if value is None else value) and key in self.ids

    def _ends(self) -> dict[str, Any] | None:
        """The post-processor that puts the first token before a text and the last after it, where the file says so."""
        puts_first = self._is_put("bos", self._get("model") == PIECES or self._pre_tokenizer() in PUT_FIRST)
        first, last = ["bos"] * puts_first, ["eos"] * self._is_put("eos", False)
        if not first and not last:
            return None

        def template(text: str, number: int) -> list[dict[str, Any]]:
            around = [
                [{"SpecialToken": {"id": self.tokens[self.ids[key]], "type_id": number}} for key in keys]
                for keys in (first, last)
            ]
            return [*around[0], {"Sequence": {"id": text, "type_id": number}}, *around[1]]

        special = {self.tokens[self.ids[key]]: self.ids[key] for key in first + last}
        return {
            "type": "TemplateProcessing",
            "single": template("A", 0),
            "pair": [*template("A", 0), *template("B", 1)],
            "special_tokens": {
                text: {"id": text, "ids": [number], "tokens": [text]} for text, number in special.items()
            },
        }


UNUSED = 5
"""Values of ``tokenizer.ggml.token_type``."""
HARMLESS = (None, {"type": "NFC"})
"""Normalisers that may be left out: llama.cpp takes texts as they are, and most texts are in NFC."""


def describe_tokenizer(folder: Path | None, rows: int) -> dict[str, Any]:
    """The metadata by key.

    Args:
        rows: of the model's vocabulary; tokens beyond are left out, rows without a token are called unused.

    Raises:
        BadInputError: there is no tokenizer, or llama.cpp cannot cut texts as it does.
    """
    if folder is None or not is_file(folder / TOKENIZER):
        raise BadInputError("--format=gguf: the run has no tokenizer.json, which the file has to hold; use --format hf")
    content = json_file(folder / TOKENIZER)
    texts = {number: text for number, text in token_texts(folder / TOKENIZER).items() if number < rows}
    added = {entry["id"]: entry for entry in content.get("added_tokens") or []}
    kinds = {
        number: NORMAL if number not in added else CONTROL if added[number].get("special") else USER_DEFINED
        for number in texts
    }
    numbers = {text: number for number, text in texts.items()}
    named = special_tokens(folder)
    ids = {key: numbers[named[name]] for key, name in SPECIAL_IDS.items() if named.get(name) in numbers}
    first, last = _ends(folder, ids)
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(rows)]
    if is_sentence_pieces(content):
        model = _sentence_pieces(content, folder, tokens)
        kinds = {number: kind_of_piece(texts[number], kind) for number, kind in kinds.items()}
    else:
        model = _byte_pairs(content, folder, numbers)
    template = chat_template(folder)
    return {
        **model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(number, UNUSED) for number in range(rows)],
        **{f"tokenizer.ggml.{key}_token_id": number for key, number in ids.items()},
        "tokenizer.ggml.add_bos_token": first,
        "tokenizer.ggml.add_eos_token": last,
        **({} if template is None else {"tokenizer.chat_template": template}),
    }


def _ends(folder: Path, ids: Mapping[str, int]) -> tuple[bool, bool]:
    """Whether the tokenizer puts its first token before a text, and its last after it."""
    encoded = load_tokenizer_file(folder / TOKENIZER).encode("a").ids
    return encoded[:1] == [ids.get("bos")], encoded[-1:] == [ids.get("eos")]


def _byte_pairs(content: Mapping[str, Any], folder: Path, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Model, pre-tokenizer and merges of a byte-level BPE; BadInputError for another kind."""
    model, before = content["model"], content.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    name = next((name for name, known in PRE_TOKENIZERS.items() if same_steps(known.steps(), steps)), None)
    if model.get("type", "BPE") != "BPE" or name is None or content.get("normalizer") not in HARMLESS:
        kind = model.get("type") if name is not None else [step.get("type") for step in steps]
        raise BadInputError(
            f"--format=gguf: the tokenizer cuts texts by {kind}, for which llama.cpp has no name here; use --format hf"
        )
    if bool(model.get("ignore_merges")) != PRE_TOKENIZERS[name].ignores_merges:
        names = [other for other, known in PRE_TOKENIZERS.items() if same_steps(known.steps(), steps)]
        name = next((n for n in names if PRE_TOKENIZERS[n].ignores_merges == bool(model.get("ignore_merges"))), None)
        if name is None:
            raise BadInputError(
                f"--format=gguf: the tokenizer has ignore_merges={model.get('ignore_merges')}, which llama.cpp does "
                "not take with this pre-tokenizer; use --format hf"
            )
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.merges": [
            f"{left} {right}" for left, right in _pairs(model) if {left, right, left + right} <= numbers.keys()
        ],
    }


def _pairs(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs that are merged, in order."""
    pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model.get("merges") or []]
    return [(left, right) for left, right in pairs]


def _sentence_pieces(content: Mapping[str, Any], folder: Path, tokens: Sequence[str]) -> dict[str, Any]:
    """Model and scores of a SentencePiece tokenizer; BadInputError if it marks spaces otherwise."""
    prefix = begins_with_space(content)
    if prefix is None:
        raise BadInputError("--format=gguf: the tokenizer marks spaces as llama.cpp cannot; use --format hf")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.scores": scores_of(tokens, _pairs(content["model"])),
    }
