"""Parameter groups and layer-wise decay under every strategy: the plain loop, where each parameter has a group of its
own that is written by hand, gives the same."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from mgpu_pipe.config.group_keys import ParameterGroup
from tests.support.plain_training import plain, worst_error
from tests.support.processes import run_processes
from tests.support.training import LR, MUON, Case, trained
from tests.support.ways import WAYS

DECAY, STEPS, LATE = 0.5, 4, 2
ADAMW_LR = 3e-4
TREATED: dict[str, Any] = {
    "layer_decay": DECAY,
    "groups": {
        "queries": ParameterGroup(["*.q_proj.*"], lr=3 * LR, weight_decay=0.0),
        "late": ParameterGroup(["model.layers.1.mlp.*", "model.norm.weight"], frozen_until=LATE),
    },
}
RATES = {"model.embed_tokens": DECAY**3, "model.layers.0": DECAY**2, "model.layers.1": DECAY, "": 1.0}
"""Of a model of two blocks."""


class ByHand(torch.optim.AdamW):
    def __init__(self, model: torch.nn.Module) -> None:
        groups = []
        for name, parameter in model.named_parameters():
            rate = next(rate for start, rate in RATES.items() if name.startswith(start))
            late = name == "model.norm.weight" or name.startswith("model.layers.1.mlp.")
            group = {"params": [parameter], "lr": LR * rate, "late": late}
            groups.append({**group, "lr": 3 * LR, "weight_decay": 0.0} if "q_proj" in name else group)
        super().__init__(groups, lr=LR, weight_decay=0.1)
        self.rates, self.steps = [group["lr"] for group in groups], 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            group["lr"] = 0.0 if group["late"] and self.steps < LATE else rate
        self.steps += 1
        super().step()


class MuonByHand(torch.optim.Optimizer):
    """torch.optim.Muon or AdamW for each parameter alone."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.each: list[tuple[torch.optim.Optimizer, float, bool]] = []
        for name, parameter in model.named_parameters():
            is_matrix = name.startswith("model.layers") and parameter.dim() == 2
            rate = (LR if is_matrix else ADAMW_LR) * next(r for start, r in RATES.items() if name.startswith(start))
            decay = 0.1 if parameter.dim() == 2 else 0.0
            if "q_proj" in name:
                rate, decay = 3 * LR, 0.0
            if is_matrix:
                optimizer: torch.optim.Optimizer = torch.optim.Muon([parameter], lr=rate, weight_decay=decay)
            else:
                optimizer = torch.optim.AdamW([parameter], lr=rate, betas=(0.9, 0.95), weight_decay=decay)
            late = name == "model.norm.weight" or name.startswith("model.layers.1.mlp.")
            self.each.append((optimizer, rate, late))
        self.steps = 0
        super().__init__(list(model.parameters()), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double):
            for optimizer, rate, late in self.each:
                optimizer.param_groups[0]["lr"] = 0.0 if late and self.steps < LATE else rate
                optimizer.step()
        self.steps += 1


SAMPLED = ("single", "pp 2", "zero3 2")


def case_of(**more: Any) -> Case:
    return Case(steps=STEPS, layers=2, treated=TREATED, **more)


@pytest.mark.parametrize(
    "way", [name if name in SAMPLED else pytest.param(name, marks=pytest.mark.exhaustive) for name in WAYS]
)
def test_groups_are_trained_as_one_process_with_groups_by_hand_does(way: str) -> None:
    dims, more = WAYS[way]
    results = run_processes(dims.world_size, trained, case_of(**more), dims)
    worst, where = worst_error(results, plain(case_of(by_hand=ByHand)))
    assert worst <= 1, where


@pytest.mark.parametrize(
    "way",
    [
        name if name == "fsdp 2" else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in WAYS
        if not name.startswith("zero")
    ],
)
def test_groups_of_muon_are_trained_as_by_hand(way: str) -> None:
    dims, more = WAYS[way]
    options = {"weight_decay": 0.1, "adamw_lr": ADAMW_LR}
    case = case_of(optimizer=MUON, optimizer_options=options, **more)
    results = run_processes(dims.world_size, trained, case, dims)
    worst, where = worst_error(results, plain(case_of(by_hand=MuonByHand)))
    assert worst <= 1, where
