"""Documents of a packed row do not see each other: the oracle is each document alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from mgpu_pipe.architectures.find import families_with
from mgpu_pipe.checks.check_model import check_attention, check_packing
from mgpu_pipe.checks.notices import notices
from mgpu_pipe.config.objective import description
from mgpu_pipe.config.run_identity import differences, mathematics_hash
from mgpu_pipe.config.schema import ModelConfig, RunConfig
from mgpu_pipe.data.model_field import resolve_packing
from mgpu_pipe.data.text.prepare_text import prepare as prepare_text
from mgpu_pipe.errors import ConfigError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.packed_text import block_diagonal_mask, forward_kwargs
from tests.data.support import text_files
from tests.models.tiny import tiny_model
from tests.support.sampling import one_in

CUTS = ((5, 4, 3), (2, 7, 3))
"""Document lengths of two rows; the last of each stands for the padding at the tail."""


def packed_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(3, 100, (2, sum(CUTS[0])), generator=generator)
    input_ids[:, -3:] = 2
    positions = [torch.cat([torch.arange(length) for length in row]) for row in CUTS]
    return {"input_ids": input_ids, "position_ids": torch.stack(positions)}


ALL = families_with(lambda family: family.packing in ("positions", "mask"))
BY_MASK = families_with(lambda family: family.packing == "mask")
EAGER = ["llama", "gpt2", "qwen3", "mixtral", *BY_MASK]


@pytest.mark.parametrize(("family", "attention"), one_in(2, [*product(ALL, ("auto",)), *product(EAGER, ("eager",))]))
def test_logits_of_a_packed_row_are_those_of_each_document_alone(family: str, attention: str) -> None:
    config = tiny_model(family)
    config.attn_implementation = attention  # type: ignore[assignment]
    model = materialise(build_meta(config), 1, "cpu").eval()
    batch = packed_batch()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # makes attention matter: at initialisation it is nearly uniform
        packed = model(**forward_kwargs(model, batch)).logits
        for row, lengths in enumerate(CUTS):
            start = 0
            for length in lengths:
                window = slice(start, start + length)
                alone = model(input_ids=batch["input_ids"][row : row + 1, window], use_cache=False).logits[0]
                worst = (packed[row, window] - alone).abs().max() / alone.abs().max()
                assert worst < 1e-5, f"row {row}, document at {start}: {worst:.1e}"
                start += length


def test_an_unpacked_row_needs_no_mask() -> None:
    model = materialise(build_meta(tiny_model("llama")), 1, "cpu").eval()
    ids = packed_batch()["input_ids"]
    batch = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids)}
    torch.testing.assert_close(model(**forward_kwargs(model, batch)).logits, model(input_ids=ids).logits)


def test_flash_attention_gets_rows_end_to_end() -> None:
    model = build_meta(tiny_model("llama"))
    model.config._attn_implementation = "flash_attention_2"
    batch = packed_batch()
    kwargs = forward_kwargs(model, batch)
    assert kwargs["input_ids"].shape == kwargs["position_ids"].shape == (1, 24)
    assert kwargs["position_ids"][0].eq(0).sum() == sum(map(len, CUTS))


def test_mask_is_causal_inside_documents() -> None:
    mask = block_diagonal_mask(torch.tensor([[0, 1, 0, 1, 2]]), as_bool=True)[0, 0]
    expected = torch.block_diag(torch.ones(2, 2).tril(), torch.ones(3, 3).tril()).bool()
    assert torch.equal(mask, expected)


def test_families_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.packing=best_fit.*data\.packing=none"):
        check_packing({"model_type": "mamba"}, "best_fit")
    with pytest.raises(ConfigError, match="flash_attention_2"):
        check_packing({"model_type": "falcon"}, "best_fit", "flash_attention_2")
    with pytest.raises(ConfigError, match=r"falcon family with alibi=true .*; use data\.packing=none"):
        check_packing({"model_type": "falcon", "alibi": True}, "best_fit")
    check_packing({"model_type": "mamba"}, "none")
    check_packing({"model_type": "llama"}, "best_fit", "flash_attention_2")


ISOLATION = {"llama": "best_fit", "bloom": "none", "gptj": "none", "gpt_oss": "none", "deepseek_v2": "none"}


@pytest.mark.parametrize("kind", ISOLATION)
def test_auto_packs_where_documents_are_kept_apart(kind: str) -> None:
    config = RunConfig(model=ModelConfig(type=kind))
    assert config.data.packing == "auto"
    assert resolve_packing(config.model, config.data, config.objective) == ISOLATION[kind]
    check_attention(config.model, config.data, config.objective)
    noticed = [notice.text for notice in notices(config) if notice.key == "data.packing"]
    assert len(noticed) == (ISOLATION[kind] == "none")
    explicit = replace(config, data=replace(config.data, packing="best_fit"))
    assert mathematics_hash(explicit) == mathematics_hash(config) and not differences(explicit, config)
    if ISOLATION[kind] == "none":
        with pytest.raises(ConfigError, match=r"data\.packing=best_fit: .*; use data\.packing=none"):
            check_attention(explicit.model, explicit.data, explicit.objective)


def test_auto_reads_the_fields_that_decide() -> None:
    falcon = RunConfig(model=ModelConfig(type="falcon"))
    assert resolve_packing(falcon.model, falcon.data, falcon.objective) == "best_fit"
    falcon.model.config = {"alibi": True}
    assert resolve_packing(falcon.model, falcon.data, falcon.objective) == "none"
    seeing = RunConfig(model=ModelConfig(type="paligemma"))
    seeing.objective = description("vision_language").keys()
    assert resolve_packing(seeing.model, seeing.data, seeing.objective) == "none"
    seeing.model.type = "llava"
    assert resolve_packing(seeing.model, seeing.data, seeing.objective) == "best_fit"


def test_documents_of_a_family_that_cannot_pack_have_a_row_each(tmp_path: Path) -> None:
    run, samples = text_files(tmp_path, number=6), {}
    run.data.seq_len, run.data.packing = 1024, "auto"
    for kind in ("llama", "bloom"):
        run.model.type = kind
        prepared = prepare_text(run)
        assert prepared.packing == ISOLATION[kind]
        samples[kind] = prepared.train_samples
    assert samples["llama"] < samples["bloom"] == 5
