"""Models of several towers: blocks, checkpointing and sharding of each, and towers kept whole, whose pictures are dealt
over tensor-parallel ranks. Oracle: one process."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
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
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from mgpu_pipe.architectures.pictures import Grid, deal_by_cost, encoding_costs
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.shard_units import decoder_blocks, sharding_units
from mgpu_pipe.parallel.checkpointing import apply_activation_checkpointing
from mgpu_pipe.parallel.fsdp import apply_fully_shard
from mgpu_pipe.parallel.tensor.whole_towers import keep_towers_whole
from tests.objectives.test_vision_language import chats
from tests.support import small_runs
from tests.support.processes import run_processes
from tests.verify.support import small_run

SIDES = [
    *((480, 640), (640, 480), (427, 640), (1080, 1920), (2339, 1654), (4032, 3024)),
    *((3024, 4032), (600, 800), (224, 224), (768, 1024), (512, 512), (300, 400)),
]
"""Heights and widths of photographs, screens, scanned pages and thumbnails."""
QWEN25 = {
    **{"hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "patch_size": 14, "window_size": 112},
    "fullatt_block_indexes": [7, 15, 23, 31],
}
"""Tower of Qwen2.5-VL."""
WHOLE = "strategy.parts.vision=whole"


def busiest_over_mean(pictures: int) -> tuple[float, float]:
    """The busiest of four ranks over the mean, averaged over micro-batches: dealt by cost, and by number."""
    grid, draw, dealt, by_number = Grid(14, 2, 2, 3, 56 * 56, 1280 * 28 * 28), random.Random(1), 0.0, 0.0
    for _ in range(100):
        places = [grid.places(*draw.choice(SIDES)) for _ in range(pictures)]
        costs = encoding_costs([(1, 2 * down, 2 * across) for down, across in places], QWEN25.get, 3)
        shares = deal_by_cost(costs, 4)
        assert sorted(number for share in shares for number in share) == list(range(pictures))
        mean = sum(costs) / 4
        dealt += max(sum(costs[number] for number in share) for share in shares) / mean / 100
        by_number += max(sum(costs[rank::4]) for rank in range(4)) / mean / 100
    return dealt, by_number


@pytest.mark.parametrize(("pictures", "bound"), [(16, 1.1), (32, 1.03)])
def test_four_ranks_work_about_equally_long(pictures: int, bound: float) -> None:
    """Dealing by number would leave 1.25 and more."""
    dealt, by_number = busiest_over_mean(pictures)
    assert dealt <= bound < by_number


def test_costs_are_the_operations_of_the_tower() -> None:
    """Over those of a picture of 16 x 16 patches, counted on Qwen2.5-VL's tower; patches and merger are left out."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_heads": 4, "out_hidden_size": 256}
    config = Qwen2_5_VLVisionConfig(**sizes, depth=4, fullatt_block_indexes=[1])
    config._attn_implementation = "eager"  # torch counts no fused attention on CPUs
    tower = Qwen2_5_VisionTransformerPretrainedModel(config)
    grids = [(1, 16, 16), (1, 4, 4), (1, 24, 40), (2, 16, 16)]
    counted = []
    for grid in grids:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            tower(torch.randn(math.prod(grid), 3 * 2 * 14 * 14), grid_thw=torch.tensor([grid]))
        counted.append(counter.get_total_flops())
    costs = encoding_costs(grids, lambda name: getattr(config, name, None), 3)
    for cost, operations in zip(costs, counted, strict=True):
        assert cost / costs[0] == pytest.approx(operations / counted[0], rel=0.03)


def test_a_patch_sees_its_window_or_its_frame() -> None:
    whole = {name: value for name, value in QWEN25.items() if name not in ("fullatt_block_indexes", "window_size")}
    (one, four), (all_one, all_four) = (
        encoding_costs([(1, 32, 32), (1, 64, 64)], kind.get) for kind in (QWEN25, whole)
    )
    assert four > 4 * one and all_four / all_one > four / one
    assert encoding_costs([(3, 32, 32)], whole.get) == [3 * all_one]


