"""Oracle: the plain model of tests/support/tiny.py in one process: loss, every gradient, by verify.certificate."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.local_shards import layouts_of
from mgpu_pipe.objectives.causal_lm import CausalLMObjective
from mgpu_pipe.parallel.checkpointing import apply_activation_checkpointing
from mgpu_pipe.parallel.device_memory import ForwardMeter
from mgpu_pipe.parallel.fsdp import ShardingOptions, apply_fully_shard, reshard_all
from mgpu_pipe.parallel.tensor.apply import apply_tensor_parallel
from mgpu_pipe.parallel.tensor.collectives import reduce_replicated_gradients
from mgpu_pipe.parallel.tensor.cut import TensorCut
from tests.support.filling import assembled, fill, owned_shards
from tests.support.processes import run_processes
from tests.support.sampling import one_in, sampled
from tests.support.tiny import MODELS, SEQ_LEN, global_batch, plain_steps, step_batch

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def changed(name: str, **fields: Any) -> ModelConfig:
    return replace(MODELS[name], config={**MODELS[name].config, **fields})


CASES = {
    **{name: MODELS[name] for name in ("llama", "qwen3", "gpt2", "mixtral")},
    "odd vocabulary": changed("llama", vocab_size=101, attention_bias=True, mlp_bias=True),
    "one key-value head": changed("qwen3", num_key_value_heads=1, attention_bias=True),
    "tied": changed("qwen3", tie_word_embeddings=True, vocab_size=99),
    "scaled embedding, soft-capped logits": ModelConfig(
        name="gemma2", type="gemma2", config={**MODELS["llama"].config, "head_dim": 8, "pad_token_id": 0}
    ),
    "norms with weights for each head": ModelConfig(
        name="cohere", type="cohere", config={**MODELS["llama"].config, "use_qk_norm": True, "pad_token_id": 0}
    ),
    "norms of heads that the plan does not name": ModelConfig(
        name="glm4_moe",
        type="glm4_moe",
        config={
            **MODELS["llama"].config,
            **{"head_dim": 8, "use_qk_norm": True, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
            **{"n_shared_experts": 1},
        },
    ),
    "qwen3_moe": ModelConfig(
        name="qwen3_moe",
        type="qwen3_moe",
        config={
            **MODELS["llama"].config,
            **{"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"norm_topk_prob": True},
        },
    ),
}


SPLIT = set(CASES) - {
    "scaled embedding, soft-capped logits",
    "norms with weights for each head",
    "norms of heads that the plan does not name",
}
"""Those with a plan for sequence parallelism."""


def oracle(config: ModelConfig) -> dict[str, Any]:
    model = build_meta(config)
    materialise(model, 5, CPU)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {**plain_steps(model, 1, 1e-4), "weights": weights}


def step_of(
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    tp: int,
    sequence_parallel: bool,
    chunk: int | str = 7,
    checkpointing: str = "none",
    loss_head_first: bool = True,
) -> dict[str, Any]:
    """One step batch, its samples cut over what ``tp`` leaves of the world; loss, and this rank's local shards of
    gradients.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp_shard", "tp"))
    group, dp = mesh["tp"].get_group(), mesh["dp_shard"]
    model = build_meta(config)
    before = CausalLMObjective(model, None, lambda step: 1.0, chunk) if loss_head_first else None
    apply_tensor_parallel(model, group, sequence_parallel=sequence_parallel)
    apply_activation_checkpointing(model, checkpointing)  # type: ignore[arg-type]
    root = apply_fully_shard(model, dp, "fp32", ShardingOptions()) if dp.size() > 1 else None
    fill(model, weights)
    objective = before or CausalLMObjective(model, None, lambda step: 1.0, chunk)
    step = step_batch(0, dp.get_local_rank(), dp.size(), 2)
    loss_sum = torch.zeros((), dtype=torch.float64)
    for micro_batch in step.micro_batches:
        loss = objective.micro_batch_loss(micro_batch)
        loss.backward(torch.full_like(loss, 1.0 / step.loss_denominator))
        loss_sum += loss.detach()
    dist.all_reduce(loss_sum, group=dp.get_group())
    if root is not None:
        reshard_all(root)
    reduce_replicated_gradients(model, group)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    plain = {} if dp.size() > 1 else {name: gradient.clone() for name, gradient in gradients.items()}
    return {
        "loss": float(loss_sum) / step.loss_denominator,
        "pieces": owned_shards(model, gradients),
        "gradients": {(name, layouts_of(model)[name].ranges): gradient for name, gradient in plain.items()},
    }


