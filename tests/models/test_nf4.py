"""Weights of four bits. Oracles: the bitsandbytes package, where it is installed; adapters beside usual weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mgpu_pipe.config.group_keys import PeftConfig
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.adapters.lora import add_adapters
from mgpu_pipe.models.adapters.qlora import (
    Block,
    dequantise,
    is_scales,
    packed_parameters,
    packed_ranges,
    packed_shapes,
    quantise,
    unpack,
)
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.parallel.tensor.cut import check_blocks
from tests.support.exact import BOUND, distance
from tests.support.tiny import MODELS, SEQ_LEN, VOCABULARY

QLORA = PeftConfig(name="qlora", r=4, alpha=12.0, targets=["q_proj", "down_proj", "c_proj"])
QUANTISED = ("_proj.weight", "c_fc.weight", "c_attn.weight", "experts.gate_up_proj", "experts.down_proj")


def drawn(*shape: int) -> torch.Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.05
    weight[..., 0, :64] = 0  # a block of zeros
    return weight


@pytest.mark.parametrize("shape", [(8, 64), (96, 192), (256, 512)])
def test_codes_scales_and_values_are_those_of_bitsandbytes(shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = drawn(*shape)
    packed, tops = quantise(weight)
    assert (tuple(packed.shape), tuple(tops.shape)) == packed_shapes(shape)
    codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    half = shape[1] // 2
    assert torch.equal(packed[:, :half].reshape(-1), codes.flatten())
    fp32, offset = tops.view(torch.float32)[1:], tops.view(torch.float32)[0]
    # The scales' mean is one of float64 here.
    torch.testing.assert_close(fp32, state.state2.absmax, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(offset, state.offset, rtol=1e-6, atol=0)
    # Its kernel for the CPU finds a scale's level by a coarse table: close to the middle of two it may take the other.
    ours, theirs = packed[:, half:].reshape(-1).int(), state.absmax.flatten().int()
    wanted = (weight.reshape(-1, 64).abs().amax(1) - offset) / fp32.repeat_interleave(256)[: len(ours)]
    table = state.state2.code
    assert bool(((table[ours] - wanted).abs() <= (table[theirs] - wanted).abs() + 1e-7).all())
    assert int((ours - theirs).abs().max()) <= 1 and float((ours != theirs).float().mean()) < 0.002
    packed[:, half:] = state.absmax.view(shape[0], -1)
    values = dequantise(packed, tops, Block(shape[1]))
    torch.testing.assert_close(values, functional.dequantize_4bit(codes, state), rtol=1e-6, atol=1e-8)
    assert 0.05 < float((values - weight).norm() / weight.norm()) < 0.12


def test_parts_are_the_wholes() -> None:
    """Rows and inputs as tensor-parallel ranks hold them, and a stack of experts."""
    weight = drawn(96, 192)
    packed, tops = quantise(weight)
    whole = dequantise(packed, tops, Block(192))
    rows = ((8, 24), (56, 72))
    some = torch.cat([packed[a:b] for a, b in rows])
    expected = torch.cat([whole[a:b] for a, b in rows])
    assert torch.equal(dequantise(some, tops, Block(192, rows=rows)), expected)
    columns = torch.cat([packed[:, a:b] for a, b in packed_ranges(192, 64, 192)], 1)
    assert torch.equal(dequantise(columns, tops, Block(192, columns=((64, 192),))), whole[:, 64:])
    stack = torch.stack([weight, weight.flip(0)])
    both = dequantise(*quantise(stack), Block(192))
    assert torch.equal(both[0], whole) and torch.equal(both[1], dequantise(*quantise(stack[1]), Block(192)))


def built(name: str, keys: PeftConfig) -> Any:
    model = build_meta(MODELS[name])
    known = {n.rpartition(".")[2] for n, _ in model.named_modules()}
    add_adapters(model, replace(keys, targets=[one for one in keys.targets if one in known]))
    return materialise(model, 3, "cpu")


@pytest.mark.parametrize("name", ["llama_128", "gpt2_128", "mixtral_128"])
def test_loss_and_gradients_are_those_of_lora_beside_the_values_of_the_bytes(name: str) -> None:
    packed, plain = built(name, QLORA), built(name, QLORA.without_quantisation())
    weights = {n: p.numel() for n, p in plain.named_parameters() if n.endswith(QUANTISED)}
    bytes_ = {n: p for n, p in packed.named_parameters() if p.dtype == torch.uint8 and not is_scales(n)}
    assert bytes_.keys() == weights.keys(), "matrices without an adapter too"
    kept = 0
    for one, value in bytes_.items():
        scales = packed.get_parameter(packed_parameters(one)[1])
        plain.get_parameter(one).data.copy_(unpack(packed, one, value, scales))
        kept += value.numel() + scales.numel()
    assert kept <= 1.02 * sum(weights.values()) * (4 + 8 / 64 + 32 / (64 * 256)) / 8
    generator, losses = torch.Generator().manual_seed(1), []
    ids = torch.randint(0, VOCABULARY, (3, SEQ_LEN), generator=generator)
    for parameter_name, parameter in packed.double().named_parameters():
        if parameter.requires_grad:
            parameter.data.normal_(generator=generator, std=0.05)
            plain.get_parameter(parameter_name).data = parameter.data.clone()
    if name == "mixtral_128":
        plain.set_experts_implementation("eager")  # torch's grouped product takes no float64
    for model in (packed, plain.double()):
        losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    for parameter_name, parameter in packed.named_parameters():
        if parameter.requires_grad:
            expected = plain.get_parameter(parameter_name).grad
            assert parameter.grad is not None and distance(parameter.grad, expected) <= BOUND
        else:
            assert parameter.grad is None


def adapted(source: ModelConfig) -> Any:
    model = build_meta(source)
    add_adapters(model, replace(QLORA, targets=["all-linear"]))
    return model


def test_widths_that_blocks_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"peft=qlora: .*q_proj has 32 inputs, no multiple of 64; use peft=lora"):
        adapted(MODELS["llama"])
    fields = {**MODELS["mixtral_128"].config, "intermediate_size": 96}
    with pytest.raises(ConfigError, match=r"peft=qlora: .*experts.down_proj has 96 inputs, no multiple of 64"):
        adapted(replace(MODELS["mixtral_128"], config=fields))
    model = adapted(MODELS["llama_128"])
    check_blocks(model, 2)
    said = r"strategy.tp=4: it would split blocks of 64 weights of .*o_proj, which has 128 inputs; use one of \[1, 2\]"
    with pytest.raises(ConfigError, match=said):
        check_blocks(model, 4)
    fields |= {"head_dim": 64, "hidden_size": 256, "intermediate_size": 128}
    model = adapted(replace(MODELS["mixtral_128"], config=fields))
    check_blocks(model, 4, cuts_experts=False)
    with pytest.raises(ConfigError, match=r"weights of .*experts.down_proj, which has 128 inputs; use one of \[1, 2\]"):
        check_blocks(model, 4)
