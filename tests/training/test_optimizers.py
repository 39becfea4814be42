"""What an optimizer refuses is an error of its key, not a traceback of torch's."""

from __future__ import annotations

import pytest
import torch

from mgpu_pipe.config.schema import OptimizerConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.optim.optimizers import optimizer_factory


def build(**fields: object) -> torch.optim.Optimizer:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    return optimizer_factory(OptimizerConfig(**fields), model)(model)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"options": {"betas": [2, 3]}}, "Invalid beta parameter at index 0: 2; change optimizer.options"),
        ({"_target_": "torch.optim.SGD", "options": {"nesterov": True}}, "Nesterov momentum requires a momentum"),
        ({"_target_": "torch.optim.LBFGS", "weight_decay": 0.0}, "evaluates the loss itself"),
    ],
)
def test_a_refusal_is_one_line_of_the_key(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\._target_=torch\.optim\.") as refused:
        build(**fields)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_vectors_are_not_decayed_unless_asked() -> None:
    decays = {group["weight_decay"]: len(group["params"]) for group in build(weight_decay=0.1).param_groups}
    assert decays == {0.1: 1, 0.0: 3}
    assert len(build(weight_decay=0.1, decay_norms_and_biases=True).param_groups) == 1


@pytest.mark.parametrize(
    "fields", [{}, {"decay_norms_and_biases": True}, {"_target_": "torch.optim.Rprop", "weight_decay": 0.0}]
)
def test_a_rank_that_trains_nothing_has_an_optimizer_too(fields: dict[str, object]) -> None:
    frozen = torch.nn.Linear(3, 2).requires_grad_(False)
    optimizer = optimizer_factory(OptimizerConfig(**fields), frozen)(frozen)
    optimizer.step()
    assert [group["params"] for group in optimizer.param_groups] == [[]]