def worst(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest error of a gradient over its bound, and whose."""
    total = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
    return max(
        (float((gradients[n] - g).double().norm()) / (1e-5 * float(g.double().norm()) + 1e-7 * total), n)
        for n, g in expected.items()
    )


def compare(case: str, results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for result in results:
        assert abs(result["loss"] / expected["losses"][0] - 1) < 1e-5
        assert result["loss"] == results[0]["loss"]
    whole = assembled((shard for result in results for shard in result["pieces"]), expected["gradients"])
    error, name = worst(whole, expected["gradients"])
    print(f"{case}: error over bound {error:.4f} ({name})")
    assert error < 1, name
    held: dict[Any, torch.Tensor] = {}
    for result in results:
        for key, gradient in result["gradients"].items():
            assert torch.equal(gradient, held.setdefault(key, gradient)), f"copies of {key} have one gradient"


def steps_of(config: ModelConfig, weights: dict[str, torch.Tensor], variants: list[tuple[Any, ...]]) -> list[Any]:
    """One step each; starting processes takes longer than what they do."""
    return [step_of(config, weights, *variant) for variant in variants]


def check(case: str, world_size: int, variants: list[tuple[Any, ...]]) -> None:
    expected = oracle(CASES[case])
    ranks = run_processes(world_size, steps_of, CASES[case], expected["weights"], variants)
    for number, variant in enumerate(variants):
        compare(f"{case} {variant}", [steps[number] for steps in ranks], expected)


@pytest.mark.parametrize(
    ("case", "tp"), sampled(product(CASES, (2, 4)), lambda case, tp: list(CASES).index(case) % 4 == tp // 2)
)
def test_loss_and_every_gradient_are_those_of_one_process(case: str, tp: int) -> None:
    # Without and with sequence parallelism; some logits at once, or all; the objective made before or after.
    if case not in SPLIT:
        check(case, tp, [(tp, False, 7)])
    elif tp == 2:
        check(case, tp, [(tp, False, 7, "none", True), (tp, True, 7, "none", False)])
    else:
        check(case, tp, [(tp, False, "auto", "none", False), (tp, True, 0, "none", True)])


@pytest.mark.parametrize("case", one_in(3, ["mixtral", "llama", "gpt2"]))
def test_sharded_over_the_data_parallel_ranks_too(case: str) -> None:
    check(case, 4, [(2, False), (2, True)])


def test_with_activation_checkpointing() -> None:
    check("qwen3", 2, [(2, split, 7, mode) for split in (False, True) for mode in ("full", "selective")])


def _logits(config: ModelConfig, weights: dict[str, torch.Tensor], length: int) -> list[torch.Tensor]:
    model = build_meta(config)
    group = dist.group.WORLD
    assert group is not None
    apply_tensor_parallel(model, group, sequence_parallel=True)
    fill(model, weights)
    with mock.patch.object(dist, "all_reduce", side_effect=AssertionError("two rounds, where a gathering takes one")):
        return _evaluated(model, length)


@torch.no_grad()
def _evaluated(model: Any, length: int) -> list[torch.Tensor]:
    """Whole logits, the last position's alone, and four tokens generated with a key-value cache."""
    model.eval()
    ids = global_batch(0)["input_ids"][:2, :length]
    generated = model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=True, eos_token_id=-1, pad_token_id=0)
    return [model(input_ids=ids).logits, model(input_ids=ids, logits_to_keep=1).logits, generated]


