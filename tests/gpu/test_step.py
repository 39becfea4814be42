"""A step by the fast kernels against the plain ones, each gradient over that of fp32; dry on the CPU."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.kernels.packed_attention import use_packed_attention
from mgpu_pipe.objectives.causal_lm import CausalLMObjective

Gradients = dict[str, torch.Tensor]
WORSE, WORSE_OF_ONE = 1.1, 2.0
"""How much larger the fast kernels' error may be than the plain ones': of the gradients together, and of one."""


def small_or_wide(device: torch.device) -> ModelConfig:
    """Two layers; on a GPU as wide as a model of one billion parameters, with its vocabulary."""
    wide = device.type == "cuda"
    width, vocabulary = (2048, 128_256) if wide else (64, 512)
    fields = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": width // 16 if not wide else 32,
        "num_key_value_heads": 2 if not wide else 8,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    }
    return ModelConfig(type="llama", config=fields)


def batch(vocabulary: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Two rows of documents of uneven length."""
    tokens = 4096 if device.type == "cuda" else 96
    torch.manual_seed(3)
    ids = torch.randint(vocabulary, (2, tokens + 1))
    cuts = [[tokens // 5, tokens // 2], [tokens * 3 // 4]]
    positions = torch.stack(
        [torch.cat([torch.arange(part.numel()) for part in torch.arange(tokens).tensor_split(cut)]) for cut in cuts]
    )
    labels = ids[:, 1:].clone()
    for row, cut in enumerate(cuts):
        labels[row, [at - 1 for at in cut]] = IGNORE_INDEX
    found = {"input_ids": ids[:, :-1].contiguous(), "labels": labels, "position_ids": positions}
    return {name: value.to(device) for name, value in found.items()}


def step(model: Any, samples: dict[str, torch.Tensor], chunk_tokens: int | str) -> tuple[float, Gradients]:
    objective = CausalLMObjective(model, None, lambda _: 1.0, chunk_tokens)
    loss = objective.micro_batch_loss(samples)
    loss.backward(torch.full_like(loss, 1 / 8000))
    return float(loss.detach()), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def errors(found: Gradients, expected: Gradients) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}


def test_the_fast_kernels_err_as_the_plain_ones_do(device: torch.device) -> None:
    config = small_or_wide(device)
    plain = materialise(build_meta(config), 5, device)
    fast = copy.deepcopy(plain)
    assert use_packed_attention(fast)
    samples = batch(int(config.config["vocab_size"]), device)
    wanted_loss, wanted = step(copy.deepcopy(plain), samples, 0)
    plain_loss, of_plain = step(plain.bfloat16(), samples, 0)
    fast_loss, of_fast = step(fast.bfloat16(), samples, "auto")
    assert abs(fast_loss / wanted_loss - 1) < 1e-3
    assert abs(fast_loss / plain_loss - 1) < 1e-3
    by_plain, by_fast = errors(of_plain, wanted), errors(of_fast, wanted)
    assert math.hypot(*by_fast.values()) <= WORSE * math.hypot(*by_plain.values())
    assert [name for name in by_fast if by_fast[name] > WORSE_OF_ONE * by_plain[name]] == []


def test_in_fp32_they_agree(device: torch.device) -> None:
    config = small_or_wide(device)
    plain = materialise(build_meta(config), 5, device)
    fast = copy.deepcopy(plain)
    assert use_packed_attention(fast)
    samples = batch(int(config.config["vocab_size"]), device)
    wanted_loss, wanted = step(plain, samples, 0)
    loss, found = step(fast, samples, "auto")
    assert abs(loss / wanted_loss - 1) < 1e-6
    assert max(errors(found, wanted).values()) < 1e-5
