"""Says which class a classifier takes texts for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from mgpu_pipe.data.text.labelled_row import Row
from mgpu_pipe.data.text.row_encoder import RowEncoder
from mgpu_pipe.data.text.tokenizer import TokenizerInfo
from mgpu_pipe.data.text.tokenizer_folder import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def classify_texts(model: PreTrainedModel, tokenizer_folder: Path, texts: Sequence[str], seq_len: int) -> list[str]:
    """For each text the likeliest class and its probability, as ``name (97%)``.

    Of a sharded model a collective call.

    Args:
        tokenizer_folder: of a run, whose special tokens it names.
        seq_len: tokens of a row at most, as in training.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    end = tokenizer.token_to_id(special_tokens(tokenizer_folder)["eos_token"])
    assert end is not None
    encoder = RowEncoder(TokenizerInfo(tokenizer_folder, "", tokenizer.get_vocab_size(), end), seq_len)
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    found, names = [], cast(Any, model.config.id2label)
    try:
        for text in texts:
            ids = encoder.encode([Row((text,), "", "", 0)])[0].tokens.astype("int64")
            with torch.no_grad():
                logits = model(input_ids=torch.from_numpy(ids).to(device)[None]).logits[0].float()
            share, number = logits.softmax(-1).max(-1)
            found.append(f"{names[int(number)]} ({100 * float(share):.0f}%)")
    finally:
        model.train(was_training)
    return found