@pytest.mark.parametrize(("case", "length"), [("llama", 12), ("tied", 7), ("gpt2", 7)])
def test_evaluation_and_generation_see_whole_logits(case: str, length: int) -> None:
    model = build_meta(CASES[case])
    materialise(model, 5, CPU)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = _evaluated(model, length)
    for logits, last, generated in run_processes(2, _logits, CASES[case], weights, length):
        torch.testing.assert_close(logits, expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(last, expected[1], rtol=1e-5, atol=1e-6)
        assert torch.equal(generated, expected[2])


METER = 0.01
"""The meter tells storages apart by their address: small ones at an address used before may go uncounted."""


def _activation_bytes(tp: int, sequence_parallel: bool) -> list[int]:
    """What the forward pass of one micro-batch leaves, for 2 and for 4 blocks."""
    found = []
    for layers in (2, 4):
        model = build_meta(changed("llama", num_hidden_layers=layers, num_key_value_heads=4))
        group = dist.group.WORLD
        assert group is not None and group.size() == tp
        apply_tensor_parallel(model, group, sequence_parallel=sequence_parallel)
        fill(model, _Ones(model))
        objective = CausalLMObjective(model, None, lambda step: 1.0, 7)
        (micro_batch,) = step_batch(0, 0, 4, 2).micro_batches
        with ForwardMeter(CPU) as meter:
            loss = objective.micro_batch_loss(micro_batch)
        found.append(meter.left_bytes())
        del loss
    return found


class _Ones(dict[str, torch.Tensor]):
    def __init__(self, model: torch.nn.Module) -> None:
        layouts = layouts_of(model)
        shapes = {n: layouts[n].whole if n in layouts else tuple(p.shape) for n, p in model.named_parameters()}
        super().__init__({name: torch.full(shape, 0.01) for name, shape in shapes.items()})


def test_kept_activations_of_a_block_by_the_closed_form() -> None:
    """All of a block's bytes are divided by tp, but for its norms where the sequence is whole, and for the mask.

    Two norms keep their input, the normalised and the weighted values, and the root of the mean square. The attention
    operator keeps a float copy of the mask of packed documents, which is one for all heads.
    """
    (one,) = run_processes(1, _activation_bytes, 1, False)
    mask = 4 * 2 * SEQ_LEN * SEQ_LEN
    block = (one[1] - one[0]) / 2 - mask
    norms = 2 * (3 * MODELS["llama"].config["hidden_size"] + 1) * 4 * 2 * SEQ_LEN
    for tp in (2, 4):
        for result in run_processes(tp, _activation_bytes, tp, True):
            assert (result[1] - result[0]) / 2 == pytest.approx(block / tp + mask, rel=METER)
        for result in run_processes(tp, _activation_bytes, tp, False):
            assert (result[1] - result[0]) / 2 == pytest.approx((block - norms) / tp + norms + mask, rel=METER)


def _untouched() -> list[str]:
    model = build_meta(MODELS["mixtral"])
    group = dist.group.WORLD
    assert group is not None
    apply_tensor_parallel(model, group, sequence_parallel=True, experts=False)
    return [name for name, _ in model.named_parameters() if name not in layouts_of(model)]


def test_experts_are_left_to_their_own_axis() -> None:
    for names in run_processes(2, _untouched):
        assert names == [f"model.layers.{i}.mlp.experts.{n}" for i in (0, 1) for n in ("gate_up_proj", "down_proj")]


def _split_from(size: int) -> list[Any]:
    """What a world whose ranks have devices of their own is asked for."""
    world = dist.group.WORLD
    assert world is not None and world.size() == size
    world.bound_device_id = torch.device("cuda", 0)  # type: ignore[assignment]
    try:
        with (
            mock.patch.object(dist, "split_group", return_value=world) as split,
            mock.patch.object(dist, "new_group") as new,
        ):
            cut = TensorCut(build_meta(MODELS["llama"]), world)
            assert cut.sharers(2) is cut.sharers(2) is cut.sharers(1) is cut.sharers(4)
        return [call.args[1] for call in split.call_args_list if call.args[0] is world] + new.call_args_list
    finally:
        world.bound_device_id = None  # type: ignore[assignment]


def test_on_gpus_ranks_that_share_heads_wait_for_no_other_stage() -> None:
    """NCCL splits a new group from the world, which a pipeline stage without attention would never join."""
    assert run_processes(4, _split_from, 4) == [[[[0, 1], [2, 3]], [[0], [1], [2], [3]]]] * 4
