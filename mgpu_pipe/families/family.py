"""What a family's file says of it: everything that transformers' own description of the family does not.

A file ``<model_type>.py`` of this package holds one ``FAMILY``; a family without a file is what :class:`Family` says by
default, and what transformers' plans say of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Style = Literal["column", "row", "packed", "qkv", "grouped", "per_head", "own_heads", "once", "experts"]
"""How tensor parallelism cuts a module. ``column`` and ``row`` parallel; ``packed``: columns of several fused matrices;
``qkv``: columns of all queries, then all keys, then all values; ``grouped``: columns of the queries, keys and values of
one key-value head after another; ``per_head``: an argument with a value for each head, batch and heads in one
dimension; ``own_heads``: whole on every rank, each of which applies it to its own heads; ``once``: whole on every rank,
each of which adds its share; ``experts``: a module that calls cut experts."""
COLUMNS = ("column", "packed", "qkv", "grouped")
"""Styles that cut outputs."""

Packing = Literal["positions", "axes", "mask", "none"]
"""What keeps documents of one row apart: positions that start again, from which transformers makes the mask
(``masking_utils.find_packed_sequence_indices``) as long as it gets no attention mask and no cache; the same before
positions along three axes; a mask that is handed to it; or nothing (state space layers, convolutions, positions that
are no input)."""
FLASH = ("flash_attention_2", "flash_attention_3")
"""Kinds of attention that take no mask."""


@dataclass(frozen=True)
class Stages:
    """Where a family keeps what a pipeline cuts apart: names of modules in its base model.

    The output head is the model's own ``get_output_embeddings()``.

    Attributes:
        embedding: of tokens.
        layers: the list of repeated blocks, which hand on hidden states alone.
        norm: after the last block; None where it stays in every stage, as one without parameters that is used twice.
        added: other embeddings, added to the tokens' own (learned positions).
        after_embedding: modules through which the embeddings go before the first block.
        tuples: a block gives a tuple, hidden states first.
        path: of the module in the base model that holds all of these; empty where it is the base model.
    """

    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str | None = "norm"
    added: tuple[str, ...] = ()
    after_embedding: tuple[str, ...] = ()
    tuples: bool = False
    path: str = ""


@dataclass(frozen=True)
class SequencePlan:
    """Where sequence parallelism splits: between the embeddings, which are only scaled or added to, and the norm."""

    blocks: str = "layers"
    norm: str = "norm"
    addends: tuple[str, ...] = ()
    """Embeddings that are added to the tokens' own."""


@dataclass(frozen=True)
class Sizes:
    """What decides the parameters of a decoder's layers, beside its standard fields: exactly, counted against modules.

    Attributes:
        qkv_bias: queries, keys and values have biases; a name is the field that says so.
        out_bias: likewise the attention's output.
        mlp_bias: likewise the feed-forward layer.
        norm_bias: norms have biases.
        head_norms: queries and keys of a head are normed.
        learned_positions: there is a table of them.
        gated: the feed-forward layer has a third matrix, a gate.
        inner: the field with its width; null there is four times the model's.
        expert_width: the field with the width of one expert; empty: no experts.
    """

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    norm_bias: bool = False
    head_norms: bool = False
    learned_positions: bool = False
    gated: bool = True
    inner: str = "intermediate_size"
    expert_width: str = ""


@dataclass(frozen=True)
class Family:
    """One family of models. What is said here was tried, and equals one process.

    Attributes:
        packing: what keeps documents of one row apart.
        unpacked_with: a boolean of the configuration under which nothing does.
        own_attention: does not look its attention function up by name, so that no other one can take its place.
        stages: of a pipeline; ``brought``: as transformers' own plan says; None: it cannot be cut into stages.
        tensor: whether tensor parallelism cuts it right.
        tensor_if: fields that have to have these values for that, in one of the ways.
        modules: how it cuts the children of a module, by the module's class, where transformers brings no plan. It
            holds wherever that class is part of a larger model.
        sequence: where sequence parallelism splits; None: it does not.
        experts: the field that numbers the experts, packed in one module that the family's ``ep_plan`` names; empty:
            none that can be spread over processes.
        softmax_routers: routers take the softmax of their logits; others balance by a bias or by sigmoid scores.
        width_is_heads: the head size, where it is not given, is hidden_size / num_attention_heads.
        needs: fields that a forward pass needs and that have no default, and what to do about each.
        heads_together: heads whose queries, keys and values lie together in a fused projection.
        causal: False where every token sees all others, whatever the configuration says.
        mixes_tokens: a boolean of the configuration under which the tokens of a micro-batch are mixed.
        sizes: for the exact number of its parameters; None: it is not counted.
        reads_inside: classes of modules that look at the shapes of their parts' weights, which ZeRO-3 gives them.
        projector: names of the modules of a tower that lie between it and the language model.
    """

    packing: Packing = "none"
    unpacked_with: str = ""
    own_attention: bool = False
    stages: Stages | Literal["brought"] | None = "brought"
    tensor: bool = True
    tensor_if: tuple[Mapping[str, object], ...] = ()
    modules: Mapping[str, Mapping[str, Style]] = field(default_factory=dict)
    sequence: SequencePlan | None = None
    experts: str = ""
    softmax_routers: bool = False
    width_is_heads: bool = False
    needs: Mapping[str, str] = field(default_factory=dict)
    heads_together: int = 1
    causal: bool = True
    mixes_tokens: str = ""
    sizes: Sizes | None = None
    reads_inside: tuple[str, ...] = ()
    projector: tuple[str, ...] = ()

    @property
    def context(self) -> bool:
        """Whether its attention can run over several ranks, its positions being an input."""
        return self.packing == "positions" and not self.own_attention


FC: Mapping[str, Style] = {"fc1": "column", "fc2": "row"}
QKV: Mapping[str, Style] = {"q_proj": "column", "k_proj": "column", "v_proj": "column"}
OUT_PROJ: Mapping[str, Style] = {**QKV, "out_proj": "row"}
"""Attention of the encoders."""
