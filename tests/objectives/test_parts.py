"""SmolVLM. Oracle: transformers' own model and picture processor, one conversation at a time, in one process."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mgpu_pipe.architectures.pictures import Parts
from mgpu_pipe.config.hydra.compose import compose
from mgpu_pipe.config.schema import RunConfig
from mgpu_pipe.data.images.grids import chat_pixels
from mgpu_pipe.data.prepare_data import prepare, read_prepared
from mgpu_pipe.data.step_batch import IGNORE_INDEX
from mgpu_pipe.data.text.preview import parts_of
from mgpu_pipe.models.build import build_meta, materialise
from mgpu_pipe.models.model_parts import part_patterns
from mgpu_pipe.objectives.patch_pictures import build_picture_inputs
from mgpu_pipe.objectives.picture_inputs import NOT_ZERO
from mgpu_pipe.objectives.vision_language import VisionLanguageObjective
from tests.objectives.harness import GREEDY, check_trained_on, check_written, exported_model, generated
from tests.objectives.test_vision_language import CLASS
from tests.support import small_runs
from tests.support.pictures import SIZES, write_chats
from tests.verify.support import small_run

GIVEN = ("objective=vision_language", "logger=none", "trainer.progress=off", "model=smolvlm_tiny")
IDEFICS = ("model.type=idefics3", "model.config.vision_config.model_type=idefics3_vision")


def chats(folder: Path, *overrides: str) -> RunConfig:
    """Conversations with none, one or two pictures, of four sizes, in parts of 16 pixels of which a side has two."""
    write_chats(folder)
    tower = "model.config.vision_config"
    shape = (f"{tower}.num_channels=3", f"{tower}.image_size=16", f"{tower}.patch_size=4")
    given = ("data=picture_chats", f"data.paths=[{folder / 'chats.jsonl'}]", f"data.cache_dir={folder / 'cache'}")
    more = ("data.chat_template=chatml", "data.seq_len=160", "data.max_side=32", "data.validation_fraction=0.4")
    steps = ("trainer.max_steps=4", "data.global_batch_size=4", "data.num_workers=0")
    hub = "model=hf" in overrides
    named = [one for one in GIVEN if not (hub and one.startswith("model="))]
    return compose([*named, *given, *more, *steps, *(() if hub else shape), *overrides])[0]


run = partial(small_runs.run, chats)


def processed(config: Any, pixels: Any, images: list[Image.Image]) -> tuple[torch.Tensor, list[str]]:
    """What transformers' processor makes of pictures, and writes into a text for each."""
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    processor = SmolVLMImageProcessorPil(
        size={"longest_edge": pixels.parts.longest}, max_image_size={"longest_edge": pixels.size}
    )
    own = processor(images, return_tensors="pt", return_row_col_info=True)  # type: ignore[call-arg]
    assert own["pixel_attention_mask"].all(), "so that the model needs none"
    places = (config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor) ** 2
    counts = zip(own["rows"][0], own["cols"][0], strict=True)
    names = ("<fake_token_around_image>", "<image>", "<global-img>")
    return own["pixel_values"][0], [get_image_prompt_string(*one, places, *names) for one in counts]


