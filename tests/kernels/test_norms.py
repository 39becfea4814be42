"""LayerNorm on CPUs in two bytes. Oracle: float64, of the same rounded inputs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mgpu_pipe.models.kernels.norms import add_up_in_fp32

TOKENS, WIDTH = 2048, 32


def results(layer: nn.LayerNorm, values: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    given = values.clone().requires_grad_()
    out = layer(given)
    assert out.dtype == values.dtype
    out.backward(gradient)
    assert layer.weight.grad is not None and given.grad is not None
    found = [out.detach(), given.grad, layer.weight.grad]
    return found if layer.bias is None else [*found, layer.bias.grad]  # type: ignore[list-item]


@pytest.mark.parametrize(("dtype", "bias"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True)])
def test_gradients_are_rounded_once_where_torch_rounds_them_with_every_token(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    values, gradient = (torch.randn(TOKENS, WIDTH, generator=generator).to(dtype) for _ in range(2))
    stock = nn.LayerNorm(WIDTH, bias=bias).to(dtype)
    model = nn.Sequential(copy.deepcopy(stock))
    add_up_in_fp32(model)
    truth = results(copy.deepcopy(stock).double(), values.double(), gradient.double())
    ours, theirs = results(model[0], values, gradient), results(stock, values, gradient)  # type: ignore[arg-type]

    def errors(found: list[torch.Tensor]) -> list[float]:
        return [float((one.double() - own).norm() / own.norm()) for one, own in zip(found, truth, strict=True)]

    assert max(errors(ours)) < torch.finfo(dtype).eps / 2
    assert min(errors(theirs)[2:]) > 3 * torch.finfo(dtype).eps, "torch adds up in fp32: this module can go"


def test_what_is_computed_in_fp32_is_left_alone() -> None:
    stock = nn.LayerNorm(WIDTH)
    model = nn.Sequential(copy.deepcopy(stock))
    add_up_in_fp32(model)
    values = torch.randn(8, WIDTH)
    assert torch.equal(model(values), stock(values)) and [name for name, _ in model.named_parameters()] == [
        "0.weight",
        "0.bias",
    ]
