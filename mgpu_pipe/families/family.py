"""What a family's file says of it: everything that transformers' own description of the family does not.

A file ``<model_type>.py`` of this package holds one ``FAMILY``; a family without a file is what :class:`Family` says by
default, and what transformers' plans say of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Style = Literal["column", "row", "packed", "own_heads", "experts"]
"""How tensor parallelism cuts a module. ``column`` and ``row`` parallel; ``packed``: columns of several fused matrices;
``own_heads``: whole on every rank, each of which applies it to its own heads; ``experts``: a module that calls cut
experts."""

Packing = Literal["position_ids", "mask", "none"]
"""What keeps documents of one row apart: positions that start again, from which transformers makes the mask; a mask
that is handed to it; or nothing."""


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
class Sequence:
    """Where sequence parallelism splits: between the embeddings, which are only scaled or added to, and the norm."""

    blocks: str = "layers"
    norm: str = "norm"
    addends: tuple[str, ...] = ()
    """Embeddings that are added to the tokens' own."""


@dataclass(frozen=True)
class Family:
    """One family of models. What is tried here is true; what is not, is not said.

    Attributes:
        stages: of a pipeline; ``"brought"``: as transformers' own plan says; None: it cannot be cut into stages.
    """

    stages: Stages | Literal["brought"] | None = "brought"
