"""Which layers compute in float8, and how. torchao is played, or emulates float8."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.parallel.compile import float8_product, use_float8
from mgpu_pipe.parallel.tensor import linear as tensor_linear
from mgpu_pipe.topology import ParallelDims
from mgpu_pipe.training.mesh import MeshStrategy
from tests.strategies.test_precision import gradient_error
from tests.support.plain_training import plain
from tests.support.processes import run_processes
from tests.support.training import Case, Outcome, built, filled, trained

ROWWISE = ("precision=fp8", "precision.fp8_recipe=rowwise")


def recipe_of(*words: str) -> str:
    return MeshStrategy.run_options(compose([*words])[0], ParallelDims())["options"].fp8_recipe


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


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torchao emulate float8, in this process, with sums of fp32."""
    float8 = pytest.importorskip("torchao.float8", reason="torchao computes in float8, emulated; pip install torchao")
    make = float8.Float8LinearConfig.from_recipe_name
    emulated = staticmethod(lambda name: replace(make(name), emulate=True))
    monkeypatch.setattr(float8.Float8LinearConfig, "from_recipe_name", emulated)


@pytest.mark.parametrize("words", [("precision=fp8",), ROWWISE])
def test_each_recipe_stays_within_float8_of_fp32(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    ids = torch.arange(32).reshape(2, 16) % 64
    plain, short = (filled(built(Case(model="llama"))) for _ in range(2))
    use_float8(short, recipe_of(*words))
    gradients = []
    for model in (plain, short):
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append(model.model.layers[0].mlp.down_proj.weight.grad)
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert 1e-4 < error < 0.1


def cut_over(case: Case, dims: ParallelDims) -> tuple[Outcome, int]:
    """Trained in emulated float8, and how many products of layers of which ranks hold rows were so."""
    products = []

    def counted(layer: Any, x: torch.Tensor) -> torch.Tensor:
        products.append(layer)
        return float8_product(layer, x)

    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        patch.setattr(tensor_linear, "float8_product", counted)
        return trained(case, dims), len(products)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("dims", "sequence_parallel"),
    [
        (ParallelDims(tp=2), True),
        pytest.param(ParallelDims(tp=2), False, marks=pytest.mark.exhaustive),
        pytest.param(ParallelDims(tp=2, dp_shard=2), True, marks=pytest.mark.exhaustive),
    ],
)
def test_cut_layers_compute_in_float8_and_err_as_those_of_one_process_do(
    dims: ParallelDims, sequence_parallel: bool, recipe: str
) -> None:
    pytest.importorskip("torchao.float8", reason="torchao computes in float8, emulated; pip install torchao")
    case = Case(model="llama_128", steps=2, precision="fp8", options={"fp8_recipe": recipe})
    expected = plain(replace(case, precision="fp32"))
    ((alone, none),) = run_processes(1, cut_over, case, ParallelDims())
    split = replace(case, options={**case.options, "sequence_parallel": sequence_parallel})
    outcomes = run_processes(dims.world_size, cut_over, split, dims)
    found = [outcome for outcome, _ in outcomes]
    assert none == 0 and {count for _, count in outcomes} == {2 * 2 * case.steps}
    for loss, wanted in zip(found[0].losses, expected["losses"], strict=True):
        assert abs(loss / wanted - 1) < 2e-3
    assert 1e-3 < gradient_error(found, expected["gradients"]) <= 1.2 * gradient_error([alone], expected["gradients"])
