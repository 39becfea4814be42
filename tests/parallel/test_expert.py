"""Oracle: the same model in one process; for the layer alone, its own forward pass with all experts. Last, every family
of the table on two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

from mgpu_pipe.architectures.find import families_with, family_of
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.models.fields import config_fields
from mgpu_pipe.models.local_shards import layouts_of
from mgpu_pipe.objectives.losses.router_balance import router_modules
from mgpu_pipe.parallel.checkpointing import apply_activation_checkpointing
from mgpu_pipe.parallel.expert.experts import ExpertLoad, apply_expert_parallel, experts_modules
from mgpu_pipe.topology import Meshes, ParallelDims
from tests.support.expert_groups import expert_groups
from tests.support.experts import (
    MIXTURES,
    batch_of,
    fill_like_whole,
    loss_sum,
    one_process,
    share,
    summed_gradients,
    valid_tokens,
    whole_model,
    worst_error,
)
from tests.support.processes import run_processes
from tests.support.sampling import one_in
from tests.support.tiny import MODELS

pytestmark = pytest.mark.slow

LENGTH = 23
"""Odd, so that two tensor-parallel ranks take slices of unequal length."""


def subgroup(wanted: list[list[int]]) -> dist.ProcessGroup:
    """Of the groups of ranks, which all ranks list alike, this rank's."""
    rank = dist.get_rank()
    made = [(ranks, dist.new_group(ranks)) for ranks in wanted]
    return next(group for ranks, group in made if rank in ranks)


def groups_of(dims: ParallelDims) -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's expert-parallel, expert-data, tensor-parallel and data-parallel group."""
    world = range(dims.world_size)
    both = [expert_groups(dims, rank) for rank in world]
    unique = [sorted({tuple(pair[at]) for pair in both}) for at in (0, 1)]
    tensor = [[rank + i for i in range(dims.tp)] for rank in world if rank % dims.tp == 0]
    data = [[rank for rank in world if rank % dims.tp == i] for i in range(dims.tp)]
    experts, expert_data = (subgroup([list(ranks) for ranks in listed]) for listed in unique)
    return experts, expert_data, subgroup(tensor), subgroup(data)


