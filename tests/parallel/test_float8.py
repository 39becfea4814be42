"""Which layers compute in float8, and how. torchao is played, or itself where it is installed."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mgpu_pipe.config.compose import compose
from mgpu_pipe.parallel.float8 import use_float8
from mgpu_pipe.strategies.mesh import split_options
from mgpu_pipe.topology import ParallelDims
from tests.support.training import Case, built, filled

ROWWISE = ("precision=fp8", "precision.fp8_recipe=rowwise")


def recipe_of(*words: str) -> str:
    return split_options(compose([*words])[0], ParallelDims()).fp8_recipe


def test_torchao_is_asked_for_the_recipe_and_the_blocks_fitting_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[str] = []

    def convert(block: Any, module_filter_fn: Any, config: str) -> None:
        assert config == "made of rowwise"
        converted.extend(name for name, module in block.named_modules() if module_filter_fn(module, name))

    class Config:
        @staticmethod
        def from_recipe_name(name: str) -> str:
            return f"made of {name}"

    played = SimpleNamespace(Float8LinearConfig=Config, convert_to_float8_training=convert)
    monkeypatch.setitem(sys.modules, "torchao.float8", played)
    model = built(Case(model="llama"))
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(32, 40, device="meta")  # not a multiple of 16
    use_float8(model, recipe_of(*ROWWISE))
    of_one = [*(f"self_attn.{side}_proj" for side in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
    assert sorted(converted) == sorted([*of_one, *of_one[:5], of_one[6]])


@pytest.mark.parametrize("words", [("precision=fp8",), ROWWISE])
def test_each_recipe_stays_within_float8_of_fp32(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "torchao computes in float8, emulated on a CPU; pip install torchao"
    torchao = pytest.importorskip("torchao.float8", reason=reason)
    make = torchao.Float8LinearConfig.from_recipe_name
    emulated = staticmethod(lambda name: replace(make(name), emulate=True))
    monkeypatch.setattr(torchao.Float8LinearConfig, "from_recipe_name", emulated)
    ids = torch.arange(32).reshape(2, 16) % 64
    plain, short = (filled(built(Case(model="llama"))) for _ in range(2))
    use_float8(short, recipe_of(*words))
    gradients = []
    for model in (plain, short):
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(model.model.layers[0].mlp.down_proj.weight.grad)
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert 1e-4 < error < 0.1
