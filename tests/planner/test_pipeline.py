"""Oracles: every possible cut tried, and the parameters that the built stages hold."""

from __future__ import annotations

import itertools
import random

import pytest

from mgpu_pipe.architectures.formulas.pipeline_schedules import LayerCosts, layer_costs, stage_contents, stage_layers
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.fields import resolved_fields
from tests.parallel.pipeline_support import build_meta, model_of


def every_cut(layers: int, stages: int) -> list[tuple[range, ...]]:
    found = []
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        ends = [0, *cuts, layers]
        found.append(tuple(range(start, stop) for start, stop in itertools.pairwise(ends)))
    return found


def test_no_cut_has_a_cheaper_costliest_stage() -> None:
    generator = random.Random(3)
    for _ in range(60):
        layers = generator.randint(1, 8)
        costs = LayerCosts(
            generator.choice([0, 2]),
            tuple(generator.choice([1, 2, 5]) for _ in range(layers)),
            generator.choice([0, 7]),
        )
        stages = generator.randint(1, layers)
        found = stage_layers(costs, stages)
        assert [layer for held in found for layer in held] == list(range(layers)) and all(map(len, found))
        best = min(max(map(costs.stage, cut)) for cut in every_cut(layers, stages))
        assert max(map(costs.stage, found)) == best


def test_a_large_head_takes_layers_from_the_last_stage() -> None:
    fields = resolved_fields(model_of("llama", 8))
    small, large = ({**fields, "vocab_size": size} for size in (16, 4096))
    assert list(map(len, stage_layers(layer_costs(small, 24), 4))) == [2, 2, 2, 2]
    assert len(stage_layers(layer_costs(large, 24), 4)[-1]) == 1


def test_layers_of_experts_cost_what_a_token_passes_through() -> None:
    fields = {
        "model_type": "qwen3_moe",
        "hidden_size": 8,
        "vocab_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "intermediate_size": 64,
        "moe_intermediate_size": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    }
    costs = layer_costs(fields, 16)
    dense, sparse = costs.layers[0], costs.layers[1]
    assert costs.layers == (dense, sparse, dense, sparse) and dense > sparse
    assert dense - sparse == 2 * (3 * 8 * 64 - 8 * 8 - 2 * 3 * 8 * 4)
    assert costs.layer_parameters[1] - costs.layer_parameters[0] == 8 * 8 + 8 * 3 * 8 * 4 - 3 * 8 * 64


def test_by_hand_is_taken_as_it_is_or_refused() -> None:
    costs = LayerCosts(1, (1, 1, 1, 1), 1)
    assert stage_layers(costs, 2, [3, 1]) == (range(3), range(3, 4))
    for wrong in ([2, 1], [4, 0], [1, 1, 2]):
        with pytest.raises(ValueError, match="does not cut 4 layers into 2 stages"):
            stage_layers(costs, 2, wrong)
    with pytest.raises(ValueError, match="4 layers cannot be cut into 5 stages"):
        stage_layers(costs, 5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "mixtral"])
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("interleaved_1f1b", 2), ("zbv", 2)])
def test_what_check_prints_is_what_the_ranks_hold(name: str, schedule: str, ranks: int) -> None:
    from mgpu_pipe.parallel.pipeline.run_pipeline import PipelinePlan

    model = model_of(name, 5)
    costs = layer_costs(resolved_fields(model), 24)
    plan = PipelinePlan.make(schedule, ranks, costs)
    contents = stage_contents(costs, plan.layers, plan.ranks_of_stages)
    assert sum(content.share for content in contents) == pytest.approx(1.0)
    for rank in range(ranks):
        built = build_meta(model)
        views = plan.cut(built, rank)
        held = sum(content.parameters or 0 for content in contents if content.rank == rank)
        assert sum(p.numel() for p in built.parameters()) == held
        assert [view.index for view in views] == [c.stage for c in contents if c.rank == rank]


def test_what_a_stage_holds_is_left_out_where_it_cannot_be_counted() -> None:
    said = {}
    for family in ("llama", "gpt_neox"):
        costs = layer_costs(resolved_fields(ModelConfig(type=family)), 24)
        (content,) = stage_contents(costs, [range(len(costs.layers))], (0,))
        said[family] = content.describe()
    assert said["llama"].endswith("norm and head, 6.74e+03M parameters, 100% of the work")
    assert said["gpt_neox"].endswith("norm and head, 100% of the work")