def send_all_to_the_first(model: Any) -> None:
    """Make every router choose the first experts, whatever it thinks."""

    def override(_: Any, __: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        first = torch.arange(output[2].shape[1]).expand_as(output[2])
        return output[0], output[1], first

    for router in router_modules(model):
        router.register_forward_hook(override)


def trained(name: str, sizes: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """One step of two micro-batches on the mesh; the worst gradient, the loss, the load."""
    dims, rank = ParallelDims(**sizes), dist.get_rank()
    experts, expert_data, tensor, data = groups_of(dims)
    model = build_meta(MIXTURES[name])
    model.config._experts_implementation = options.get("implementation", "grouped_mm")
    apply_expert_parallel(model, experts, tp_group=tensor, sequence_parallel=options.get("sequence_parallel", False))
    load = ExpertLoad(model)
    apply_activation_checkpointing(model, options.get("checkpointing", "none"))
    fill_like_whole(model, name)
    reference, batch = whole_model(name), batch_of(8, LENGTH)
    if options.get("uneven"):
        send_all_to_the_first(model)
        send_all_to_the_first(reference)
    expected_loss, expected = one_process(reference, batch)
    # Under sequence parallelism tensor-parallel ranks hold different tokens, here: other samples.
    differ = dims.world_size if options.get("sequence_parallel") else dims.dp_shard
    mine = share(batch, rank if options.get("sequence_parallel") else dims.data_parallel_rank(rank), differ)
    total = torch.zeros((), dtype=torch.float64)
    for number in range(2):
        loss = loss_sum(model, share(mine, number, 2))
        loss.backward(torch.full_like(loss, 1 / valid_tokens(batch)))
        total += loss.detach()
    dense = dist.group.WORLD if options.get("sequence_parallel") else data
    dist.all_reduce(total, group=dense)
    found = summed_gradients(model, dense, expert_data)
    taken = load.take(dist.group.WORLD, dims.world_size // differ)
    owned = {name: layout.ranges for name, layout in layouts_of(model).items()}
    return {
        "worst": worst_error(found, expected),
        "loss": abs(total.item() / valid_tokens(batch) / expected_loss - 1),
        "load": taken,
        "again": load.take(dist.group.WORLD),
        "owned": owned,
    }


def within_bounds(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["loss"] < 1e-5
        assert result["worst"][0] < 1, result["worst"]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("size", [2, 4])
def test_loss_and_every_gradient_are_those_of_one_process(name: str, size: int) -> None:
    results = run_processes(size, trained, name, {"dp_shard": size, "ep": size}, {})
    within_bounds(results)
    assignments = 8 * LENGTH * MIXTURES[name].config["num_experts_per_tok"]
    for result in results:
        assert result["load"].dropped == 0 and result["load"].max_over_mean > 1
        assert [sum(layer) for layer in result["load"].assignments] == [assignments, assignments]
        assert result["again"].max_over_mean == 0
    ranges = [result["owned"]["model.layers.1.mlp.experts.down_proj"] for result in results]
    each = len(results[0]["load"].assignments[0]) // size
    assert ranges == [((rank * each, (rank + 1) * each),) for rank in range(size)]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dp_shard": 4, "ep": 2}, {}),
        pytest.param({"dp_shard": 2, "tp": 2, "ep": 4}, {}, marks=pytest.mark.exhaustive),
        ({"dp_shard": 2, "tp": 2, "ep": 2}, {"checkpointing": "full"}),
        ({"dp_shard": 2, "tp": 2, "ep": 4}, {"sequence_parallel": True}),
    ],
)
def test_it_composes_with_data_and_tensor_parallelism(sizes: dict[str, int], options: dict[str, Any]) -> None:
    results = run_processes(4, trained, "mixtral", sizes, options)
    within_bounds(results)
    for result in results:
        assert result["load"].dropped == 0
        assert [sum(layer) for layer in result["load"].assignments] == [8 * LENGTH * 2] * 2


@pytest.mark.parametrize(
    "options", one_in(2, [{"checkpointing": "full"}, {"checkpointing": "selective"}, {"implementation": "eager"}])
)
def test_recomputed_blocks_and_the_plain_loop_over_experts(options: dict[str, Any]) -> None:
    results = run_processes(2, trained, "qwen3_moe", {"dp_shard": 2, "ep": 2}, options)
    within_bounds(results)
    # Counted once, although blocks are computed twice.
    assert [sum(layer) for layer in results[0]["load"].assignments] == [8 * LENGTH * 3] * 2


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_rank_whose_experts_get_no_token_takes_part(checkpointing: str) -> None:
    options = {"uneven": True, "checkpointing": checkpointing}
    results = run_processes(4, trained, "mixtral", {"dp_shard": 4, "ep": 4}, options)
    within_bounds(results)  # also that unused experts have gradients of zero, as in one process
    assert results[0]["load"].assignments == [[8 * LENGTH, 8 * LENGTH, 0, 0]] * 2
    assert results[0]["load"].max_over_mean == 2


def _one_token() -> tuple[float, float]:
    """A layer with two tensor-parallel ranks and a single token: one rank's slice is empty."""
    torch.manual_seed(3)
    world = dist.group.WORLD
    model = build_meta(MIXTURES["mixtral"])
    apply_expert_parallel(model, world, tp_group=world)
    fill_like_whole(model, "mixtral")
    errors = []
    inputs = torch.randn(1, 1, 32)
    outputs = []
    for layer in (model.model.layers[0].mlp, whole_model("mixtral").model.layers[0].mlp):
        tokens = inputs.clone().requires_grad_()
        output = layer(tokens)
        output.square().sum().backward()
        outputs.append((output.detach(), tokens.grad, layer.gate.weight.grad))
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(*outputs, strict=True)]
    return max(errors), float(outputs[1][2].norm())


def test_a_tensor_parallel_rank_without_a_token_takes_part_and_the_router_counts_once() -> None:
    for error, router_norm in run_processes(2, _one_token):
        assert error < 1e-6
        assert router_norm > 0


def _fully_sharded() -> dict[str, Any]:
    """Experts over ep 2 and sharded over the 2 ranks that hold the same; the rest sharded over all 4."""
    meshes, rank = Meshes(ParallelDims(dp_shard=4, ep=2), "cpu"), dist.get_rank()
    data, same_experts = meshes.data_mesh(), meshes.data_mesh("expert_shard")
    model = build_meta(MIXTURES["mixtral"])
    apply_expert_parallel(model, meshes.group("ep"))
    fill_like_whole(model, "mixtral")
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=same_experts)
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    batch = batch_of(8)
    loss = loss_sum(model, share(batch, rank, 4))
    loss.backward(torch.full_like(loss, 1 / valid_tokens(batch)))
    layouts = layouts_of(model)
    found = {name: (layouts.get(name), p.grad.full_tensor()) for name, p in model.named_parameters()}
    return {"worst": worst_error(found, one_process(whole_model("mixtral"), batch)[1]), "loss": 0.0}


