"""Closed forms of text encoders. Oracles: transformers' modules, and torch's own FLOP counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mgpu_pipe.architectures.find import families_in_role
from mgpu_pipe.architectures.formulas.parameters import count_parameters, layer_counts
from mgpu_pipe.models.active_parameters import training_flops_per_token
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.fields import resolved_fields
from tests.models.tiny import tiny_model
from tests.objectives.test_text_encoders import MORE, encoder_config

PLAIN_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c"], "conv_kernel_size": 3, "type_vocab_size": 2}
MODELS = [
    *((family, MORE.get(family, {})) for family in families_in_role("text_encoder")),
    ("deberta-v2", PLAIN_DEBERTA),
    ("deberta-v2", {}),
    ("electra", {"embedding_size": 64}),
    ("modernbert", {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "decoder_bias": False}),
]


@pytest.mark.parametrize(("family", "fields"), MODELS)
def test_counts_are_those_of_built_models(family: str, fields: dict[str, Any]) -> None:
    config = tiny_model(family, num_labels=3, **fields)
    known = resolved_fields(config)
    for model_class in ("AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"):
        counted = count_parameters(known, model_class)
        built = build_meta(config, model_class)
        assert counted is not None and counted.total == counted.active
        assert counted.total == sum(parameter.numel() for parameter in built.parameters()), model_class
    blocks = max(
        (module for module in built.modules() if isinstance(module, torch.nn.ModuleList)),
        key=lambda blocks: len(blocks),
    )
    for number, block in enumerate(blocks):
        assert layer_counts(known)[number].total == sum(p.numel() for p in block.parameters())


@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet"])
def test_flops_are_those_that_torch_counts(family: str) -> None:
    """Every token sees all others of its text; ModernBERT's window is wider than it here."""
    config = encoder_config(family)
    if family == "modernbert":
        config.config["local_attention"] = 64
    config.attn_implementation = "eager"
    real: Any = materialise(build_meta(config, "AutoModelForMaskedLM"), 1, "cpu")
    length, counter = 32, FlopCounterMode(display=False)
    with counter:
        real(input_ids=torch.arange(3, 3 + length)[None]).logits.sum().backward()
    ours = training_flops_per_token(real.config, length, "AutoModelForMaskedLM") * length
    # Norms and biases are in our 6N, not in its products.
    vectors = 6 * length * sum(parameter.numel() for parameter in real.parameters() if parameter.dim() == 1)
    assert counter.get_total_flops() == ours - vectors
