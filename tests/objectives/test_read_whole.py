"""PaliGemma. Oracle: transformers' own model and processor, one conversation at a time, in one process."""

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
from mgpu_pipe.data.images.check_images import check_picture_chats
from mgpu_pipe.data.prepare_data import prepare
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.errors import ConfigErrors
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.objectives.patch_pictures import build_picture_inputs
from tests.objectives.harness import check_trained_on, check_written, exported_model, generated
from tests.objectives.test_vision_language import CLASS
from tests.support import small_runs
from tests.support.pictures import folder_of_classes, said

GIVEN = ("objective=vision_language", "logger=none", "trainer.progress=off", "model=paligemma_tiny")


ROWS: list[dict[str, Any]] = [
    {"messages": said("<image>What is it?", "dark"), "images": ["p/dark/0.png"]},
    {"messages": said("<image> Caption en", "a light square"), "images": ["p/light/0.png"]},
    {"messages": said("<image><image>Compare.", "two"), "images": ["p/light/1.png", "p/stripes/1.png"]},
    {"messages": [{**said("", "so")[1], "train": False}, *said("<image>And?", "more")], "image": "p/dark/1.png"},
    {"messages": said("Do you see me?", "No.")},
]


def chats(folder: Path, *overrides: str, rows: list[dict[str, Any]] = ROWS) -> RunConfig:
    if not (folder / "chats.jsonl").exists():
        folder_of_classes(folder / "p")
        (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tower = "model.config.vision_config"
    shape = (f"{tower}.num_channels=3", f"{tower}.image_size=16", f"{tower}.patch_size=4")
    given = ("data=picture_chats", f"data.paths=[{folder / 'chats.jsonl'}]", f"data.cache_dir={folder / 'cache'}")
    more = ("data.chat_template=paligemma", "data.seq_len=64", "data.validation_fraction=0.4")
    steps = ("trainer.max_steps=4", "data.global_batch_size=4", "data.num_workers=0")
    hub = "model=hf" in overrides
    named = [one for one in GIVEN if not (hub and one.startswith("model="))]
    return compose([*named, *given, *more, *steps, *(() if hub else shape), *overrides])[0]


run = partial(small_runs.run, chats)


def processor_of(folder: Path, **own: Any) -> Any:
    from transformers import AutoTokenizer, PaliGemmaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    processor = SiglipImageProcessorPil(**own)
    processor.image_seq_length = 16  # type: ignore[attr-defined]
    return PaliGemmaProcessor(processor, AutoTokenizer.from_pretrained(folder))


def test_rows_are_those_of_transformers_processor_and_only_questions_are_read_from_both_sides(tmp_path: Path) -> None:
    config = chats(tmp_path, "data.validation_fraction=0")
    prepared: Any = prepare(config)
    samples, every = prepared.open(config, "train"), np.arange(len(ROWS))
    batch = samples.batch(every, every)
    model: Any = materialise(build_meta(prepared.complete(config).model, CLASS), 1, "cpu").eval()
    processor = processor_of(prepared.tokenizer_folder, size={"height": 16, "width": 16}, resample=Image.BILINEAR)  # type: ignore[attr-defined]
    given = build_picture_inputs(model.config).inputs(batch)
    types = given["token_type_ids"]
    for row in range(3):
        paths = [tmp_path / name for name in ROWS[row]["images"]]
        question, answer = (one["content"] for one in ROWS[row]["messages"])
        images = [[Image.open(path).convert("RGB") for path in paths]]
        made = processor(images=images, text=[question], suffix=[answer], return_tensors="pt")
        length = made["input_ids"].shape[1]
        for name, found in (("input_ids", batch["input_ids"]), ("token_type_ids", types)):
            assert found[row, :length].tolist() == made[name][0].tolist(), name
        assert batch["labels"][row, : length - 1].tolist() == made["labels"][0, 1:].tolist()
        pixels = batch["pixel_values"][row, : len(paths)]
        assert torch.allclose(pixels, made["pixel_values"], rtol=0, atol=1e-6)
        # Logits of the answer of a row among others are those of the row alone.
        with torch.no_grad():
            whole = model(**given).logits[row, :length]
            alone = model(**{name: made[name] for name in ("input_ids", "token_type_ids", "pixel_values")}).logits[0]
        assert torch.allclose(whole, alone, rtol=0, atol=1e-5)
    # Another last token of an answer changes nothing before it; another last token of a question its beginning.
    learned = batch["labels"] != IGNORE_INDEX
    with torch.no_grad():
        before = model(**given).logits
        for place, reaches in ((int(learned[0].nonzero()[-1]), False), (int(learned[0].nonzero()[0]), True)):
            ids = given["input_ids"].clone()
            ids[0, place] = 5
            after = model(**{**given, "input_ids": ids}).logits
            assert (not torch.allclose(after[0, :place], before[0, :place], rtol=0, atol=1e-6)) is reaches
            assert torch.equal(after[1:], before[1:])


def test_several_answers_to_learn_are_refused(tmp_path: Path) -> None:
    rows = [{"messages": [*said("Do you?", "No."), *said("Why?", "So.")]}]
    config = chats(tmp_path, rows=rows)
    with pytest.raises(ConfigErrors, match=r"has 2 answers to learn.*give the others \"train\": false, or a row each"):
        check_picture_chats(config.model, config.data)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_run_goes_on_under_another_strategy_answers_and_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import PaliGemmaForConditionalGeneration
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    metrics = small_runs.run_moved(chats, tmp_path)
    second, picture = tmp_path / "second", tmp_path / "p" / "dark" / "0.png"
    answer, unseen = (generated(second, capsys, "What is it?", *shown) for shown in ([picture], []))
    exported = exported_model(second, PaliGemmaForConditionalGeneration, capsys)
    # Its own processor and generation write the same.
    own = SiglipImageProcessorPil.from_pretrained(tmp_path / "out")
    assert own.image_seq_length == 16  # type: ignore[attr-defined]
    processor = processor_of(tmp_path / "out", size=own.size, resample=own.resample)
    made = processor(images=Image.open(picture).convert("RGB"), text="<image>What is it?", return_tensors="pt")
    made.pop("labels", None)
    check_written(exported, processor.tokenizer, answer, **made)
    text = processor.tokenizer.bos_token + "What is it?\n"
    ids = processor.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    check_written(exported, processor.tokenizer, unseen, ids, token_type_ids=torch.zeros_like(ids))
    check_trained_on(chats, tmp_path, metrics, 2, "data.chat_template=null", "strategy=fsdp")
