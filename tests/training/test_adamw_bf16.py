"""AdamW with moments in bfloat16. Oracle: torch.optim.AdamW, whose moments are rounded after each step."""

from __future__ import annotations

import pytest
import torch

from mgpu_pipe.architectures.formulas.kept_memory import optimizer_bytes
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.optim import adamw_bf16
from mgpu_pipe.optim.adamw_bf16 import BETAS_BELOW, MOMENTS, AdamWBf16

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
STEPS = 6


def tensors() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((33, 20), (7,), (0, 4))]


def trained(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], rounded: bool) -> None:
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = None if step == 2 and parameter.ndim == 1 else gradient  # one that a step does not use
        optimizer.step()
        for state in optimizer.state.values() if rounded else ():
            for key in MOMENTS:
                state[key].copy_(state[key].bfloat16())


@pytest.mark.parametrize("at_once", [1 << 24, 64])
def test_it_is_torchs_adamw_with_rounded_moments(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_bf16, "AT_ONCE", at_once)
    mine, theirs = tensors(), tensors()
    ours, oracle = AdamWBf16(mine, **OPTIONS), torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    trained(ours, mine, rounded=False)
    trained(oracle, theirs, rounded=True)
    for a, b in zip(mine, theirs, strict=True):
        # A vectorised loop rounds the ends of a tensor in another way; bfloat16 makes a unit of that 1/256.
        assert torch.allclose(a, b, rtol=0, atol=0 if at_once > 64 else 1e-2 * OPTIONS["lr"])  # type: ignore[operator]
        assert ours.state[a]["step"] == oracle.state[b]["step"]
        assert {ours.state[a][key].dtype for key in MOMENTS} == {torch.bfloat16}
    moments = sum(ours.state[mine[0]][key].nbytes for key in MOMENTS)
    assert moments == optimizer_bytes(compose(["optimizer=adamw_bf16"])[0].optimizer) * mine[0].numel()


def test_weights_in_bfloat16_are_updated_in_fp32_and_rounded() -> None:
    mine, wide = (
        [torch.nn.Parameter(one.bfloat16().to(dtype)) for one in tensors()] for dtype in (torch.bfloat16, torch.float32)
    )
    one, other = AdamWBf16(mine, **OPTIONS), AdamWBf16(wide, **OPTIONS)
    for optimizer, parameters in ((one, mine), (other, wide)):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(mine, wide, strict=True))


@pytest.mark.parametrize("beta", [BETAS_BELOW - 1e-6, 0.999])
def test_a_moment_decays_by_the_largest_beta_that_is_taken(beta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if beta > BETAS_BELOW:
        with pytest.raises(ValueError, match=r"below 0\.992, where bfloat16 loses a moment's decay: \[0\.9, 0\.999\]"):
            AdamWBf16(tensors(), betas=(0.9, beta))
        monkeypatch.setattr(adamw_bf16, "BETAS_BELOW", 1.0)
    parameters = tensors()
    optimizer = AdamWBf16(parameters, betas=(0.9, beta))
    for step in range(2000):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.0 if step else 1.0)
        optimizer.step()
    left = optimizer.state[parameters[0]]["exp_avg_sq"].max().item() / (1 - beta)
    assert (left < 1e-4) == (beta < BETAS_BELOW)
