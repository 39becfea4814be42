"""Keyed initialisation against transformers' own initialisation of an ordinarily constructed model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import build_meta, draw_parameter, materialise, recipe_of
from mgpu_pipe.models.init import keyed_init
from tests.models.tiny import tiny_model

FAMILIES = [
    *("llama", "gpt2", "qwen3", "mixtral", "qwen3_moe", "mistral", "gemma2", "gemma3_text", "phi3", "qwen2", "falcon"),
    *("opt", "bloom", "gpt_neox", "olmoe", "rwkv", "apertus"),
]


def ordinary(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The oracle: the same class and configuration, constructed on CPU as transformers does it."""
    torch.manual_seed(seed)
    return type(model)(model.config)


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_and_buffers_are_those_of_an_ordinary_model(family: str) -> None:
    config = tiny_model(family, **({"hidden_act": "xielu"} if family == "apertus" else {}))
    model = materialise(build_meta(config), 7, "cpu")
    oracle = ordinary(model)
    expected = dict(oracle.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, parameter in model.named_parameters():
        want = expected[name]
        assert (parameter.dtype, parameter.shape) == (torch.float32, want.shape), name
        if want.numel() < 2:
            continue
        deviation, count = want.std().item(), want.numel()
        assert parameter.std().item() == pytest.approx(deviation, abs=6 * deviation / (2 * count) ** 0.5 + 1e-7), name
        assert parameter.mean().item() == pytest.approx(want.mean().item(), abs=8 * deviation / count**0.5 + 1e-6), name
    buffers = dict(oracle.named_buffers())
    assert set(buffers) == {name for name, _ in model.named_buffers()}
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_materialised_model_computes(family: str) -> None:
    model = materialise(build_meta(tiny_model(family)), 7, "cpu").eval()
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert torch.isfinite(model(input_ids=torch.arange(8)[None]).logits).all()


def test_a_parameter_has_the_same_bits_whatever_else_is_drawn() -> None:
    whole = dict(materialise(build_meta(tiny_model("mixtral")), 3, "cpu").named_parameters())
    meta = build_meta(tiny_model("mixtral"))
    recipe = recipe_of(meta)
    for name in reversed([*whole][1::3]):
        assert torch.equal(draw_parameter(meta, recipe, name, 3), whole[name]), name
    other = draw_parameter(meta, recipe, "model.embed_tokens.weight", 4)
    assert not torch.equal(other, whole["model.embed_tokens.weight"])
    first, second = (whole[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)


def test_rows_are_slices_of_the_whole_across_chunks_and_threads() -> None:
    meta = build_meta(tiny_model("llama", vocab_size=80_000))
    recipe, name = recipe_of(meta), "model.embed_tokens.weight"
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = draw_parameter(meta, recipe, name, 3)
        torch.set_num_threads(2)
        again = draw_parameter(meta, recipe, name, 3)
    finally:
        torch.set_num_threads(threads)
    assert whole.numel() > 2 * keyed_init.CHUNK
    assert torch.equal(whole, again)
    for rows in ((0, 1), (32_700, 32_800), (10, 70_001), (79_999, 80_000)):
        assert torch.equal(draw_parameter(meta, recipe, name, 3, rows=rows), whole[slice(*rows)])
    start = keyed_init.CHUNK // 64
    assert not torch.equal(whole[0], whole[start])


def test_drawing_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    materialise(build_meta(tiny_model("rwkv")), 3, "cpu")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_tied_embeddings_are_drawn_once_and_stay_tied(family: str) -> None:
    model = materialise(build_meta(tiny_model(family, tie_word_embeddings=True)), 3, "cpu")
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert embedding is head
    assert sum(parameter is embedding for parameter in model.parameters()) == 1


def test_padding_row_is_zero_and_only_that_row() -> None:
    for tied in (False, True):
        model = materialise(build_meta(tiny_model("llama", pad_token_id=5, tie_word_embeddings=tied)), 3, "cpu")
        zero = (model.get_input_embeddings().weight == 0).all(dim=1)
        assert zero.nonzero().flatten().tolist() == [5]


def test_gpt2_scales_its_residual_projections() -> None:
    model = materialise(build_meta(tiny_model("gpt2", n_embd=128, n_layer=8)), 3, "cpu")
    weight = model.transformer.h[3].attn.c_proj.weight
    assert weight.std().item() == pytest.approx(0.02 / (2 * 8) ** 0.5, rel=0.03)


class OddConfig(PretrainedConfig):
    model_type = "odd"


class Odd(PreTrainedModel):
    """Has one parameter that its initialisation forgets, one truncated normal, one orthogonal."""

    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.forgotten = nn.Parameter(torch.empty(4))
        self.truncated = nn.Parameter(torch.empty(300, 400))
        self.orthogonal = nn.Parameter(torch.empty(16, 16))
        self.constructed = nn.Parameter(torch.arange(6.0) * 2)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            nn.init.trunc_normal_(self.truncated, std=0.5, a=-0.6, b=1.0)
            nn.init.orthogonal_(self.orthogonal)


def test_initialisations_that_torch_skips_on_meta_are_replayed() -> None:
    with torch.device("meta"):
        meta = Odd(OddConfig())
    recipe = recipe_of(meta)
    truncated = recipe.draw("truncated", 1)
    oracle = nn.init.trunc_normal_(torch.empty(300, 400), std=0.5, a=-0.6, b=1.0)
    assert truncated.min() >= -0.6
    assert truncated.max() <= 1.0
    assert truncated.std().item() == pytest.approx(oracle.std().item(), rel=0.02)
    orthogonal = recipe.draw("orthogonal", 1)
    torch.testing.assert_close(orthogonal @ orthogonal.T, torch.eye(16), atol=1e-5, rtol=0)
    assert torch.equal(orthogonal, recipe.draw("orthogonal", 1))
    assert not torch.equal(orthogonal, recipe.draw("orthogonal", 2))
    assert torch.equal(recipe.draw("constructed", 1), torch.arange(6.0) * 2)


def test_a_forgotten_parameter_is_an_error_that_names_it() -> None:
    with torch.device("meta"):
        meta = Odd(OddConfig())
    with pytest.raises(ConfigError, match=r"model\.type=odd.*forgotten"):
        materialise(meta, 1, "cpu")
