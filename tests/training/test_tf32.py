"""TF32 is on for the products of a model's layers, off for its rotary angles. Oracle: torch's setting, seen there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mgpu_pipe.training.trainer import set_tf32


def settings() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.fixture
def model() -> Iterator[LlamaForCausalLM]:
    before = settings()
    yield LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def seen_in_a_pass(model: LlamaForCausalLM) -> dict[str, tuple[str, bool]]:
    """The setting that each module's forward pass meets."""
    seen: dict[str, tuple[str, bool]] = {}
    for name, module in model.named_modules():
        forward = module.forward

        def noted(*args: object, name: str = name, forward=forward, **named: object) -> object:  # type: ignore[no-untyped-def]
            seen[name] = settings()
            return forward(*args, **named)

        module.forward = noted
    model(torch.tensor([[1, 2, 3]]))
    return seen


def test_allowed_it_is_on_but_for_rotary_angles(model: LlamaForCausalLM) -> None:
    set_tf32(model, True)
    seen = seen_in_a_pass(model)
    assert seen.pop("model.rotary_emb") == ("highest", False)
    assert set(seen.values()) == {("high", True)} and "model.layers.0.mlp.up_proj" in seen
    assert settings() == ("high", True)


def test_else_it_is_off_for_convolutions_too(model: LlamaForCausalLM) -> None:
    assert torch.backends.cudnn.allow_tf32, "torch's default"
    set_tf32(model, False)
    assert set(seen_in_a_pass(model).values()) == {("highest", False)}


def test_what_torch_reads_itself_can_be_read(model: LlamaForCausalLM) -> None:
    set_tf32(model, True)
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
