"""Qwen-VL. Oracle: transformers' own model and picture processor, one conversation at a time, in one process."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.preview import parts_of
from mgpu_pipe.errors import DataError
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.model_parts import part_patterns
from mgpu_pipe.objectives.vision_language import VisionLanguageObjective
from tests.objectives.harness import check_trained_on, check_written, exported_model, generated
from tests.objectives.test_vision_language import CLASS
from tests.support import small_runs
from tests.support.pictures import SIZES, stored, write_chats
from tests.support.sampling import one_in
from tests.verify.support import small_run

GIVEN = ("objective=vision_language", "logger=none", "trainer.progress=off")
QWEN25, QWEN3 = "model=qwen25_vl_tiny", "model=qwen3_vl_tiny"
ADAPTED = ("peft=lora", "peft.targets=[language]", "peft.train_also=[projector]")
FURTHER = {ADAPTED: (QWEN3, "tp"), ("precision=bf16",): (QWEN25, "fsdp")}
"""What else each strategy is tried with, and the cell that is sampled."""


def chats(folder: Path, *overrides: str) -> RunConfig:
    """Conversations with none, one or two pictures, of four sizes."""
    write_chats(folder)
    tower = "model.config.vision_config"
    shape = (f"{tower}.in_channels=3", f"{tower}.temporal_patch_size=2", "model.config.text_config.vocab_size=300")
    given = ("data=picture_chats", f"data.paths=[{folder / 'chats.jsonl'}]", f"data.cache_dir={folder / 'cache'}")
    more = ("data.chat_template=chatml", "data.seq_len=160", "data.max_pixels=1600", "data.validation_fraction=0.4")
    steps = ("trainer.max_steps=4", "data.global_batch_size=4", "data.num_workers=0")
    chosen = () if any(one.startswith("model=") for one in overrides) else (QWEN25,)
    shape = () if "model=hf" in overrides else shape
    return compose([*GIVEN, *chosen, *given, *more, *steps, *shape, *overrides])[0]


run = partial(small_runs.run, chats)


def test_a_picture_keeps_its_shape_and_tokens_stand_where_transformers_puts_them(tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    config = chats(tmp_path, "data.validation_fraction=0")
    prepared: Any = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    samples, every = prepared.open(config, "train"), np.arange(len(SIZES) + 2)
    batch, row = samples.batch(every, every), len(SIZES)
    side = {name: 4 * torch.tensor(prepared.grid.places(*size)) for name, size in SIZES.items()}
    assert {name: tuple(one.tolist()) for name, one in side.items()} == {
        **{"wide": (12, 40), "high": (32, 16), "small": (8, 12), "large": (44, 32)}
    }, "scaled up to four places, down to 1600 pixels, and to whole places else"
    shown = [[name] for name in SIZES] + [["wide", "high"], []]
    assert batch["grids"][row].tolist() == [[1, *(side[name] // 2).tolist()] for name in ("wide", "high")]
    amounts = [sum(int(side[name].prod()) // 16 for name in names) for names in shown]
    pictured = batch["input_ids"] == prepared.image_token_id
    assert pictured.sum(1).tolist() == amounts
    assert samples.padding(every) == 160 * len(every) - int(samples.length.sum())
    # transformers' processor makes the same patches and grids of each picture ...
    grid, pixels = prepared.grid, samples._pixels
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": grid.least, "longest_edge": grid.most},
        **{"patch_size": grid.patch, "merge_size": grid.merge, "temporal_patch_size": grid.frames},
        **{"image_mean": list(pixels.mean), "image_std": list(pixels.std)},
    )
    model: Any = materialise(build_meta(prepared.complete(config).model, CLASS), 1, "cpu").model  # type: ignore[union-attr]
    for number, names in enumerate(shown):
        if names:
            own = processor([Image.open(tmp_path / f"{name}.png") for name in names], return_tensors="pt")
            patches = batch["pixel_values"][number][: len(own["pixel_values"])]
            assert torch.allclose(patches, own["pixel_values"], atol=1e-5)
            assert not batch["pixel_values"][number][len(patches) :].any()
            # ... and its model the same positions of each row.
            found, _ = model.get_rope_index(
                batch["input_ids"][number][None], pictured[number][None].int(), own["image_grid_thw"]
            )
            assert torch.equal(batch["position_ids"][number], found[:, 0])
    assert torch.equal(batch["position_ids"][-1], torch.arange(160).expand(3, -1))
    text = ["".join(part.text for part in one) for one in parts_of(prepared, samples, every, every, True)]
    assert [one.count("<image>") for one in text] == list(map(len, shown)), "as people are shown them"
    most = int(samples.length.max()) - 1
    short = prepare(chats(tmp_path, "data.validation_fraction=0", f"data.seq_len={most}"))
    assert short.train_samples == 5 and short.too_long_samples == 1


@pytest.mark.slow
def test_a_picture_that_is_too_long_stops_or_is_left_out(tmp_path: Path) -> None:
    chats(tmp_path)
    (tmp_path / "small.png").write_bytes(stored(Image.new("RGB", (402, 2))))
    with pytest.raises(DataError, match=r"small.png is more than 200 times as long as wide.*on_bad_sample=skip"):
        prepare(chats(tmp_path))
    prepared: Any = prepare(chats(tmp_path, "data.on_bad_sample=skip", "data.validation_fraction=0"))
    assert (prepared.train_samples, prepared.bad_samples) == (5, 1)


def test_the_merger_is_the_projector_and_shipped_models_have_their_published_size() -> None:
    model = build_meta(compose(["model=qwen25_vl_7b"])[0].model, CLASS)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(8292.2, rel=1e-4)
    parts = part_patterns(model)
    assert parts["projector"] == ["model.visual.merger.*"]
    assert parts["vision"] == ["model.visual.patch_embed.*", "model.visual.blocks.*"]
    assert parts["language"] == ["model.language_model.*", "lm_head.*"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), one_in(2, [(QWEN25, "Qwen2_5_VL"), (QWEN3, "Qwen3VL")]))
@pytest.mark.exhaustive
def test_a_run_goes_on_under_another_strategy_answers_and_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, name: str
) -> None:
    import transformers

    from mgpu_pipe.inference.open import load_run
    from mgpu_pipe.inference.visual_prompts import PromptVisuals

    metrics = small_runs.run_moved(chats, tmp_path, words=(model,))
    second, pictures = tmp_path / "second", [tmp_path / "high.png", tmp_path / "large.png"]
    answer = generated(second, capsys, "Is <image> or <image> high?", *pictures)
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    exported = exported_model(second, kind, capsys)
    # Its own picture processor, positions and generation write the same.
    processor = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil.from_pretrained(
        tmp_path / "out"
    )
    made = processor([Image.open(picture) for picture in pictures], return_tensors="pt")
    loaded = load_run(second)
    visuals = PromptVisuals.from_files(loaded, pictures)
    assert visuals is not None
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    places = ["<image>" * (int(one.prod()) // 4) for one in made["image_grid_thw"]]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Is {} or {} high?".format(*places)}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    inputs = {"input_ids": ids, **made, "mm_token_type_ids": (ids == exported.config.image_token_id).int()}
    ours = visuals.inputs(ids.tolist(), torch.device("cpu"))
    with torch.no_grad():
        plain = exported(**inputs).logits
        assert torch.allclose(loaded.model(input_ids=ids, **ours).logits, plain, rtol=0, atol=1e-5)
    check_written(exported, tokenizer, answer, **inputs)
    check_trained_on(chats, tmp_path, metrics, 2, "data.chat_template=null", "strategy=fsdp")


def test_a_blank_picture_changes_nothing() -> None:
    small = small_run(*GIVEN, QWEN3, "data.packing=none", "trainer.devices=1", "strategy=single").model
    objective = VisionLanguageObjective(materialise(build_meta(small, CLASS), 1, "cpu"), None, lambda step: 1.0, 7)
    batch = objective.random_batch(3, 1, 4, 32, packed=False)
    assert not batch["grids"].numel()
    inputs = objective.model_inputs(batch)
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 2]] and inputs["input_ids"].shape == (5, 32)
    objective.micro_batch_loss(batch).backward()  # type: ignore[no-untyped-call]
    model: Any = objective.model
    seeing = [p.grad for name, p in model.named_parameters() if ".visual." in name]
    assert all(grad is not None and not grad.any() for grad in seeing), "gradients are there, and zero"
    assert (batch["labels"] != IGNORE_INDEX).any()
