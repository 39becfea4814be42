"""Writes a plain Hugging Face folder that ``from_pretrained`` loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def save_pretrained_folder(
    model: PreTrainedModel, tokenizer_folder: Path | None, out: Path, dtype: torch.dtype | None = None,
    adopt_special_tokens: bool = False,
) -> None:
    """Write configuration, safetensors weights (under Hugging Face's own names) and tokenizer into ``out``.

    Args:
        model: whole, with real weights; its parameters are cast in place where ``dtype`` is given.
        tokenizer_folder: where the tokenizer's files lie; None writes none.
        dtype: type of the weights written; None keeps the model's.
        adopt_special_tokens: write the tokenizer's special ids into the configurations, for a model that was not
            made from a folder whose own configuration says where texts end.
    """
    if dtype is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
    with _cache_in_config(model):
        model.save_pretrained(out)
    if tokenizer_folder is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer_folder / name).is_file():
                shutil.copyfile(tokenizer_folder / name, out / name)
        if adopt_special_tokens:
            _adopt_special_tokens(out)


@contextmanager
def _cache_in_config(model: PreTrainedModel) -> Iterator[None]:
    """Training turns the key-value cache off; who loads the folder wants it."""
    before = model.config.use_cache
    model.config.use_cache = True
    try:
        yield
    finally:
        model.config.use_cache = before


def _adopt_special_tokens(out: Path) -> None:
    """Write the tokenizer's end-of-text id into the folder's configurations, so that ``generate`` stops there."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(out), local_files_only=True)
    if tokenizer.eos_token_id is None:
        return
    for name in ("config.json", "generation_config.json"):
        file = out / name
        if not file.is_file():
            continue
        content = json.loads(file.read_text(encoding="utf-8"))
        content["eos_token_id"] = tokenizer.eos_token_id
        if tokenizer.bos_token_id is not None:
            content["bos_token_id"] = tokenizer.bos_token_id
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
