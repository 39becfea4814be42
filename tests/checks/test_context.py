"""Which sizes and models context parallelism refuses, and with what to write instead."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from mgpu_pipe.checks.model_axes import context_parallel_errors
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.fields import resolved_fields


def messages(model_type: str, cp: int, method: str, seq_len: int, tp: int = 1, **config: Any) -> list[str]:
    fields = resolved_fields(ModelConfig(name="m", type=model_type, config=config))
    return [str(error) for error in context_parallel_errors(fields, model_type, cp, method, seq_len, tp)]


def test_sizes_that_do_not_divide_are_told_with_those_that_do() -> None:
    assert messages("llama", 4, "ring", 256) == messages("llama", 1, "ring", 7) == []
    (ring,) = messages("llama", 4, "ring", 260)
    assert ring == "data.seq_len=260: not a multiple of 2 * strategy.cp = 8; use 256 or 264"
    assert messages("llama", 4, "ulysses", 260) == []
    (short,) = messages("llama", 4, "ulysses", 3)
    assert short.endswith("use 4")
    (heads,) = messages("gpt2", 5, "ulysses", 100, n_head=12, attn_pdrop=0.0)
    assert heads.startswith("strategy.cp=5: ") and "12 heads" in heads
    assert heads.endswith("use one of [1, 2, 3, 4, 6, 12], or strategy.context.method=ring")
    (shared,) = messages("llama", 4, "ulysses", 256, tp=2, num_attention_heads=12, num_key_value_heads=2)
    assert "12 heads / strategy.tp=2" in shared and "[1, 2, 3, 6]" in shared
    assert messages("llama", 4, "ulysses", 256, tp=2, num_attention_heads=8, num_key_value_heads=2) == []


@pytest.mark.parametrize("model_type", ["gpt_neo", "opt", "mamba"])
def test_families_that_cannot_are_told_with_those_that_can(model_type: str) -> None:
    (message,) = messages(model_type, 2, "ring", 256)
    assert message.startswith("strategy.cp=2: ") and model_type in message and "llama, " in message


@pytest.mark.parametrize(
    ("model_type", "config", "key"),
    [
        ("mistral", {"sliding_window": 100}, "model.config.sliding_window=100"),
        ("gemma2", {"attn_logit_softcapping": 50.0}, "model.config.attn_logit_softcapping=50.0"),
        ("gpt2", {"attn_pdrop": 0.1}, "model.config.attn_pdrop=0.1"),
        ("llama", {"attention_dropout": 0.2}, "model.config.attention_dropout=0.2"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "model.config.use_bidirectional_attention=true"),
    ],
)
def test_attention_that_is_not_computed_is_refused_by_its_field(
    model_type: str, config: dict[str, Any], key: str
) -> None:
    quiet = {"attn_logit_softcapping": None} if model_type == "gemma2" else {}
    quiet = {"attn_pdrop": 0.0} if model_type == "gpt2" else quiet
    assert messages(model_type, 2, "ring", 256, **quiet) == []
    (message,) = messages(model_type, 2, "ring", 256, **{**quiet, **config})
    assert message.startswith(key + ": ")


def test_a_window_that_is_not_used_or_long_enough_is_fine() -> None:
    assert messages("qwen3", 2, "ring", 8192) == []
    assert messages("mistral", 2, "ring", 4096) == []
    assert messages("mistral", 2, "ring", 8192, sliding_window=None) == []
    assert len(messages("mistral", 2, "ring", 8192)) == 1


def test_rotary_tables_by_the_length_of_the_run_are_the_same_on_every_rank() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 4.0}
    assert messages("llama", 2, "ring", 256, rope_parameters=rope) == []


def test_no_torch_is_needed() -> None:
    code = (
        "import sys; from mgpu_pipe.checks.model_axes import context_parallel_errors as f;"
        "assert len(f({'num_attention_heads': 6}, 'llama', 4, 'ulysses', 9, 1)) == 2; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
