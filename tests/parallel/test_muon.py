"""Oracle: torch.optim.Muon and torch.optim.AdamW, bit for bit where they compute in the same precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mgpu_pipe.config.schema import OptimizerConfig
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.optim.muon import Muon
from mgpu_pipe.optim.optimizers import optimizer_factory
from tests.models.tiny import tiny_model

SHAPES = [(8, 24), (24, 8), (16, 16)]


def gradients(step: int, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}])
def test_in_bf16_a_step_is_torchs(options: dict[str, Any]) -> None:
    shapes: list[tuple[int, ...]] = [*SHAPES, (5,)]
    ours, theirs = ([torch.nn.Parameter(g) for g in gradients(0, shapes)] for _ in range(2))
    muon = torch.optim.Muon(theirs[:3], lr=2e-2, weight_decay=0.1, **options)
    adamw = torch.optim.AdamW(theirs[3:], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    mine = Muon(ours, lr=2e-2, weight_decay=0.1, precision="bf16", **options)
    for step in range(3):
        for parameters in (ours, theirs):
            for parameter, gradient in zip(parameters, gradients(step + 1, shapes), strict=True):
                parameter.grad = gradient
        for optimizer in (muon, adamw, mine):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("family", "by_adamw"),
    [
        ("llama", {"model.embed_tokens.weight", "lm_head.weight"}),
        ("gpt2", {"transformer.wte.weight", "transformer.wpe.weight"}),
        ("mixtral", {"model.embed_tokens.weight", "lm_head.weight"}),
    ],
)
def test_matrices_of_hidden_layers_are_its_own_and_the_rest_is_adamws(family: str, by_adamw: set[str]) -> None:
    model = materialise(build_meta(tiny_model(family)), 1, "cpu")
    config = OptimizerConfig("mgpu_pipe.optim.muon.Muon", 2e-2, 0.1, options={"adamw_lr": 1e-3})
    optimizer = optimizer_factory(config, model)(model)
    names = {id(p): name for name, p in model.named_parameters()}
    matrices, decayed, plain = ({names[id(p)] for p in group["params"]} for group in optimizer.param_groups)
    assert decayed == by_adamw
    assert plain == {name for name, p in model.named_parameters() if p.dim() == 1}
    assert matrices == set(names.values()) - decayed - plain
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (2e-2, 0.1),
        (1e-3, 0.1),
        (1e-3, 0.0),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"momentum": -1}, "momentum is negative"),
        ({"ns_steps": 0}, "ns_steps"),
        ({"adjust_lr_fn": "x"}, "original"),
        ({"adamw_betas": (0.9,)}, "adamw_betas"),
        ({"ns_coefficients": (1, 2)}, "three numbers"),
    ],
)
def test_values_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Muon([torch.nn.Parameter(torch.zeros(2, 2))], **options)
