"""Oracles: transformers builds the small model; the large one has the same parameters, layers and sizes aside."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import build_meta
from mgpu_pipe.parallel.random_streams import uses_dropout
from mgpu_pipe.system.conf_folders import conf_dir
from mgpu_pipe.topology import BatchPlan, ParallelDims
from mgpu_pipe.verify.shrink import Shrunk, shrink
from mgpu_pipe.verify.shrink_model import shrink_model
from tests.support.sampling import one_in
from tests.support.tiny import model_class
from tests.verify.support import composed

SHIPPED = sorted(path.stem for path in (conf_dir() / "model").glob("*.yaml") if path.stem != "hf")
FAMILIES = ["deepseek_v3", "gemma2", "gemma3_text", "gpt_neox", "gpt2", "olmo2", "opt", "phi3", "qwen2_moe", "smollm3"]


def small(config: RunConfig, **sizes: int) -> Shrunk:
    dims = ParallelDims(**sizes)
    return shrink(replace(config, strategy=replace(config.strategy, **dims.as_dict())), dims)


def layout(model: torch.nn.Module) -> dict[str, int]:
    """Parameter names without layer numbers, and their number of dimensions."""
    return {re.sub(r"\.\d+\.", ".*.", name): p.ndim for name, p in model.named_parameters()}


def shallow(fields: dict[str, Any]) -> dict[str, Any]:
    """A model's fields with two layers and four experts, in its towers too."""
    sizes = {"n_layer": 2, "num_hidden_layers": 2, "num_layers": 2, "num_decoder_layers": 2}
    sizes |= {"num_experts": 4, "num_local_experts": 4}
    return {
        name: shallow(value) if name in ("text_config", "vision_config") else sizes.get(name, value)
        for name, value in fields.items()
    }


@pytest.mark.parametrize("name", one_in(2, SHIPPED))
def test_a_shipped_model_becomes_small_and_keeps_its_architecture(name: str) -> None:
    config = composed(f"model={name}", "strategy=ddp")
    kind = model_class(config.model)
    model = build_meta(small(config, dp_replicate=4).config.model, kind)
    assert sum(p.numel() for p in model.parameters()) < 200_000
    large = build_meta(replace(config.model, config=shallow(config.model.config)), kind)
    assert layout(model) == layout(large)
    assert type(model) is type(large)
    if not hasattr(large.config, "num_attention_heads"):  # two towers
        return
    heads, small_heads = (m.config.num_attention_heads for m in (large, model))
    if hasattr(large.config, "num_key_value_heads"):
        assert small_heads * large.config.num_key_value_heads == heads * model.config.num_key_value_heads


@pytest.mark.parametrize("name", one_in(2, reversed(SHIPPED)))
def test_the_small_model_divides_as_the_large_one(name: str) -> None:
    config = composed(f"model={name}", "strategy=ddp")
    tp = 2 if name.startswith("gpt2") else 4
    found = small(config, tp=tp, pp=3, cp=2, dp_shard=2, ep=2 * tp)
    model = build_meta(found.config.model, model_class(found.config.model)).config
    towers = [getattr(model, f"{part}_config", None) for part in ("text", "vision", "audio")]
    if towers := [tower for tower in towers if tower is not None]:
        assert len(towers) > 1
        for part in towers:
            assert part.num_attention_heads % tp == part.hidden_size % tp == part.intermediate_size % tp == 0
        return
    for size in ("num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "n_inner"):
        alone = config.model.config.get(size) == 1  # key-value head, which all ranks share
        if getattr(model, size, None) is not None and not alone:
            assert getattr(model, size) % tp == 0, size
    vocabulary = config.model.config.get("vocab_size")  # pictures have none
    assert vocabulary is None or (model.vocab_size % tp == 0) == (vocabulary % tp == 0)
    assert model.num_hidden_layers % 3 == 0
    assert found.config.data.seq_len % 4 == 0
    experts = getattr(model, "num_local_experts", None) or getattr(model, "num_experts", None)
    if experts:
        assert experts >= model.num_experts_per_tok
        assert experts % (2 * tp) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_folder_of_another_family_becomes_small(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    large = AutoConfig.for_model(family)
    large.save_pretrained(tmp_path)
    found = shrink_model(ModelConfig(path=str(tmp_path)), ParallelDims(tp=2), 32)
    model = build_meta(found)
    assert model.config.model_type == family
    assert sum(p.numel() for p in model.parameters()) < 300_000
    assert not uses_dropout(model)
    model.to_empty(device="cpu")
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02)
    ids = torch.zeros(1, 32, dtype=torch.int64)
    assert model(input_ids=ids, use_cache=False).logits.shape[-1] == found.config["vocab_size"]


def test_every_kind_of_layer_stays(tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("gemma3_text").save_pretrained(tmp_path)
    found = shrink_model(ModelConfig(path=str(tmp_path)), ParallelDims(pp=4), 32, 4)
    assert found.config["layer_types"] == ["sliding_attention", "full_attention"] * 2


def test_what_is_taken_away_is_told() -> None:
    config = composed("model=gpt2_tiny", "model.config.resid_pdrop=0.1", "optimizer.lr=1e-3", "strategy=single")
    found = small(config)
    assert found.config.optimizer.lr == 3e-4
    assert found.config.model.config["resid_pdrop"] == 0.0
    told = "\n".join(found.notices())
    assert "model.config.resid_pdrop=0.0 here instead of 0.1" in told
    assert "optimizer.lr=0.0003 here instead of 0.001" in told
    assert small(composed("model=gpt2_tiny", "optimizer.lr=1e-4")).notices() == []


def test_the_batch_accumulates_where_the_configured_one_does() -> None:
    several = composed("strategy=ddp", "data.global_batch_size=64", "data.micro_batch_size=4")
    one = composed("strategy=ddp", "data.global_batch_size=16", "data.micro_batch_size=4")
    for config, expected in ((several, 2), (one, 1)):
        found = small(config, dp_replicate=4).config
        assert BatchPlan.resolve(found.data, 4).num_micro_batches == expected


def test_what_decides_the_numbers_is_kept() -> None:
    config = composed(
        "optimizer=sgd",
        "optimizer.options.momentum=0.9",
        "trainer.gradient_clip_val=0.3",
        "precision=bf16",
        "scheduler=wsd",
        "scheduler.warmup_steps=50",
        "optimizer.lr=1e-4",
    )
    found = small(config).config
    assert found.optimizer == config.optimizer
    assert found.trainer.gradient_clip_val == 0.3
    assert found.precision.name == "bf16"
    assert found.scheduler.name == "wsd"
    assert 0 < found.scheduler.warmup_steps < 10


def test_shrinking_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "import mgpu_pipe.verify.driver\n"
        "from mgpu_pipe.config.hydra.compose import compose\n"
        "from mgpu_pipe.topology import ParallelDims\n"
        "from mgpu_pipe.verify.shrink import shrink\n"
        "shrink(compose(['model=llama3_8b'])[0], ParallelDims())\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_what_cpu_processes_do_not_have_is_refused_or_left_out() -> None:
    config = composed("model=llama_tiny", "strategy=fsdp", "precision=fp8")
    with pytest.raises(ConfigError, match="verify computes on CPU processes"):
        small(config, dp_shard=2)
    found = small(composed("model=llama_tiny", "strategy=fsdp", "strategy.offload=cpu"), dp_shard=2)
    assert found.config.strategy.offload == "none"
    assert any("strategy.offload=none here instead of cpu" in line for line in found.notices())
    assert small(composed("model=llama_tiny", "strategy=zero3_cpu"), dp_shard=2).config.strategy.offload == "cpu"
