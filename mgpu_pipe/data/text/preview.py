"""Previews of text samples for people: the parts that the loss counts, and the starts of documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from mgpu_pipe.data.samples import Prepared
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.labelled_text import PreparedLabelled
from mgpu_pipe.data.text.mixed_samples import PreparedMixture
from mgpu_pipe.data.text.packing import masked_counts
from mgpu_pipe.data.text.pairs import PreparedPairs
from mgpu_pipe.data.text.preferences import PreparedPreferences
from mgpu_pipe.data.text.prepare_text import PreparedData
from mgpu_pipe.data.text.prepared_rows import PreparedRows
from mgpu_pipe.data.text.scored_groups import PreparedEmbeddingPairs, PreparedScoredPairs
from mgpu_pipe.data.text.token_store import TokenStore

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from mgpu_pipe.data.samples import SampleSet


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a sample with the same marks."""

    text: str
    trained: bool
    """The loss counts them."""
    begins: bool = False
    """A document begins here."""


def lengths_of(prepared: Prepared) -> tuple[NDArray[np.int64], str] | None:
    """Tokens of each training document, and the documents' name; None for data other than text."""
    if isinstance(prepared, PreparedPairs):
        return TokenStore.open(prepared.folder).lengths[prepared.documents("train")], "pair"
    if isinstance(prepared, PreparedPreferences):
        return TokenStore.open(prepared.folder).lengths, "pair"
    if isinstance(prepared, PreparedMixture):
        return np.concatenate([TokenStore.open(part.folder).lengths for part in prepared.parts]), "document"
    if prepared.kind == "picture_chats":
        return _with_pictures(prepared)[0], "conversation, pictures included"
    if isinstance(prepared, (PreparedData, PreparedRows)):
        return TokenStore.open(prepared.folder).lengths, "document"
    return None


def places_of_pictures(prepared: Prepared) -> tuple[int, int] | None:
    """Counts the pictures and videos in the training conversations, and their placeholder tokens; None for other
    data."""
    return _with_pictures(prepared)[1:] if prepared.kind == "picture_chats" else None


def _with_pictures(prepared: Any) -> tuple[NDArray[np.int64], int, int]:
    """Lengths of conversations, the number of their pictures, and the placeholder tokens of these."""
    pictures = len(prepared.visual_index("train").pictures)
    more = prepared.more_tokens("train")  # each picture is one token of the store
    written = TokenStore.open(prepared.folder).lengths
    return written + more, pictures, pictures + int(more.sum())


def uncounted_of(prepared: Prepared) -> int:
    """Counts documents of packed text without labels: only an end token, or no trained answer."""
    parts = prepared.parts if isinstance(prepared, PreparedMixture) else (prepared,)
    stores = [TokenStore.open(part.folder) for part in parts if isinstance(part, PreparedData)]
    return sum(int((_label_counts(store) == 0).sum()) for store in stores)


def _label_counts(store: TokenStore) -> NDArray[np.int64]:
    """Labels that count, for each document. A document's first token is never a label."""
    count = np.diff(store.offsets) - 1
    if store.loss_mask is not None:
        some = count > 0
        count[some] = masked_counts(store.offsets[:-1][some] + 1, count[some], store.loss_mask)
    return count


def parts_of(
    prepared: Prepared, samples: SampleSet, indices: NDArray[np.int64], numbers: NDArray[np.int64], causal: bool
) -> list[list[Part]]:
    """Splits the samples, in the model's form, into parts.

    Args:
        samples: the objective's view of the data's samples.
        numbers: see :class:`SampleSet`.
        causal: a label stands at the position before its token.
    """
    batch, tokenizer = samples.batch(indices, numbers), _tokenizer(prepared)
    if isinstance(prepared, PreparedLabelled):
        return [_labelled_parts(tokenizer, batch, row, prepared) for row in range(len(indices))]
    if isinstance(prepared, PreparedPairs):
        return [_pair(tokenizer, batch, row) for row in range(len(indices))]
    if isinstance(prepared, PreparedEmbeddingPairs):
        positive = 1 if prepared.more_tokens is None else 0
        return [_group(tokenizer, batch, row, positive) for row in range(len(indices))]
    if isinstance(prepared, PreparedScoredPairs):
        return [
            [*_group(tokenizer, batch, row, -1), Part(f" \u2192 {batch['scores'][row]:g}", True)]
            for row in range(len(indices))
        ]
    if isinstance(prepared, PreparedPreferences) and "lengths" in batch:
        return [_group(tokenizer, batch, row, 0) for row in range(len(indices))]
    if prepared.kind == "picture_chats":
        rows = [_as_packed_row(batch, row, prepared) for row in range(len(indices))]
        return [_packed_parts(tokenizer, row, 0, True) for row in rows]
    return [_packed_parts(tokenizer, batch, row, causal) for row in range(len(indices))]


def _tokenizer(prepared: Prepared) -> Tokenizer:
    from tokenizers import Tokenizer

    assert prepared.tokenizer_folder is not None
    return Tokenizer.from_file(str(prepared.tokenizer_folder / "tokenizer.json"))


