"""Parameters of a layer, from a configuration's fields. Oracle: the layers of transformers' own model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from mgpu_pipe.architectures.find import FAMILIES
from mgpu_pipe.architectures.formulas.parameters import has_exact_sizes, layer_parameters
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError, ConfigErrors
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.models.fields import model_types, resolved_fields

LAYERS = 4
EXACT = ["gpt_oss", "gemma3_text", "deepseek_v3", "qwen2_moe", "phi3", "gemma2", "olmo2", "starcoder2", "gemma", "glm4"]
FAR = {"bitnet": 0.3, "jetmoe": 0.25, "gemma4_text": 0.45, "whisper": 0.3, "jamba": 0.8}
"""Relative errors of families whose layers have more than their fields say."""
TYPICAL = 0.08


def sizes(family: str) -> tuple[list[int], list[int], bool]:
    """Parameters of four layers of the family's default width, built and by the formula; whether that is exact."""
    model = ModelConfig(name=family, type=family, config={"num_hidden_layers": LAYERS})
    built = build_meta(model)
    lists = (_lists_of_layers(each) for each in built.modules())
    blocks = zip(*next(found for found in lists if found), strict=True)  # XLM has a list for each part of a layer
    fields = resolved_fields(model)
    formula = [layer_parameters(fields, layer).total for layer in range(LAYERS)]
    in_blocks = [sum(p.numel() for part in block for p in part.parameters()) for block in blocks]
    return in_blocks, formula, has_exact_sizes(fields)


def _lists_of_layers(module: nn.Module) -> list[nn.ModuleList]:
    return [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child) == LAYERS]


@pytest.mark.parametrize("family", EXACT)
def test_known_families_are_counted_exactly(family: str) -> None:
    built, formula, is_exact = sizes(family)
    assert built == formula and is_exact


def decoders() -> Iterator[str]:
    known = set(model_types())
    yield from (name for name in FAMILIES if name in known and FAMILIES[name].causal)


def test_other_families_are_near() -> None:
    """Mixtures of experts among them, which twelve squared widths would miss by a factor of ten."""
    tried, wrong = 0, {}
    for family in decoders():
        try:
            built, formula, is_exact = sizes(family)
        except (ConfigError, ConfigErrors, StopIteration):  # its defaults do not go with four layers of one kind
            continue
        tried += 1
        error = abs(formula[-1] / built[-1] - 1)  # the first layer may be dense, which transformers decides
        if error > FAR.get(family, 0.0 if is_exact else TYPICAL):
            wrong[family] = error
    assert tried > 55 and wrong == {}
