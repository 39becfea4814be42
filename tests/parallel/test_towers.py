"""Models of several towers: blocks are found, checkpointed and sharded in each. Oracle: one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from mgpu_pipe.models.shard_units import decoder_blocks, sharding_units
from mgpu_pipe.parallel.checkpointing import apply_activation_checkpointing
from mgpu_pipe.parallel.fsdp import apply_fully_shard
from tests.support.processes import run_processes

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
VISION = {**SIZES, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8}
BLOCKS = {
    "t5": {"encoder.block": 3, "decoder.block": 2},
    "clip": {"text_model.encoder.layers": 3, "vision_model.encoder.layers": 2},
    "llava": {"model.vision_tower.encoder.layers": 2, "model.language_model.layers": 3},
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name == "t5":
        stacks = {"num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        return T5ForConditionalGeneration(T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, **stacks))
    if name == "clip":
        model = CLIPModel(CLIPConfig(text_config={"vocab_size": 96, **SIZES}, vision_config=VISION))
        model.logit_scale = nn.Parameter(model.logit_scale.detach()[None])  # FSDP2 takes no scalars
        return model
    text, vision = LlamaConfig(vocab_size=96, **SIZES), CLIPVisionConfig(**VISION)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=5, vision_feature_layer=-1)
    return LlavaForConditionalGeneration(config)


def loss_of(model: nn.Module, rows: slice) -> torch.Tensor:
    """A sum over the samples of ``rows``."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(8, 96, (4, 6), generator=generator)[rows]
    if isinstance(model, T5ForConditionalGeneration):
        return model(input_ids=ids, decoder_input_ids=ids.flip(1), use_cache=False).logits.logsumexp(-1).sum()
    pixels = torch.randn(4, 3, 16, 16, generator=generator)[rows]
    if isinstance(model, CLIPModel):
        found = model(input_ids=ids, pixel_values=pixels)
        return (found.text_embeds * found.image_embeds.flip(1)).sum()
    ids = torch.cat([torch.full((len(ids), 4), 5), ids], 1)  # the image's patches
    return model(input_ids=ids, pixel_values=pixels, use_cache=False).logits.logsumexp(-1).sum()


def names_of(model: nn.Module, modules: list[nn.Module]) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(module)] for module in modules]


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_every_tower_has_its_blocks_and_units(name: str) -> None:
    model = model_of(name)
    blocks = [f"{tower}.{layer}" for tower, layers in BLOCKS[name].items() for layer in range(layers)]
    assert names_of(model, decoder_blocks(model)) == blocks
    units = [names_of(model, list(unit.modules)) for unit in sharding_units(model)]
    assert [unit for unit in units if unit[0] in blocks] == [[block] for block in blocks]


def test_parts_of_a_block_are_no_tower() -> None:
    """Leaves, lists inside of a block, and modules of several kinds are none; an only list of blocks is one."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(9)])

    model = nn.Module()
    model.heads = nn.ModuleList([nn.Linear(2, 2) for _ in range(8)])
    model.parts = nn.ModuleList([nn.Sequential(nn.ReLU()), nn.ModuleDict({"one": nn.ReLU()})])
    model.layers = nn.ModuleList([Block()])
    assert decoder_blocks(model) == [model.layers[0]]


@pytest.mark.parametrize(("mode", "towers"), [("none", "full"), ("full", "none"), ("full", "same")])
@pytest.mark.parametrize("name", ["clip", "llava"])
def test_a_tower_is_recomputed_by_its_mode(name: str, mode: Any, towers: Any) -> None:
    model, plain = model_of(name), model_of(name)
    runs = dict.fromkeys(names_of(model, decoder_blocks(model)), 0)
    for block in runs:

        def count(*_: object, block: str = block) -> None:
            runs[block] += 1

        leaf = next(part for part in model.get_submodule(block).modules() if isinstance(part, nn.Linear))
        leaf.register_forward_hook(count)
    apply_activation_checkpointing(model, mode, towers)
    for each in (model, plain):
        loss_of(each, slice(None)).backward()
    chosen = {True: mode if towers == "same" else towers, False: mode}
    assert runs == {block: 1 + (chosen["vision" in block] == "full") for block in runs}
    gradients = {key: parameter.grad for key, parameter in plain.named_parameters() if parameter.grad is not None}
    assert all(torch.equal(model.get_parameter(key).grad, gradient) for key, gradient in gradients.items())


def sharded(names: list[str]) -> dict[str, dict[str, Any]]:
    """Of each model under FSDP and full checkpointing: its gradients, and how often each block ran."""
    found = {}
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_replicate", "dp_shard"))
    share = 4 // dist.get_world_size()
    for name in names:
        model = model_of(name)
        runs = dict.fromkeys(names_of(model, decoder_blocks(model)), 0)
        for block in runs:
            leaf = next(part for part in model.get_submodule(block).modules() if isinstance(part, nn.Linear))

            def count(*_: object, block: str = block, runs: dict[str, int] = runs) -> None:
                runs[block] += 1

            leaf.register_forward_hook(count)
        apply_activation_checkpointing(model, "full")
        apply_fully_shard(model, mesh, "fp32")
        loss_of(model, slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)).backward()
        gradients = {key: p.grad.full_tensor() for key, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
        units = all(isinstance(model.get_submodule(block), FSDPModule) for block in runs)
        found[name] = {"gradients": gradients, "runs": runs, "units": units}
    return found


@pytest.mark.slow
def test_each_tower_is_sharded_and_computed_again() -> None:
    found = run_processes(2, sharded, sorted(BLOCKS))[0]
    for name, result in found.items():
        assert result["units"]
        assert set(result["runs"].values()) == {2}, result["runs"]
        model = model_of(name)
        loss_of(model, slice(None)).backward()
        expected = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        total = float(torch.stack([g.double().square().sum() for g in expected.values()]).sum().sqrt())
        for key, gradient in result["gradients"].items():
            whole = expected.get(key, torch.zeros_like(gradient))  # unused on both: FSDP2 gives zeros
            error = float((gradient - whole).double().norm())
            assert error <= 1e-5 * float(whole.double().norm()) + 1e-7 * total, (name, key)
        assert set(expected) <= set(result["gradients"])
