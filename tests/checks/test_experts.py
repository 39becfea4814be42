"""Oracle: transformers' own configuration classes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from transformers import AutoConfig

from mgpu_pipe.architectures.find import families_with, family_of
from mgpu_pipe.checks.model_axes import expert_count, expert_parallel_errors, router_loss_errors
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.fields import resolved_fields


@pytest.mark.parametrize("family", families_with(lambda family: family.experts))
def test_each_family_brings_a_plan_and_says_how_many_experts_it_has(family: str) -> None:
    config = AutoConfig.for_model(family)
    assert "ep_dispatch_experts" in config.base_model_ep_plan.values()
    fields = resolved_fields(ModelConfig(name=family, type=family))
    assert expert_count(fields, family) == getattr(config, family_of(family).experts)


def test_balanced_families_are_among_them() -> None:
    assert all(family_of(name).experts for name in families_with(lambda family: family.softmax_routers))


def said(model_type: str, ep: int, fields: dict[str, int], sizes: list[int] | None = None) -> str:
    (error,) = expert_parallel_errors(fields, model_type, ep, sizes)
    assert error.key == "strategy.ep" and error.value == ep
    return str(error)


def test_sizes_that_divide_and_no_expert_parallelism_are_taken() -> None:
    assert expert_parallel_errors({"num_local_experts": 8}, "mixtral", 4) == []
    assert expert_parallel_errors({}, "llama", 1) == []


def test_a_dense_family_is_refused_with_those_that_have_experts() -> None:
    text = said("llama", 2, {})
    assert text.startswith("strategy.ep=2: the llama family has no experts")
    assert "mixtral" in text and "qwen3_moe" in text


def test_experts_that_do_not_divide_are_refused_with_sizes_that_work() -> None:
    text = "strategy.ep=3: does not divide model.config.num_local_experts=8; use 1 or 2 or 4 or 8"
    assert said("mixtral", 3, {"num_local_experts": 8}) == text
    assert said("mixtral", 3, {"num_local_experts": 8}, [1, 2, 4]).endswith("use 1 or 2 or 4")
    assert said("mixtral", 3, {"num_local_experts": 8}, [3, 6]).endswith(
        "use 1, or a multiple of 3 as model.config.num_local_experts"
    )


def test_a_balance_loss_wants_routers_that_take_a_softmax() -> None:
    assert router_loss_errors("llama", 0.0) == router_loss_errors("mixtral", 0.01) == []
    (dense,), (sigmoid,) = router_loss_errors("llama", 0.01), router_loss_errors("deepseek_v3", 0.01)
    assert str(dense).startswith("objective.router_aux_loss=0.01: the llama family has no routers; those with: ernie")
    assert "do not choose by softmax" in str(sigmoid)
    assert router_loss_errors("mixtral", -1.0)[0].key == "objective.router_aux_loss"


def test_nothing_here_imports_torch() -> None:
    code = "import sys, mgpu_pipe.checks.model_axes; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
