"""Small tokenizers of the kinds that models have, trained on words of the tests."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel

from tests.data.text.written import BOS, CONTENTS, EOS

KINDS = ("byte-level", "metaspace", "wordpiece", "qwen")
END_OF_TEXT = {**dict.fromkeys(KINDS, EOS), "qwen": "<|im_end|>"}
_WORDS = ["System: User: Assistant: Hello", "user assistant system model tool", "Assistant: PARIS\n\nthe house\n"]
_LETTERS = [f"{chr(number)} a{chr(number)}" for number in range(33, 127)]
_TEXTS = [*CONTENTS, *_WORDS, *_LETTERS] * 20
# As of Qwen2's tokenizer.json: line breaks stand with what is before them.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_kind(kind: str, folder: Path) -> Path:
    """A tokenizer folder."""
    tokenizer, trainer = {"metaspace": _metaspace, "wordpiece": _wordpiece}.get(kind, lambda: _bytes(kind))()
    tokenizer.train_from_iterator(_TEXTS, trainer)
    special = {"bos_token": BOS, "eos_token": END_OF_TEXT[kind]}
    if kind == "qwen":
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    if kind == "byte-level":  # which says that tokens begin behind their spaces
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _bytes(kind: str) -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    if kind == "qwen":
        split = pre_tokenizers.Split(Regex(_QWEN), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
            [split, ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(
        vocab_size=700, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )


def _metaspace() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")  # type: ignore[assignment]
    return tokenizer, trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", BOS, EOS], unk_token="<unk>", show_progress=False
    )


def _wordpiece() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    tokenizer.decoder = decoders.WordPiece()  # type: ignore[assignment]
    return tokenizer, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", BOS, EOS], show_progress=False)


def text_of(kind: str, tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of some tokens, piece by piece; without spaces where the kind does not keep them."""
    added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
    pieces = [(number in added, tokenizer.id_to_token(number)) for number in ids]
    if kind in ("byte-level", "qwen"):
        values = {character: number for number, character in enumerate(_byte_characters())}
        read = [
            piece.encode() if special else bytes(values[character] for character in piece) for special, piece in pieces
        ]
        return b"".join(read).decode()
    if kind == "metaspace":
        return "".join(piece if special else piece.replace("\u2581", "") for special, piece in pieces).replace("\n", "")
    return "".join(piece if special else piece.removeprefix("##") for special, piece in pieces).lower()


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte, as GPT-2's code gives them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(number) if number in shown else chr(next(others)) for number in range(256)]
