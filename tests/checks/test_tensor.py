"""Sizes that tensor parallelism takes, from configurations alone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from mgpu_pipe.architectures.find import has_tensor_plan
from mgpu_pipe.architectures.library_plans import library_plan
from mgpu_pipe.checks.model_axes import tensor_parallel_errors
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.fields import resolved_fields

LLAMA = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
}


def messages(
    family: str, fields: dict[str, Any], tp: int, sequence_parallel: bool = False, seq_len: int = 24
) -> list[str]:
    resolved = resolved_fields(ModelConfig(name=family, type=family, config=fields))
    return [str(error) for error in tensor_parallel_errors(resolved, family, tp, sequence_parallel, seq_len)]


@pytest.mark.parametrize("tp", [1, 2, 4, 12])
def test_sizes_that_fit(tp: int) -> None:
    assert messages("llama", LLAMA, tp, True) == []


@pytest.mark.parametrize(
    ("family", "fields", "tp", "what"),
    [
        ("llama", LLAMA, 8, "it does not divide the 12 attention heads; use one of [1, 2, 4, 12]"),
        ("llama", LLAMA, 3, "neither divides the 4 key-value heads nor is divided by them; use one of [1, 2, 4, 12]"),
        ("llama", {**LLAMA, "intermediate_size": 98}, 4, "intermediate_size=98; use one of [1, 2]"),
        ("gpt2", {"n_embd": 40, "n_head": 4}, 8, "it does not divide the 4 attention heads; use one of [1, 2, 4]"),
        ("gpt2", {"n_embd": 40, "n_head": 4, "n_inner": 90}, 4, "n_inner=90; use one of [1, 2]"),
        ("qwen3_moe", {"moe_intermediate_size": 772}, 8, "moe_intermediate_size=772; use one of [1, 2, 4]"),
        ("mamba", {}, 2, "the mamba family has no plan for tensor parallelism; use strategy.tp=1; the axes for it are"),
    ],
)
def test_sizes_that_do_not_fit(family: str, fields: dict[str, Any], tp: int, what: str) -> None:
    found = messages(family, fields, tp)
    assert any(what in message for message in found), found
    assert all(message.startswith(f"strategy.tp={tp}: ") for message in found)


def test_sequence_parallelism() -> None:
    (length,) = messages("llama", LLAMA, 4, True, 30)
    assert length.startswith("data.seq_len=30: ") and "use 28 or 32" in length
    (family,) = messages("gemma2", {}, 4, True, 32)
    assert family.startswith("strategy.sequence_parallel=true: the gemma2 family has no plan for it")


def test_plans_are_read_without_torch() -> None:
    assert library_plan("llama", "base_model_tp_plan")["layers.*.self_attn.o_proj"] == "rowwise"
    assert has_tensor_plan("gpt2") and not has_tensor_plan("gpt2_of_nobody")
    code = "import sys, mgpu_pipe.checks.model_axes as p; p.has_tensor_plan('llama')"
    command = [sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(command, check=False).returncode == 0
