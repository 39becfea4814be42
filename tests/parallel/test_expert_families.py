"""Oracle: one process. Every family of the table, tiny, with its experts on two processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mgpu_pipe.architectures.find import families_with, family_of
from mgpu_pipe.config.schema import ModelConfig
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.models.fields import config_fields
from mgpu_pipe.models.local_shards import layouts_of
from mgpu_pipe.parallel.expert.experts import apply_expert_parallel
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

pytestmark = pytest.mark.slow

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


@pytest.mark.slow
@pytest.mark.parametrize("first", one_in(3, range(3)))
def test_every_family_gives_the_gradients_of_one_process(first: int) -> None:
    """A third at a time."""
    families = FAMILIES[first::3]
    for result in run_processes(2, _compared, families):
        assert set(result) == set(families)
        for family, (error, name, cut) in result.items():
            assert error < 1, (family, name, error)
            assert cut >= 2, family
