"""Metadata of a GGUF file that describes the tokenizer of a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgpu_pipe.data.text.tokenizer_folder import (
    TOKENIZER,
    chat_template,
    json_file,
    load_tokenizer_file,
    special_tokens,
    token_texts,
)
from mgpu_pipe.errors import BadInputError
from mgpu_pipe.inference.gguf.read_tokenizer import CONTROL, SPECIAL_IDS, USER_DEFINED
from mgpu_pipe.inference.gguf.tokenizer_kinds import (
    PRE_TOKENIZERS,
    begins_with_space,
    is_sentence_pieces,
    kind_of_piece,
    same_steps,
    scores_of,
)
from mgpu_pipe.system.local_files import is_file

NORMAL, UNUSED = 1, 5
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
    """Model, pre-tokenizer and merges of a byte-level BPE.

    Raises:
        BadInputError: the tokenizer is of another kind.
    """
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
    """Model and scores of a tokenizer of the SentencePiece kind.

    Raises:
        BadInputError: it marks spaces in another way.
    """
    prefix = begins_with_space(content)
    if prefix is None:
        raise BadInputError("--format=gguf: the tokenizer marks spaces as llama.cpp cannot; use --format hf")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.scores": scores_of(tokens, _pairs(content["model"])),
    }