def test_parts_and_the_tokens_around_them_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = chats(tmp_path, "data.validation_fraction=0")
    prepared: Any = read_prepared(json.loads(json.dumps(prepare(config).as_dict())))
    samples, every = prepared.open(config, "train"), np.arange(len(SIZES) + 2)
    batch = samples.batch(every, every)
    model: Any = materialise(build_meta(prepared.complete(config).model, CLASS), 1, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    shown = [[name] for name in SIZES] + [["wide", "high"], []]
    rows = [json.loads(line)["messages"] for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    assert batch["pictures"].tolist() == [3, 3, 5, 5, 6, 0], "1 x 2, 2 x 1 and 2 x 2 parts, and each whole"
    for number, names in enumerate(shown):
        written = list[str]()
        if names:
            images = [Image.open(tmp_path / f"{name}.png") for name in names]
            own, written = processed(model.config, samples._pixels, images)
            values = batch["pixel_values"][number][: len(own)]
            assert torch.allclose(values, own, rtol=0, atol=1e-6) and len(own) == int(batch["pictures"][number])
        first, *rest = rows[number][0]["content"].split("<image>")
        said_first = first + "".join(one + text for one, text in zip(written, rest, strict=True))
        messages = [{**rows[number][0], "content": said_first}, rows[number][1]]
        ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
        # A store ends each document by a token of its own.
        assert batch["input_ids"][number][: len(ids)].tolist() == ids
        answer = batch["labels"][number]
        assert (
            tokenizer.decode(answer[answer != IGNORE_INDEX], skip_special_tokens=True).strip()
            == (rows[number][1]["content"])
        )
    inputs = build_picture_inputs(model.config).inputs(batch)
    assert inputs["pixel_values"].shape == (1, 22, 3, 16, 16)
    text = ["".join(part.text for part in one) for one in parts_of(prepared, samples, every, every, True)]
    assert [one.count("<image>") for one in text] == [3, 3, 5, 5, 6, 0] and "<row_2_col_1><image>" in text[1]
    whole: Any = prepare(chats(tmp_path, "data.validation_fraction=0", "data.max_side=16"))
    assert whole.open(config, "train") is not None and whole.places_in("train")[:, 1:].tolist() == [[1, 1]] * 6
    most = int(samples.length.max()) - 1
    short = prepare(chats(tmp_path, "data.validation_fraction=0", f"data.seq_len={most}"))
    assert short.train_samples == 5 and short.too_long_samples > 0


@pytest.mark.parametrize(("longest", "side"), [(2048, 512), (1536, 384), (1456, 364), (5000, 512), (1000, 384)])
def test_pictures_have_as_many_parts_as_transformers_cuts(longest: int, side: int) -> None:
    from transformers.models.smolvlm import image_processing_pil_smolvlm as own

    parts, random = Parts(side, longest, 64), np.random.default_rng(longest)
    for height, width in [(1, 1), (1, 999), (3000, 2), *random.integers(1, 4000, (200, 2)).tolist()]:
        scaled = own.get_resize_output_image_size(np.empty((1, height, width), np.bool_), longest)
        assert parts.scaled_size(height, width) == scaled

        class Sized(own.SmolVLMImageProcessorPil):  # type: ignore[name-defined,misc]
            def resize(self, image: Any, size: Any, **_: Any) -> Any:
                return size

        found = Sized.resize_for_vision_encoder(Sized.__new__(Sized), np.empty((1, *scaled), np.bool_), side)
        assert parts.places(height, width) == (found.height // side, found.width // side)


def test_a_wholly_black_picture_is_seen() -> None:
    """transformers' own model leaves pictures of zeros out, and then stops, for their places are there."""
    small = small_run(*GIVEN, "data.packing=none", "trainer.devices=1", "strategy=single").model
    objective = VisionLanguageObjective(materialise(build_meta(small, CLASS), 1, "cpu"), None, lambda step: 1.0, 7)
    model: Any = objective.model
    batch = objective.random_batch(3, 2, 6, 32, packed=False)
    row = next(at for at, number in enumerate(batch["pictures"].tolist()) if number > 1)
    batch["pixel_values"][row, 1] = 0
    inputs = objective.model_inputs(batch)
    with torch.no_grad(), pytest.raises(ValueError, match="do not match"):
        pixels = inputs["pixel_values"]
        model(input_ids=batch["input_ids"], pixel_values=pixels.masked_fill(pixels == NOT_ZERO, 0))
    nothing = torch.zeros_like(inputs["pixel_values"][0, :1])
    seen = []
    run_tower = model.model.vision_model.forward

    def tower(pixel_values: torch.Tensor, **more: Any) -> Any:
        seen.append(run_tower(pixel_values=pixel_values, **more))
        return seen[-1]

    model.model.vision_model.forward = tower
    with torch.no_grad():
        model(**inputs)
        at = int(batch["pictures"][:row].sum()) + 1
        alone = run_tower(pixel_values=nothing).last_hidden_state[0]
    assert torch.allclose(seen[0].last_hidden_state[at], alone, rtol=0, atol=1e-6)
    without = objective.random_batch(3, 1, 4, 32, packed=False)
    inputs = objective.model_inputs(without)
    assert inputs["pixel_values"].shape[:2] == (1, 1) and len(inputs["input_ids"]) == 5
    objective.micro_batch_loss(without).backward()  # type: ignore[no-untyped-call]
    seeing = [p.grad for name, p in model.named_parameters() if "vision_model" in name]
    assert all(grad is not None and not grad.any() for grad in seeing), "gradients are there, and zero"
    assert part_patterns(model)["projector"] == ["model.connector.*"]


@pytest.mark.exhaustive
def test_a_run_goes_on_under_another_strategy_answers_and_is_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer, SmolVLMForConditionalGeneration
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    from mgpu_pipe.cli.main import main
    from mgpu_pipe.inference.open import load_run

    metrics = small_runs.run_moved(chats, tmp_path)
    second, pictures = tmp_path / "second", [tmp_path / "high.png", tmp_path / "large.png"]
    asked = "Is <image> or <image> high?"
    answer = generated(second, capsys, asked, *pictures)
    talk = io.StringIO(f"/image {pictures[0]}\n/image {pictures[1]}\n{asked}\nReally?\n/exit\n")
    monkeypatch.setattr("sys.stdin", talk)
    assert main(["chat", str(second), *GREEDY]) == 0
    assert capsys.readouterr().out.startswith(answer)
    exported = exported_model(second, SmolVLMForConditionalGeneration, capsys)
    # Its own picture processor, tokens around parts and generation write the same.
    processor = SmolVLMImageProcessorPil.from_pretrained(tmp_path / "out")
    assert isinstance(processor.resample, int) and processor.resample == Image.Resampling.LANCZOS
    made = processor([Image.open(picture) for picture in pictures], return_tensors="pt")
    pixels = chat_pixels(load_run(second).config.data, load_run(second).config.model)  # type: ignore[union-attr,arg-type]
    _, written = processed(exported.config, pixels, [Image.open(picture) for picture in pictures])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": asked.replace("<image>", "{}").format(*written)}],
        **{"tokenize": False, "add_generation_prompt": True},
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    check_written(exported, tokenizer, answer, ids, **made)
    assert json.loads((tmp_path / "out" / "processor_config.json").read_text())["image_seq_len"] == 4
    check_trained_on(chats, tmp_path, metrics, 2, "data.chat_template=null", "strategy=fsdp", "data.max_side=auto")