def test_fsdp2_shards_the_experts_over_their_own_mesh() -> None:
    within_bounds(run_processes(4, _fully_sharded))


@pytest.mark.parametrize(
    ("sizes", "rank", "experts", "expert_data"),
    [
        ({"dp_shard": 4, "ep": 4}, 1, [0, 1, 2, 3], [1]),
        ({"dp_shard": 4, "ep": 2}, 3, [2, 3], [1, 3]),
        ({"dp_shard": 2, "tp": 2, "ep": 2}, 2, [2, 3], [0, 2]),
        ({"dp_shard": 2, "tp": 2, "ep": 4}, 2, [0, 1, 2, 3], [2]),
        # Context-parallel ranks lie between: each position has a group of its own, and they share experts.
        ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}, 3, [2, 3, 6, 7], [1, 3]),
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 2, "ep": 2}, 5, [4, 5], [5, 7]),
        ({"dp_shard": 4}, 2, [2], [0, 1, 2, 3]),
    ],
)
def test_groups(sizes: dict[str, int], rank: int, experts: list[int], expert_data: list[int]) -> None:
    assert expert_groups(ParallelDims(**sizes), rank) == (experts, expert_data)


def _mesh_groups(sizes: dict[str, int]) -> tuple[list[int], list[int]]:
    meshes = Meshes(ParallelDims(**sizes), "cpu")
    everyone = meshes.data_mesh("expert_shard").mesh
    return dist.get_process_group_ranks(meshes.group("ep")), sorted(everyone.flatten().tolist())


def test_the_mesh_holds_the_same_groups() -> None:
    for sizes in ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4}, {"dp_replicate": 2, "dp_shard": 4, "ep": 2}):
        for rank, found in enumerate(run_processes(8, _mesh_groups, sizes)):
            assert found == expert_groups(ParallelDims(**sizes), rank)


def _refusals() -> list[str]:
    said = []
    for config in (MODELS["llama"], MODELS["mixtral"]):
        try:
            apply_expert_parallel(build_meta(config), dist.group.WORLD)
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_dense_model_and_experts_that_do_not_divide_are_refused() -> None:
    assert not experts_modules(build_meta(MODELS["llama"]))
    (dense, indivisible), *_ = run_processes(3, _refusals)
    assert "LlamaForCausalLM has no experts" in dense
    assert "has 4 experts, which 3 ranks do not divide" in indivisible


FAMILIES = families_with(lambda family: family.experts)

FIELDS = {
    **{"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 8},
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
"""Sizes by the names that the families give them."""
LATENT = {"num_key_value_heads": 4}
"""Latent attention has one key-value head a head, and no head size of its own."""


def tiny(family: str) -> ModelConfig:
    known = config_fields(family) or set()
    fields = {name: value for name, value in FIELDS.items() if name in known}
    if "kv_lora_rank" in known:
        fields = {**{name: value for name, value in fields.items() if name != "head_dim"}, **LATENT}
    return ModelConfig(name=family, type=family, config={**fields, family_of(family).experts: 4})


def _compared(families: list[str]) -> dict[str, tuple[float, str, int]]:
    """By family the worst gradient over its bound, its name, and how many parameters were cut."""
    world, found = dist.group.WORLD, {}
    for family in families:
        MIXTURES[family] = tiny(family)
        model = build_meta(MIXTURES[family])
        apply_expert_parallel(model, world)
        fill_like_whole(model, family)
        batch = batch_of(4)
        loss = loss_sum(model, share(batch, dist.get_rank(), 2))
        loss.backward(torch.full_like(loss, 1 / valid_tokens(batch)))
        error, name = worst_error(summed_gradients(model, world, None), one_process(whole_model(family), batch)[1])
        found[family] = error, name, len(layouts_of(model))
    return found


@pytest.mark.parametrize("first", one_in(3, range(3)))
def test_every_family_gives_the_gradients_of_one_process(first: int) -> None:
    """A third at a time."""
    families = FAMILIES[first::3]
    for result in run_processes(2, _compared, families):
        assert set(result) == set(families)
        for family, (error, name, cut) in result.items():
            assert error < 1, (family, name, error)
            assert cut >= 2, family