def _packed_parts(tokenizer: Tokenizer, batch: Mapping[str, torch.Tensor], row: int, causal: bool) -> list[Part]:
    ids, labels, positions = (batch[name][row].numpy() for name in ("input_ids", "labels", "position_ids"))
    begins = positions == 0
    trained = labels != IGNORE_INDEX
    if causal:
        # A token is learned if it is the label of the previous position, in the same document.
        trained = np.concatenate([[False], trained[:-1]]) & ~begins
    filled = len(ids) - int(_padding(ids, positions, trained))
    parts = []
    starts = np.flatnonzero(np.concatenate([[True], (trained[1:] != trained[:-1]) | begins[1:]])[:filled])
    for first, end in zip(starts, [*starts[1:], filled], strict=True):
        visible = labels[first:end] if not causal and trained[first] else ids[first:end]
        parts.append(Part(_text(tokenizer, visible), bool(trained[first]), bool(begins[first])))
    return parts


def _as_packed_row(batch: Mapping[str, torch.Tensor], row: int, prepared: Any) -> dict[str, torch.Tensor]:
    """Converts a conversation to a packed row: each picture one token, the padding a separate document."""
    ids = batch["input_ids"][row]
    pictures = (ids[:, None] == ids.new_tensor(prepared.placeholders)).any(1)
    if prepared.opener is not None:  # another token than that of the places
        pictures &= ids != prepared.opener
    sizes = _tokens_of_pictures(batch, row, prepared)
    firsts = sizes.cumsum(0) - sizes + 1
    keep = ~pictures | (pictures.cumsum(0)[:, None] == firsts).any(1)
    ids, labels = ids[keep], batch["labels"][row][keep]
    end = int((ids != prepared.padding_token_id).nonzero()[-1]) + 2  # the padding's token also ends a conversation
    positions = pictures.new_ones(len(ids)).cumsum(0) - 1
    positions[end:] -= end
    return {"input_ids": ids[None], "labels": labels[None], "position_ids": positions[None]}


def _tokens_of_pictures(batch: Mapping[str, torch.Tensor], row: int, prepared: Any) -> torch.Tensor:
    if "recordings" in batch and "grids" not in batch:
        return _tokens_of_sounds(batch, row, prepared)
    if "recordings" in batch:
        ids, ordered = batch["input_ids"][row], list[int]()
        ids = ids[(ids[:, None] == ids.new_tensor(prepared.standing)).any(1)]
        seen = {name: values for name, values in batch.items() if name != "recordings"}
        pictures = iter(_tokens_of_pictures(seen, row, prepared).tolist())
        sounds = iter(_tokens_of_sounds(batch, row, prepared).tolist())
        while (position := sum(ordered)) < len(ids):
            ordered.append(next(sounds if ids[position] == prepared.audio_token_id else pictures))
        return ids.new_tensor(ordered)
    if "grids" not in batch:
        number = batch["pictures"][row]
        return number.new_full((int(number),), prepared.tokens_a_picture)
    patches = batch["grids"][row].prod(-1)
    return patches[patches > 0] // prepared.cut.merge**2


def _tokens_of_sounds(batch: Mapping[str, torch.Tensor], row: int, prepared: Any) -> torch.Tensor:
    frames = batch["recordings"][row]
    return cast("torch.Tensor", prepared.window.num_tokens(frames[frames > 0]))


def _padding(ids: NDArray[np.int64], positions: NDArray[np.int64], trained: NDArray[np.bool_]) -> int:
    """Length of the padding: the untrained run of one token at the end."""
    start = int(np.flatnonzero(positions == 0)[-1])
    run = slice(start, None)
    return len(ids) - start if (ids[run] == ids[start]).all() and not trained[run].any() else 0


def _pair(tokenizer: Tokenizer, batch: Mapping[str, torch.Tensor], row: int) -> list[Part]:
    source = batch["input_ids"][row][batch["attention_mask"][row] == 1].numpy()
    labels = batch["labels"][row].numpy()
    return [Part(_text(tokenizer, source), False, True), Part(_text(tokenizer, labels[labels != IGNORE_INDEX]), True)]


def _group(tokenizer: Tokenizer, batch: Mapping[str, torch.Tensor], row: int, wanted: int) -> list[Part]:
    """Texts that are compared; the wanted one counts."""
    texts = zip(batch["input_ids"][row].numpy(), batch["lengths"][row].tolist(), strict=True)
    return [
        Part(_text(tokenizer, ids[:length]), index == wanted, True)
        for index, (ids, length) in enumerate(texts)
        if length
    ]


def _labelled_parts(
    tokenizer: Tokenizer, batch: Mapping[str, torch.Tensor], row: int, prepared: PreparedLabelled
) -> list[Part]:
    ids = batch["input_ids"][row][: int(batch["lengths"][row])].numpy()
    label = prepared.classes[int(batch["labels"][row])]
    return [Part(_text(tokenizer, ids), False, True), Part(f" \u2192 {label}", True)]


def _text(tokenizer: Tokenizer, ids: NDArray[np.int64]) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))