class Sent(TorchDispatchMode):
    """Bytes that this process sends to others, by one all-to-all after another."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            assert func._schema.name == "c10d::alltoall_base_", func
            self.bytes.append(args[1].nbytes // dist.get_world_size() * (dist.get_world_size() - 1))
        return func(*args, **(kwargs or {}))


def pictures_of(name: str, model: Any, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    vision = model.config.vision_config
    if name == "llava_tiny":
        shape = (number, vision.num_channels, vision.image_size, vision.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    grids = 2 * torch.randint(1, 4, (number, 3), generator=generator)
    grids[:, 0] = 1
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches = int(grids.prod(1).sum())
    return {"pixel_values": torch.randn(patches, values, generator=generator), "image_grid_thw": grids}


def encoded(name: str, number: int, deals: bool) -> dict[str, Any]:
    """Features and gradients of one micro-batch; bytes sent in each pass."""
    small = small_run("objective=vision_language", f"model={name}", "strategy=single", "trainer.devices=1").model
    model: Any = materialise(build_meta(small, "AutoModelForImageTextToText"), 1, "cpu")
    tower = "model.vision_tower" if name == "llava_tiny" else "model.visual"
    if deals:
        assert dist.group.WORLD is not None
        keep_towers_whole(model, {"vision": tower}, dist.group.WORLD, None)
    read: list[Any] = []
    model.get_submodule(tower).register_forward_hook(lambda _, __, output: read.append(output))
    with Sent() as forward:
        output = model.model.get_image_features(**pictures_of(name, model, number))
    features = torch.cat(tree_leaves([output.pooler_output, output.get("deepstack_features") or []]))
    weights = torch.randn(features.shape, generator=torch.Generator().manual_seed(7))
    with Sent() as backward:
        (features * weights).sum().backward()
    named = {key: parameter.grad for key, parameter in model.named_parameters() if key.startswith(tower)}
    # LLaVA's projector reads one layer, class embedding included; Qwen-VL's is inside of its tower.
    layers = read[0].hidden_states
    exchanged = sum(layer.nbytes for layer in layers.values()) if isinstance(layers, dict) else features.nbytes
    return {
        "features": features.detach(),
        "gradients": {key: grad for key, grad in named.items() if grad is not None},
        "sent": (forward.bytes, backward.bytes),
        "exchanged": exchanged,
    }


def all_encoded(cells: list[tuple[str, int]]) -> list[dict[str, Any]]:
    return [encoded(*cell, deals=True) for cell in cells]


CELLS = [(name, number) for name in ("llava_tiny", "qwen3_vl_tiny") for number in (1, 2, 7)]


@pytest.mark.slow
def test_each_picture_is_encoded_once_and_sent_once() -> None:
    """Fewer pictures than the three ranks, as many and more; features and their gradients send 1.00 of their bytes."""
    ranks = run_processes(3, all_encoded, CELLS)
    for number, cell in enumerate(CELLS):
        expected, found = encoded(*cell, deals=False), [rank[number] for rank in ranks]
        for rank in found:
            assert torch.allclose(rank["features"], expected["features"], rtol=0, atol=1e-6)
            assert set(rank["gradients"]) == set(expected["gradients"]), "every rank runs every layer"
            assert rank["sent"][1] == [] and len(rank["sent"][0]) == 1
        for name, gradient in expected["gradients"].items():
            total = sum(rank["gradients"][name] for rank in found)
            assert float((total - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-6, (cell, name)
        assert sum(rank["sent"][0][0] for rank in found) == 2 * found[0]["exchanged"], "once to each of the others"


@pytest.mark.slow
def test_a_run_goes_on_with_its_tower_cut_and_whole_again(tmp_path: Path) -> None:
    """Checkpoints of one load under the other; the result is that of one process, answers included."""
    single = small_runs.run(chats, tmp_path / "single", 1, "strategy=single")
    keep = ("checkpoint.every_n_steps=1", "checkpoint.keep_last=0", "strategy=tp")
    step, metrics = None, {}
    for number, words in enumerate(((WHOLE,), (), (WHOLE,))):
        folder = tmp_path / str(number)
        metrics = small_runs.run(chats, folder, 2, *keep, *words, resume=step)
        step = folder / "checkpoints" / f"step-0000000{number + 1}"
    for key in ("train/loss", "val/loss", "val/exact_match"):
        assert metrics[key] == pytest.approx(single[key], rel=1e-5)


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
