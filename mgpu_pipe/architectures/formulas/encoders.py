"""Parameter counts of text encoders from a configuration's fields, exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Fields = Mapping[str, Any]
BASE, MASKED, CLASSIFIER = "AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"


@dataclass(frozen=True)
class EncoderParameters:
    """Parameters of an encoder's parts.

    Attributes:
        embedding: of all tables, norms and projections before the layers, and of those outside of them.
        layers: of each layer.
        pooler: of what a model without a head has after the layers.
        masked: of the head that finds hidden tokens, without its matrix, which is the embedding's.
        classifier: of the head of classes but for its last layer.
    """

    embedding: int
    layers: tuple[int, ...]
    pooler: int
    masked: int
    classifier: int


def encoder_parameters(fields: Fields) -> EncoderParameters | None:
    """Parts of the encoder with these ``fields``; None for other models."""
    count = _FAMILIES.get(str(fields.get("model_type")))
    return None if count is None or fields.get("is_decoder") else count(fields)


def count_encoder(fields: Fields, model_class: str) -> int | None:
    """Parameters of the encoder's ``model_class``, tied ones once; None for other models, or an unknown head.

    Args:
        fields: of a classifier with ``num_labels``.
    """
    parts = encoder_parameters(fields)
    if parts is None or not fields.get("tie_word_embeddings", True):
        return None
    classes = fields.get("num_labels")
    heads = {BASE: parts.pooler, MASKED: parts.masked}
    if isinstance(classes, int):
        heads[CLASSIFIER] = parts.classifier + _linear(int(fields["hidden_size"]), classes)
    head = heads.get(model_class)
    return None if head is None else parts.embedding + sum(parts.layers) + head


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + outputs * bias


def _norm(width: int, bias: bool = True) -> int:
    return width * (1 + bias)


def _sizes(fields: Fields) -> tuple[int, int, int]:
    """Width, layers and vocabulary."""
    return int(fields["hidden_size"]), int(fields["num_hidden_layers"]), int(fields["vocab_size"])


def _plain_layer(fields: Fields) -> int:
    """Attention, feed-forward layer and their norms, all with biases."""
    width, inner = int(fields["hidden_size"]), int(fields.get("intermediate_size") or fields["hidden_dim"])
    return 4 * _linear(width, width) + _linear(width, inner) + _linear(inner, width) + 2 * _norm(width)


def _bert(fields: Fields, has_pooler: bool = True, more: int = 0) -> EncoderParameters:
    width, layers, words = _sizes(fields)
    tables = words + int(fields["max_position_embeddings"]) + int(fields.get("type_vocab_size") or 0)
    dense = _linear(width, width)
    return EncoderParameters(
        embedding=tables * width + _norm(width) + more,
        layers=(_plain_layer(fields),) * layers,
        pooler=dense * has_pooler,
        masked=dense + _norm(width) + words,
        classifier=dense,
    )


def _mpnet(fields: Fields) -> EncoderParameters:
    return _bert(fields, more=int(fields["relative_attention_num_buckets"]) * int(fields["num_attention_heads"]))


def _electra(fields: Fields) -> EncoderParameters:
    """ELECTRA, whose embeddings may be narrower than its layers."""
    width, layers, words = _sizes(fields)
    narrow = int(fields["embedding_size"])
    tables = words + int(fields["max_position_embeddings"]) + int(fields["type_vocab_size"])
    return EncoderParameters(
        embedding=tables * narrow + _norm(narrow) + _linear(narrow, width) * (narrow != width),
        layers=(_plain_layer(fields),) * layers,
        pooler=0,
        masked=_linear(width, narrow) + _norm(narrow) + words,
        classifier=_linear(width, width),
    )


def _deberta(fields: Fields) -> EncoderParameters:
    width, layers, words = _sizes(fields)
    positions, dense = int(fields["max_position_embeddings"]), _linear(width, width)
    embedding = (words + int(fields["type_vocab_size"])) * width + _norm(width)
    embedding += positions * width * bool(fields.get("position_biased_input", True))
    more = 0
    if fields.get("relative_attention"):
        buckets, distance = fields.get("position_buckets", -1), fields.get("max_relative_positions", -1)
        embedding += 2 * width * int(buckets if buckets > 0 else distance if distance > 0 else positions)
        kinds = fields.get("pos_att_type") or ()
        kinds = kinds.split("|") if isinstance(kinds, str) else kinds
        more = 0 if fields.get("share_att_key") else dense * len({"c2p", "p2c"} & {kind.strip() for kind in kinds})
    embedding += _norm(width) * ("layer_norm" in str(fields.get("norm_rel_ebd", "none")))
    kernel = int(fields.get("conv_kernel_size") or 0)
    if kernel:
        embedding += width * width * kernel // int(fields.get("conv_groups", 1)) + width + _norm(width)
    layer = _plain_layer(fields) + more
    return EncoderParameters(embedding, (layer,) * layers, 0, dense + _norm(width) + words, dense)


def _modernbert(fields: Fields) -> EncoderParameters:
    width, layers, words = _sizes(fields)
    inner, attention = int(fields["intermediate_size"]), bool(fields["attention_bias"])
    norm = _norm(width, bool(fields["norm_bias"]))
    layer = _linear(width, 3 * width, attention) + _linear(width, width, attention) + 2 * norm
    layer += _linear(width, 2 * inner, bool(fields["mlp_bias"])) + _linear(inner, width, bool(fields["mlp_bias"]))
    head = _linear(width, width, bool(fields["classifier_bias"])) + norm
    return EncoderParameters(
        embedding=words * width + 2 * norm,
        layers=(layer - norm, *(layer,) * (layers - 1)),  # the first has no norm before attention
        pooler=0,
        masked=head + words * bool(fields["decoder_bias"]),
        classifier=head,
    )


_FAMILIES: Mapping[str, Callable[[Fields], EncoderParameters]] = {
    **dict.fromkeys(("bert", "camembert", "roberta", "xlm-roberta"), _bert),
    "deberta-v2": _deberta,
    "distilbert": lambda fields: _bert(fields, has_pooler=False),
    "electra": _electra,
    "modernbert": _modernbert,
    "mpnet": _mpnet,
}
